// A linear of any kind of weight: rows in blocks that fit into registers, inside one pair of panels after another.
#pragma once

#include "epilogue.h"
#include "linear_bf16.h"
#include "linear_grouped.h"
#include "linear_int8.h"

namespace pointsman {
namespace {

typedef void (*SumsOfRows)(const LinearCall& call, int32_t pair, int32_t first_row, float* block);

// One kind's functions by number of rows, from 1 on.
struct RowBlocks {
  const SumsOfRows* sums;
  int32_t max_rows;
};

#if defined(__AVX512F__)
#define PM_BLOCKS_OF_8(f) f<1>, f<2>, f<3>, f<4>, f<5>, f<6>, f<7>, f<8>
#define PM_ROW_BLOCKS(f) {PM_BLOCKS_OF_8(f), f<9>, f<10>, f<11>, f<12>}
#define PM_GROUPED_BLOCKS(f) {PM_BLOCKS_OF_8(f)}  // more rows are slower: all their sums end with a group
constexpr int32_t kMaxBlockRows = 12, kMaxGrouped4Rows = 6, kMaxGrouped8Rows = 8;
#else
#define PM_ROW_BLOCKS(f) {f<1>, f<2>, f<3>}
#define PM_GROUPED_BLOCKS PM_ROW_BLOCKS
constexpr int32_t kMaxBlockRows = 3, kMaxGrouped4Rows = 3, kMaxGrouped8Rows = 3;
#endif

constexpr SumsOfRows kBf16Sums[] = PM_ROW_BLOCKS(bf16_sums);
constexpr SumsOfRows kInt8Sums[] = PM_ROW_BLOCKS(int8_sums);
constexpr SumsOfRows kGrouped4Sums[] = PM_GROUPED_BLOCKS(grouped_4);
constexpr SumsOfRows kGrouped8Sums[] = PM_GROUPED_BLOCKS(grouped_8);
constexpr SumsOfRows kGrouped8HalvesSums[] = PM_GROUPED_BLOCKS(grouped_8_halves);

PM_INLINE RowBlocks row_blocks(const PackedWeight& weight) {
  if (weight.kind == WeightKind::bf16) return {kBf16Sums, kMaxBlockRows};
  if (weight.kind == WeightKind::int8) return {kInt8Sums, kMaxBlockRows};
  if (weight.bits == 4) return {kGrouped4Sums, kMaxGrouped4Rows};
  return {weight.scales_per_group == 2 ? kGrouped8HalvesSums : kGrouped8Sums, kMaxGrouped8Rows};
}

// Blocks of nearly equal size: 13 rows are 7 and 6, because a lone row costs as much weight traffic as twelve.
PM_INLINE int32_t next_block_rows(int32_t rows_left, int32_t max_rows) {
  int32_t blocks_left = (rows_left + max_rows - 1) / max_rows;
  return (rows_left + blocks_left - 1) / blocks_left;
}

static void linear(const LinearCall& call, int32_t first_pair, int32_t last_pair, int32_t first_row, int32_t last_row) {
  const RowBlocks blocks = row_blocks(*call.weight);
  alignas(64) float block[kMaxBlockRows * kPair];
  for (int32_t pair = first_pair; pair < last_pair; pair++) {
    for (int32_t row = first_row; row < last_row;) {
      int32_t num_rows = next_block_rows(last_row - row, blocks.max_rows);
      blocks.sums[num_rows - 1](call, pair, row, block);
      apply_epilogue(call, pair, row, num_rows, block);
      row += num_rows;
    }
  }
}

#undef PM_ROW_BLOCKS
#undef PM_GROUPED_BLOCKS
#undef PM_BLOCKS_OF_8

}  // namespace
}  // namespace pointsman
