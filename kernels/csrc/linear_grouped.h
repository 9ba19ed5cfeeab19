// Weights in groups of 32 inputs with scales of their own: the inputs' quantisation, and sums for a few rows.
//
// Within a group integers are summed, exactly. A group adds to its output, in this order:
//   (dot - zero * sum of inputs) * (weight scale * input scale)     once, or for each half of the group
//   min * (sum of inputs * input scale)                             right behind it, where there are minima
#pragma once

#include "linear_int8.h"
#include "linear_lanes.h"

namespace pointsman {
namespace {

constexpr int kGroupQuads = kGroup / 4;

PM_INLINE int32_t sum_of_bytes(const int8_t* p) {
  int32_t sum = 0;
  for (int i = 0; i < 16; i++) sum += p[i];
  return sum;
}

static void quantise_groups(const bf16* x, int32_t width, int8_t* out, float* scales, int32_t* sums) {
  for (int32_t i = 0; i < width; i += kGroup) {
    float greatest = greatest_magnitude(x + i, kGroup);
    f32x16 factor = splat(symmetric_factor(greatest));
    *scales++ = symmetric_scale(greatest);
    for (int half = 0; half < kGroup; half += 16) {
      store_bytes(out + i + half, round_to_int(load_bf16(x + i + half) * factor));
      *sums++ = sum_of_bytes(out + i + half);
    }
  }
}

#if defined(__AVX2__) && !defined(__AVX512F__)

// VPMADDUBSW adds pairs of products in 16 bits, saturating. 4 bits: a whole group stays below 32 * 15 * 127 / 2.
// 8 bits: as q - 128 split into magnitude and sign, two products stay below 2 * 128 * 127.
template <int kBits>
struct GroupQuads {
  static constexpr int32_t kShift = kBits == 8 ? 128 : 0;  // what was taken from every q
  Ints magnitudes[kGroupQuads];
  Ints signs[kGroupQuads];  // 8 bits

  inline __attribute__((always_inline)) void set(int j, Ints bytes) {
    magnitudes[j] = bytes;
    if (kBits == 4) return;
    signs[j] = _mm256_xor_si256(bytes, broadcast_int((int32_t)0x80808080));
    magnitudes[j] = _mm256_abs_epi8(signs[j]);
  }

  // sum + the products of quads [first, last) with inputs.
  inline __attribute__((always_inline)) Ints dot(Ints sum, const int8_t* inputs, int first, int last) const {
    const Ints ones = _mm256_set1_epi16(1);
    Ints shorts = broadcast_int(0);
    for (int j = first; j < last; j++) {
      Ints input = broadcast_32_bits(inputs + j * 4);
      if (kBits == 4) {
        shorts = _mm256_add_epi16(shorts, _mm256_maddubs_epi16(magnitudes[j], input));
      } else {
        shorts = _mm256_maddubs_epi16(magnitudes[j], _mm256_sign_epi8(input, signs[j]));
        sum = add_ints(sum, dot_shorts(shorts, ones));
      }
    }
    return kBits == 4 ? add_ints(sum, dot_shorts(shorts, ones)) : sum;
  }
};

#else

template <int kBits>
struct GroupQuads {
  static constexpr int32_t kShift = 0;
  ByteQuads quads[kGroupQuads];

  inline __attribute__((always_inline)) void set(int j, Ints bytes) { quads[j] = split_unsigned(bytes); }

  inline __attribute__((always_inline)) Ints dot(Ints sum, const int8_t* inputs, int first, int last) const {
    for (int j = first; j < last; j++)
      sum = dot_grouped(sum, quads[j], split_signed(broadcast_32_bits(inputs + j * 4)));
    return sum;
  }
};

#endif

// One vector's columns of a group.
//   4 bits   64-byte row j: quad 2j in the low nibbles, quad 2j + 1 in the high ones
//   8 bits   64-byte row j: quad j
template <int kBits>
PM_INLINE void load_quads(const uint8_t* columns, GroupQuads<kBits>* quads) {
  if (kBits == 8) {
    for (int j = 0; j < kGroupQuads; j++) quads->set(j, load_ints(columns + j * 64));
    return;
  }
  Ints low_nibbles = broadcast_int(0x0f0f0f0f);
  for (int j = 0; j < kGroupQuads / 2; j++) {
    Ints both = load_ints(columns + j * 64);
    quads->set(2 * j, bit_and(both, low_nibbles));
    quads->set(2 * j + 1, bit_and(shift_right_16(both, 4), low_nibbles));
  }
}

// p: the 16 scales or minima of a panel; column: the vector's first of them.
PM_INLINE Floats load_scales(const uint8_t* p, int column, bool has_f32_scales) {
  return has_f32_scales ? load_floats(p + column * 4) : load_halves(p + column * 2);
}

template <int kRows, int kBits, int kHalves>
PM_INLINE void add_group(const LinearCall& call, const uint8_t* group, int column, int32_t first_row, int32_t index,
                         Floats* sums) {
  const PackedWeight& weight = *call.weight;
  const Rows& in = call.in;
  const int32_t num_groups = in.stride / kGroup;
  const int scale_bytes = (weight.has_f32_scales ? 4 : 2) * kPanel;
  const uint8_t* scales = group + kGroup * kPanel * kBits / 8;
  const uint8_t* minima = scales + scale_bytes * kHalves;
  GroupQuads<kBits> quads;
  load_quads<kBits>(group + column * 4, &quads);
  for (int half = 0; half < kHalves; half++) {
    Floats weight_scale = load_scales(scales + half * scale_bytes, column, weight.has_f32_scales);
    Floats min = zero_floats();
    if (weight.has_min) min = load_scales(minima + half * scale_bytes, column, weight.has_f32_scales);
    for (int row = 0; row < kRows; row++) {
      int64_t group_index = (int64_t)(first_row + row) * num_groups + index;
      const int8_t* inputs = in.quantised + group_index * kGroup;
      const int32_t* half_sums = in.sums + group_index * 2;
      int32_t sum = kHalves == 2 ? half_sums[half] : half_sums[0] + half_sums[1];
      float input_scale = in.scales[group_index];
      Ints dot = broadcast_int((quads.kShift - weight.zero) * sum);
      dot = quads.dot(dot, inputs, half * kGroupQuads / kHalves, (half + 1) * kGroupQuads / kHalves);
      Floats scale = multiply(weight_scale, broadcast_float(input_scale));
      Floats& output = sums[row * kPassVectors];
      output = multiply_add(to_floats(dot), scale, output);
      if (weight.has_min) output = multiply_add(min, broadcast_float((float)sum * input_scale), output);
    }
  }
}

template <int kRows, int kBits, int kHalves>
static void grouped_sums(const LinearCall& call, int32_t pair, int32_t first_row, float* block) {
  const PackedWeight& weight = *call.weight;
  const int32_t bytes = group_bytes(weight);
  const uint8_t* panels = weight.data + pair * 2 * weight.panel_bytes;
  for (int start = 0; start < kPair; start += kPassColumns) {
    Floats sums[kRows * kPassVectors];
    for (int i = 0; i < kRows * kPassVectors; i++) sums[i] = zero_floats();
    for (int32_t index = 0; index < weight.k_padded / kGroup; index++) {
      for (int v = 0; v < kPassVectors; v++) {
        int column = start + v * kLanes;
        const uint8_t* panel = panels + column / kPanel * weight.panel_bytes;
        if (column % kPanel == 0)
          for (int i = 0; i < bytes; i += 64) prefetch_ahead(weight, panel, (int64_t)index * bytes + i);
        const uint8_t* group = panel + (int64_t)index * bytes;
        add_group<kRows, kBits, kHalves>(call, group, column % kPanel, first_row, index, sums + v);
      }
    }
    for (int row = 0; row < kRows; row++)
      for (int v = 0; v < kPassVectors; v++)
        store_floats(block + row * kPair + start + v * kLanes, sums[row * kPassVectors + v]);
  }
}

template <int kRows>
static void grouped_4(const LinearCall& call, int32_t pair, int32_t first_row, float* block) {
  grouped_sums<kRows, 4, 1>(call, pair, first_row, block);
}
template <int kRows>
static void grouped_8(const LinearCall& call, int32_t pair, int32_t first_row, float* block) {
  grouped_sums<kRows, 8, 1>(call, pair, first_row, block);
}
template <int kRows>
static void grouped_8_halves(const LinearCall& call, int32_t pair, int32_t first_row, float* block) {
  grouped_sums<kRows, 8, 2>(call, pair, first_row, block);
}

}  // namespace
}  // namespace pointsman
