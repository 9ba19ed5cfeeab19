// What happens to a linear's sums: a block [rows][kPair] of one pair of panels becomes outputs.
#pragma once

#include "ops.h"
#include "vec.h"

namespace pointsman {
namespace {

// Exact sums of int8 products to floats. offset: the inputs were x + 128, which added the weight's compensation.
PM_INLINE void scale_int8(const LinearCall& call, int32_t pair, int32_t first_row, int32_t num_rows, bool offset,
                          const int32_t* sums, float* block) {
  const PackedWeight& weight = *call.weight;
  for (int panel = 0; panel < 2; panel++) {
    int32_t column = pair * kPair + panel * kPanel;
    i32x16 compensation = {};
    if (offset) memcpy(&compensation, weight.compensation + column, 64);
    f32x16 weight_scales = load_f32(weight.scales + column);
    for (int32_t row = 0; row < num_rows; row++) {
      i32x16 sum;
      memcpy(&sum, sums + row * kPair + panel * kPanel, 64);
      f32x16 scale = weight_scales * call.in.scales[first_row + row];
      store_f32(block + row * kPair + panel * kPanel, __builtin_convertvector(sum - compensation, f32x16) * scale);
    }
  }
}

PM_INLINE f32x16 activate(Activation activation, f32x16 x) {
  if (activation == Activation::silu) return x / (1.0f + exp16(-x));
  f32x16 inner = x * 0.7978845608028654f * (1.0f + 0.044715f * x * x);  // sqrt(2 / pi)
  return 0.5f * x * (1.0f + tanh16(inner));
}

// block: [num_rows][kPair], the sums of rows first_row and on.
PM_INLINE void apply_epilogue(const LinearCall& call, int32_t pair, int32_t first_row, int32_t num_rows,
                              const float* block) {
  const float* bias = call.weight->bias;
  f32x16 first_bias = bias ? load_f32(bias + pair * kPair) : splat(0.0f);
  f32x16 second_bias = bias ? load_f32(bias + pair * kPair + kPanel) : splat(0.0f);
  for (int32_t row = 0; row < num_rows; row++) {
    int64_t out_row = (first_row + row) * call.out_stride;
    f32x16 first = load_f32(block + row * kPair), second = load_f32(block + row * kPair + kPanel);
    if (bias) first += first_bias, second += second_bias;
    if (call.epilogue == Epilogue::gate) {
      store_bf16(call.gated + out_row + pair * kPanel, activate(call.activation, first) * second);
      continue;
    }
    float* out = call.out + out_row + pair * kPair;
    if (call.epilogue == Epilogue::add) first += load_f32(out), second += load_f32(out + kPanel);
    store_f32(out, first);
    store_f32(out + kPanel, second);
  }
}

}  // namespace
}  // namespace pointsman
