// Pairs of bf16 and their dot product: all that attention needs of an instruction set beyond vec.h.
#pragma once

#include "vec.h"

namespace pointsman {
namespace {

#if defined(__AVX512BF16__)

typedef __m512bh Pairs;  // 16 pairs

PM_INLINE Pairs load_pairs(const bf16* p) { return (Pairs)_mm512_loadu_si512(p); }

PM_INLINE Pairs splat_pair(const bf16* p) {
  int32_t pair;
  memcpy(&pair, p, 4);
  return (Pairs)_mm512_set1_epi32(pair);
}

// sum + a[0] * b[0] + a[1] * b[1] in each lane.
PM_INLINE f32x16 dot_pairs(f32x16 sum, Pairs a, Pairs b) { return (f32x16)_mm512_dpbf16_ps((__m512)sum, a, b); }

PM_INLINE void store_weights(bf16* p, f32x16 v) {
  __m256bh rounded = _mm512_cvtneps_pbh((__m512)v);
  memcpy(p, &rounded, 32);
}

// Rows and vectors that a kernel keeps in registers. More than 6 sums are needed to hide a dot's latency.
constexpr int kScoreRows = 8, kScoreTiles = 2;
constexpr int kWeighRows = 6, kWeighVectors = 4;

#else

struct Pairs {
  f32x16 low, high;  // the first and the second of each pair
};

PM_INLINE Pairs load_pairs(const bf16* p) {
  u32x16 bits;
  memcpy(&bits, p, 64);
  return {(f32x16)(bits << 16), (f32x16)(bits & 0xffff0000)};
}

PM_INLINE Pairs splat_pair(const bf16* p) { return {splat(bf16_to_f32(p[0])), splat(bf16_to_f32(p[1]))}; }

PM_INLINE f32x16 dot_pairs(f32x16 sum, Pairs a, Pairs b) { return fma16(a.high, b.high, fma16(a.low, b.low, sum)); }

PM_INLINE void store_weights(bf16* p, f32x16 v) { store_bf16(p, v); }

#if defined(__AVX512F__)
constexpr int kScoreRows = 8, kScoreTiles = 2;
constexpr int kWeighRows = 4, kWeighVectors = 4;
#else
// A vector takes 2 of 16 registers, or 4 of them.
constexpr int kScoreRows = 4, kScoreTiles = 1;
constexpr int kWeighRows = 4, kWeighVectors = 1;
#endif

#endif

}  // namespace
}  // namespace pointsman
