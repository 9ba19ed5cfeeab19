// Large buffers that the kernel may back with 2 MiB pages: weights are read from end to end, and each page that is
// looked up costs time.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <vector>

namespace pointsman {

// Zeroed, 2 MiB aligned; null where the system has no such memory.
void* alloc_huge(size_t bytes);
// bytes: as they were allocated. Null is no buffer.
void free_huge(void* buffer, size_t bytes);

// Buffers that go all at once. Many weights are smaller than a huge page: here they share them.
class Arena {
 public:
  Arena() = default;
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Zeroed, 64-byte aligned; null where the system has no such memory.
  void* alloc(int64_t bytes);

 private:
  struct Chunk {
    uint8_t* start;
    int64_t size, used;
  };
  std::vector<Chunk> chunks_;
};

}  // namespace pointsman
