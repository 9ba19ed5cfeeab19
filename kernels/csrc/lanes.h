// The widest vectors that an instruction set keeps in registers, and the operations that linears and attention need.
//
// vec.h's 64-byte vectors live in memory where registers are narrower, which the inner loops cannot afford.
#pragma once

#include <immintrin.h>

#include "ops.h"
#include "vec.h"

namespace pointsman {
namespace {

#if defined(__AVX512F__)

constexpr int kLanes = 16;
constexpr int kPassVectors = 2;  // vectors of outputs that are summed together: with kLanes, a pair or half of one
typedef __m512 Floats;
typedef __m512i Ints;

PM_INLINE Floats zero_floats() { return _mm512_setzero_ps(); }
PM_INLINE Floats broadcast_float(float x) { return _mm512_set1_ps(x); }
PM_INLINE Floats load_floats(const void* p) { return _mm512_loadu_ps(p); }
PM_INLINE Floats load_halves(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
PM_INLINE void store_floats(float* p, Floats v) { _mm512_storeu_ps(p, v); }
PM_INLINE Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
PM_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
PM_INLINE Ints broadcast_int(int32_t x) { return _mm512_set1_epi32(x); }
PM_INLINE Ints load_ints(const void* p) { return _mm512_loadu_si512(p); }
PM_INLINE void store_ints(int32_t* p, Ints v) { _mm512_storeu_si512(p, v); }
PM_INLINE Floats to_floats(Ints v) { return _mm512_cvtepi32_ps(v); }
PM_INLINE Ints bit_and(Ints a, Ints b) { return _mm512_and_si512(a, b); }
PM_INLINE Ints shift_left_32(Ints v, int by) { return _mm512_slli_epi32(v, by); }
PM_INLINE Ints shift_right_16(Ints v, int by) { return _mm512_srli_epi16(v, by); }
PM_INLINE Floats as_floats(Ints v) { return _mm512_castsi512_ps(v); }
PM_INLINE Ints as_ints(Floats v) { return _mm512_castps_si512(v); }
PM_INLINE Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
PM_INLINE Ints bit_or(Ints a, Ints b) { return _mm512_or_si512(a, b); }
PM_INLINE Ints and_or(Ints a, Ints b, Ints c) { return _mm512_ternarylogic_epi32(a, b, c, 0xea); }
PM_INLINE Ints shift_right_32(Ints v, int by) { return _mm512_srli_epi32(v, by); }

#elif defined(__AVX2__)

constexpr int kLanes = 8;
constexpr int kPassVectors = 4;
typedef __m256 Floats;
typedef __m256i Ints;

PM_INLINE Floats zero_floats() { return _mm256_setzero_ps(); }
PM_INLINE Floats broadcast_float(float x) { return _mm256_set1_ps(x); }
PM_INLINE Floats load_floats(const void* p) { return _mm256_loadu_ps((const float*)p); }
PM_INLINE Floats load_halves(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
PM_INLINE void store_floats(float* p, Floats v) { _mm256_storeu_ps(p, v); }
PM_INLINE Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
PM_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
PM_INLINE Ints broadcast_int(int32_t x) { return _mm256_set1_epi32(x); }
PM_INLINE Ints load_ints(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
PM_INLINE void store_ints(int32_t* p, Ints v) { _mm256_storeu_si256((__m256i*)p, v); }
PM_INLINE Floats to_floats(Ints v) { return _mm256_cvtepi32_ps(v); }
PM_INLINE Ints bit_and(Ints a, Ints b) { return _mm256_and_si256(a, b); }
PM_INLINE Ints add_ints(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
PM_INLINE Ints dot_shorts(Ints a, Ints b) { return _mm256_madd_epi16(a, b); }
PM_INLINE Ints shift_left_32(Ints v, int by) { return _mm256_slli_epi32(v, by); }
PM_INLINE Ints shift_left_16(Ints v, int by) { return _mm256_slli_epi16(v, by); }
PM_INLINE Ints shift_right_16(Ints v, int by) { return _mm256_srli_epi16(v, by); }
PM_INLINE Ints shift_right_signed_16(Ints v, int by) { return _mm256_srai_epi16(v, by); }
PM_INLINE Floats as_floats(Ints v) { return _mm256_castsi256_ps(v); }
PM_INLINE Floats subtract(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
PM_INLINE Ints and_or(Ints a, Ints b, Ints c) { return _mm256_or_si256(_mm256_and_si256(a, b), c); }
PM_INLINE Ints shift_right_32(Ints v, int by) { return _mm256_srli_epi32(v, by); }

#else

constexpr int kLanes = 4;
constexpr int kPassVectors = 4;
typedef __m128 Floats;
typedef __m128i Ints;

PM_INLINE Floats zero_floats() { return _mm_setzero_ps(); }
PM_INLINE Floats broadcast_float(float x) { return _mm_set1_ps(x); }
PM_INLINE Floats load_floats(const void* p) { return _mm_loadu_ps((const float*)p); }
PM_INLINE void store_floats(float* p, Floats v) { _mm_storeu_ps(p, v); }
PM_INLINE Floats multiply(Floats a, Floats b) { return _mm_mul_ps(a, b); }
PM_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm_add_ps(_mm_mul_ps(a, b), c); }
PM_INLINE Ints broadcast_int(int32_t x) { return _mm_set1_epi32(x); }
PM_INLINE Ints load_ints(const void* p) { return _mm_loadu_si128((const __m128i*)p); }
PM_INLINE void store_ints(int32_t* p, Ints v) { _mm_storeu_si128((__m128i*)p, v); }
PM_INLINE Floats to_floats(Ints v) { return _mm_cvtepi32_ps(v); }
PM_INLINE Ints bit_and(Ints a, Ints b) { return _mm_and_si128(a, b); }
PM_INLINE Ints add_ints(Ints a, Ints b) { return _mm_add_epi32(a, b); }
PM_INLINE Ints dot_shorts(Ints a, Ints b) { return _mm_madd_epi16(a, b); }
PM_INLINE Ints shift_left_32(Ints v, int by) { return _mm_slli_epi32(v, by); }
PM_INLINE Ints shift_left_16(Ints v, int by) { return _mm_slli_epi16(v, by); }
PM_INLINE Ints shift_right_16(Ints v, int by) { return _mm_srli_epi16(v, by); }
PM_INLINE Ints shift_right_signed_16(Ints v, int by) { return _mm_srai_epi16(v, by); }
PM_INLINE Floats as_floats(Ints v) { return _mm_castsi128_ps(v); }
PM_INLINE Floats subtract(Floats a, Floats b) { return _mm_sub_ps(a, b); }
PM_INLINE Ints and_or(Ints a, Ints b, Ints c) { return _mm_or_si128(_mm_and_si128(a, b), c); }
PM_INLINE Ints shift_right_32(Ints v, int by) { return _mm_srli_epi32(v, by); }

// Moves exponent and fraction to a float's place; multiplying by 2^(127 - 15) puts the exponent right, subnormal or
// not. What comes out beyond the greatest half was an infinity or a NaN, and gets a float's exponent of one.
PM_INLINE Floats load_halves(const void* p) {
  Ints half = _mm_unpacklo_epi16(_mm_loadl_epi64((const __m128i*)p), _mm_setzero_si128());
  Ints sign = _mm_slli_epi32(_mm_and_si128(half, _mm_set1_epi32(0x8000)), 16);
  Ints rest = _mm_slli_epi32(_mm_and_si128(half, _mm_set1_epi32(0x7fff)), 13);
  Floats value = _mm_mul_ps(_mm_castsi128_ps(rest), _mm_castsi128_ps(_mm_set1_epi32((127 + 112) << 23)));
  Floats is_special = _mm_cmpge_ps(value, _mm_set1_ps(65536.0f));
  Floats special = _mm_and_ps(is_special, _mm_castsi128_ps(_mm_set1_epi32(0x7f800000)));
  return _mm_or_ps(_mm_or_ps(value, special), _mm_castsi128_ps(sign));
}

#endif

constexpr int kPassColumns = kPassVectors * kLanes;

// Four or two neighbours along k, the same in every lane.
PM_INLINE Ints broadcast_32_bits(const void* p) {
  int32_t bits;
  memcpy(&bits, p, 4);
  return broadcast_int(bits);
}

// One instruction takes a dot product of two: without BF16 two fused ones in a fixed order do.
#if defined(__AVX512BF16__)

typedef Ints Bf16Pairs;
PM_INLINE Bf16Pairs split_pairs(Ints v) { return v; }
PM_INLINE Floats dot_pairs(Floats sum, Bf16Pairs a, Bf16Pairs b) {
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

#else

struct Bf16Pairs {
  Floats even, odd;
};
PM_INLINE Bf16Pairs split_pairs(Ints v) {
  return {as_floats(shift_left_32(v, 16)), as_floats(bit_and(v, broadcast_int((int32_t)0xffff0000)))};
}
PM_INLINE Floats dot_pairs(Floats sum, const Bf16Pairs& a, const Bf16Pairs& b) {
  return multiply_add(a.odd, b.odd, multiply_add(a.even, b.even, sum));
}

#endif

// Dot products of four bytes, exact. VPDPBUSD wants one side unsigned, so that int8 activations are kept as x + 128.
// Without it, even and odd bytes are spread to 16 bits, whose products of pairs cannot overflow.
#if defined(__AVX512VNNI__)

constexpr bool kActivationsAreOffset = true;
typedef Ints ByteQuads;
PM_INLINE ByteQuads split_signed(Ints v) { return v; }
PM_INLINE Ints dot_int8(Ints sum, ByteQuads weights, ByteQuads offset_inputs) {
  return _mm512_dpbusd_epi32(sum, offset_inputs, weights);
}

#else

constexpr bool kActivationsAreOffset = false;
struct ByteQuads {
  Ints even, odd;
};
PM_INLINE ByteQuads split_signed(Ints v) {
  return {shift_right_signed_16(shift_left_16(v, 8), 8), shift_right_signed_16(v, 8)};
}
PM_INLINE Ints dot_int8(Ints sum, const ByteQuads& weights, const ByteQuads& inputs) {
  Ints products = add_ints(dot_shorts(weights.even, inputs.even), dot_shorts(weights.odd, inputs.odd));
  return add_ints(sum, products);
}

#endif

// Where a pass's vector of outputs starts in a row of 64 bytes of a panel:
//
//   column   0 ... 15 | 16 ... 31        panel 0 | panel 1, 4 bytes a column
PM_INLINE const uint8_t* column_start(const PackedWeight& weight, int32_t pair, int column) {
  return weight.data + (pair * 2 + column / kPanel) * weight.panel_bytes + column % kPanel * 4;
}

// Measured for one row on Zen 4, weights from memory: 512 and 1024 equal, each further doubling 3 % slower.
constexpr int64_t kPrefetchBytes = 1024;

// Weights come once from memory. What a panel's end runs into is the other panel of the pair, so skip one.
PM_INLINE void prefetch_ahead(const PackedWeight& weight, const uint8_t* panel, int64_t offset) {
  int64_t ahead = offset + kPrefetchBytes;
  if (ahead >= weight.panel_bytes) ahead += weight.panel_bytes;
  _mm_prefetch((const char*)((uintptr_t)panel + (uintptr_t)ahead), _MM_HINT_T0);
}

}  // namespace
}  // namespace pointsman
