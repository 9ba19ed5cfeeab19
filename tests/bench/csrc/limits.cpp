// What this machine can do at most: read memory the way the kernels read weights, and multiply. Prints a line of JSON.
//
//   limits THREADS MEGABYTES ROUNDS
//
// Built with -march=native, for the machine that it runs on; only tiles are asked for again, because Linux must allow
// them. All threads start a piece of work together and the last one ends it; of all rounds the best counts, so that
// neighbours on a shared machine cost rounds, not figures.

#include <immintrin.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <atomic>
#include <functional>
#include <thread>
#include <vector>

namespace {

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

// The compiler no longer knows what is in it, hence computes it, and takes no two parts of it for equal.
template <class Value>
void hide(Value& value) {
  asm volatile("" : "+m"(value));
}

#if defined(__AVX512F__)
constexpr int kFloats = 16;
#elif defined(__AVX__)
constexpr int kFloats = 8;
#else
constexpr int kFloats = 4;
#endif
typedef float Floats __attribute__((vector_size(kFloats * 4)));
typedef int32_t Ints __attribute__((vector_size(kFloats * 4)));

// ---------------------------------------------------------------- threads
class Barrier {
 public:
  explicit Barrier(int num_threads) : num_threads_(num_threads) {}

  // Waits for all; returns when the last of them came.
  double wait() {
    int generation = generation_.load();
    if (num_waiting_.fetch_add(1) == num_threads_ - 1) {
      num_waiting_.store(0);
      time_ = now();
      generation_.store(generation + 1);
      return time_;
    }
    for (int spins = 0; generation_.load() == generation;)
      if (++spins > 400) sched_yield();
    return time_;
  }

 private:
  const int num_threads_;
  double time_ = 0;
  alignas(64) std::atomic<int> num_waiting_{0};
  alignas(64) std::atomic<int> generation_{0};
};

// Best seconds of each part, over the rounds. work(part, step): step counts the parts of all rounds.
std::vector<double> best_seconds(int threads, int parts, int rounds, const std::function<void(int, int)>& work) {
  Barrier barrier(threads);
  std::vector<double> best(parts, 1e9);
  auto serve = [&](bool is_first) {
    for (int step = 0; step < parts * rounds; step++) {
      double start = barrier.wait();
      work(step % parts, step);
      double seconds = barrier.wait() - start;
      if (is_first) best[step % parts] = std::min(best[step % parts], seconds);
    }
  };
  std::vector<std::thread> helpers;
  for (int thread = 1; thread < threads; thread++) helpers.emplace_back(serve, false);
  serve(true);
  for (std::thread& helper : helpers) helper.join();
  return best;
}

// ---------------------------------------------------------------- memory
constexpr size_t kHugePage = size_t(2) << 20;
constexpr int64_t kPanelBytes = 576 * 32;  // of 16 outputs and 576 inputs in bf16: SmolLM2's widest kind
constexpr int64_t kPairBytes = 2 * kPanelBytes;
constexpr int64_t kPrefetchBytes = 1536;
constexpr int kParts = 16;

uint8_t* alloc_huge(size_t bytes) {
  size_t size = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* mapped = mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  uintptr_t aligned = ((uintptr_t)mapped + kHugePage - 1) / kHugePage * kHugePage;
  madvise((void*)aligned, size, MADV_HUGEPAGE);
  memset((void*)aligned, 1, size);
  return (uint8_t*)aligned;
}

long huge_kilobytes() {
  FILE* file = fopen("/proc/self/smaps_rollup", "r");
  long found = 0;
  for (char line[256]; file && fgets(line, sizeof line, file);) sscanf(line, "AnonHugePages: %ld", &found);
  if (file) fclose(file);
  return found;
}

// A pair of panels as a linear of one row reads it: side by side, each from end to end.
void read_pair(const uint8_t* pair) {
  Ints left = {}, right = {};
  for (int64_t offset = 0; offset < kPanelBytes; offset += 64) {
    int64_t ahead = offset + kPrefetchBytes;
    if (ahead >= kPanelBytes) ahead += kPanelBytes;  // the next pair's
    _mm_prefetch((const char*)((uintptr_t)pair + ahead), _MM_HINT_T0);
    _mm_prefetch((const char*)((uintptr_t)pair + kPanelBytes + ahead), _MM_HINT_T0);
    for (int i = 0; i < 64; i += sizeof(Ints)) {
      left ^= *(const Ints*)(pair + offset + i);
      right ^= *(const Ints*)(pair + kPanelBytes + offset + i);
    }
  }
  left ^= right;
  hide(left);
}

// Bytes per second over all of the memory, as long as a model's weights: what the caches keep of those, they keep here.
double read_rate(int threads, int64_t megabytes, int rounds) {
  int pairs_per_part = std::max<int64_t>(1, megabytes * 1000000 / kPairBytes / kParts);
  int64_t part_bytes = pairs_per_part * kPairBytes;
  uint8_t* data = alloc_huge(part_bytes * kParts);
  if (!data) return 0;
  std::vector<std::atomic<int>> next(kParts * rounds);
  auto best = best_seconds(threads, kParts, rounds, [&](int part, int step) {
    for (int pair; (pair = next[step].fetch_add(1)) < pairs_per_part;)
      read_pair(data + part * part_bytes + pair * kPairBytes);
  });
  double seconds = 0;
  for (double part : best) seconds += part;
  return part_bytes * kParts / seconds;
}

// ---------------------------------------------------------------- arithmetic
constexpr int kChains = 12;  // more than latency times throughput of any of these instructions
constexpr int kRepeats = 20000;

struct Unit {
  const char* instruction;     // null: the machine has none
  void (*run)();               // kRepeats times
  double operations;           // of one repeat; a multiplication and an addition are two
};

#if defined(__AVX512BF16__)
void multiply_bf16() {
  __m512 sums[kChains] = {};
  hide(sums);
  const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
  for (int i = 0; i < kRepeats; i++)
#pragma GCC unroll 12
    for (int chain = 0; chain < kChains; chain++) sums[chain] = _mm512_dpbf16_ps(sums[chain], ones, ones);
  hide(sums);
}
const Unit kBf16Vectors = {"vdpbf16ps", multiply_bf16, 2.0 * 32 * kChains};
#else
void multiply_bf16() {
  Floats sums[kChains] = {}, factor = {};
  factor += 1.0f;
  hide(sums);
  hide(factor);
  for (int i = 0; i < kRepeats; i++)
#pragma GCC unroll 12
    for (int chain = 0; chain < kChains; chain++) sums[chain] += factor * factor;
  hide(sums);
}
#if defined(__FMA__) || defined(__AVX512F__)
const Unit kBf16Vectors = {"fp32 fma", multiply_bf16, 2.0 * kFloats * kChains};
#else
const Unit kBf16Vectors = {"fp32 mul and add", multiply_bf16, 2.0 * kFloats * kChains};
#endif
#endif

#if defined(__AVX512VNNI__)
void multiply_int8() {
  __m512i sums[kChains] = {};
  hide(sums);
  const __m512i ones = _mm512_set1_epi8(1);
  for (int i = 0; i < kRepeats; i++)
#pragma GCC unroll 12
    for (int chain = 0; chain < kChains; chain++) sums[chain] = _mm512_dpbusd_epi32(sums[chain], ones, ones);
  hide(sums);
}
const Unit kInt8Vectors = {"vpdpbusd", multiply_int8, 2.0 * 64 * kChains};
#elif defined(__AVX2__)
void multiply_int8() {
  __m256i sums[kChains] = {};
  hide(sums);
  __m256i bytes = _mm256_set1_epi8(1);
  const __m256i shorts = _mm256_set1_epi16(1);
  for (int i = 0; i < kRepeats; i++)
#pragma GCC unroll 12
    for (int chain = 0; chain < kChains; chain++) {
      asm volatile("" : "+x"(bytes));  // or the products would be computed once
      __m256i products = _mm256_madd_epi16(_mm256_maddubs_epi16(bytes, bytes), shorts);
      sums[chain] = _mm256_add_epi32(sums[chain], products);
    }
  hide(sums);
}
const Unit kInt8Vectors = {"vpmaddubsw", multiply_int8, 2.0 * 32 * kChains};
#else
const Unit kInt8Vectors = {nullptr, nullptr, 0};
#endif

#if defined(__x86_64__)
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64, "LDTILECFG reads 64 bytes");

// Sums in tiles 0 to 3, which are zero after it; factors in 4 to 7, all rows full of `value`.
void fill_tiles(uint16_t value) {
  TileConfig config;
  for (int tile = 0; tile < 8; tile++) config.rows[tile] = 16, config.row_bytes[tile] = 64;
  alignas(64) uint16_t values[512];
  std::fill_n(values, 512, value);
  asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
  asm volatile(
      "tileloadd (%0,%1,1), %%tmm4\n\ttileloadd (%0,%1,1), %%tmm5\n\t"
      "tileloadd (%0,%1,1), %%tmm6\n\ttileloadd (%0,%1,1), %%tmm7" ::"r"(values),
      "r"((int64_t)64)
      : "memory");
}

void multiply_bf16_tiles() {
  fill_tiles(0x3f80);
  for (int i = 0; i < kRepeats; i++)
    asm volatile(
        "tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n\ttdpbf16ps %%tmm7, %%tmm4, %%tmm1\n\t"
        "tdpbf16ps %%tmm6, %%tmm5, %%tmm2\n\ttdpbf16ps %%tmm7, %%tmm5, %%tmm3" ::);
  asm volatile("tilerelease");
}

void multiply_int8_tiles() {
  fill_tiles(0x0101);
  for (int i = 0; i < kRepeats; i++)
    asm volatile(
        "tdpbssd %%tmm6, %%tmm4, %%tmm0\n\ttdpbssd %%tmm7, %%tmm4, %%tmm1\n\t"
        "tdpbssd %%tmm6, %%tmm5, %%tmm2\n\ttdpbssd %%tmm7, %%tmm5, %%tmm3" ::);
  asm volatile("tilerelease");
}

// Asks Linux too, which gives a process tiles only when asked.
bool may_use_tiles() {
  uint32_t a, b, c, d, low, high;
  if (!__get_cpuid_count(1, 0, &a, &b, &c, &d) || !(c >> 27 & 1)) return false;  // no xgetbv
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & 0x60000) != 0x60000) return false;  // the system does not save tiles
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  bool bf16_tile_int8 = (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1);
  return bf16_tile_int8 && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}
const Unit kBf16Tiles = {"tdpbf16ps", multiply_bf16_tiles, 4 * 2.0 * 16 * 16 * 32};
const Unit kInt8Tiles = {"tdpbssd", multiply_int8_tiles, 4 * 2.0 * 16 * 16 * 64};
#endif

void print_rate(const char* name, const Unit& unit, int threads, int rounds) {
  if (!unit.instruction) {
    printf(", \"%s\": null", name);
    return;
  }
  double seconds = best_seconds(threads, 1, rounds, [&](int, int) { unit.run(); })[0];
  double rate = unit.operations * kRepeats * threads / seconds;
  printf(", \"%s\": {\"instruction\": \"%s\", \"operations_per_s\": %.6g}", name, unit.instruction, rate);
}

}  // namespace

int main(int argc, char** argv) {
  int threads = argc == 4 ? atoi(argv[1]) : 0, megabytes = argc == 4 ? atoi(argv[2]) : 0;
  int rounds = argc == 4 ? atoi(argv[3]) : 0;
  if (threads < 1 || megabytes < 1 || rounds < 1) {
    fprintf(stderr, "usage: limits THREADS MEGABYTES ROUNDS, each at least 1\n");
    return 64;
  }
  Unit bf16 = kBf16Vectors, int8 = kInt8Vectors;
#if defined(__x86_64__)
  if (may_use_tiles()) bf16 = kBf16Tiles, int8 = kInt8Tiles;
#endif
  printf("{\"num_threads\": %d, \"read_bytes_per_s\": %.6g", threads, read_rate(threads, megabytes, rounds));
  printf(", \"huge_page_bytes\": %ld", huge_kilobytes() * 1024);
  print_rate("bf16", bf16, threads, 50 * rounds);
  print_rate("int8", int8, threads, 50 * rounds);
  printf("}\n");
}
