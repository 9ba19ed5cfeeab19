// Weights in groups of 32 inputs with scales of their own: the inputs' quantisation, and sums for a few rows.
//
// Within a group integers are summed, exactly. A group adds to its output, in this order:
//   (dot - zero * sum of inputs) * (weight scale * input scale)     once, or for each half of the group
//   min * (sum of inputs * input scale)                             right behind it, where there are minima
#pragma once

#include "linear_int8.h"
#include "linear_lanes.h"

namespace pointsman {
namespace {

constexpr int kGroupQuads = kGroup / 4;

PM_INLINE int32_t sum_of_ints(i32x16 v) {
  int32_t sum = 0;
  for (int i = 0; i < 16; i++) sum += v[i];
  return sum;
}

static void quantise_groups(const bf16* x, int32_t width, int8_t* out, float* scales, int32_t* sums) {
  for (int32_t i = 0; i < width; i += kGroup) {
    float greatest = greatest_magnitude(x + i, kGroup);
    f32x16 factor = splat(symmetric_factor(greatest));
    *scales++ = symmetric_scale(greatest);
    for (int half = 0; half < kGroup; half += 16) {
      i32x16 values = round_to_int(load_bf16(x + i + half) * factor);
      store_bytes(out + i + half, values);
      *sums++ = sum_of_ints(values);
    }
  }
}

// One vector's columns of a group.
//   4 bits   64-byte row j: quad 2j in the low nibbles, quad 2j + 1 in the high ones
//   8 bits   64-byte row j: quad j
template <int kBits>
PM_INLINE void load_quads(const uint8_t* columns, ByteQuads* quads) {
  if (kBits == 8) {
    for (int j = 0; j < kGroupQuads; j++) quads[j] = split_unsigned(load_ints(columns + j * 64));
    return;
  }
  Ints low_nibbles = broadcast_int(0x0f0f0f0f);
  for (int j = 0; j < kGroupQuads / 2; j++) {
    Ints both = load_ints(columns + j * 64);
    quads[2 * j] = split_unsigned(bit_and(both, low_nibbles));
    quads[2 * j + 1] = split_unsigned(bit_and(shift_right_16(both, 4), low_nibbles));
  }
}

// p: the 16 scales or minima of a panel; column: the vector's first of them.
PM_INLINE Floats load_scales(const uint8_t* p, int column, bool has_f32_scales) {
  return has_f32_scales ? load_floats(p + column * 4) : load_halves(p + column * 2);
}

template <int kRows, int kBits, int kHalves>
PM_INLINE void add_group(const LinearCall& call, const uint8_t* group, int column, int32_t first_row, int32_t index,
                         Floats* sums) {
  const PackedWeight& weight = *call.weight;
  const Rows& in = call.in;
  const int32_t num_groups = in.stride / kGroup;
  const int scale_bytes = (weight.has_f32_scales ? 4 : 2) * kPanel;
  const uint8_t* scales = group + kGroup * kPanel * kBits / 8;
  const uint8_t* minima = scales + scale_bytes * kHalves;
  ByteQuads quads[kGroupQuads];
  load_quads<kBits>(group + column * 4, quads);
  for (int half = 0; half < kHalves; half++) {
    Floats weight_scale = load_scales(scales + half * scale_bytes, column, weight.has_f32_scales);
    Floats min = zero_floats();
    if (weight.has_min) min = load_scales(minima + half * scale_bytes, column, weight.has_f32_scales);
    for (int row = 0; row < kRows; row++) {
      int64_t group_index = (int64_t)(first_row + row) * num_groups + index;
      const int8_t* inputs = in.quantised + group_index * kGroup;
      const int32_t* half_sums = in.sums + group_index * 2;
      int32_t sum = kHalves == 2 ? half_sums[half] : half_sums[0] + half_sums[1];
      float input_scale = in.scales[group_index];
      Ints dot = broadcast_int(-weight.zero * sum);
      for (int j = half * kGroupQuads / kHalves; j < (half + 1) * kGroupQuads / kHalves; j++)
        dot = dot_grouped(dot, quads[j], split_signed(broadcast_32_bits(inputs + j * 4)));
      Floats scale = multiply(weight_scale, broadcast_float(input_scale));
      Floats& output = sums[row * kPassVectors];
      output = multiply_add(to_floats(dot), scale, output);
      if (weight.has_min) output = multiply_add(min, broadcast_float((float)sum * input_scale), output);
    }
  }
}

template <int kRows, int kBits, int kHalves>
static void grouped_sums(const LinearCall& call, int32_t pair, int32_t first_row, float* block) {
  const PackedWeight& weight = *call.weight;
  const int32_t bytes = group_bytes(weight);
  const uint8_t* panels = weight.data + pair * 2 * weight.panel_bytes;
  for (int start = 0; start < kPair; start += kPassColumns) {
    Floats sums[kRows * kPassVectors];
    for (int i = 0; i < kRows * kPassVectors; i++) sums[i] = zero_floats();
    for (int32_t index = 0; index < weight.k_padded / kGroup; index++) {
      for (int v = 0; v < kPassVectors; v++) {
        int column = start + v * kLanes;
        const uint8_t* panel = panels + column / kPanel * weight.panel_bytes;
        if (column % kPanel == 0)
          for (int i = 0; i < bytes; i += 64) prefetch_ahead(weight, panel, (int64_t)index * bytes + i);
        const uint8_t* group = panel + (int64_t)index * bytes;
        add_group<kRows, kBits, kHalves>(call, group, column % kPanel, first_row, index, sums + v);
      }
    }
    for (int row = 0; row < kRows; row++)
      for (int v = 0; v < kPassVectors; v++)
        store_floats(block + row * kPair + start + v * kLanes, sums[row * kPassVectors + v]);
  }
}

template <int kRows>
static void grouped_4(const LinearCall& call, int32_t pair, int32_t first_row, float* block) {
  grouped_sums<kRows, 4, 1>(call, pair, first_row, block);
}
template <int kRows>
static void grouped_8(const LinearCall& call, int32_t pair, int32_t first_row, float* block) {
  grouped_sums<kRows, 8, 1>(call, pair, first_row, block);
}
template <int kRows>
static void grouped_8_halves(const LinearCall& call, int32_t pair, int32_t first_row, float* block) {
  grouped_sums<kRows, 8, 2>(call, pair, first_row, block);
}

}  // namespace
}  // namespace pointsman
