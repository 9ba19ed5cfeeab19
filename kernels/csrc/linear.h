// A linear of any kind of weight: rows in blocks that fit into registers, inside one pair of panels after another.
#pragma once

#include "epilogue.h"
#include "linear_bf16.h"
#include "linear_grouped.h"
#include "linear_int8.h"
#include "row_blocks.h"

namespace pointsman {
namespace {

typedef void (*SumsOfRows)(const LinearCall& call, int32_t pair, int32_t first_row, float* block);

// One kind's functions by number of rows, from 1 on.
constexpr SumsOfRows kBf16Sums[] = PM_ROW_BLOCKS(bf16_sums);
constexpr SumsOfRows kInt8Sums[] = PM_ROW_BLOCKS(int8_sums);

static void linear(const LinearCall& call, int32_t first_pair, int32_t last_pair, int32_t first_row, int32_t last_row) {
  if (call.weight->kind == WeightKind::grouped)
    return linear_grouped(call, first_pair, last_pair, first_row, last_row);
  const SumsOfRows* sums = call.weight->kind == WeightKind::bf16 ? kBf16Sums : kInt8Sums;
  alignas(64) float block[kMaxBlockRows * kPair];
  for (int32_t pair = first_pair; pair < last_pair; pair++) {
    for (int32_t row = first_row; row < last_row;) {
      int32_t num_rows = next_block_rows(last_row - row);
      sums[num_rows - 1](call, pair, row, block);
      apply_epilogue(call, pair, row, num_rows, block);
      row += num_rows;
    }
  }
}

}  // namespace
}  // namespace pointsman
