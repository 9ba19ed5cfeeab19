// Attention of up to 64 query rows to one split of one KV head: the table's attend() of every set without AMX.
//
// Scores, softmax and weighted values, each for all rows, a block of 32 positions at a time. For a row alone or among
// others, in whatever blocks of registers, the same sums run in the same order:
//
//   score      one chain along the pairs of d
//   sum        along the vectors of 16 positions, from the row's first on, then across the lanes
//   output     one chain along the pairs of positions, for each d
//
// A row among others meets pairs that it does not see: weights of zero. x + 0 * v is x in all bits, but for the sign of
// a zero: -0 is made 0 at the end. 0 * NaN is not: values behind the last position that any row of the call sees, and
// before the first, are never used; between those two all are of the request that the rows belong to.
#pragma once

#include "attend_dot.h"
#include "attend_pages.h"
#include "attend_softmax.h"

namespace pointsman {
namespace {

struct AttendScratch {
  bf16 block[kBlockValues];                    // a block of int8 pages, widened
  bf16 edge[2 * kMaxHeadDim];                  // a pair of which one position is not to be used
  float scores[kMaxRows * kScoreStride];
  bf16 weights[kMaxRows * kWeightStride];
  Span spans[kMaxRows];                        // what each row sees
};

constexpr int64_t kAttendScratchBytes = sizeof(AttendScratch);

// Rows of those left that are multiplied together: as even a cut as can be, none above kMost.
template <int kMost>
PM_INLINE int32_t next_rows(int32_t left) {
  int32_t cuts = (left + kMost - 1) / kMost;
  return (left + cuts - 1) / cuts;
}

// ---- scores = q k^T

// T: bf16 or int8_t
template <typename T>
struct ScoreArgs {
  const bf16* q;             // [rows][head_dim]
  const T* k;                // [tiles][head_dim / 2][16][2]
  const uint8_t* next;       // what will be wanted next, as many bytes
  int32_t head_dim;
  float* scores;             // [rows][kScoreStride]
};

template <int kRows, int kCount, typename T>
inline void score_parts(const ScoreArgs<T>& a, int32_t part) {
  Lanes sum[kRows][kCount] = {};
  int32_t d = 0;
  do {
    Pairs keys[kCount];
#pragma GCC unroll 8
    for (int j = 0; j < kCount; j++) {
      int64_t at = (int64_t)(part + j) / kParts * kTile * a.head_dim + kTile * d + (part + j) % kParts * 2 * kLanes;
      keys[j] = load_pairs(a.k + at);
      prefetch(a.next + at * (int64_t)sizeof(T));
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
      SplatPair query = splat_pair(a.q + r * a.head_dim + d);
#pragma GCC unroll 8
      for (int j = 0; j < kCount; j++) sum[r][j] = dot_pairs(sum[r][j], keys[j], query);
    }
    d += 2;
  } while (d < a.head_dim);  // at least once: else gcc does not keep the sums in registers
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 8
    for (int j = 0; j < kCount; j++) store_floats(a.scores + r * kScoreStride + (part + j) * kLanes, sum[r][j]);
}

template <int kRows, typename T>
inline void score_rows(int32_t rows, int32_t tiles, const ScoreArgs<T>& a) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return score_rows<kRows - 1, T>(rows, tiles, a);
  }
  int32_t part = 0, parts = tiles * kParts;
  for (; part + kScoreParts <= parts; part += kScoreParts) score_parts<kRows, kScoreParts>(a, part);
  for (; part < parts; part++) score_parts<kRows, 1>(a, part);
}

template <typename T>
PM_INLINE void score_block(const AttendCall& call, int32_t tiles, const T* k, const uint8_t* next, float* scores) {
  for (int32_t row = 0; row < call.num_rows;) {
    int32_t rows = next_rows<kScoreRows>(call.num_rows - row);
    int32_t head_dim = call.kv.head_dim;
    score_rows<kScoreRows, T>(rows, tiles, {call.q + row * head_dim, k, next, head_dim, scores + row * kScoreStride});
    next = (const uint8_t*)k;  // only the first rows need to ask
    row += rows;
  }
}

// ---- out += weights v

// T: bf16 or int8_t
template <typename T>
struct WeighArgs {
  const bf16* weights;       // [rows][kWeightStride], of the first pair on
  const T* v;                // [pairs][head_dim][2]
  const uint8_t* next;
  int32_t pairs;
  int32_t head_dim;
  float* out;                // [rows][head_dim]
};

template <int kRows, int kCount, typename T>
inline void weigh_parts(const WeighArgs<T>& a, int32_t part) {
  Lanes sum[kRows][kCount];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 8
    for (int j = 0; j < kCount; j++) sum[r][j] = load_floats(a.out + r * a.head_dim + (part + j) * kLanes);
  int32_t pair = 0;
  do {
    Pairs values[kCount];
#pragma GCC unroll 8
    for (int j = 0; j < kCount; j++) {
      int64_t at = (int64_t)pair * 2 * a.head_dim + (part + j) * 2 * kLanes;
      values[j] = load_pairs(a.v + at);
      prefetch(a.next + at * (int64_t)sizeof(T));
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
      SplatPair weight = splat_pair(a.weights + r * kWeightStride + pair * 2);
#pragma GCC unroll 8
      for (int j = 0; j < kCount; j++) sum[r][j] = dot_pairs(sum[r][j], values[j], weight);
    }
  } while (++pair < a.pairs);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 8
    for (int j = 0; j < kCount; j++) store_floats(a.out + r * a.head_dim + (part + j) * kLanes, sum[r][j]);
}

template <int kRows, typename T>
inline void weigh_rows(int32_t rows, const WeighArgs<T>& a) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return weigh_rows<kRows - 1, T>(rows, a);
  }
  int32_t part = 0, parts = a.head_dim / kLanes;
  for (; part + kWeighParts <= parts; part += kWeighParts) weigh_parts<kRows, kWeighParts>(a, part);
  for (; part < parts; part += 2) weigh_parts<kRows, 2>(a, part);  // head_dim is a multiple of 32
}

// weights: of the first pair's first position on.
template <typename T>
PM_INLINE void weigh_pairs(const AttendCall& call, int32_t pairs, const T* v, const uint8_t* next,
                           const bf16* weights) {
  for (int32_t row = 0; row < call.num_rows;) {
    int32_t rows = next_rows<kWeighRows>(call.num_rows - row);
    int32_t head_dim = call.kv.head_dim;
    const bf16* row_weights = weights + row * kWeightStride;
    weigh_rows<kWeighRows, T>(rows, {row_weights, v, next, pairs, head_dim, call.out + row * head_dim});
    next = (const uint8_t*)v;
    row += rows;
  }
}

// One pair of which only the first (keep = 0) or the second (1) position may be used.
template <typename T>
PM_INLINE void weigh_half(const AttendCall& call, int32_t keep, const T* v, T* edge, const bf16* weights) {
  for (int32_t d = 0; d < call.kv.head_dim; d++) {
    edge[2 * d + keep] = v[2 * d + keep];
    edge[2 * d + 1 - keep] = 0;
  }
  weigh_pairs(call, 1, edge, (const uint8_t*)v, weights);
}

// v: of the block's position `begin`, which is even. Positions [span.first, span.last) of it, in order.
template <typename T>
PM_INLINE void weigh_block(const AttendCall& call, Span span, const T* v, const uint8_t* next, AttendScratch& scratch) {
  int32_t begin = span.first / 2 * 2, end = span.last / 2 * 2, head_dim = call.kv.head_dim;
  T* edge = (T*)scratch.edge;
  if (span.first > begin) {
    weigh_half(call, 1, v, edge, scratch.weights + begin);
    begin += 2, v += 2 * head_dim;
  }
  if (begin < end) weigh_pairs(call, (end - begin) / 2, v, next, scratch.weights + begin);
  if (end < span.last) weigh_half(call, 0, v + (int64_t)(end - begin) * head_dim, edge, scratch.weights + end);
}

// ---- The split

PM_INLINE Span find_spans(const AttendCall& call, Span* spans) {
  Span all = {kSplit, 0};
  for (int32_t row = 0; row < call.num_rows; row++) {
    spans[row] = clip({call.first[row] - call.split_start, call.last[row] - call.split_start}, 0, kSplit);
    if (is_empty(spans[row])) {
      spans[row] = {0, 0};
      continue;
    }
    if (spans[row].first < all.first) all.first = spans[row].first;
    if (spans[row].last > all.last) all.last = spans[row].last;
  }
  return all;
}

// Few rows wait for memory: 1, 2 or 3 blocks ahead read pages of 32 nearly as fast as a loop that only reads them.
constexpr int kAhead = 2;

// What to ask for while block `index` is computed: a block that comes kAhead later. K's blocks come first, then V's.
PM_INLINE const uint8_t* block_ahead(const AttendCall& call, Span all, int32_t index) {
  int32_t first = all.first / kBlock, count = (all.last + kBlock - 1) / kBlock - first;
  index += kAhead;
  if (index < count) return keys_at(call, (first + index) * kBlock);
  index = index - count < count ? index - count : count - 1;
  return values_at(call, (first + index) * kBlock);
}

// Whether int8 is widened in registers, not once for all rows. The values are the same either way.
PM_INLINE bool is_direct(const AttendCall& call) {
  return call.kv.kind == KvKind::int8 && call.num_rows <= kDirectRows;
}

PM_INLINE void score_split(const AttendCall& call, Span all, AttendScratch& scratch) {
  int32_t end = round_up(all.last, kTile), index = 0;
  for (int32_t position = all.first / kTile * kTile; position < end; index++) {
    int32_t stop = position / kBlock * kBlock + kBlock;
    stop = stop < end ? stop : end;
    const uint8_t* next = block_ahead(call, all, index);
    const uint8_t* k = keys_at(call, position);
    int32_t tiles = (stop - position) / kTile;
    float* scores = scratch.scores + position;
    if (is_direct(call)) {
      score_block(call, tiles, (const int8_t*)k, next, scores);
    } else {
      const bf16* keys = as_bf16(call, k, next, (stop - position) * call.kv.head_dim, scratch.block);
      if (call.kv.kind == KvKind::int8) next = (const uint8_t*)keys;  // as_bf16() has asked
      score_block(call, tiles, keys, next, scores);
    }
    position = stop;
  }
}

PM_INLINE void weigh_split(const AttendCall& call, Span all, AttendScratch& scratch) {
  int32_t index = (all.last + kBlock - 1) / kBlock - all.first / kBlock;
  for (int32_t position = all.first; position < all.last; index++) {
    int32_t stop = position / kBlock * kBlock + kBlock;
    stop = stop < all.last ? stop : all.last;
    int32_t even = position / 2 * 2;
    const uint8_t* next = block_ahead(call, all, index);
    const uint8_t* v = values_at(call, even);
    Span span = {position, stop};
    if (is_direct(call)) {
      weigh_block(call, span, (const int8_t*)v, next, scratch);
    } else {
      const bf16* values = as_bf16(call, v, next, round_up(stop - even, 2) * call.kv.head_dim, scratch.block);
      if (call.kv.kind == KvKind::int8) next = (const uint8_t*)values;
      weigh_block(call, span, values, next, scratch);
    }
    position = stop;
  }
}

// A zero that was summed up alone may be -0, and 0 among others.
PM_INLINE void drop_negative_zeros(float* out, int32_t n) {
  for (int32_t i = 0; i < n; i += 16) store_f32(out + i, load_f32(out + i) + 0.0f);
}

__attribute__((unused)) static void attend(const AttendCall& call) {  // AMX has its own
  AttendScratch& scratch = *(AttendScratch*)call.scratch;
  Span all = find_spans(call, scratch.spans);
  int32_t n = call.num_rows * call.kv.head_dim;
  memset(call.out, 0, n * sizeof(float));
  if (!is_empty(all)) score_split(call, all, scratch);
  for (int32_t row = 0; row < call.num_rows; row++)
    softmax_row(call, row, scratch.spans[row], is_empty(all) ? Span{0, 0} : all, scratch.scores + row * kScoreStride,
                scratch.weights + row * kWeightStride);
  if (!is_empty(all)) weigh_split(call, all, scratch);
  drop_negative_zeros(call.out, n);
}

}  // namespace
}  // namespace pointsman
