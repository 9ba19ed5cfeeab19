// Rows in blocks whose sums fit into registers, and functions by the number of a block's rows.
#pragma once

#include "linear_lanes.h"

namespace pointsman {
namespace {

#if defined(__AVX512F__)
#define PM_ROW_BLOCKS(f) {f<1>, f<2>, f<3>, f<4>, f<5>, f<6>, f<7>, f<8>, f<9>, f<10>, f<11>, f<12>}
constexpr int32_t kMaxBlockRows = 12;
#else
#define PM_ROW_BLOCKS(f) {f<1>, f<2>, f<3>}
constexpr int32_t kMaxBlockRows = 3;
#endif

// Blocks of nearly equal size: 13 rows are 7 and 6, because a lone row costs as much weight traffic as twelve.
PM_INLINE int32_t next_block_rows(int32_t rows_left) {
  int32_t blocks_left = (rows_left + kMaxBlockRows - 1) / kMaxBlockRows;
  return (rows_left + blocks_left - 1) / blocks_left;
}

}  // namespace
}  // namespace pointsman
