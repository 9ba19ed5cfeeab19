// 16 floats at a time on any instruction set: gcc splits its 64-byte vectors into what the target has.
//
// Included by the files that are compiled once per instruction set. Everything here has internal linkage: a function
// with external linkage, compiled for AVX-512 in one file, could be the copy that the linker keeps for all.
#pragma once

#include <stdint.h>
#include <string.h>
#if defined(__FMA__) || defined(__SSE2__)
#include <immintrin.h>
#endif

#define PM_INLINE static inline __attribute__((always_inline, unused))

typedef uint16_t bf16;  // the upper half of a float

typedef float f32x4 __attribute__((vector_size(16)));
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint16_t u16x32 __attribute__((vector_size(64)));
typedef int8_t i8x16 __attribute__((vector_size(16)));

PM_INLINE float bf16_to_f32(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// Rounds to the nearest, ties to even; a NaN stays one.
PM_INLINE bf16 f32_to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return (bf16)((bits >> 16) | 0x40);
  return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

PM_INLINE f32x16 splat(float x) { return x - (f32x16){}; }
PM_INLINE i32x16 splat_i32(int32_t x) { return x - (i32x16){}; }

PM_INLINE f32x16 load_f32(const float* p) {
  f32x16 v;
  memcpy(&v, p, 64);
  return v;
}
PM_INLINE void store_f32(float* p, f32x16 v) { memcpy(p, &v, 64); }

PM_INLINE f32x16 load_bf16(const bf16* p) {
  u16x16 half;
  memcpy(&half, p, 32);
  return (f32x16)(__builtin_convertvector(half, u32x16) << 16);
}

// All ones where v is a NaN. By arithmetic: gcc compares vectors longer than the target's one lane at a time.
PM_INLINE i32x16 nan_lanes(f32x16 v) { return (0x7f800000 - ((i32x16)v & 0x7fffffff)) >> 31; }

PM_INLINE u16x16 to_bf16(f32x16 v) {
  u32x16 bits = (u32x16)v;
  u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  u32x16 quiet_nan = (bits >> 16) | 0x40;
  u32x16 is_nan = (u32x16)nan_lanes(v);
  return __builtin_convertvector((is_nan & quiet_nan) | (~is_nan & rounded), u16x16);
}
PM_INLINE void store_bf16(bf16* p, f32x16 v) {
  u16x16 half = to_bf16(v);
  memcpy(p, &half, 32);
}

PM_INLINE f32x16 select(i32x16 mask, f32x16 yes, f32x16 no) {
  return (f32x16)((mask & (i32x16)yes) | (~mask & (i32x16)no));
}

// a * b + c: one rounding where the target has it. Written out, because the compiler may not choose
// (-ffp-contract=off): two copies of an expression must not differ in a bit.
PM_INLINE f32x16 fma16(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  __m256 x[2], y[2], z[2];
  memcpy(x, &a, 64), memcpy(y, &b, 64), memcpy(z, &c, 64);
  z[0] = _mm256_fmadd_ps(x[0], y[0], z[0]);
  z[1] = _mm256_fmadd_ps(x[1], y[1], z[1]);
  memcpy(&c, z, 64);
  return c;
#else
  return a * b + c;
#endif
}

// b where either is a NaN.
PM_INLINE f32x16 max16(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  __m256 x[2], y[2];
  memcpy(x, &a, 64), memcpy(y, &b, 64);
  for (int i = 0; i < 2; i++) x[i] = _mm256_max_ps(x[i], y[i]);
  memcpy(&a, x, 64);
  return a;
#elif defined(__SSE2__)
  __m128 x[4], y[4];
  memcpy(x, &a, 64), memcpy(y, &b, 64);
  for (int i = 0; i < 4; i++) x[i] = _mm_max_ps(x[i], y[i]);
  memcpy(&a, x, 64);
  return a;
#else
  return select(a > b, a, b);
#endif
}
PM_INLINE f32x16 min16(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  __m256 x[2], y[2];
  memcpy(x, &a, 64), memcpy(y, &b, 64);
  for (int i = 0; i < 2; i++) x[i] = _mm256_min_ps(x[i], y[i]);
  memcpy(&a, x, 64);
  return a;
#elif defined(__SSE2__)
  __m128 x[4], y[4];
  memcpy(x, &a, 64), memcpy(y, &b, 64);
  for (int i = 0; i < 4; i++) x[i] = _mm_min_ps(x[i], y[i]);
  memcpy(&a, x, 64);
  return a;
#else
  return select(a < b, a, b);
#endif
}
PM_INLINE f32x16 abs16(f32x16 a) { return (f32x16)((i32x16)a & 0x7fffffff); }

// The lanes' sum, halves onto halves: one order on every instruction set.
PM_INLINE float sum16(f32x16 v) {
  f32x4 x[4];
  memcpy(x, &v, 64);
  f32x4 sum = (x[0] + x[2]) + (x[1] + x[3]);
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}
PM_INLINE float max_of16(f32x16 v) {
  f32x4 x[4];
  memcpy(x, &v, 64);
  for (int i = 1; i < 4; i++) x[0] = x[i] > x[0] ? x[i] : x[0];
  float greatest = x[0][0];
  for (int i = 1; i < 4; i++) greatest = x[0][i] > greatest ? x[0][i] : greatest;
  return greatest;
}

// e^x to 2e-7 relative for x in [-87, 88]; below it is the smallest, e^-87. 0 only where the caller masks.
// 2^t = 2^n * 2^f with n the nearest integer: a polynomial for 2^f on [-0.5, 0.5], n added to the exponent.
PM_INLINE f32x16 exp16(f32x16 x) {
  x = max16(x, splat(-87.0f));
  x = min16(x, splat(88.0f));
  f32x16 t = x * 1.44269504088896341f;
  f32x16 shifter = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the lowest bits
  f32x16 n = (t + shifter) - shifter;
  // x - n * ln 2 in two parts keeps the bits that t has lost.
  f32x16 r = fma16(n, splat(-0.693359375f), x);
  r = fma16(n, splat(2.12194440e-4f), r);
  f32x16 p = splat(1.9875691500e-4f);
  p = fma16(p, r, splat(1.3981999507e-3f));
  p = fma16(p, r, splat(8.3334519073e-3f));
  p = fma16(p, r, splat(4.1665795894e-2f));
  p = fma16(p, r, splat(1.6666665459e-1f));
  p = fma16(p, r, splat(5.0000001201e-1f));
  p = fma16(p * r, r, r + 1.0f);
  i32x16 exponent = __builtin_convertvector(n, i32x16) << 23;
  return (f32x16)((i32x16)p + exponent);
}

// tanh through e^-2|x|, so that nothing overflows.
PM_INLINE f32x16 tanh16(f32x16 x) {
  f32x16 e = exp16(abs16(x) * -2.0f);
  f32x16 t = (1.0f - e) / (1.0f + e);
  return (f32x16)((i32x16)t | ((i32x16)x & (int32_t)0x80000000));
}
