// GGUF's blocks, opened: groups of 32 values as integers with their scales.
#pragma once

#include <stdint.h>

#include "pack.h"

namespace pointsman {

// value = scale * (q - zero) + min, of each half of the group.
struct GroupValues {
  uint8_t q[kGroup];
  float scale[2];
  float min[2];
};

// What a type of source needs of a grouped weight.
struct GroupLayout {
  int32_t bits, zero, has_min, has_f32_scales, scales_per_group;
};

inline bool has_groups(SourceType type) { return type >= SourceType::q8_0 && type <= SourceType::q6_k; }
GroupLayout layout_of(SourceType type);

// Values in one block, and its bytes; 1 and an element's bytes for plain types.
int32_t block_values(SourceType type);
int32_t block_bytes(SourceType type);

// Group `group` of a row that starts at `row`.
void read_group(SourceType type, const uint8_t* row, int32_t group, GroupValues* out);

float f16_to_f32(uint16_t x);
uint16_t f32_to_f16(float x);

}  // namespace pointsman
