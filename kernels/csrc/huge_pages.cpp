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

}  // namespace pointsman
