// Pairs of bf16 and their dot product: all that attention needs of an instruction set beyond vec.h.
#pragma once

#include "lanes.h"
#include "vec.h"

namespace pointsman {
namespace {

constexpr int kParts = 16 / kLanes;  // registers of 16 floats

typedef Floats Lanes;  // one register
typedef int32_t LaneInts __attribute__((vector_size(kLanes * 4)));
typedef uint32_t LaneBits __attribute__((vector_size(kLanes * 4)));

#if defined(__AVX512BF16__)

typedef __m512bh Pairs;      // a pair in each lane
typedef __m512bh SplatPair;  // the same one in each

PM_INLINE Pairs load_pairs(const bf16* p) { return (Pairs)_mm512_loadu_si512(p); }

// Exact, as bf16 holds 8 bits.
PM_INLINE Pairs load_pairs(const int8_t* p) {
  __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
  __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(p + 16))));
  return _mm512_cvtne2ps_pbh(second, first);
}

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

// kLanes words, sign-extended.
PM_INLINE LaneInts load_words(const int8_t* p) {
#if defined(__AVX512F__)
  return (LaneInts)_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return (LaneInts)_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i*)p));
#else
  int16_t words[kLanes];
  memcpy(words, p, sizeof words);
  return LaneInts{words[0], words[1], words[2], words[3]};
#endif
}

PM_INLINE Pairs load_pairs(const int8_t* p) {
  LaneInts words = load_words(p);
  return {__builtin_convertvector(words << 24 >> 24, Lanes), __builtin_convertvector(words >> 8, Lanes)};
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

// Up to so many rows int8 pages are widened in registers; more rows share a widened copy.
constexpr int kDirectRows = kScoreRows < kWeighRows ? kScoreRows : kWeighRows;

}  // namespace
}  // namespace pointsman
