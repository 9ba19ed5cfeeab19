// Weights in groups of 32 inputs with scales of their own, and inputs in bf16: sums for few rows and for many.
//
// A group adds to its output, in this order:
//   scale * (the dot product of q - zero and the inputs, one chain along k)   once, or for each half of the group
//   min * (sum of inputs)                                                     right behind it, where there are minima
//
// Few rows open a group's numbers in registers. For many they are opened once, in scratch. Either way the numbers and
// the order of the sums are the same.
#pragma once

#include "epilogue.h"
#include "open_groups.h"
#include "row_blocks.h"

namespace pointsman {
namespace {

constexpr int32_t kMaxPackedRows = 3;   // from more rows on it pays to open groups in scratch
constexpr int32_t kMaxOpenRows = 128;   // whose sums stay in the first-level cache
constexpr int32_t kOpenGroups = 4;      // as do that many open groups of two panels

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

// Where sums find pair `row * kRowPairs + r` of a vector: in the packed group ...
template <int kBits>
struct PackedPairs {
  static constexpr int kRowPairs = kPairsInRow<kBits>;
  const Opener<kBits>& opener;
  const PackedGroup& group;

  inline __attribute__((always_inline)) Bf16Pairs pair(int v, int row, int r) const {
    return opener.pair(load_ints(group.of_vector[v] + row * 64 + group.column[v] * 4), r);
  }
};

// ... or in scratch: [2 panels][16 pairs of k].
struct OpenPairs {
  static constexpr int kRowPairs = 2;
  const uint8_t* panels;
  int start;                           // the pass's first column in the pair

  inline __attribute__((always_inline)) Bf16Pairs pair(int v, int row, int r) const {
    int in_pair = start + v * kLanes;
    const uint8_t* panel = panels + in_pair / kPanel * kOpenGroupBytes;
    return load_open(panel + (row * kRowPairs + r) * kOpenRowBytes, in_pair % kPanel);
  }
};

// p: the 16 scales or minima of a panel.
PM_INLINE Floats load_scales(const uint8_t* p, int column, bool has_f32_scales) {
  return has_f32_scales ? load_floats(p + column * 4) : load_halves(p + column * 2);
}

// sums: [kRows][kPair], the pass's columns of them.
template <int kRows, int kHalves, class Pairs>
PM_INLINE void add_group(const LinearCall& call, const Pairs& pairs, const PackedGroup& group, int start,
                         int32_t first_row, int32_t index, float* sums) {
  const PackedWeight& weight = *call.weight;
  const int64_t stride = call.in.stride;
  const int32_t halves_in_row = call.in.stride / (kGroup / 2);
  const bf16* inputs = call.in.values + first_row * stride + (int64_t)index * kGroup;
  const int scale_bytes = (weight.has_f32_scales ? 4 : 2) * kPanel;
  const int rows_of_half = kGroupPairs / Pairs::kRowPairs / kHalves;
  for (int half = 0; half < kHalves; half++) {
    Floats dots[kRows][kPassVectors];
    for (int row = 0; row < kRows; row++)
      for (int v = 0; v < kPassVectors; v++) dots[row][v] = zero_floats();

    for (int packed = half * rows_of_half; packed < (half + 1) * rows_of_half; packed++) {
#pragma GCC unroll 4
      for (int r = 0; r < Pairs::kRowPairs; r++) {
        Bf16Pairs weights[kPassVectors];
        for (int v = 0; v < kPassVectors; v++) weights[v] = pairs.pair(v, packed, r);
        for (int row = 0; row < kRows; row++) {
          const bf16* at = inputs + row * stride + 2 * (packed * Pairs::kRowPairs + r);
          Bf16Pairs input = split_pairs(broadcast_32_bits(at));
          for (int v = 0; v < kPassVectors; v++) dots[row][v] = dot_pairs(dots[row][v], weights[v], input);
        }
      }
    }

    for (int v = 0; v < kPassVectors; v++) {
      const uint8_t* scales = group.of_vector[v] + kGroup * kPanel * weight.bits / 8 + half * scale_bytes;
      const uint8_t* minima = scales + kHalves * scale_bytes;
      Floats scale = load_scales(scales, group.column[v], weight.has_f32_scales);
      float* to = sums + start + v * kLanes;
      for (int row = 0; row < kRows; row++)
        store_floats(to + row * kPair, multiply_add(scale, dots[row][v], load_floats(to + row * kPair)));
      if (!weight.has_min) continue;
      Floats min = load_scales(minima, group.column[v], weight.has_f32_scales);
      for (int row = 0; row < kRows; row++) {
        const float* half_sums = call.in.sums + (int64_t)(first_row + row) * halves_in_row + index * 2;
        Floats sum = broadcast_float(kHalves == 2 ? half_sums[half] : half_sums[0] + half_sums[1]);
        store_floats(to + row * kPair, multiply_add(min, sum, load_floats(to + row * kPair)));
      }
    }
  }
}

PM_INLINE void prefetch_group(const PackedWeight& weight, int32_t pair, int32_t index) {
  const int32_t bytes = group_bytes(weight);
  for (int panel = 0; panel < 2; panel++)
    for (int32_t i = 0; i < bytes; i += 64)
      prefetch_ahead(weight, weight.data + (pair * 2 + panel) * weight.panel_bytes, (int64_t)index * bytes + i);
}

// sums: [num_rows][kPair], zeros so far.
template <int kBits, int kHalves, int kRows>
static void add_packed(const LinearCall& call, int32_t pair, int32_t first_row, float* sums) {
  const PackedWeight& weight = *call.weight;
  const Opener<kBits> opener(weight.zero);
  for (int32_t index = 0; index < weight.k_padded / kGroup; index++) {
    prefetch_group(weight, pair, index);
    for (int start = 0; start < kPair; start += kPassColumns) {
      const PackedGroup group(weight, pair, start, index);
      const PackedPairs<kBits> pairs = {opener, group};
      add_group<kRows, kHalves>(call, pairs, group, start, first_row, index, sums);
    }
  }
}

template <int kBits, int kHalves>
PM_INLINE void add_few_rows(const LinearCall& call, int32_t pair, int32_t first_row, int32_t num_rows, float* sums) {
  static_assert(kMaxPackedRows == 3, "one case for each number of rows");
  if (num_rows == 1) add_packed<kBits, kHalves, 1>(call, pair, first_row, sums);
  else if (num_rows == 2) add_packed<kBits, kHalves, 2>(call, pair, first_row, sums);
  else add_packed<kBits, kHalves, 3>(call, pair, first_row, sums);
}

// Groups [first, last) of a pair, open: [last - first][2 panels][16 pairs of k].
struct OpenGroups {
  const uint8_t* open;
  int32_t pair, first, last;
};

template <int kHalves, int kRows>
PM_INLINE void add_open(const LinearCall& call, const OpenGroups& groups, int32_t first_row, float* sums) {
  for (int start = 0; start < kPair; start += kPassColumns) {
    for (int32_t index = groups.first; index < groups.last; index++) {
      const PackedGroup group(*call.weight, groups.pair, start, index);
      const OpenPairs pairs = {groups.open + (index - groups.first) * 2 * kOpenGroupBytes, start};
      add_group<kRows, kHalves>(call, pairs, group, start, first_row, index, sums);
    }
  }
}
template <int kRows>
static void add_open_whole(const LinearCall& call, const OpenGroups& groups, int32_t first_row, float* sums) {
  add_open<1, kRows>(call, groups, first_row, sums);
}
template <int kRows>
static void add_open_halves(const LinearCall& call, const OpenGroups& groups, int32_t first_row, float* sums) {
  add_open<2, kRows>(call, groups, first_row, sums);
}

typedef void (*OpenSums)(const LinearCall& call, const OpenGroups& groups, int32_t first_row, float* sums);
constexpr OpenSums kOpenSums[] = PM_ROW_BLOCKS(add_open_whole);
constexpr OpenSums kOpenHalvesSums[] = PM_ROW_BLOCKS(add_open_halves);

template <int kBits, int kHalves>
PM_INLINE void add_many_rows(const LinearCall& call, int32_t pair, int32_t first_row, int32_t num_rows, float* sums) {
  const PackedWeight& weight = *call.weight;
  const OpenSums* add = kHalves == 2 ? kOpenHalvesSums : kOpenSums;
  const Opener<kBits> opener(weight.zero);
  const int32_t num_groups = weight.k_padded / kGroup;
  alignas(64) uint8_t open[kOpenGroups * 2 * kOpenGroupBytes];
  for (int32_t first = 0; first < num_groups; first += kOpenGroups) {
    const int32_t last = first + kOpenGroups < num_groups ? first + kOpenGroups : num_groups;
    for (int32_t index = first; index < last; index++) {
      prefetch_group(weight, pair, index);
      for (int panel = 0; panel < 2; panel++) {
        const uint8_t* packed = weight.data + (pair * 2 + panel) * weight.panel_bytes;
        open_group<kBits>(opener, packed + (int64_t)index * group_bytes(weight),
                          open + ((index - first) * 2 + panel) * kOpenGroupBytes);
      }
    }
    for (int32_t row = 0; row < num_rows;) {
      const int32_t block = next_block_rows(num_rows - row);
      add[block - 1](call, {open, pair, first, last}, first_row + row, sums + row * kPair);
      row += block;
    }
  }
}

template <int kBits, int kHalves>
static void linear_of_groups(const LinearCall& call, int32_t first_pair, int32_t last_pair, int32_t first_row,
                             int32_t last_row) {
  alignas(64) float sums[kMaxOpenRows * kPair];
  for (int32_t pair = first_pair; pair < last_pair; pair++) {
    for (int32_t row = first_row; row < last_row; row += kMaxOpenRows) {
      const int32_t num_rows = last_row - row < kMaxOpenRows ? last_row - row : kMaxOpenRows;
      memset(sums, 0, (size_t)num_rows * kPair * sizeof(float));
      if (num_rows <= kMaxPackedRows) add_few_rows<kBits, kHalves>(call, pair, row, num_rows, sums);
      else add_many_rows<kBits, kHalves>(call, pair, row, num_rows, sums);
      apply_epilogue(call, pair, row, num_rows, sums);
    }
  }
}

static void linear_grouped(const LinearCall& call, int32_t first_pair, int32_t last_pair, int32_t first_row,
                           int32_t last_row) {
  const PackedWeight& weight = *call.weight;
  if (weight.bits == 4) linear_of_groups<4, 1>(call, first_pair, last_pair, first_row, last_row);
  else if (weight.scales_per_group == 1) linear_of_groups<8, 1>(call, first_pair, last_pair, first_row, last_row);
  else linear_of_groups<8, 2>(call, first_pair, last_pair, first_row, last_row);
}

}  // namespace
}  // namespace pointsman
