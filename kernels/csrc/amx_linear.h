// Linears on AMX's tiles: bf16 and int8 weights, whose panels are tiles as they lie; grouped ones are amx_grouped.h's.
// The amx table's linear().
//
// Whole numbers are exact in any order, so few int8 rows take the vectors of linear.h.
//
// One bf16 row takes vectors too, and must get the bits that tiles give it. TDPBF16PS sums the even and the odd k of a
// tile apart, adds the two, and adds that to the output. VDPBF16PS adds odd and even products to one sum; with the
// other half of the input pair zero it adds one of them, and x * 0 changes no sum but the sign of a zero. So:
//
//   for each tile of 32 k: even = odd = 0; even += low halves, odd += high halves, pair after pair; sum += even + odd
//
// Both instructions take denormals for zeros and make zeros of them. Vector additions do so because of enter_tiles().
// A zero's sign, the only difference left, goes where 0 is added at the end. (An infinite weight would give a NaN in
// vectors where tiles may give an infinity: both say that the model is broken.)
#pragma once

#include "amx_grouped.h"
#include "amx_tiles.h"
#include "linear.h"

namespace pointsman {
namespace {

constexpr int32_t kBlockRows = 2 * kTileRows;
constexpr int32_t kMaxVectorRows = 4;     // int8: the rows from which on tiles are quicker
constexpr int64_t kStreamAhead = 2;       // tiles of a panel that are asked for ahead
constexpr int32_t kMaxChunkTiles = 20;    // 32 rows of so many tiles are 40 KiB: they stay in the first-level cache
constexpr int32_t kMaxGroupPairs = 16;    // pairs whose sums are kept while k is walked in chunks

// What becomes of a block's exact sums, [rows][kPair] floats or int32.
struct Bf16Tiles {
  template <int kC, int kA, int kB>
  PM_INLINE void dot() {
    dot_tiles_bf16<kC, kA, kB>();
  }
  PM_INLINE const uint8_t* input(const LinearCall& call) { return (const uint8_t*)call.in.values; }
  PM_INLINE int64_t input_stride(const LinearCall& call) { return (int64_t)call.in.stride * 2; }

  PM_INLINE void finish(const LinearCall& call, int32_t pair, int32_t row, int32_t num_rows, float* sums) {
    for (int32_t i = 0; i < num_rows * kPair; i += 16) store_f32(sums + i, load_f32(sums + i) + 0.0f);
    apply_epilogue(call, pair, row, num_rows, sums);
  }
};

struct Int8Tiles {
  template <int kC, int kA, int kB>
  PM_INLINE void dot() {
    dot_tiles_u8s8<kC, kA, kB>();
  }
  PM_INLINE const uint8_t* input(const LinearCall& call) { return (const uint8_t*)call.in.quantised; }
  PM_INLINE int64_t input_stride(const LinearCall& call) { return call.in.stride; }

  PM_INLINE void finish(const LinearCall& call, int32_t pair, int32_t row, int32_t num_rows, float* sums) {
    alignas(64) float scaled[kBlockRows * kPair];
    scale_int8(call, pair, row, num_rows, kActivationsAreOffset, (const int32_t*)(const void*)sums, scaled);
    apply_epilogue(call, pair, row, num_rows, scaled);
  }
};
static_assert(kActivationsAreOffset, "TDPBUSD takes the inputs unsigned, as x + 128");

// A block that is multiplied out. Its rows are finished two at a time between the next block's products: the vector
// units are idle then.
struct Unfinished {
  int32_t pair, row, last_row;
  float* sums;               // of `row`
};

// A block's sums, and the sums that wait while that block is multiplied.
struct alignas(64) TwoBlocks {
  float sums[2][kBlockRows * kPair];
  int turn = 0;
  Unfinished before = {};
};

template <class Format>
static __attribute__((noinline)) void finish_rows(const LinearCall& call, int32_t num_rows, Unfinished& block) {
  if (num_rows > block.last_row - block.row) num_rows = block.last_row - block.row;
  Format::finish(call, block.pair, block.row, num_rows, block.sums);
  block.row += num_rows;
  block.sums += num_rows * kPair;
}

template <class Format>
PM_INLINE void finish_rest(const LinearCall& call, Unfinished& block) {
  if (block.row < block.last_row) finish_rows<Format>(call, kBlockRows, block);
}

// The first factor: 16 or 32 rows of inputs.
struct TiledInputs {
  const uint8_t* tile;       // the first
  int64_t stride;            // from row to row of a tile
  int64_t step;              // from tile to tile along k
  int64_t second;            // from the first 16 rows to the second
};

// The second factor: two panels.
struct TiledWeights {
  const uint8_t* tile;
  int64_t panel_bytes;
};

struct Block {
  int32_t row, num_rows;     // 1 to 32 rows

  int32_t first_tile_rows() const { return num_rows < kTileRows ? num_rows : kTileRows; }
  int32_t second_tile_rows() const { return num_rows - first_tile_rows(); }
};

// Asks for what the streams of both panels need next but one; behind their end, of the next pair's panels.
PM_INLINE void prefetch_tiles(const TiledWeights& weights, int32_t tile, int32_t num_tiles) {
  uintptr_t ahead = (uintptr_t)weights.tile + (tile + kStreamAhead) * kTileBytes;
  if (tile + kStreamAhead >= num_tiles) ahead += weights.panel_bytes;
  for (int line = 0; line < kTileBytes; line += 64) {
    _mm_prefetch((const char*)(ahead + line), _MM_HINT_T0);
    _mm_prefetch((const char*)(ahead + weights.panel_bytes + line), _MM_HINT_T0);
  }
}

// Adds num_tiles of k to the sums in tiles 0 to 3, and finishes rows of `before` meanwhile.
template <class Format, int kRowTiles, bool kStream>
PM_INLINE void multiply_tiles(const LinearCall& call, const TiledInputs& inputs, const TiledWeights& weights,
                              int32_t num_tiles, Unfinished& before) {
  for (int32_t t = 0; t < num_tiles; t++) {
    const uint8_t* input = inputs.tile + t * inputs.step;
    const uint8_t* weight = weights.tile + (int64_t)t * kTileBytes;
    if (kStream) prefetch_tiles(weights, t, num_tiles);
    load_tile<6>(weight, kTileRowBytes);
    load_tile<4>(input, inputs.stride);
    Format::template dot<0, 4, 6>();
    load_tile<7>(weight + weights.panel_bytes, kTileRowBytes);
    Format::template dot<1, 4, 7>();
    if constexpr (kRowTiles == 2) {
      load_tile<5>(input + inputs.second, inputs.stride);
      Format::template dot<2, 5, 6>();
      Format::template dot<3, 5, 7>();
    }
    if (before.row < before.last_row) finish_rows<Format>(call, 2, before);
  }
}

// Tiles 0 to 3 from and to a block's [32][kPair] sums.
template <int kRowTiles>
PM_INLINE void zero_sums() {
  zero_tile<0>(), zero_tile<1>();
  if constexpr (kRowTiles == 2) zero_tile<2>(), zero_tile<3>();
}

template <int kRowTiles>
PM_INLINE void load_sums(const float* sums) {
  const int64_t stride = kPair * sizeof(float);
  load_tile<0>(sums, stride), load_tile<1>(sums + kPanel, stride);
  sums += kTileRows * kPair;
  if constexpr (kRowTiles == 2) load_tile<2>(sums, stride), load_tile<3>(sums + kPanel, stride);
}

template <int kRowTiles>
PM_INLINE void store_sums(float* sums) {
  const int64_t stride = kPair * sizeof(float);
  store_tile<0>(sums, stride), store_tile<1>(sums + kPanel, stride);
  sums += kTileRows * kPair;
  if constexpr (kRowTiles == 2) store_tile<2>(sums, stride), store_tile<3>(sums + kPanel, stride);
}

PM_INLINE TiledWeights pair_of(const PackedWeight& weight, int32_t pair) {
  return {weight.data + 2 * pair * weight.panel_bytes, weight.panel_bytes};
}

// A block of rows straight from the inputs, over all of k, with pair after pair.
template <class Format, int kRowTiles, bool kStream>
static void multiply_block(const LinearCall& call, int32_t first_pair, int32_t last_pair, Block block, TwoBlocks& two) {
  const int64_t stride = Format::input_stride(call);
  const TiledInputs inputs = {Format::input(call) + block.row * stride, stride, kTileRowBytes, kTileRows * stride};
  const int32_t num_tiles = (int32_t)(call.weight->panel_bytes / kTileBytes);
  for (int32_t pair = first_pair; pair < last_pair; pair++) {
    zero_sums<kRowTiles>();
    multiply_tiles<Format, kRowTiles, kStream>(call, inputs, pair_of(*call.weight, pair), num_tiles, two.before);
    finish_rest<Format>(call, two.before);
    float* sums = two.sums[two.turn];
    store_sums<kRowTiles>(sums);
    two.before = {pair, block.row, block.row + block.num_rows, sums};
    two.turn = 1 - two.turn;
  }
}

// Inputs of a chunk of k, tile after tile, so that they fill the first-level cache evenly and are walked in order.
//   [2 row tiles][tiles of the chunk][16 rows][64 bytes]
template <class Format>
PM_INLINE TiledInputs pack_inputs(const LinearCall& call, Block block, int32_t first_tile, int32_t num_tiles,
                                  uint8_t* packed) {
  const int64_t stride = Format::input_stride(call);
  const int64_t second = (int64_t)num_tiles * kTileBytes;
  for (int32_t row = 0; row < block.num_rows; row++) {
    const uint8_t* from = Format::input(call) + (block.row + row) * stride + first_tile * kTileRowBytes;
    uint8_t* to = packed + row / kTileRows * second + row % kTileRows * kTileRowBytes;
    for (int32_t t = 0; t < num_tiles; t++) memcpy(to + t * kTileBytes, from + t * kTileRowBytes, kTileRowBytes);
  }
  return {packed, kTileRowBytes, kTileBytes, second};
}

// A block of rows with up to kMaxGroupPairs pairs, k in chunks: a chunk's inputs are used for all pairs before the
// next is read. Sums go on where the last chunk left them, so that their order is that of multiply_block().
template <class Format, int kRowTiles>
static void multiply_chunked(const LinearCall& call, int32_t first_pair, int32_t last_pair, Block block) {
  alignas(64) uint8_t packed[2 * kMaxChunkTiles * kTileBytes];
  alignas(64) float sums[kMaxGroupPairs][kBlockRows * kPair];
  const int32_t all_tiles = (int32_t)(call.weight->panel_bytes / kTileBytes);
  const int32_t num_chunks = (all_tiles + kMaxChunkTiles - 1) / kMaxChunkTiles;
  const int32_t chunk = (all_tiles + num_chunks - 1) / num_chunks;
  Unfinished before = {};
  for (int32_t first = 0; first < all_tiles; first += chunk) {
    const int32_t num_tiles = first + chunk < all_tiles ? chunk : all_tiles - first;
    const TiledInputs inputs = pack_inputs<Format>(call, block, first, num_tiles, packed);
    for (int32_t pair = first_pair; pair < last_pair; pair++) {
      float* pair_sums = sums[pair - first_pair];
      TiledWeights weights = pair_of(*call.weight, pair);
      weights.tile += first * kTileBytes;
      if (first == 0) zero_sums<kRowTiles>();
      else load_sums<kRowTiles>(pair_sums);
      multiply_tiles<Format, kRowTiles, false>(call, inputs, weights, num_tiles, before);
      finish_rest<Format>(call, before);
      store_sums<kRowTiles>(pair_sums);
      if (first + chunk >= all_tiles) before = {pair, block.row, block.row + block.num_rows, pair_sums};
    }
  }
  finish_rest<Format>(call, before);
}

// Inputs that do not fit the first-level cache are worth packing where several pairs use them.
PM_INLINE bool in_chunks(const LinearCall& call, int32_t num_pairs) {
  return call.weight->panel_bytes > kMaxChunkTiles * kTileBytes && num_pairs >= 4;
}

template <class Format, int kRowTiles>
static void multiply_many(const LinearCall& call, int32_t first_pair, int32_t last_pair, Block block, TwoBlocks& two) {
  if (!in_chunks(call, last_pair - first_pair))
    return multiply_block<Format, kRowTiles, false>(call, first_pair, last_pair, block, two);
  for (int32_t pair = first_pair; pair < last_pair; pair += kMaxGroupPairs) {
    int32_t end = pair + kMaxGroupPairs < last_pair ? pair + kMaxGroupPairs : last_pair;
    multiply_chunked<Format, kRowTiles>(call, pair, end, block);
  }
}

// The first block of rows waits for the weights, which come from memory; the others find them in a cache, and wait for
// the products.
template <class Format>
static void linear_in_tiles(const LinearCall& call, int32_t first_pair, int32_t last_pair, int32_t first_row,
                            int32_t last_row) {
  TwoBlocks two;
  int32_t configured = 0;
  for (int32_t row = first_row; row < last_row; row += kBlockRows) {
    const Block block = {row, last_row - row < kBlockRows ? last_row - row : kBlockRows};
    if (block.num_rows != configured) configure_tiles({block.first_tile_rows(), block.second_tile_rows()});
    configured = block.num_rows;
    const bool is_stream = row == first_row, is_one_tile = block.num_rows <= kTileRows;
    if (is_stream && is_one_tile) multiply_block<Format, 1, true>(call, first_pair, last_pair, block, two);
    else if (is_stream) multiply_block<Format, 2, true>(call, first_pair, last_pair, block, two);
    else if (is_one_tile) multiply_many<Format, 1>(call, first_pair, last_pair, block, two);
    else multiply_many<Format, 2>(call, first_pair, last_pair, block, two);
  }
  finish_rest<Format>(call, two.before);
}

// ---- One bf16 row

struct PairSums {
  __m512 of_panel[2];
};

// One tile of k of both panels: the recipe at the top of this file.
PM_INLINE void add_tile_of_row(const uint8_t* inputs, const TiledWeights& weights, int64_t ahead, PairSums& sums) {
  const __m512i low_halves = _mm512_set1_epi32(0xffff);
  __m512 even[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()}, odd[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
#pragma GCC unroll 16
  for (int r = 0; r < kTileRows; r++) {
    __m512i input = broadcast_32_bits(inputs + 4 * r);
    __m512i low = _mm512_and_si512(low_halves, input), high = _mm512_andnot_si512(low_halves, input);
    for (int panel = 0; panel < 2; panel++) {
      const uint8_t* at = weights.tile + panel * weights.panel_bytes + r * kTileRowBytes;
      _mm_prefetch((const char*)((uintptr_t)at + ahead), _MM_HINT_T0);
      __m512bh weight = (__m512bh)_mm512_load_si512(at);
      even[panel] = _mm512_dpbf16_ps(even[panel], (__m512bh)low, weight);
      odd[panel] = _mm512_dpbf16_ps(odd[panel], (__m512bh)high, weight);
    }
  }
  for (int panel = 0; panel < 2; panel++) sums.of_panel[panel] += even[panel] + odd[panel];
}

static void linear_of_one_row(const LinearCall& call, int32_t first_pair, int32_t last_pair, int32_t row) {
  const uint8_t* inputs = Bf16Tiles::input(call) + row * Bf16Tiles::input_stride(call);
  const int32_t num_tiles = (int32_t)(call.weight->panel_bytes / kTileBytes);
  for (int32_t pair = first_pair; pair < last_pair; pair++) {
    TiledWeights weights = pair_of(*call.weight, pair);
    PairSums sums = {{_mm512_setzero_ps(), _mm512_setzero_ps()}};
    for (int32_t t = 0; t < num_tiles; t++, weights.tile += kTileBytes) {
      int64_t ahead = kStreamAhead * kTileBytes + (t + kStreamAhead >= num_tiles ? weights.panel_bytes : 0);
      add_tile_of_row(inputs + t * kTileRowBytes, weights, ahead, sums);
    }
    alignas(64) float block[kPair];
    _mm512_store_ps(block, sums.of_panel[0]);
    _mm512_store_ps(block + kPanel, sums.of_panel[1]);
    Bf16Tiles::finish(call, pair, row, 1, block);
  }
}

// ---- The table's functions

static void amx_linear(const LinearCall& call, int32_t first_pair, int32_t last_pair, int32_t first_row,
                       int32_t last_row) {
  const WeightKind kind = call.weight->kind;
  const int32_t num_rows = last_row - first_row;
  if (kind == WeightKind::grouped) return amx_linear_grouped(call, first_pair, last_pair, first_row, last_row);
  if (kind == WeightKind::int8 && num_rows <= kMaxVectorRows)
    return linear(call, first_pair, last_pair, first_row, last_row);
  if (kind == WeightKind::int8) return linear_in_tiles<Int8Tiles>(call, first_pair, last_pair, first_row, last_row);
  if (num_rows == 1) return linear_of_one_row(call, first_pair, last_pair, first_row);
  linear_in_tiles<Bf16Tiles>(call, first_pair, last_pair, first_row, last_row);
}

}  // namespace
}  // namespace pointsman
