// Sums of bf16 products for a few rows and one pair of panels.
#pragma once

#include "lanes.h"

namespace pointsman {
namespace {

// Every output is one chain along k, whatever kRows is.
template <int kRows>
static void bf16_sums(const LinearCall& call, int32_t pair, int32_t first_row, float* block) {
  const PackedWeight& weight = *call.weight;
  const bf16* inputs = call.in.values + (int64_t)first_row * call.in.stride;
  for (int start = 0; start < kPair; start += kPassColumns) {
    const uint8_t* columns[kPassVectors];
    Floats sums[kRows][kPassVectors];
    for (int v = 0; v < kPassVectors; v++) columns[v] = column_start(weight, pair, start + v * kLanes);
    for (int row = 0; row < kRows; row++)
      for (int v = 0; v < kPassVectors; v++) sums[row][v] = zero_floats();

    for (int32_t k = 0; k < weight.k_padded; k += 2) {
      int64_t offset = (int64_t)k * kPanel * 2;  // 64 bytes: a pair of k for 16 columns
      Bf16Pairs weights[kPassVectors];
      for (int v = 0; v < kPassVectors; v++) {
        weights[v] = split_pairs(load_ints(columns[v] + offset));
        if (v * kLanes % kPanel == 0) prefetch_ahead(weight, columns[v], offset);
      }
      for (int row = 0; row < kRows; row++) {
        Bf16Pairs input = split_pairs(broadcast_32_bits(inputs + (int64_t)row * call.in.stride + k));
        for (int v = 0; v < kPassVectors; v++) sums[row][v] = dot_pairs(sums[row][v], weights[v], input);
      }
    }

    for (int row = 0; row < kRows; row++)
      for (int v = 0; v < kPassVectors; v++) store_floats(block + row * kPair + start + v * kLanes, sums[row][v]);
  }
}

}  // namespace
}  // namespace pointsman
