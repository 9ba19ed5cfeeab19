// Weights in groups of 32 inputs with scales of their own, inputs in bf16: sums for a few rows, one pair of panels.
//
// A group adds to its output, in this order:
//   scale * (the dot product of q - zero and the inputs, one chain along k)   once, or for each half of the group
//   min * (sum of inputs)                                                     right behind it, where there are minima
//
// Every block of rows opens the numbers anew, in registers: for 6 to 8 rows that costs less than it does to keep them
// open in scratch, where few rows would have to wait for stores.
#pragma once

#include "lanes.h"
#include "open_groups.h"

namespace pointsman {
namespace {

// The inputs' sums, of each half group.
static void sum_groups(const bf16* x, int32_t width, float* sums) {
  for (int32_t i = 0; i < width; i += kGroup / 2) *sums++ = sum16(load_bf16(x + i));
}

// One group of a pair of panels: of each of a pass's vectors, its panel's bytes.
struct PackedGroup {
  const uint8_t* of_vector[kPassVectors];
  int column[kPassVectors];            // the vector's first in the panel

  PackedGroup(const PackedWeight& weight, int32_t pair, int start, int32_t index) {
    for (int v = 0; v < kPassVectors; v++) {
      int in_pair = start + v * kLanes;
      const uint8_t* panel = weight.data + (pair * 2 + in_pair / kPanel) * weight.panel_bytes;
      of_vector[v] = panel + (int64_t)index * group_bytes(weight);
      column[v] = in_pair % kPanel;
    }
  }
};

// p: the 16 scales or minima of a panel.
PM_INLINE Floats load_scales(const uint8_t* p, int column, bool has_f32_scales) {
  return has_f32_scales ? load_floats(p + column * 4) : load_halves(p + column * 2);
}

// The sum of a row's inputs in a group or in the half of one.
struct GroupTotals {
  const float* of_halves;              // the first row's
  int64_t stride;
  int half;

  GroupTotals(const LinearCall& call, int32_t first_row, int32_t index, int half)
      : stride(call.in.stride / (kGroup / 2)), half(half) {
    of_halves = call.in.sums + first_row * stride + index * 2;
  }

  template <int kHalves>
  PM_MEMBER Floats of_row(int row) const {
    const float* at = of_halves + row * stride;
    return broadcast_float(kHalves == 2 ? at[half] : at[0] + at[1]);
  }
};

// Of a group or the half of one: of a pass's columns.
struct GroupScales {
  Floats scale[kPassVectors], min[kPassVectors];

  GroupScales(const PackedWeight& weight, const PackedGroup& group, int half) {
    const int bytes = (weight.has_f32_scales ? 4 : 2) * kPanel;
    for (int v = 0; v < kPassVectors; v++) {
      const uint8_t* scales = group.of_vector[v] + kGroup * kPanel * weight.bits / 8 + half * bytes;
      const uint8_t* minima = scales + weight.scales_per_group * bytes;
      scale[v] = load_scales(scales, group.column[v], weight.has_f32_scales);
      min[v] = weight.has_min ? load_scales(minima, group.column[v], weight.has_f32_scales) : zero_floats();
    }
  }
};

// sums += scale * dots, and min * total: of one row.
template <bool kHasMin>
PM_INLINE void fold_row(const GroupScales& scales, const Floats (&dots)[kPassVectors], Floats total, float* sums) {
  for (int v = 0; v < kPassVectors; v++) {
    float* at = sums + v * kLanes;
    Floats sum = multiply_add(scales.scale[v], dots[v], load_floats(at));
    store_floats(at, kHasMin ? multiply_add(scales.min[v], total, sum) : sum);
  }
}

// sums: [kRows][kPair].
template <int kRows, int kHalves>
PM_INLINE void fold_rows(bool has_min, const GroupScales& scales, const GroupTotals& totals,
                         const Floats (&dots)[kRows][kPassVectors], float* sums) {
  if (!has_min) {
    for (int row = 0; row < kRows; row++) fold_row<false>(scales, dots[row], zero_floats(), sums + row * kPair);
    return;
  }
  for (int row = 0; row < kRows; row++)
    fold_row<true>(scales, dots[row], totals.of_row<kHalves>(row), sums + row * kPair);
}

// A dot product as one chain along k.
struct Chain {
  typedef Bf16Pairs Input;
  Floats sum = zero_floats();

  static PM_MEMBER Input input(Ints pair) { return split_pairs(pair); }
  PM_MEMBER void add(const Bf16Pairs& weights, const Input& input) { sum = dot_pairs(sum, weights, input); }
  PM_MEMBER Floats total() const { return sum; }
};

// sums: [kRows][kPair], the pass's columns of them. Dot: how products are summed, as Chain.
template <class Dot, int kBits, int kHalves, int kRows>
PM_INLINE void add_group(const LinearCall& call, const Opener<kBits>& opener, const PackedGroup& group,
                         int32_t first_row, int32_t index, float* sums) {
  const PackedWeight& weight = *call.weight;
  const int64_t stride = call.in.stride;
  const bf16* inputs = call.in.values + first_row * stride + (int64_t)index * kGroup;
  const int rows_of_half = kGroupPairs / kPairsInRow<kBits> / kHalves;
  for (int half = 0; half < kHalves; half++) {
    Dot dots[kRows][kPassVectors];
    for (int j = half * rows_of_half; j < (half + 1) * rows_of_half; j++) {
      Ints packed[kPassVectors];
      for (int v = 0; v < kPassVectors; v++) packed[v] = load_ints(group.of_vector[v] + j * 64 + group.column[v] * 4);
#pragma GCC unroll 4
      for (int r = 0; r < kPairsInRow<kBits>; r++) {
        Bf16Pairs weights[kPassVectors];
        for (int v = 0; v < kPassVectors; v++) weights[v] = opener.pair(packed[v], r);
        for (int row = 0; row < kRows; row++) {
          const bf16* at = inputs + row * stride + 2 * (j * kPairsInRow<kBits> + r);
          const typename Dot::Input input = Dot::input(broadcast_32_bits(at));
          for (int v = 0; v < kPassVectors; v++) dots[row][v].add(weights[v], input);
        }
      }
    }

    Floats totals[kRows][kPassVectors];
    for (int row = 0; row < kRows; row++)
      for (int v = 0; v < kPassVectors; v++) totals[row][v] = dots[row][v].total();
    fold_rows<kRows, kHalves>(weight.has_min, GroupScales(weight, group, half), {call, first_row, index, half}, totals,
                              sums);
  }
}

PM_INLINE void prefetch_group(const PackedWeight& weight, int32_t pair, int32_t index) {
  const int32_t bytes = group_bytes(weight);
  for (int panel = 0; panel < 2; panel++)
    for (int32_t i = 0; i < bytes; i += 64)
      prefetch_ahead(weight, weight.data + (pair * 2 + panel) * weight.panel_bytes, (int64_t)index * bytes + i);
}

template <class Dot, int kBits, int kHalves, int kRows>
PM_INLINE void sums_of_groups(const LinearCall& call, int32_t pair, int32_t first_row, float* block) {
  const PackedWeight& weight = *call.weight;
  const Opener<kBits> opener(weight.zero);
  memset(block, 0, kRows * kPair * sizeof(float));
  for (int32_t index = 0; index < weight.k_padded / kGroup; index++) {
    prefetch_group(weight, pair, index);
    for (int start = 0; start < kPair; start += kPassColumns) {
      const PackedGroup group(weight, pair, start, index);
      add_group<Dot, kBits, kHalves, kRows>(call, opener, group, first_row, index, block + start);
    }
  }
}

template <int kRows>
static void grouped_4(const LinearCall& call, int32_t pair, int32_t first_row, float* block) {
  sums_of_groups<Chain, 4, 1, kRows>(call, pair, first_row, block);
}
template <int kRows>
static void grouped_8(const LinearCall& call, int32_t pair, int32_t first_row, float* block) {
  sums_of_groups<Chain, 8, 1, kRows>(call, pair, first_row, block);
}
template <int kRows>
static void grouped_8_halves(const LinearCall& call, int32_t pair, int32_t first_row, float* block) {
  sums_of_groups<Chain, 8, 2, kRows>(call, pair, first_row, block);
}

}  // namespace
}  // namespace pointsman
