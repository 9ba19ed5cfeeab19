// GFLOP/s and GB/s of linear() by kind of weight, rows and instruction set, on one thread, best of many runs.
//
//   linear_bench [name of one instruction set]
//
// Beside each figure stands its share of what this core can do: sums of products in registers, and a plain read of a
// buffer larger than every cache.

#include <immintrin.h>
#include <stdlib.h>
#include <time.h>

#include "check.h"
#include "huge_pages.h"
#include "weight_case.h"

using namespace pointsman;

namespace {

constexpr size_t kLargeBytes = size_t(270) << 20;

// Of this thread: others may take turns on the core.
double cpu_s() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// The shortest of `runs` runs.
template <typename Function>
double best_s(int runs, Function&& function) {
  double best = 1e9;
  for (int i = 0; i < runs; i++) {
    double start = cpu_s();
    function();
    double took = cpu_s() - start;
    best = took < best ? took : best;
  }
  return best;
}

// Reads a buffer with 64-byte loads and the linears' prefetch distance.
__attribute__((target("avx512f"))) void read_512(const uint8_t* data, size_t bytes) {
  __m512i sum[4] = {};
  for (size_t i = 0; i < bytes; i += 256) {
    for (int j = 0; j < 4; j++) {
      _mm_prefetch((const char*)((uintptr_t)data + i + j * 64 + 3072), _MM_HINT_T0);
      sum[j] = _mm512_or_si512(sum[j], _mm512_load_si512(data + i + j * 64));
    }
  }
  __m512i all = _mm512_or_si512(_mm512_or_si512(sum[0], sum[1]), _mm512_or_si512(sum[2], sum[3]));
  asm volatile("" ::"v"(all));
}

__attribute__((target("sse2"))) void read_128(const uint8_t* data, size_t bytes) {
  __m128i sum = _mm_setzero_si128();
  for (size_t i = 0; i < bytes; i += 16) sum = _mm_or_si128(sum, _mm_load_si128((const __m128i*)(data + i)));
  asm volatile("" ::"x"(sum));
}

double read_gb_per_s() {
  uint8_t* data = (uint8_t*)alloc_huge(kLargeBytes);
  memset(data, 1, kLargeBytes);
  bool has_512 = __builtin_cpu_supports("avx512f");
  double took = best_s(20, [&] { has_512 ? read_512(data, kLargeBytes) : read_128(data, kLargeBytes); });
  free_huge(data, kLargeBytes);
  return kLargeBytes / took / 1e9;
}

constexpr int kPeakRuns = 1 << 14, kChains = 16;

// Sums of products of registers: GFLOP/s of the instruction that linears of the kind live on.
__attribute__((target("avx512f,avx512bf16"))) void run_dpbf16(void) {
  __m512 sum[kChains] = {};
  __m512bh a = (__m512bh)_mm512_setzero_si512();
  for (int i = 0; i < kPeakRuns; i++) {
#pragma GCC unroll 16
    for (int j = 0; j < kChains; j++) {
      sum[j] = _mm512_dpbf16_ps(sum[j], a, a);
      asm volatile("" : "+v"(sum[j]));
    }
  }
}
__attribute__((target("avx512f,avx512vnni"))) void run_dpbusd(void) {
  __m512i sum[kChains] = {};
  __m512i a = _mm512_setzero_si512();
  for (int i = 0; i < kPeakRuns; i++) {
#pragma GCC unroll 16
    for (int j = 0; j < kChains; j++) {
      sum[j] = _mm512_dpbusd_epi32(sum[j], a, a);
      asm volatile("" : "+v"(sum[j]));
    }
  }
}
__attribute__((target("avx2,fma"))) void run_fma(void) {
  __m256 sum[8] = {};
  __m256 a = _mm256_setzero_ps();
  for (int i = 0; i < kPeakRuns; i++) {
#pragma GCC unroll 16
    for (int j = 0; j < 8; j++) {
      sum[j] = _mm256_fmadd_ps(a, a, sum[j]);
      asm volatile("" : "+x"(sum[j]));
    }
  }
}

struct Peaks {
  double read_gb_s, dpbf16, dpbusd, fma;
};

double gflops(double took_s, double operations) { return operations / took_s / 1e9; }

Peaks measure_peaks() {
  Peaks peaks = {read_gb_per_s(), 0, 0, 0};
  double runs = (double)kPeakRuns;
  if (__builtin_cpu_supports("avx512bf16")) peaks.dpbf16 = gflops(best_s(200, run_dpbf16), runs * kChains * 64);
  if (__builtin_cpu_supports("avx512vnni")) peaks.dpbusd = gflops(best_s(200, run_dpbusd), runs * kChains * 128);
  if (__builtin_cpu_supports("fma")) peaks.fma = gflops(best_s(200, run_fma), runs * 8 * 16);
  printf("this core: read %.1f GB/s, vdpbf16ps %.0f, vpdpbusd %.0f, 256-bit fma %.0f GFLOP/s\n", peaks.read_gb_s,
         peaks.dpbf16, peaks.dpbusd, peaks.fma);
  return peaks;
}

double peak_of(const Peaks& peaks, const KernelTable& table, const PackedWeight& weight) {
  bool has_512 = !strncmp(table.name, "avx512", 6);
  if (weight.kind == WeightKind::int8) return has_512 ? peaks.dpbusd : peaks.fma;
  return !strcmp(table.name, "avx512") ? peaks.dpbf16 : peaks.fma;
}

// Rows of zeros take as long as any.
struct Buffers {
  std::vector<uint8_t> inputs;
  std::vector<float> scales, sums, out;
  LinearCall call = {};

  Buffers(const PackedWeight& weight, int32_t num_rows) {
    size_t values = (size_t)num_rows * weight.k_padded;
    inputs.resize(values * 2);
    scales.resize(values);
    sums.resize(values);
    out.resize((size_t)num_rows * weight.n_padded);
    call.weight = &weight;
    call.in = {(bf16*)inputs.data(), (int8_t*)inputs.data(), scales.data(), sums.data(), weight.k_padded};
    call.epilogue = Epilogue::store;
    call.out = out.data();
    call.out_stride = weight.n_padded;
  }
};

void bench_rows(const KernelTable& table, const Peaks& peaks, const char* name, const PackedWeight& weight,
                int32_t num_rows) {
  Buffers buffers(weight, num_rows);
  double weight_bytes = (double)packed_bytes(weight, false), operations = 2.0 * num_rows * weight.n * weight.k;
  double about_s = operations / 100e9 + weight_bytes / 20e9;
  int runs = about_s < 0.01 ? (int)(0.1 / about_s) : 7;
  double took = best_s(runs, [&] { table.linear(buffers.call, 0, weight.n_padded / kPair, 0, num_rows); });
  double peak = peak_of(peaks, table, weight);
  printf("%-12s %-5s k %5d n %6d rows %4d  %8.3f ms  %7.1f GFLOP/s", table.name, name, weight.k, weight.n, num_rows,
         took * 1e3, gflops(took, operations));
  if (peak > 0) printf(" (%3.0f %%)", 100 * gflops(took, operations) / peak);
  printf("  %5.1f GB/s (%3.0f %%)\n", weight_bytes / took / 1e9, 100 * weight_bytes / took / 1e9 / peaks.read_gb_s);
}

// As many rows as make a large weight, or a layer's worth.
void bench_shape(const KernelTable& table, const Peaks& peaks, const WeightCase& c, int32_t n, int32_t k,
                 const std::vector<int32_t>& row_counts) {
  Random random = {1};
  std::vector<uint8_t> data = random_source(c.type, 64, k, random);
  std::vector<int32_t> order(n);
  for (int32_t i = 0; i < n; i++) order[i] = i % 64;
  PackSource source = {data.data(), c.type, 64};
  PackJob job = {c.format, n, k, &source, 1, order.data(), nullptr};
  PackedWeight weight;
  if (const char* fault = begin_pack(job, &weight)) {
    printf("%s\n", fault);
    exit(1);
  }
  pack_panels(job, 0, num_panels(weight), &weight);
  table.enter();
  for (int32_t num_rows : row_counts) bench_rows(table, peaks, c.name, weight, num_rows);
  table.leave();
  free_packed(&weight);
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<WeightCase> cases = {{"bf16", PackFormat::bf16, SourceType::bf16},
                                         {"int8", PackFormat::int8, SourceType::bf16},
                                         {"int4", PackFormat::int4, SourceType::bf16},
                                         {"q8_0", PackFormat::grouped, SourceType::q8_0}};
  Peaks peaks = measure_peaks();
  for (const KernelTable* table : tables_to_test()) {
    if (argc > 1 && strcmp(argv[1], table->name)) continue;
    for (const WeightCase& c : cases) {
      bench_shape(*table, peaks, c, 1536, 576, {1, 4, 64, 512});
      bench_shape(*table, peaks, c, 576, 1536, {1, 4, 12, 64, 512});
      bench_shape(*table, peaks, c, 92160, 1536, {1, 2, 4, 8, 16});
    }
  }
  return 0;
}
