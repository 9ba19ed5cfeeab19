// Large buffers that the kernel may back with 2 MiB pages: weights are read from end to end, and each page that is
// looked up costs time.
#pragma once

#include <stddef.h>

namespace pointsman {

// Zeroed, 2 MiB aligned; null where the system has no such memory.
void* alloc_huge(size_t bytes);
// bytes: as they were allocated. Null is no buffer.
void free_huge(void* buffer, size_t bytes);

}  // namespace pointsman
