// Builds PackedWeights from a checkpoint's tensors: plain, or in GGUF's blocks.
//
// begin_pack() lays a weight out, pack_panels() fills some of its panels: threads may share them out. A caller with
// memory of its own uses plan_pack() and place_packed() instead.
#pragma once

#include <stdint.h>

#include "ops.h"

namespace pointsman {

enum class SourceType : int32_t {
  f32 = 0,
  bf16 = 1,
  f16 = 2,
  q8_0 = 3,
  q4_0 = 4,
  q4_1 = 5,
  q5_0 = 6,
  q5_1 = 7,
  q4_k = 8,
  q5_k = 9,
  q6_k = 10,
};

enum class PackFormat : int32_t {
  bf16 = 0,
  int8 = 1,      // one scale for each output
  int4 = 2,      // 4 bits in groups of 32 with a scale and a minimum, found by least squares
  grouped = 3,   // the sources' own groups, value for value; all sources must have groups
};

// Some rows of k values, contiguous.
struct PackSource {
  const void* data;
  SourceType type;
  int32_t num_rows;
};

// Rows of several sources, numbered through: source 0's first. The sources must live until the last pack_panels().
struct PackJob {
  PackFormat format;
  int32_t n, k;
  const PackSource* sources;
  int32_t num_sources;
  const int32_t* row_order;   // [n], the row that each packed row comes from, -1 for zeros; null: as they are
  const float* bias;          // [n] in the order of the packed rows, or null
};

// Sets the weight's layout and none of its pointers. Returns null, or a sentence that says what is wrong.
const char* plan_pack(const PackJob& job, PackedWeight* weight);

// Bytes that a planned weight takes, a multiple of 64.
int64_t packed_bytes(const PackedWeight& weight, bool has_bias);

// Points a planned weight into memory of packed_bytes(): zeroed, 64-byte aligned. Sets the bias.
void place_packed(const PackJob& job, void* memory, PackedWeight* weight);

// Plans the weight and places it in memory of its own, which free_packed() gives back.
const char* begin_pack(const PackJob& job, PackedWeight* weight);
void free_packed(PackedWeight* weight);

inline int32_t num_panels(const PackedWeight& weight) { return weight.n_padded / kPanel; }

// Fills panels [first_panel, last_panel). Disjoint ranges may be filled by several threads at once.
void pack_panels(const PackJob& job, int32_t first_panel, int32_t last_panel, PackedWeight* weight);

// The exact values of a packed row: out [k].
void unpack_row(const PackedWeight& weight, int32_t packed_row, float* out);

// The source's row as floats: out [k]. What formats other than `grouped` are made from.
void read_row(const PackSource& source, int32_t row, int32_t k, float* out);

}  // namespace pointsman
