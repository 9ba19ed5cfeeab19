#include "huge_pages.h"

#include <stdint.h>
#include <sys/mman.h>

namespace pointsman {

constexpr size_t kHugePage = size_t(2) << 20;

static size_t whole_pages(size_t bytes) { return (bytes + kHugePage - 1) / kHugePage * kHugePage; }

void* alloc_huge(size_t bytes) {
  size_t size = whole_pages(bytes);
  void* mapped = mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  // mmap aligns to 4 KiB: what lies before the first 2 MiB boundary and behind the buffer goes back.
  uintptr_t start = (uintptr_t)mapped;
  uintptr_t aligned = (start + kHugePage - 1) / kHugePage * kHugePage;
  if (aligned > start) munmap(mapped, aligned - start);
  if (size_t behind = start + kHugePage - aligned) munmap((void*)(aligned + size), behind);
  madvise((void*)aligned, size, MADV_HUGEPAGE);
  return (void*)aligned;
}

void free_huge(void* buffer, size_t bytes) {
  if (buffer) munmap(buffer, whole_pages(bytes));
}

constexpr int64_t kChunkBytes = int64_t(64) << 20;  // what is not used of it is never given memory

Arena::~Arena() {
  for (const Chunk& chunk : chunks_) free_huge(chunk.start, chunk.size);
}

void* Arena::alloc(int64_t bytes) {
  bytes = (bytes + 63) / 64 * 64;
  if (chunks_.empty() || chunks_.back().size - chunks_.back().used < bytes) {
    int64_t size = bytes > kChunkBytes ? bytes : kChunkBytes;
    void* start = alloc_huge(size);
    if (!start) return nullptr;
    chunks_.push_back({static_cast<uint8_t*>(start), size, 0});
  }
  Chunk& chunk = chunks_.back();
  void* buffer = chunk.start + chunk.used;
  chunk.used += bytes;
  return buffer;
}

}  // namespace pointsman
