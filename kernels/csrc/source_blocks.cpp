#include "source_blocks.h"

#include <string.h>

#include <cmath>

// Source: the block structures and dequantisation of GGUF (gguf-py's quants.py is the oracle of the tests).

namespace pointsman {

// Exponent and fraction in a float's place, times 2^(127 - 15): right for subnormals too, not for infinities and NaN.
float f16_to_f32(uint16_t x) {
  uint32_t bits = (uint32_t)(x & 0x7fff) << 13;
  float value;
  memcpy(&value, &bits, 4);
  value *= 5.192296858534828e33f;  // 2^112
  if ((x & 0x7c00) == 0x7c00) value = x & 1023 ? NAN : INFINITY;
  return x & 0x8000 ? -value : value;
}

// Rounds to the nearest, ties to even.
uint16_t f32_to_f16(float x) {
  uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  float magnitude = std::fabs(x);
  if (std::isnan(x)) return sign | 0x7e00;
  if (magnitude >= 65520.0f) return sign | 0x7c00;
  if (magnitude < 6.103515625e-05f) return sign | (uint16_t)std::nearbyint(std::ldexp(magnitude, 24));
  int exponent;
  float fraction = std::frexp(magnitude, &exponent);  // in [0.5, 1)
  // A fraction that rounds up to 2048 carries into the exponent, as it should.
  int32_t rounded = (int32_t)std::nearbyint(std::ldexp(fraction, 11)) - 1024;
  return sign | (uint16_t)(((exponent + 14) << 10) + rounded);
}

namespace {

struct BlockShape {
  int32_t values, bytes;
  GroupLayout layout;
};

// In SourceType's order. Layout: bits, zero, has_min, has_f32_scales, scales_per_group.
constexpr BlockShape kShapes[] = {
    {1, 4, {}},
    {1, 2, {}},
    {1, 2, {}},
    {32, 34, {8, 128, 0, 0, 1}},
    {32, 18, {4, 8, 0, 0, 1}},
    {32, 20, {4, 0, 1, 0, 1}},
    {32, 22, {8, 16, 0, 0, 1}},
    {32, 24, {8, 0, 1, 0, 1}},
    {256, 144, {4, 0, 1, 1, 1}},
    {256, 176, {8, 0, 1, 1, 1}},
    {256, 210, {8, 32, 0, 1, 2}},
};

float half_at(const uint8_t* p) {
  uint16_t bits;
  memcpy(&bits, p, 2);
  return f16_to_f32(bits);
}

void set_scales(float scale, float min, GroupValues* out) {
  for (int half = 0; half < 2; half++) out->scale[half] = scale, out->min[half] = min;
}

// 16 bytes: values 0 to 15 in the low nibbles, 16 to 31 in the high ones.
void read_nibbles(const uint8_t* bytes, GroupValues* out) {
  for (int i = 0; i < 16; i++) out->q[i] = bytes[i] & 15, out->q[i + 16] = bytes[i] >> 4;
}

// A fifth bit for each value.
void add_fifth_bits(const uint8_t* bits, GroupValues* out) {
  for (int i = 0; i < kGroup; i++) out->q[i] |= (bits[i / 8] >> (i % 8) & 1) << 4;
}

void read_q8_0(const uint8_t* block, GroupValues* out) {
  for (int i = 0; i < kGroup; i++) out->q[i] = (uint8_t)(block[2 + i] ^ 0x80);  // plus 128
  set_scales(half_at(block), 0, out);
}

// K blocks: [d][dmin][12 bytes: 8 scales and 8 minima of 6 bits][Q5_K: 32 bytes of fifth bits][128 bytes of nibbles].
//
//   scale byte    0-3: scales 0-3, upper 2 bits of scales 4-7 on top
//                 4-7: minima 0-3, upper 2 bits of minima 4-7 on top
//                8-11: lower 4 bits of scales 4-7 | of minima 4-7
void read_k_scales(const uint8_t* block, int32_t group, GroupValues* out) {
  const uint8_t* packed = block + 4;
  int32_t scale, min;
  if (group < 4) {
    scale = packed[group] & 63;
    min = packed[group + 4] & 63;
  } else {
    scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4;
    min = packed[group + 4] >> 4 | (packed[group] >> 6) << 4;
  }
  set_scales(half_at(block) * (float)scale, -(half_at(block + 2) * (float)min), out);
}

// Groups 2j and 2j + 1 share 32 bytes: low and high nibbles.
void read_k_nibbles(const uint8_t* nibbles, int32_t group, GroupValues* out) {
  for (int i = 0; i < kGroup; i++) out->q[i] = nibbles[group / 2 * 32 + i] >> (group % 2 * 4) & 15;
}

void read_q4_k(const uint8_t* block, int32_t group, GroupValues* out) {
  read_k_scales(block, group, out);
  read_k_nibbles(block + 16, group, out);
}

void read_q5_k(const uint8_t* block, int32_t group, GroupValues* out) {
  read_k_scales(block, group, out);
  read_k_nibbles(block + 48, group, out);
  for (int i = 0; i < kGroup; i++) out->q[i] |= (block[16 + i] >> group & 1) << 4;
}

// [128 bytes: low 4 bits][64 bytes: high 2 bits][16 scales][d]. Each half of a block, 4 groups:
//   64 bytes of low bits: groups 0 and 1 in the low nibbles, 2 and 3 in the high ones; 32 bytes of high bits: group g
//   at bit 2 g.
void read_q6_k(const uint8_t* block, int32_t group, GroupValues* out) {
  int32_t half = group / 4, part = group % 4;
  const uint8_t* low = block + half * 64 + part % 2 * 32;
  const uint8_t* high = block + 128 + half * 32;
  for (int i = 0; i < kGroup; i++)
    out->q[i] = (low[i] >> (part / 2 * 4) & 15) | (high[i] >> (part * 2) & 3) << 4;
  float d = half_at(block + 208);
  for (int i = 0; i < 2; i++) out->scale[i] = d * (float)(int8_t)block[192 + group * 2 + i], out->min[i] = 0;
}

}  // namespace

GroupLayout layout_of(SourceType type) { return kShapes[(int32_t)type].layout; }
int32_t block_values(SourceType type) { return kShapes[(int32_t)type].values; }
int32_t block_bytes(SourceType type) { return kShapes[(int32_t)type].bytes; }

void read_group(SourceType type, const uint8_t* row, int32_t group, GroupValues* out) {
  const int32_t groups_in_block = block_values(type) / kGroup;
  const uint8_t* block = row + (int64_t)(group / groups_in_block) * block_bytes(type);
  const int32_t index = group % groups_in_block;
  switch (type) {
    case SourceType::q8_0:
      return read_q8_0(block, out);
    case SourceType::q4_0:
      read_nibbles(block + 2, out);
      return set_scales(half_at(block), 0, out);
    case SourceType::q4_1:
      read_nibbles(block + 4, out);
      return set_scales(half_at(block), half_at(block + 2), out);
    case SourceType::q5_0:
      read_nibbles(block + 6, out);
      add_fifth_bits(block + 2, out);
      return set_scales(half_at(block), 0, out);
    case SourceType::q5_1:
      read_nibbles(block + 8, out);
      add_fifth_bits(block + 4, out);
      return set_scales(half_at(block), half_at(block + 2), out);
    case SourceType::q4_k:
      return read_q4_k(block, index, out);
    case SourceType::q5_k:
      return read_q5_k(block, index, out);
    default:
      return read_q6_k(block, index, out);
  }
}

}  // namespace pointsman
