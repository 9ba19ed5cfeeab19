// Pairs of bf16 and their dot product: all that attention needs of an instruction set beyond vec.h.
#pragma once

#include "linear_lanes.h"
#include "vec.h"

namespace pointsman {
namespace {

constexpr int kParts = 16 / kLanes;  // registers of 16 floats

typedef Floats Lanes;  // one register
typedef uint32_t LaneBits __attribute__((vector_size(kLanes * 4)));

PM_INLINE Lanes load_lanes(const float* p) {
  Lanes v;
  memcpy(&v, p, sizeof v);
  return v;
}
PM_INLINE void store_lanes(float* p, Lanes v) { memcpy(p, &v, sizeof v); }

#if defined(__AVX512BF16__)

typedef __m512bh Pairs;      // a pair in each lane
typedef __m512bh SplatPair;  // the same one in each

PM_INLINE Pairs load_pairs(const bf16* p) { return (Pairs)_mm512_loadu_si512(p); }

PM_INLINE SplatPair splat_pair(const bf16* p) {
  int32_t pair;
  memcpy(&pair, p, 4);
  return (SplatPair)_mm512_set1_epi32(pair);
}

// sum + a[0] * b[0] + a[1] * b[1] in each lane.
PM_INLINE Lanes dot_pairs(Lanes sum, Pairs a, SplatPair b) { return (Lanes)_mm512_dpbf16_ps((__m512)sum, a, b); }

PM_INLINE void store_weights(bf16* p, f32x16 v) {
  __m256bh rounded = _mm512_cvtneps_pbh((__m512)v);
  memcpy(p, &rounded, 32);
}

#else

struct Pairs {
  Lanes low, high;  // the first and the second of each pair
};
typedef Pairs SplatPair;

PM_INLINE Pairs load_pairs(const bf16* p) {
  LaneBits bits;
  memcpy(&bits, p, sizeof bits);
  return {(Lanes)(bits << 16), (Lanes)(bits & 0xffff0000)};
}

PM_INLINE SplatPair splat_pair(const bf16* p) {
  return {bf16_to_f32(p[0]) - (Lanes){}, bf16_to_f32(p[1]) - (Lanes){}};
}

PM_INLINE Lanes dot_pairs(Lanes sum, Pairs a, SplatPair b) {
  return multiply_add(a.high, b.high, multiply_add(a.low, b.low, sum));
}

PM_INLINE void store_weights(bf16* p, f32x16 v) { store_bf16(p, v); }

#endif

// Rows and registers of positions or of d that a kernel sums at a time: more than 6 sums hide the latency of a dot.
#if defined(__AVX512BF16__)
constexpr int kScoreRows = 8, kScoreParts = 2;
constexpr int kWeighRows = 6, kWeighParts = 4;
#elif defined(__AVX512F__)
constexpr int kScoreRows = 8, kScoreParts = 2;
constexpr int kWeighRows = 4, kWeighParts = 4;
#else
constexpr int kScoreRows = 4, kScoreParts = 2;
constexpr int kWeighRows = 4, kWeighParts = 2;
#endif

}  // namespace
}  // namespace pointsman
