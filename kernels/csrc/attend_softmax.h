// From a row's scores to its weights: scale, soft cap, mask, maximum, exponential, sum.
#pragma once

#include "attend_dot.h"
#include "attend_pages.h"

namespace pointsman {
namespace {

// Both strides keep rows on lines of their own and off the same cache set.
constexpr int kScoreStride = kSplit + 16;
constexpr int kWeightStride = kSplit + 32;

constexpr float kNothing = -__builtin_inff();

PM_INLINE i32x16 lanes_in(Span span, int32_t position) {
  const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  i32x16 positions = lane + position;
  return (~(positions - span.first) & (positions - span.last)) >> 31;  // signs: not before the first, before the last
}

// Whether the row sees all 16 positions from this one on.
PM_INLINE bool is_whole(Span span, int32_t position) { return position >= span.first && position + kTile <= span.last; }

// Scores in place, -inf where the row does not see: what lies there may be anything. Returns the greatest.
template <bool kIsInt8, bool kIsCapped>
inline float finish_scores(const AttendCall& call, Span span, float* scores) {
  f32x16 greatest = splat(kNothing);
  const float scale = call.scale, cap = call.soft_cap;
  for (int32_t position = span.first / kTile * kTile; position < span.last; position += kTile) {
    f32x16 score = load_f32(scores + position);
    if constexpr (kIsInt8) score *= scales_at(call, call.kv.k_scales_offset, position);
    score *= scale;
    if constexpr (kIsCapped) score = tanh16(score / cap) * cap;
    if (!is_whole(span, position)) score = select(lanes_in(span, position), score, splat(kNothing));
    store_f32(scores + position, score);
    greatest = max16(score, greatest);
  }
  return max_of16(greatest);
}

// e^(score - max). exp16() takes a NaN for a small number: a score that is none must show in the output.
PM_INLINE f32x16 exp_of(f32x16 score, float max) {
  f32x16 x = score - max;
  return select(nan_lanes(x), x, exp16(x));
}

// The weights of the positions that the row sees, in bf16; returns their sum.
//
// bf16 pages: of the rounded weights, so that equal values give that value. int8 pages: V's scale goes into the rounded
// weight, so the sum is of the weights before it. Either way along the vectors, then across the lanes.
template <bool kIsInt8>
inline float write_weights(const AttendCall& call, Span span, const float* scores, float max, bf16* weights) {
  f32x16 sum = {};
  for (int32_t position = span.first / kTile * kTile; position < span.last; position += kTile) {
    f32x16 weight = exp_of(load_f32(scores + position), max);
    f32x16 scaled = weight;
    if constexpr (kIsInt8) scaled *= scales_at(call, call.kv.v_scales_offset, position);
    if (!is_whole(span, position)) {
      i32x16 seen = lanes_in(span, position);
      weight = select(seen, weight, splat(0)), scaled = select(seen, scaled, splat(0));
    }
    store_weights(weights + position, scaled);
    sum += kIsInt8 ? weight : load_bf16(weights + position);
  }
  return sum16(sum);
}

template <bool kIsInt8>
inline void finish_row(const AttendCall& call, int32_t row, Span span, float* scores, bf16* weights) {
  float max = call.soft_cap != 0 ? finish_scores<kIsInt8, true>(call, span, scores)
                                 : finish_scores<kIsInt8, false>(call, span, scores);
  call.max[row] = max;
  call.sum[row] = is_empty(span) ? 0 : write_weights<kIsInt8>(call, span, scores, max, weights);
}

// Scores of the row to weights over `all`, the positions that any row of the call sees: zeros where this one does not.
PM_INLINE void softmax_row(const AttendCall& call, int32_t row, Span span, Span all, float* scores, bf16* weights) {
  int32_t all_first = all.first / kTile * kTile, all_last = round_up(all.last, kTile);
  int32_t first = is_empty(span) ? all_last : span.first / kTile * kTile;
  int32_t last = is_empty(span) ? all_last : round_up(span.last, kTile);
  memset(weights + all_first, 0, (first - all_first) * sizeof(bf16));
  memset(weights + last, 0, (all_last - last) * sizeof(bf16));
  if (call.kv.kind == KvKind::int8) finish_row<true>(call, row, span, scores, weights);
  else finish_row<false>(call, row, span, scores, weights);
}

}  // namespace
}  // namespace pointsman
