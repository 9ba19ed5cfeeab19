// Rows and weights of int8 with one scale each: the row's quantisation, and sums for a few rows and one pair of panels.
#pragma once

#include "epilogue.h"
#include "lanes.h"

namespace pointsman {
namespace {

// Rounds to the nearest: adding 1.5 * 2^23 leaves the integer in the lowest bits.
PM_INLINE i32x16 round_to_int(f32x16 x) { return (i32x16)(x + 12582912.0f) - 0x4b400000; }

// The greatest magnitude's bits: those of an infinity, and more so of a NaN, are greater than any number's.
PM_INLINE float greatest_magnitude(const bf16* x, int32_t n) {
  i32x16 greatest = {};
  for (int32_t i = 0; i < n; i += 16) {
    i32x16 bits = (i32x16)load_bf16(x + i) & 0x7fffffff;
    i32x16 greater = bits > greatest;
    greatest = (greater & bits) | (~greater & greatest);
  }
  int32_t most = 0;
  for (int i = 0; i < 16; i++) most = greatest[i] > most ? greatest[i] : most;
  float value;
  memcpy(&value, &most, 4);
  return value;
}

// A scale of a row that is all but zero would overflow when inverted. A NaN or infinity goes on as the scale.
PM_INLINE float symmetric_scale(float greatest) { return greatest < 1e-30f ? 0.0f : greatest / 127.0f; }
PM_INLINE float symmetric_factor(float greatest) { return greatest < 1e-30f ? 0.0f : 127.0f / greatest; }

PM_INLINE void store_bytes(int8_t* out, i32x16 values) {
  i8x16 bytes = __builtin_convertvector(values, i8x16);
  memcpy(out, &bytes, 16);
}

static void quantise_row(const bf16* x, int32_t width, int8_t* out, float* scale) {
  float greatest = greatest_magnitude(x, width);
  f32x16 factor = splat(symmetric_factor(greatest));
  *scale = symmetric_scale(greatest);
  for (int32_t i = 0; i < width; i += 16) {
    i32x16 values = round_to_int(load_bf16(x + i) * factor);
    store_bytes(out + i, kActivationsAreOffset ? values + 128 : values);
  }
}

template <int kRows>
static void int8_sums(const LinearCall& call, int32_t pair, int32_t first_row, float* block) {
  const PackedWeight& weight = *call.weight;
  const int8_t* inputs = call.in.quantised + (int64_t)first_row * call.in.stride;
  alignas(64) int32_t exact[kRows * kPair];
  for (int start = 0; start < kPair; start += kPassColumns) {
    const uint8_t* columns[kPassVectors];
    Ints sums[kRows][kPassVectors];
    for (int v = 0; v < kPassVectors; v++) columns[v] = column_start(weight, pair, start + v * kLanes);
    for (int row = 0; row < kRows; row++)
      for (int v = 0; v < kPassVectors; v++) sums[row][v] = broadcast_int(0);

    for (int32_t k = 0; k < weight.k_padded; k += 4) {
      int64_t offset = (int64_t)k * kPanel;  // 64 bytes: a quad of k for 16 columns
      ByteQuads weights[kPassVectors];
      for (int v = 0; v < kPassVectors; v++) {
        weights[v] = split_signed(load_ints(columns[v] + offset));
        if (v * kLanes % kPanel == 0) prefetch_ahead(weight, columns[v], offset);
      }
      for (int row = 0; row < kRows; row++) {
        ByteQuads input = split_signed(broadcast_32_bits(inputs + (int64_t)row * call.in.stride + k));
        for (int v = 0; v < kPassVectors; v++) sums[row][v] = dot_int8(sums[row][v], weights[v], input);
      }
    }

    for (int row = 0; row < kRows; row++)
      for (int v = 0; v < kPassVectors; v++) store_ints(exact + row * kPair + start + v * kLanes, sums[row][v]);
  }
  scale_int8(call, pair, first_row, kRows, kActivationsAreOffset, exact, block);
}

}  // namespace
}  // namespace pointsman
