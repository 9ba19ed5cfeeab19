// A model put together from packed linears, its pages, and the forward pass over them.
#pragma once

#include <vector>

#include "abi.h"
#include "buffers.h"
#include "huge_pages.h"
#include "ops.h"
#include "pool.h"

struct pm_machine {
  const pointsman::KernelTable* table;
  pointsman::Pool pool;
  pointsman::Arena arena;  // of the packed weights
  std::vector<pointsman::Buffer<uint8_t>> attend_scratch;  // one a thread

  pm_machine(const pointsman::KernelTable* table, int num_threads);
};

struct pm_linear {
  pm_machine* machine;
  pointsman::PackedWeight weight;
  int64_t num_bytes;
};

namespace pointsman {

struct Layer {
  const PackedWeight* qkv[3] = {};
  int num_qkv = 0;
  const PackedWeight *o, *gate_up, *down;
  Buffer<float> input_norm, q_norm, k_norm, attn_post_norm, mlp_norm, mlp_post_norm;  // padded with zeros
  int32_t window_left;
  int32_t rope;
};

// Where q, k and v of one token lie in the fused projection, in floats. Separate linears write whole pairs of panels,
// so each starts a pair of its own.
struct QkvLayout {
  int64_t k, v, stride;
};

// Up to kMaxRows query rows of one request: tokens [first_token, last_token) of the step, times the heads of a group.
struct QueryBlock {
  int32_t request;
  int32_t first_token, last_token;
};

// How a step's attention is cut. Splits that are computed apart, so that threads can share them, leave partial results:
//   of the shared prefix, for all rows at once, and of all splits where there are fewer blocks than threads.
struct AttentionPlan {
  std::vector<QueryBlock> blocks;
  std::vector<QueryBlock> shared_blocks;  // rows of whatever requests; `request` is one whose pages begin alike
  int32_t num_shared_splits = 0;
  int32_t num_splits = 0;                 // of the longest request
  bool is_split = false;                  // each block's splits are computed apart
  bool stores_within = false;             // one token a request, and its K and V are read by nobody else in this step
};

// What one thread alone reads and writes. Sized before the threads start: none of them may throw between barriers.
struct ThreadSpace {
  Buffer<bf16> values;           // inputs of linears, in steps of few rows
  Buffer<int8_t> quantised;
  Buffer<float> scales, sums;
  Buffer<float> fold;            // attention: two partial softmaxes of kMaxRows rows
  Buffer<float> logits;          // the head: [rows][a few pairs of panels]
};

// What the linears read and write, sized for the step.
struct Workspace {
  Buffer<float> residual, qkv, projected, scales, sums, partial_max, partial_sum, partial_out;
  Buffer<bf16> normed, q, attended, gated, last_hidden;
  Buffer<int8_t> quantised;
  std::vector<ThreadSpace> of_threads;
  std::vector<Dispenser> dispensers;      // one a stage of the step, so that none is reset while in use
};

enum Phase { kQkv, kAttention, kO, kGateUp, kDown, kHead, kOther, kNumPhases };

}  // namespace pointsman

struct pm_pages {
  const pm_model* model;
  int32_t num_pages, page_size;
  pointsman::KvKind kind;
  uint8_t* data;                 // [layer][page][kv head][K | V | scales]
  int64_t head_bytes, layer_page_bytes, num_bytes;

  pointsman::KvHead head(int32_t layer, int32_t kv_head) const;
};

struct pm_model {
  pm_machine* machine;
  pm_model_config config;        // its pointers are not to be followed, but for embedding's
  std::vector<pointsman::Layer> layers;
  pointsman::Buffer<float> final_norm;
  const pointsman::PackedWeight* head;
  const float* rope[2] = {};
  int32_t num_rope_positions[2] = {};

  int32_t group, head_dim_padded, hidden_stride;
  pointsman::QkvLayout qkv_layout;
  int32_t attended_stride, gated_stride, widest_input;  // elements
  pointsman::Workspace work;
  int32_t num_hidden_rows = 0;   // of the last forward
  double seconds[pointsman::kNumPhases] = {};

  void forward(const pm_pages& pages, const pm_step& step);
  void head_rows(int32_t first_row, int32_t num_rows, int32_t num_token_ids, float* logits, int32_t* greedy_ids,
                 uint8_t* is_finite);
};
