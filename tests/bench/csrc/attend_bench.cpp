// How near attention comes to the machine's peaks: GFLOP/s of prefill, GB/s of decode. Best of many short runs.
// Usage: attend_bench [milliseconds a case]. Compiled once for every instruction set, on one thread.
#include "../../../kernels/csrc/attend.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <vector>

using namespace pointsman;

static double now() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);  // others may want the core, too
  return t.tv_sec + t.tv_nsec * 1e-9;
}

struct Case {
  const char* name;
  int head_dim, rows, context, page_size, requests;
  KvKind kind;
  int repeats() const { return requests == 1 ? 50 : 1; }  // reading the clock takes a microsecond
};

// Every (request, head) has pages of its own, as in a model's layer; one head to a page.
struct Pool {
  KvHead kv;
  std::vector<int32_t> ids;
  uint8_t* memory;

  explicit Pool(const Case& c) {
    int64_t n = (int64_t)c.page_size * c.head_dim;
    int64_t half = c.kind == KvKind::int8 ? n + c.page_size * 4 : n * 2;
    int pages = (c.context + c.page_size - 1) / c.page_size * c.requests;
    memory = (uint8_t*)aligned_alloc(1 << 21, round_up((int)(pages * half * 2 >> 12) + 1, 512) * 4096ll);
    madvise(memory, pages * half * 2, MADV_HUGEPAGE);  // as the KV pool does
    for (int64_t i = 0; i < pages * half; i++) ((uint16_t*)memory)[i] = (uint16_t)(0x3c00 + (i * 37 & 0xff));
    kv = {memory, 2 * half, half, n, half + n, c.page_size, c.head_dim, c.kind};
    for (int i = 0; i < pages; i++) ids.push_back((int)((int64_t)i * 7919 % pages));
  }
  ~Pool() { free(memory); }
};

// One pass over all requests; seconds.
static double pass(const Case& c, const Pool& pool, const std::vector<bf16>& q, void* scratch) {
  std::vector<float> max(c.rows), sum(c.rows), out(c.rows * c.head_dim);
  std::vector<int32_t> first(c.rows, 0), last(c.rows, c.context);
  int pages = (int)pool.ids.size() / c.requests;
  double start = now();
  for (int i = 0; i < c.requests * c.repeats(); i++)
    for (int split = 0; split < c.context; split += kSplit)
      attend({pool.kv, pool.ids.data() + i % c.requests * pages, split, c.rows, q.data(), first.data(), last.data(),
              1 / sqrtf((float)c.head_dim), 0, max.data(), sum.data(), out.data(), scratch});
  return (now() - start) / c.repeats();
}

static void measure(const Case& c, double seconds) {
  Pool pool(c);
  std::vector<bf16> q(c.rows * c.head_dim);
  for (size_t i = 0; i < q.size(); i++) q[i] = (bf16)(0x3f00 + i % 200);
  void* scratch = aligned_alloc(64, kAttendScratchBytes);
  double best = 1e9;
  for (double end = now() + seconds; now() < end;) best = std::min(best, pass(c, pool, q, scratch));
  double positions = (double)c.context * c.requests, bytes = c.kind == KvKind::int8 ? 1 : 2;
  printf("%-28s %8.1f us  %7.1f GFLOP/s  %6.1f GB/s (%.0f MB)\n", c.name, best * 1e6,
         positions * c.rows * c.head_dim * 4 / best * 1e-9, positions * c.head_dim * 2 * bytes / best * 1e-9,
         positions * c.head_dim * 2 * bytes * 1e-6);
  free(scratch);
}

int main(int argc, char** argv) {
  double seconds = (argc > 1 ? atoi(argv[1]) : 200) * 1e-3;
  const Case cases[] = {
      {"decode 256, 3 x 64, cached", 64, 3, 256, 32, 1, KvKind::bf16},
      {"decode 256, 3 x 64", 64, 3, 256, 32, 1500, KvKind::bf16},
      {"decode 1024, 3 x 64", 64, 3, 1024, 32, 400, KvKind::bf16},
      {"decode 256, 2 x 128", 128, 2, 256, 32, 800, KvKind::bf16},
      {"decode 1024, 2 x 128", 128, 2, 1024, 32, 200, KvKind::bf16},
      {"decode 1024, 4 x 128, int8", 128, 4, 1024, 32, 400, KvKind::int8},
      {"decode 1024, 3 x 64, int8", 64, 3, 1024, 32, 800, KvKind::int8},
      {"prefill 512, 63 x 64", 64, 63, 512, 32, 1, KvKind::bf16},
      {"prefill 512, 64 x 128", 128, 64, 512, 32, 1, KvKind::bf16},
      {"prefill 512, 64 x 128, int8", 128, 64, 512, 32, 1, KvKind::int8},
      {"prefill 512, 64 x 256", 256, 64, 512, 32, 1, KvKind::bf16},
  };
  for (const Case& c : cases) measure(c, seconds);
}
