// Attention on AMX's tiles: the amx table's attend(). Masks, softmax and where things lie are those of attend.h.
//
// Both products run on tiles for any number of rows: a tile's product takes as long for one row as for sixteen, and
// even that is quicker than vectors. So a row's sums are the same alone and among others:
//
//   score      TDPBF16PS after TDPBF16PS along d, 32 at a time
//   output     the same along the positions, 32 at a time, blocks lying at multiples of 32; what a row does not see has
//              weight zero, and adds nothing but, maybe, the sign of a zero
//
// A block's values that no row of the call sees may be anything, NaN too: they are replaced by zeros.
#pragma once

#include "amx_tiles.h"
#include "attend.h"

namespace pointsman {
namespace {

constexpr int32_t kAttendRows = 2 * kTileRows;           // rows that go through scores, softmax and values together
constexpr int32_t kSplitBlocks = kSplit / kBlock;
constexpr int32_t kWidenedBlocks = 4;                    // of int8 values, before they are used

struct AmxAttendScratch {
  bf16 blocks[kWidenedBlocks][kBlockValues];             // widened int8 pages, or copies of blocks seen in part
  float scores[kAttendRows * kScoreStride];
  bf16 weights[kAttendRows * kWeightStride];
  Span spans[kAttendRows];
};

constexpr int64_t kAmxAttendScratchBytes = sizeof(AmxAttendScratch);
static_assert(kBlock == kTileK, "a block of positions is a tile's depth");

// All whole blocks that hold a position of the span.
PM_INLINE Span in_blocks(Span span) { return {span.first / kBlock * kBlock, round_up(span.last, kBlock)}; }

// A KiB in rows of 64 bytes, into L2.
PM_INLINE void prefetch_tile(const void* tile, int64_t stride) {
  for (int row = 0; row < kTileRows; row++) prefetch((const uint8_t*)tile + row * stride);
}

// ---- scores = q k^T

// k: [2 tiles of positions][head_dim / 32] tiles of 1 KiB. next: as many bytes that will be wanted later.
template <int kRowTiles>
PM_INLINE void score_in_tiles(const AttendCall& call, const bf16* k, const uint8_t* next, float* scores) {
  const int64_t q_stride = call.kv.head_dim * sizeof(bf16), score_stride = kScoreStride * sizeof(float);
  const int64_t other_positions = (int64_t)kTile * call.kv.head_dim;
  zero_tile<0>(), zero_tile<1>();
  if constexpr (kRowTiles == 2) zero_tile<2>(), zero_tile<3>();
  for (int32_t d = 0; d < call.kv.head_dim; d += kTileK) {
    const bf16* keys = k + d * kTile;
    if constexpr (kRowTiles == 1) prefetch_tile(next + d * kBlock * sizeof(bf16), 64);
    if constexpr (kRowTiles == 1) prefetch_tile(next + d * kBlock * sizeof(bf16) + kTileBytes, 64);
    load_tile<4>(call.q + d, q_stride);
    load_tile<6>(keys, kTileRowBytes);
    dot_tiles_bf16<0, 4, 6>();
    load_tile<7>(keys + other_positions, kTileRowBytes);
    dot_tiles_bf16<1, 4, 7>();
    if constexpr (kRowTiles == 2) {
      load_tile<5>(call.q + kTileRows * call.kv.head_dim + d, q_stride);
      dot_tiles_bf16<2, 5, 6>();
      dot_tiles_bf16<3, 5, 7>();
    }
  }
  store_tile<0>(scores, score_stride), store_tile<1>(scores + kTile, score_stride);
  scores += kTileRows * kScoreStride;
  if constexpr (kRowTiles == 2) store_tile<2>(scores, score_stride), store_tile<3>(scores + kTile, score_stride);
}

// Keys behind the last position may be anything: softmax_row() never looks at their scores.
template <int kRowTiles>
static void score_blocks(const AttendCall& call, Span all, AmxAttendScratch& scratch) {
  const Span blocks = in_blocks(all);
  const int32_t block_values = kBlock * call.kv.head_dim;
  for (int32_t position = blocks.first; position < blocks.last; position += kBlock) {
    const uint8_t* next = block_ahead(call, all, (position - blocks.first) / kBlock);
    const bf16* keys = as_bf16(call, keys_at(call, position), next, block_values, scratch.blocks[0]);
    if (call.kv.kind == KvKind::int8) next = (const uint8_t*)keys;  // as_bf16() has asked
    score_in_tiles<kRowTiles>(call, keys, next, scratch.scores + position);
  }
}

// ---- out += weights v

// The values of consecutive blocks: [pairs of positions][head_dim][2] each.
struct ValueBlocks {
  const bf16* values[kSplitBlocks];
  int32_t count;
};

// used: positions of the block, counted from its start. The others become zeros, whatever they were.
PM_INLINE void copy_values(const bf16* v, Span used, int32_t head_dim, bf16* out) {
  for (int32_t first = 0; first < kBlock; first += 2) {
    const bool keeps_low = first >= used.first && first < used.last;
    const bool keeps_high = first + 1 >= used.first && first + 1 < used.last;
    const uint32_t kept = (keeps_low ? 0x0000ffffu : 0) | (keeps_high ? 0xffff0000u : 0);
    for (int32_t i = first * head_dim; i < (first + 2) * head_dim; i += 32) {
      u32x16 pairs;
      memcpy(&pairs, v + i, 64);
      pairs &= kept;
      memcpy(out + i, &pairs, 64);
    }
  }
}

// What block_ahead() says for the values at `position`: it counts on from the last block of keys.
PM_INLINE const uint8_t* value_block_ahead(const AttendCall& call, Span all, int32_t position) {
  const Span blocks = in_blocks(all);
  return block_ahead(call, all, (blocks.last - blocks.first + position - blocks.first) / kBlock);
}

// Blocks from `position` on. int8: as many as fit when widened. bf16: all; the first and the last may be copies.
PM_INLINE ValueBlocks find_values(const AttendCall& call, Span all, int32_t position, AmxAttendScratch& scratch) {
  const bool is_int8 = call.kv.kind == KvKind::int8;
  const int32_t most = is_int8 ? kWidenedBlocks : kSplitBlocks, head_dim = call.kv.head_dim;
  ValueBlocks found = {{}, 0};
  bf16* copy = scratch.blocks[0];
  for (; position < all.last && found.count < most; position += kBlock) {
    const uint8_t* v = values_at(call, position);
    const Span used = clip(all, position, position + kBlock);
    const bool is_whole_block = used.last - used.first == kBlock;
    found.values[found.count++] = is_int8 || !is_whole_block ? copy : (const bf16*)v;
    if (is_int8)
      widen(v, value_block_ahead(call, all, position), kBlock * head_dim, copy);
    else if (!is_whole_block)
      copy_values((const bf16*)v, {used.first - position, used.last - position}, head_dim, copy);
    if (is_int8 || !is_whole_block) copy += kBlockValues;
  }
  return found;
}

// Tiles kC and kC + 1: sums of 16 rows and 32 d.
template <int kC>
PM_INLINE void load_outputs(const float* sums, int64_t stride) {
  load_tile<kC>(sums, stride), load_tile<kC + 1>(sums + kTile, stride);
}
template <int kC>
PM_INLINE void store_outputs(float* sums, int64_t stride) {
  store_tile<kC>(sums, stride), store_tile<kC + 1>(sums + kTile, stride);
}

// Up to 16 rows, 64 d in tiles 0 to 3, or 32 in 0 and 1.
template <int kVectors>
PM_INLINE void weigh_one_row_tile(const ValueBlocks& blocks, const bf16* weights, int32_t head_dim, int32_t d,
                                  float* out) {
  const int64_t out_stride = head_dim * sizeof(float), v_stride = 2 * head_dim * sizeof(bf16);
  load_outputs<0>(out + d, out_stride);
  if constexpr (kVectors == 4) load_outputs<2>(out + d + kTileK, out_stride);
  for (int32_t i = 0; i < blocks.count; i++) {
    const bf16* v = blocks.values[i] + 2 * d;
    const bf16* ahead = blocks.values[i + kAhead < blocks.count ? i + kAhead : i] + 2 * d;
    for (int j = 0; j < kVectors; j++) prefetch_tile(ahead + j * 32, v_stride);
    load_tile<4>(weights + i * kBlock, kWeightStride * sizeof(bf16));
    load_tile<6>(v, v_stride);
    dot_tiles_bf16<0, 4, 6>();
    load_tile<7>(v + 32, v_stride);
    dot_tiles_bf16<1, 4, 7>();
    if constexpr (kVectors == 4) {
      load_tile<6>(v + 64, v_stride);
      dot_tiles_bf16<2, 4, 6>();
      load_tile<7>(v + 96, v_stride);
      dot_tiles_bf16<3, 4, 7>();
    }
  }
  store_outputs<0>(out + d, out_stride);
  if constexpr (kVectors == 4) store_outputs<2>(out + d + kTileK, out_stride);
}

// 17 to 32 rows, 32 d.
PM_INLINE void weigh_two_row_tiles(const ValueBlocks& blocks, const bf16* weights, int32_t head_dim, int32_t d,
                                  float* out) {
  const int64_t out_stride = head_dim * sizeof(float), v_stride = 2 * head_dim * sizeof(bf16);
  const int64_t weight_stride = kWeightStride * sizeof(bf16);
  float* second = out + kTileRows * head_dim;
  load_outputs<0>(out + d, out_stride);
  load_outputs<2>(second + d, out_stride);
  for (int32_t i = 0; i < blocks.count; i++) {
    const bf16* v = blocks.values[i] + 2 * d;
    load_tile<4>(weights + i * kBlock, weight_stride);
    load_tile<6>(v, v_stride);
    dot_tiles_bf16<0, 4, 6>();
    load_tile<7>(v + 32, v_stride);
    dot_tiles_bf16<1, 4, 7>();
    load_tile<5>(weights + kTileRows * kWeightStride + i * kBlock, weight_stride);
    dot_tiles_bf16<2, 5, 6>();
    dot_tiles_bf16<3, 5, 7>();
  }
  store_outputs<0>(out + d, out_stride);
  store_outputs<2>(second + d, out_stride);
}

template <int kRowTiles>
static void weigh_blocks(const AttendCall& call, Span all, AmxAttendScratch& scratch) {
  const int32_t head_dim = call.kv.head_dim;
  for (int32_t position = in_blocks(all).first; position < all.last;) {
    const ValueBlocks blocks = find_values(call, all, position, scratch);
    const bf16* weights = scratch.weights + position;
    for (int32_t d = 0; d < head_dim;) {
      const bool is_last = d + kTileK == head_dim;
      if (kRowTiles == 2) weigh_two_row_tiles(blocks, weights, head_dim, d, call.out);
      else if (is_last) weigh_one_row_tile<2>(blocks, weights, head_dim, d, call.out);
      else weigh_one_row_tile<4>(blocks, weights, head_dim, d, call.out);
      d += kRowTiles == 2 || is_last ? kTileK : 2 * kTileK;
    }
    position += blocks.count * kBlock;
  }
}

// ---- The split

// Up to 32 rows.
template <int kRowTiles>
static void attend_in_tiles(const AttendCall& call, AmxAttendScratch& scratch) {
  const Span all = find_spans(call, scratch.spans);
  const bool sees_any = !is_empty(all);
  const int32_t first_rows = kRowTiles == 2 ? kTileRows : call.num_rows;
  memset(call.out, 0, call.num_rows * call.kv.head_dim * sizeof(float));
  // One row tile: sums of other columns, with as many rows, take the place of the second's.
  configure_tiles({first_rows, kRowTiles == 2 ? call.num_rows - kTileRows : first_rows});
  if (sees_any) score_blocks<kRowTiles>(call, all, scratch);
  const Span zeroed = sees_any ? in_blocks(all) : Span{0, 0};
  for (int32_t row = 0; row < call.num_rows; row++)
    softmax_row(call, row, scratch.spans[row], zeroed, scratch.scores + row * kScoreStride,
                scratch.weights + row * kWeightStride);
  if (sees_any) weigh_blocks<kRowTiles>(call, all, scratch);
  drop_negative_zeros(call.out, call.num_rows * call.kv.head_dim);
}

PM_INLINE AttendCall rows_of(const AttendCall& call, int32_t row, int32_t num_rows) {
  AttendCall part = call;
  part.num_rows = num_rows;
  part.q += row * call.kv.head_dim, part.out += row * call.kv.head_dim;
  part.first += row, part.last += row, part.max += row, part.sum += row;
  return part;
}

static void amx_attend(const AttendCall& call) {
  AmxAttendScratch& scratch = *(AmxAttendScratch*)call.scratch;
  for (int32_t row = 0; row < call.num_rows; row += kAttendRows) {
    const int32_t left = call.num_rows - row, num_rows = left < kAttendRows ? left : kAttendRows;
    if (num_rows > kTileRows) attend_in_tiles<2>(rows_of(call, row, num_rows), scratch);
    else attend_in_tiles<1>(rows_of(call, row, num_rows), scratch);
  }
}

}  // namespace
}  // namespace pointsman
