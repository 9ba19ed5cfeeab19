// What the forward pass does to single rows between the linears: norms, rotation, the way into the pages, merging.
//
// Compiled once per instruction set. One row, one order of sums.
#pragma once

#include <string.h>

#include "ops.h"
#include "vec.h"

namespace pointsman {
namespace {

PM_INLINE float sum_of_squares(const float* x, int32_t width) {
  f32x16 sums = {};
  for (int32_t i = 0; i < width; i += 16) {
    f32x16 v = load_f32(x + i);
    sums = fma16(v, v, sums);
  }
  return sum16(sums);
}

PM_INLINE float reciprocal_rms(const float* x, float eps, int32_t width) {
  float square = sum_of_squares(x, round_up(width, 16)) / (float)width + eps;  // what lies behind the width is zero
  return 1.0f / __builtin_sqrtf(square);
}

void rmsnorm(const float* x, const float* weight, float eps, int32_t width, int32_t width_padded, bf16* out) {
  f32x16 scale = splat(reciprocal_rms(x, eps, width));
  int32_t i = 0;
  for (; i < round_up(width, 16); i += 16) store_bf16(out + i, load_f32(x + i) * scale * load_f32(weight + i));
  memset(out + i, 0, sizeof(bf16) * (width_padded - i));
}

void add_rmsnorm(const float* y, const float* weight, float eps, int32_t width, float* residual) {
  f32x16 scale = splat(reciprocal_rms(y, eps, width));
  for (int32_t i = 0; i < width; i += 16)
    store_f32(residual + i, load_f32(residual + i) + load_f32(y + i) * scale * load_f32(weight + i));
}

// Rotates pairs (x[i], x[i + half]) by the angles of cos_sin: [half cosines | half sines]. half may be odd times 8.
PM_INLINE void rotate(float* x, const float* cos_sin, int32_t head_dim) {
  int32_t half = head_dim / 2, i = 0;
  for (; i + 16 <= half; i += 16) {
    f32x16 low = load_f32(x + i), high = load_f32(x + half + i);
    f32x16 cos = load_f32(cos_sin + i), sin = load_f32(cos_sin + half + i);
    store_f32(x + i, low * cos - high * sin);
    store_f32(x + half + i, high * cos + low * sin);
  }
  for (; i < half; i++) {
    float low = x[i], high = x[half + i], cos = cos_sin[i], sin = cos_sin[half + i];
    x[i] = low * cos - high * sin;
    x[half + i] = high * cos + low * sin;
  }
}

// Norms one head where there is a weight, then rotates it.
PM_INLINE void norm_and_rotate(float* head, const float* norm, const QkvCall& call) {
  if (norm) {
    f32x16 scale = splat(reciprocal_rms(head, call.eps, call.head_dim));
    for (int32_t i = 0; i < call.head_dim; i += 16)
      store_f32(head + i, load_f32(head + i) * scale * load_f32(norm + i));
  }
  rotate(head, call.cos_sin, call.head_dim);
}

void store_q(const QkvCall& call, int32_t first_head, int32_t last_head, bf16* out) {
  for (int32_t h = first_head; h < last_head; h++, out += call.head_dim_padded) {
    float* head = call.qkv + (int64_t)h * call.head_dim;
    norm_and_rotate(head, call.q_norm, call);
    int32_t i = 0;
    for (; i < call.head_dim; i += 16) store_bf16(out + i, load_f32(head + i));
    memset(out + i, 0, sizeof(bf16) * (call.head_dim_padded - i));
  }
}

// One head's values as bytes and a scale: value = scale * byte.
PM_INLINE float quantise_head(const float* x, int32_t head_dim, int8_t* out) {
  f32x16 most = {};
  for (int32_t i = 0; i < head_dim; i += 16) most = max16(most, abs16(load_f32(x + i)));
  float greatest = max_of16(most);
  float inverse = greatest > 0 ? 127.0f / greatest : 0.0f;
  for (int32_t i = 0; i < head_dim; i++) {
    float scaled = x[i] * inverse;
    out[i] = (int8_t)(int32_t)(scaled + (scaled < 0 ? -0.5f : 0.5f));
  }
  return greatest / 127.0f;
}

// K of position `offset` of a page: pair d / 2 of it lies at [offset / 16][d / 2][offset % 16][2].
// V: [offset / 2][d][offset % 2].
PM_INLINE int64_t k_index(int32_t offset, int32_t d, int32_t head_dim) {
  return (int64_t)(offset / 16) * 16 * head_dim + (d / 2) * 32 + (offset % 16) * 2 + d % 2;
}
PM_INLINE int64_t v_index(int32_t offset, int32_t d, int32_t head_dim) {
  return (int64_t)(offset / 2) * 2 * head_dim + d * 2 + offset % 2;
}

void store_kv(const QkvCall& call, int64_t k_offset, int64_t v_offset, const KvHead& kv, int32_t page,
              int32_t offset) {
  uint8_t* base = kv.base + page * kv.page_stride;
  float* k = call.qkv + k_offset;
  const float* v = call.qkv + v_offset;
  norm_and_rotate(k, call.k_norm, call);
  if (kv.kind == KvKind::int8) {
    alignas(64) int8_t bytes[2][kMaxHeadDim];
    ((float*)(base + kv.k_scales_offset))[offset] = quantise_head(k, call.head_dim, bytes[0]);
    ((float*)(base + kv.v_scales_offset))[offset] = quantise_head(v, call.head_dim, bytes[1]);
    int8_t *k_page = (int8_t*)base, *v_page = (int8_t*)(base + kv.v_offset);
    for (int32_t d = 0; d < call.head_dim; d++) {
      k_page[k_index(offset, d, kv.head_dim)] = bytes[0][d];
      v_page[v_index(offset, d, kv.head_dim)] = bytes[1][d];
    }
    return;
  }
  alignas(64) bf16 half[2][kMaxHeadDim];
  for (int32_t i = 0; i < call.head_dim; i += 16) {
    store_bf16(half[0] + i, load_f32(k + i));
    store_bf16(half[1] + i, load_f32(v + i));
  }
  bf16* k_page = (bf16*)base + k_index(offset, 0, kv.head_dim);
  bf16* v_page = (bf16*)(base + kv.v_offset) + v_index(offset, 0, kv.head_dim);
  for (int32_t d = 0; d < call.head_dim; d += 2) memcpy(k_page + d / 2 * 32, half[0] + d, 4);
  for (int32_t d = 0; d < call.head_dim; d++) v_page[d * 2] = half[1][d];
}

PM_INLINE float exp_of(float x) { return exp16(splat(x))[0]; }

void merge(float* max, float* sum, float* out, float part_max, float part_sum, const float* part_out,
           int32_t head_dim) {
  const float nothing = -__builtin_inff();
  if (part_max == nothing) return;
  float greatest = *max > part_max ? *max : part_max;
  float keep = *max == nothing ? 0.0f : exp_of(*max - greatest), take = exp_of(part_max - greatest);
  *max = greatest;
  *sum = *sum * keep + part_sum * take;
  for (int32_t i = 0; i < head_dim; i += 16)
    store_f32(out + i, load_f32(out + i) * keep + load_f32(part_out + i) * take);
}

void finish(const float* acc, float sum, int32_t head_dim, bf16* out) {
  f32x16 inverse = splat(1.0f / sum);
  for (int32_t i = 0; i < head_dim; i += 16) store_bf16(out + i, load_f32(acc + i) * inverse);
}

void scan_logits(const float* values, int32_t n, float* best, int32_t* index, int32_t* is_finite) {
  f32x16 greatest = splat(-__builtin_inff()), poison = {};
  i32x16 where = {}, lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  int32_t i = 0;
  for (; i + 16 <= n; i += 16) {
    f32x16 v = load_f32(values + i);
    poison += v * 0.0f;  // 0, or NaN from the first value on that is not finite
    i32x16 is_greater = v > greatest;
    where = (is_greater & (lane + i)) | (~is_greater & where);
    greatest = max16(v, greatest);
  }
  float most = greatest[0], rest = sum16(poison);
  int32_t first = where[0];
  for (int32_t j = 1; j < 16; j++) {
    float v = greatest[j];
    if (v > most || (v == most && where[j] < first)) most = v, first = where[j];
  }
  for (; i < n; i++) {
    rest += values[i] * 0.0f;
    if (values[i] > most) most = values[i], first = i;
  }
  *best = most, *index = first, *is_finite = rest == 0.0f;
}

void soft_cap(float* values, int32_t n, float cap) {
  int32_t i = 0;
  for (; i + 16 <= n; i += 16) store_f32(values + i, tanh16(load_f32(values + i) * (1.0f / cap)) * cap);
  for (; i < n; i++) values[i] = tanh16(splat(values[i] * (1.0f / cap)))[0] * cap;
}

}  // namespace
}  // namespace pointsman
