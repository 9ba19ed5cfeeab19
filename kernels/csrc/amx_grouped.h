// Linears of grouped weights on AMX's tiles: a group is opened into a bf16 tile for each panel, and multiplied alone.
//
// TDPBF16PS sums the even and the odd k of a group apart and adds the two. A few rows take vectors, which do the same;
// see amx_linear.h. What a group's sums become is linear_grouped.h's. Weights whose half groups have scales of their
// own stay with linear.h, for any number of rows.
#pragma once

#include "amx_tiles.h"
#include "linear.h"

namespace pointsman {
namespace {

constexpr int32_t kMaxGroupedVectorRows = 4;
constexpr int32_t kGroupedBlockRows = 2 * kTileRows;
static_assert(kGroup == kTileK, "a group is a tile");

// A dot product as a tile has it. The last sum makes a negative zero a positive one: tiles add to a positive zero.
struct EvenAndOdd {
  struct Input {
    Ints even, odd;
  };
  Floats even = zero_floats(), odd = zero_floats();

  static PM_MEMBER Input input(Ints pair) {
    const Ints low_halves = broadcast_int(0xffff);
    return {bit_and(low_halves, pair), _mm512_andnot_si512(low_halves, pair)};
  }
  PM_MEMBER void add(const Bf16Pairs& weights, const Input& input) {
    even = dot_pairs(even, weights, input.even);
    odd = dot_pairs(odd, weights, input.odd);
  }
  PM_MEMBER Floats total() const { return _mm512_add_ps(zero_floats(), _mm512_add_ps(even, odd)); }
};

template <int kBits, int kRows>
static void sums_as_tiles(const LinearCall& call, int32_t first_pair, int32_t last_pair, int32_t first_row) {
  alignas(64) float block[kRows * kPair];
  for (int32_t pair = first_pair; pair < last_pair; pair++) {
    sums_of_groups<EvenAndOdd, kBits, 1, kRows>(call, pair, first_row, block);
    apply_epilogue(call, pair, first_row, kRows, block);
  }
}

// A group of both panels, open: tiles as TDPBF16PS takes them, [2 panels][16 pairs of k][16 n][2].
template <int kBits>
PM_INLINE void open_group(const Opener<kBits>& opener, const PackedGroup& group, uint8_t* tiles) {
  for (int v = 0; v < kPassVectors; v++)
    for (int j = 0; j < kGroupPairs / kPairsInRow<kBits>; j++) {
      Ints packed = load_ints(group.of_vector[v] + j * 64);
      uint8_t* to = tiles + v * kTileBytes + j * kPairsInRow<kBits> * kTileRowBytes;
#pragma GCC unroll 4
      for (int r = 0; r < kPairsInRow<kBits>; r++)
        store_ints((int32_t*)(to + r * kTileRowBytes), opener.pair(packed, r));
    }
}
static_assert(kPassColumns == kPair, "a vector for each panel");

// dots: [32][kPair] of rows `inputs` and on. The tiles are as TileConfig has them.
template <int kRowTiles>
PM_INLINE void multiply_group(const bf16* inputs, int64_t stride, const uint8_t* tiles, float* dots) {
  const int64_t out_stride = kPair * sizeof(float);
  zero_tile<0>(), zero_tile<1>();
  load_tile<6>(tiles, kTileRowBytes);
  load_tile<4>(inputs, stride * 2);
  dot_tiles_bf16<0, 4, 6>();
  load_tile<7>(tiles + kTileBytes, kTileRowBytes);
  dot_tiles_bf16<1, 4, 7>();
  if constexpr (kRowTiles == 2) {
    zero_tile<2>(), zero_tile<3>();
    load_tile<5>(inputs + kTileRows * stride, stride * 2);
    dot_tiles_bf16<2, 5, 6>();
    dot_tiles_bf16<3, 5, 7>();
  }
  store_tile<0>(dots, out_stride), store_tile<1>(dots + kPanel, out_stride);
  dots += kTileRows * kPair;
  if constexpr (kRowTiles == 2) store_tile<2>(dots, out_stride), store_tile<3>(dots + kPanel, out_stride);
}

template <bool kHasMin>
PM_INLINE void fold_tiles(const GroupScales& scales, const GroupTotals& totals, int32_t num_rows, const float* dots,
                          float* sums) {
  for (int32_t row = 0; row < num_rows; row++) {
    const Floats of_row[kPassVectors] = {load_floats(dots + row * kPair), load_floats(dots + row * kPair + kPanel)};
    Floats total = zero_floats();
    if (kHasMin) total = totals.of_row<1>(row);
    fold_row<kHasMin>(scales, of_row, total, sums + row * kPair);
  }
}

// Up to 32 rows and one pair of panels. The next group is opened before this one's tiles are waited for.
template <int kBits, int kRowTiles>
static void tiles_of_groups(const LinearCall& call, int32_t pair, int32_t first_row, int32_t num_rows, float* sums) {
  const PackedWeight& weight = *call.weight;
  const Opener<kBits> opener(weight.zero);
  const int32_t num_groups = weight.k_padded / kGroup;
  const bf16* inputs = call.in.values + (int64_t)first_row * call.in.stride;
  alignas(64) uint8_t tiles[2][2 * kTileBytes];
  alignas(64) float dots[kGroupedBlockRows * kPair];
  memset(sums, 0, (size_t)num_rows * kPair * sizeof(float));
  open_group<kBits>(opener, PackedGroup(weight, pair, 0, 0), tiles[0]);
  for (int32_t index = 0; index < num_groups; index++) {
    prefetch_group(weight, pair, index);
    multiply_group<kRowTiles>(inputs + index * kGroup, call.in.stride, tiles[index % 2], dots);
    if (index + 1 < num_groups)
      open_group<kBits>(opener, PackedGroup(weight, pair, 0, index + 1), tiles[(index + 1) % 2]);
    const GroupScales scales(weight, PackedGroup(weight, pair, 0, index), 0);
    const GroupTotals totals(call, first_row, index, 0);
    if (weight.has_min) fold_tiles<true>(scales, totals, num_rows, dots, sums);
    else fold_tiles<false>(scales, totals, num_rows, dots, sums);
  }
}

template <int kBits>
static void grouped_in_tiles(const LinearCall& call, int32_t first_pair, int32_t last_pair, int32_t first_row,
                             int32_t last_row) {
  alignas(64) float sums[kGroupedBlockRows * kPair];
  int32_t configured = 0;
  for (int32_t row = first_row; row < last_row; row += kGroupedBlockRows) {
    const int32_t num_rows = last_row - row < kGroupedBlockRows ? last_row - row : kGroupedBlockRows;
    const int32_t first_tile = num_rows < kTileRows ? num_rows : kTileRows;
    if (num_rows != configured) configure_tiles({first_tile, num_rows - first_tile});
    configured = num_rows;
    for (int32_t pair = first_pair; pair < last_pair; pair++) {
      if (num_rows <= kTileRows) tiles_of_groups<kBits, 1>(call, pair, row, num_rows, sums);
      else tiles_of_groups<kBits, 2>(call, pair, row, num_rows, sums);
      apply_epilogue(call, pair, row, num_rows, sums);
    }
  }
}

template <int kBits>
static void linear_of_groups(const LinearCall& call, int32_t first_pair, int32_t last_pair, int32_t first_row,
                             int32_t last_row) {
  static_assert(kMaxGroupedVectorRows == 4, "a case for each number of rows");
  switch (last_row - first_row) {
    case 0: return;
    case 1: return sums_as_tiles<kBits, 1>(call, first_pair, last_pair, first_row);
    case 2: return sums_as_tiles<kBits, 2>(call, first_pair, last_pair, first_row);
    case 3: return sums_as_tiles<kBits, 3>(call, first_pair, last_pair, first_row);
    case 4: return sums_as_tiles<kBits, 4>(call, first_pair, last_pair, first_row);
    default: return grouped_in_tiles<kBits>(call, first_pair, last_pair, first_row, last_row);
  }
}

static void amx_linear_grouped(const LinearCall& call, int32_t first_pair, int32_t last_pair, int32_t first_row,
                               int32_t last_row) {
  const PackedWeight& weight = *call.weight;
  if (weight.scales_per_group == 2) linear(call, first_pair, last_pair, first_row, last_row);
  else if (weight.bits == 4) linear_of_groups<4>(call, first_pair, last_pair, first_row, last_row);
  else linear_of_groups<8>(call, first_pair, last_pair, first_row, last_row);
}

}  // namespace
}  // namespace pointsman
