// The library's C interface: what Python calls through ctypes. Knows no requests and no text.
//
// A handle belongs to whoever created it and is destroyed once, models before their linears, all before the machine,
// which keeps the linears' memory until then.
// A function that can fail returns null, or not 0; pm_last_error() then says why, in a sentence. One thread at a time
// may use a machine; the calls hold no lock of Python's.
#pragma once

#include <stdint.h>

#define PM_ABI_VERSION 2
#define PM_EXPORT __attribute__((visibility("default")))

extern "C" {

typedef struct pm_machine pm_machine;  // an instruction set and a pool of threads
typedef struct pm_linear pm_linear;    // a packed weight
typedef struct pm_model pm_model;      // linears and norms, put together
typedef struct pm_pages pm_pages;      // K and V of every layer

PM_EXPORT int32_t pm_abi_version(void);
PM_EXPORT const char* pm_last_error(void);
PM_EXPORT const char* pm_cpu_name(void);
// "amx", "avx512", "avx512_vnni", "avx2" or "generic": the quickest that this CPU runs and this library has.
PM_EXPORT const char* pm_best_isa(void);
PM_EXPORT int32_t pm_can_run(const char* isa);

PM_EXPORT pm_machine* pm_machine_create(const char* isa, int32_t num_threads);
PM_EXPORT void pm_machine_destroy(pm_machine*);

// How a source's numbers are stored. From PM_Q8_0 on: ggml's blocks, their own bytes.
enum {
  PM_F32 = 0, PM_BF16 = 1, PM_F16 = 2, PM_Q8_0 = 8, PM_Q4_0 = 9, PM_Q4_1 = 10, PM_Q5_0 = 11, PM_Q5_1 = 12,
  PM_Q4_K = 13, PM_Q5_K = 14, PM_Q6_K = 15
};
// What a linear computes in. PM_AS_STORED: sources of ggml blocks, all of one kind, keep their values.
enum { PM_TO_BF16 = 0, PM_TO_INT8 = 1, PM_TO_INT4 = 2, PM_AS_STORED = 3 };

typedef struct pm_source {
  const void* data;              // [num_rows][k], row after row
  int32_t storage;
  int32_t num_rows;
} pm_source;

typedef struct pm_linear_config {
  const pm_source* sources;      // read during the call only; rows are numbered through
  int32_t num_sources;
  int32_t k;                     // inputs
  int32_t n;                     // outputs
  const int32_t* row_order;      // [n], which source row becomes output i
  const float* bias;             // [n] in output order, or null
  int32_t target;
} pm_linear_config;

PM_EXPORT pm_linear* pm_linear_create(pm_machine*, const pm_linear_config*);
PM_EXPORT void pm_linear_destroy(pm_linear*);
PM_EXPORT int64_t pm_linear_bytes(const pm_linear*);
// What pm_linear_bytes() of such a linear would be, or -1. The sources' numbers are not read.
PM_EXPORT int64_t pm_planned_bytes(const pm_linear_config*);
// out[num_rows][n] = x[num_rows][k] weight^T + bias, as the model computes it. For tests and benches.
PM_EXPORT int32_t pm_linear_run(const pm_linear*, const float* x, int32_t num_rows, float* out);
// out[k] = the weights of one output, as values.
PM_EXPORT void pm_linear_row(const pm_linear*, int32_t row, float* out);

typedef struct pm_layer {
  const pm_linear* qkv[3];       // one with q, k and v stacked, or the three; unused ones null
  const pm_linear* o;
  const pm_linear* gate_up;      // 16 rows of gate and 16 of up alternate
  const pm_linear* down;
  const float* input_norm;       // [hidden]; norms are copied
  const float* q_norm;           // [head_dim] or null
  const float* k_norm;
  const float* attn_post_norm;   // [hidden] or null: both post norms or none, in all layers alike
  const float* mlp_norm;
  const float* mlp_post_norm;
  int32_t window_left;           // tokens seen to the left of the query; -1 = all
  int32_t rope;                  // which of the two tables
} pm_layer;

typedef struct pm_model_config {
  const pm_layer* layers;
  int32_t num_layers;
  int32_t hidden_size;
  int32_t num_q_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t intermediate_size;
  int32_t vocab_size;
  int32_t activation;            // 0 silu, 1 gelu_tanh
  float eps;
  float embed_scale;
  float sm_scale;
  float attn_soft_cap;           // 0 = off
  float final_soft_cap;          // 0 = off
  const uint16_t* embedding;     // [vocab][hidden] bf16, read as long as the model lives; null: the rows of head
  const float* final_norm;
  const pm_linear* head;
} pm_model_config;

PM_EXPORT pm_model* pm_model_create(pm_machine*, const pm_model_config*);
PM_EXPORT void pm_model_destroy(pm_model*);
// The rope table of `rope` 0 or 1: [num_positions][head_dim], cos of head_dim / 2 angles, then their sin. Read as long
// as it is set.
PM_EXPORT void pm_model_set_rope(pm_model*, int32_t rope, const float* cos_sin, int32_t num_positions);

enum { PM_KV_BF16 = 0, PM_KV_INT8 = 1 };
// Bytes of one page over all layers of a model of this shape.
PM_EXPORT int64_t pm_page_bytes(int32_t num_layers, int32_t num_kv_heads, int32_t head_dim, int32_t page_size,
                                int32_t kind);
PM_EXPORT pm_pages* pm_pages_create(const pm_model*, int32_t num_pages, int32_t page_size, int32_t kind);
PM_EXPORT void pm_pages_destroy(pm_pages*);
PM_EXPORT void pm_pages_copy(pm_pages*, const int32_t* from, const int32_t* to, int32_t count);
PM_EXPORT void pm_pages_read(const pm_pages*, int32_t page, uint8_t* out);
PM_EXPORT void pm_pages_write(pm_pages*, int32_t page, const uint8_t* data);

// One step over a ragged batch: StepMeta of kernels/step.py.
typedef struct pm_step {
  int32_t num_reqs;
  int32_t num_tokens;
  const int32_t* qo_indptr;      // [num_reqs + 1]
  const int32_t* kv_indptr;      // [num_reqs + 1]
  const int32_t* kv_indices;     // page ids
  const int32_t* kv_lens;        // [num_reqs]
  const int32_t* token_ids;      // [num_tokens]
  const int32_t* positions;      // [num_tokens]
  const int32_t* slot_mapping;   // [num_tokens]
  const int32_t* logit_rows;     // [num_logit_rows]
  int32_t num_logit_rows;
  int32_t num_common_pages;      // the first pages that all requests share, wholly computed before this step
  const float* embeddings;       // [num_tokens][hidden] instead of token_ids, or null
} pm_step;

// Compute a step: store its K and V, keep the normed last hidden states of logit_rows for pm_model_head().
PM_EXPORT int32_t pm_model_forward(pm_model*, pm_pages*, const pm_step*);
// Logits of the last forward's rows [first_row, first_row + num_rows).
//   logits: [num_rows][vocab_size] fp32 or null; greedy_ids: [num_rows], among the first num_token_ids ids;
//   is_finite: [num_rows], of those ids.
PM_EXPORT int32_t pm_model_head(pm_model*, int32_t first_row, int32_t num_rows, int32_t num_token_ids, float* logits,
                                int32_t* greedy_ids, uint8_t* is_finite);
// The last forward's hidden states: [num_logit_rows][hidden].
PM_EXPORT void pm_model_hidden(const pm_model*, float* out);
// Seconds spent in each phase since the last call: qkv, attention, o, gate_up, down, head, other.
PM_EXPORT void pm_model_take_times(pm_model*, double* seconds);

}  // extern "C"
