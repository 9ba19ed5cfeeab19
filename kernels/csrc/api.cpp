// The C interface over models and packed weights: builds, checks what it is given, and turns exceptions into messages.

#include <stdio.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>

#include "cpu.h"
#include "huge_pages.h"
#include "linears.h"
#include "model.h"
#include "pack.h"

namespace pointsman {

namespace {

thread_local char last_error[512];  // no string: telling that memory is out must take none

void keep_error(const char* reason) { snprintf(last_error, sizeof last_error, "%s", reason); }

// Runs work(), returns what it returns, or `failed` with the reason kept.
template <class Result, class Work>
Result guarded(Result failed, Work work) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    keep_error("There is not enough memory.");
  } catch (const std::exception& error) {
    keep_error(error.what());
  }
  return failed;
}

void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

const KernelTable* table_of(const std::string& isa) {
#ifndef PM_NO_AMX
  if (isa == "amx") return amx_table();
#endif
#ifndef PM_NO_AVX512
  if (isa == "avx512") return avx512_table();
#endif
#ifndef PM_NO_AVX512_VNNI
  if (isa == "avx512_vnni") return avx512_vnni_table();
#endif
#ifndef PM_NO_AVX2
  if (isa == "avx2") return avx2_table();
#endif
  if (isa == "generic") return generic_table();
  return nullptr;
}

bool runs_here(const std::string& isa) { return table_of(isa) && can_run(isa.c_str()); }

void copy_norm(const float* from, int32_t width, Buffer<float>* to) {
  if (from) to->assign(from, width, round_up(width, 64));
}

Layer make_layer(const pm_layer& from, const pm_model_config& config) {
  Layer layer;
  for (const pm_linear* linear : from.qkv)
    if (linear) layer.qkv[layer.num_qkv++] = &linear->weight;
  layer.o = &from.o->weight;
  layer.gate_up = &from.gate_up->weight;
  layer.down = &from.down->weight;
  copy_norm(from.input_norm, config.hidden_size, &layer.input_norm);
  copy_norm(from.q_norm, config.head_dim, &layer.q_norm);
  copy_norm(from.k_norm, config.head_dim, &layer.k_norm);
  copy_norm(from.attn_post_norm, config.hidden_size, &layer.attn_post_norm);
  copy_norm(from.mlp_norm, config.hidden_size, &layer.mlp_norm);
  copy_norm(from.mlp_post_norm, config.hidden_size, &layer.mlp_post_norm);
  layer.window_left = from.window_left;
  layer.rope = from.rope;
  return layer;
}

QkvLayout layout_qkv(const pm_model_config& config, int num_linears) {
  int64_t q = (int64_t)config.num_q_heads * config.head_dim, kv = (int64_t)config.num_kv_heads * config.head_dim;
  if (num_linears == 1) return {q, q + kv, round_up((int32_t)(q + 2 * kv), 64)};
  int64_t k_start = round_up((int32_t)q, kPair), v_start = k_start + round_up((int32_t)kv, kPair);
  return {k_start, v_start, round_up((int32_t)(v_start + kv), 64)};
}

void check_layer(const Layer& layer, const pm_model_config& config) {
  int32_t q = config.num_q_heads * config.head_dim, kv = config.num_kv_heads * config.head_dim;
  require(layer.num_qkv == 1 || layer.num_qkv == 3, "A layer has one fused qkv linear, or three.");
  require(layer.num_qkv == 3 ? layer.qkv[0]->n == q && layer.qkv[1]->n == kv && layer.qkv[2]->n == kv
                             : layer.qkv[0]->n == q + 2 * kv,
          "The qkv linear does not fit the heads.");
  for (int i = 0; i < layer.num_qkv; i++)
    require(layer.qkv[i]->k == config.hidden_size && layer.qkv[i]->kind == layer.qkv[0]->kind,
            "The qkv linears do not fit the hidden size or each other.");
  require(layer.o->n == config.hidden_size && layer.o->k == q, "The o linear does not fit the heads.");
  require(layer.gate_up->n == 2 * round_up(config.intermediate_size, kPanel) && layer.gate_up->k == config.hidden_size,
          "The gate and up linear does not fit the intermediate size.");
  require(layer.down->n == config.hidden_size && layer.down->k == config.intermediate_size,
          "The down linear does not fit the intermediate size.");
  require(layer.rope == 0 || layer.rope == 1, "There are two rope tables: 0 and 1.");
}

// A step's shape is the same in all layers: which linears there are, and which norms.
void check_alike(const Layer& layer, const Layer& first) {
  require(layer.num_qkv == first.num_qkv, "All layers must have as many qkv linears.");
  bool has_post_norms = !layer.mlp_post_norm.is_empty();
  require(layer.attn_post_norm.is_empty() != has_post_norms && first.mlp_post_norm.is_empty() != has_post_norms,
          "All layers must have both post norms, or none.");
}

void check_config(const pm_model_config& config) {
  require(config.head_dim >= 16 && config.head_dim <= kMaxHeadDim && config.head_dim % 16 == 0,
          "head_dim must be a multiple of 16, 256 at most.");
  require(config.num_layers > 0, "A model has a layer.");
  require(config.num_kv_heads > 0 && config.num_q_heads % config.num_kv_heads == 0, "The query heads make no groups.");
  require(config.num_q_heads / config.num_kv_heads <= kMaxRows, "A group has more than 64 query heads.");
}

int32_t pad_head_dim(int32_t head_dim) { return round_up(head_dim, 32); }

void lay_out(pm_model* model) {
  const pm_model_config& config = model->config;
  const Layer& first = model->layers[0];
  model->group = config.num_q_heads / config.num_kv_heads;
  model->head_dim_padded = pad_head_dim(config.head_dim);
  model->hidden_stride = round_up(config.hidden_size, 64);
  model->qkv_layout = layout_qkv(config, first.num_qkv);
  model->attended_stride = first.o->k_padded;
  model->gated_stride = first.down->k_padded;
  model->widest_input = std::max({first.qkv[0]->k_padded, first.o->k_padded, first.down->k_padded});
}

pm_model* make_model(pm_machine* machine, const pm_model_config& config) {
  check_config(config);
  auto model = std::make_unique<pm_model>();
  model->machine = machine;
  model->config = config;
  for (int32_t i = 0; i < config.num_layers; i++) {
    model->layers.push_back(make_layer(config.layers[i], config));
    check_layer(model->layers.back(), config);
    check_alike(model->layers[i], model->layers[0]);
  }
  model->final_norm.assign(config.final_norm, config.hidden_size, round_up(config.hidden_size, 64));
  model->head = &config.head->weight;
  require(model->head->n == config.vocab_size && model->head->k == config.hidden_size,
          "The head does not fit the vocabulary.");
  lay_out(model.get());
  return model.release();
}

// Bytes of one head's K, V and scales in one page.
int64_t head_bytes(int32_t head_dim, int32_t page_size, int32_t kind) {
  int64_t values = (int64_t)2 * page_size * pad_head_dim(head_dim);
  return kind == PM_KV_INT8 ? values + (int64_t)2 * page_size * sizeof(float) : values * 2;
}

pm_pages* make_pages(const pm_model& model, int32_t num_pages, int32_t page_size, int32_t kind) {
  require(page_size == 32 || page_size == 64 || page_size == 128, "A page has 32, 64 or 128 tokens.");
  require(num_pages > 0, "There must be a page.");
  auto pages = std::make_unique<pm_pages>();
  pages->model = &model;
  pages->num_pages = num_pages;
  pages->page_size = page_size;
  pages->kind = (KvKind)kind;
  pages->head_bytes = head_bytes(model.config.head_dim, page_size, kind);
  pages->layer_page_bytes = pages->head_bytes * model.config.num_kv_heads;
  pages->num_bytes = pages->layer_page_bytes * num_pages * (int64_t)model.layers.size();
  pages->data = static_cast<uint8_t*>(alloc_huge(pages->num_bytes));
  if (!pages->data) throw std::bad_alloc();
  return pages.release();
}

// The positions that every rope table in use has.
int32_t num_rope_positions(const pm_model& model) {
  int32_t num = INT32_MAX;
  for (const Layer& layer : model.layers) num = std::min(num, model.num_rope_positions[layer.rope]);
  return num;
}

void check_step(const pm_model& model, const pm_step& step) {
  require(step.num_reqs > 0 && step.num_tokens > 0, "A step computes a token.");
  int32_t num_positions = num_rope_positions(model);
  for (int32_t i = 0; i < step.num_tokens; i++) {
    require(step.positions[i] >= 0 && step.positions[i] < num_positions, "A position lies outside of the rope table.");
    require(step.embeddings || (step.token_ids[i] >= 0 && step.token_ids[i] < model.config.vocab_size),
            "A token id lies outside of the vocabulary.");
  }
  for (int32_t i = 0; i < step.num_logit_rows; i++)
    require(step.logit_rows[i] >= 0 && step.logit_rows[i] < step.num_tokens, "A row of logits is none of the step.");
}

// One layer's part of one page.
uint8_t* part(const pm_pages& pages, size_t layer, int32_t page) {
  return pages.data + ((int64_t)layer * pages.num_pages + page) * pages.layer_page_bytes;
}

}  // namespace

}  // namespace pointsman

using namespace pointsman;

pm_machine::pm_machine(const KernelTable* kernels, int num_threads) : table(kernels), pool(num_threads) {
  for (int thread = 0; thread < num_threads; thread++) attend_scratch.emplace_back(kernels->attend_scratch_bytes);
}

KvHead pm_pages::head(int32_t layer, int32_t kv_head) const {
  int64_t values = (int64_t)page_size * model->head_dim_padded, width = kind == KvKind::int8 ? 1 : 2;
  KvHead head = {};
  head.base = part(*this, layer, 0) + kv_head * head_bytes;
  head.page_stride = layer_page_bytes;
  head.v_offset = values * width;
  head.k_scales_offset = 2 * values;
  head.v_scales_offset = head.k_scales_offset + page_size * (int64_t)sizeof(float);
  head.page_size = page_size;
  head.head_dim = model->head_dim_padded;
  head.kind = kind;
  return head;
}

int32_t pm_abi_version() { return PM_ABI_VERSION; }
const char* pm_last_error() { return last_error; }
const char* pm_cpu_name() { return cpu_brand(); }

int32_t pm_can_run(const char* isa) { return runs_here(isa); }

const char* pm_best_isa() {
  for (const char* isa : {"amx", "avx512", "avx512_vnni", "avx2"})
    if (runs_here(isa)) return isa;
  return "generic";
}

pm_machine* pm_machine_create(const char* isa, int32_t num_threads) {
  return guarded<pm_machine*>(nullptr, [&] {
    require(runs_here(isa), "This CPU or this build lacks the instruction set that was asked for.");
    require(num_threads >= 1 && num_threads <= 1024, "The number of threads must lie in 1 to 1024.");
    return new pm_machine(table_of(isa), num_threads);
  });
}

void pm_machine_destroy(pm_machine* machine) { delete machine; }

pm_linear* pm_linear_create(pm_machine* machine, const pm_linear_config* config) {
  return guarded<pm_linear*>(nullptr, [&] { return make_linear(machine, *config); });
}

void pm_linear_destroy(pm_linear* linear) { delete linear; }

int32_t pm_linear_run(const pm_linear* linear, const float* x, int32_t num_rows, float* out) {
  return guarded<int32_t>(1, [&] {
    run_linear(*linear, x, num_rows, out);
    return 0;
  });
}

int64_t pm_linear_bytes(const pm_linear* linear) { return linear->num_bytes; }

int64_t pm_planned_bytes(const pm_linear_config* config) {
  return guarded<int64_t>(-1, [&] { return plan_linear_bytes(*config); });
}

void pm_linear_row(const pm_linear* linear, int32_t row, float* out) { unpack_row(linear->weight, row, out); }

pm_model* pm_model_create(pm_machine* machine, const pm_model_config* config) {
  return guarded<pm_model*>(nullptr, [&] { return make_model(machine, *config); });
}

void pm_model_destroy(pm_model* model) { delete model; }

void pm_model_set_rope(pm_model* model, int32_t rope, const float* cos_sin, int32_t num_positions) {
  model->rope[rope] = cos_sin;
  model->num_rope_positions[rope] = num_positions;
}

int64_t pm_page_bytes(int32_t num_layers, int32_t num_kv_heads, int32_t head_dim, int32_t page_size, int32_t kind) {
  return head_bytes(head_dim, page_size, kind) * num_kv_heads * num_layers;
}

pm_pages* pm_pages_create(const pm_model* model, int32_t num_pages, int32_t page_size, int32_t kind) {
  return guarded<pm_pages*>(nullptr, [&] { return make_pages(*model, num_pages, page_size, kind); });
}

void pm_pages_destroy(pm_pages* pages) {
  if (pages) free_huge(pages->data, pages->num_bytes);
  delete pages;
}

void pm_pages_copy(pm_pages* pages, const int32_t* from, const int32_t* to, int32_t count) {
  for (size_t layer = 0; layer < pages->model->layers.size(); layer++)
    for (int32_t i = 0; i < count; i++)
      std::copy_n(part(*pages, layer, from[i]), pages->layer_page_bytes, part(*pages, layer, to[i]));
}

void pm_pages_read(const pm_pages* pages, int32_t page, uint8_t* out) {
  for (size_t layer = 0; layer < pages->model->layers.size(); layer++, out += pages->layer_page_bytes)
    std::copy_n(part(*pages, layer, page), pages->layer_page_bytes, out);
}

void pm_pages_write(pm_pages* pages, int32_t page, const uint8_t* data) {
  for (size_t layer = 0; layer < pages->model->layers.size(); layer++, data += pages->layer_page_bytes)
    std::copy_n(data, pages->layer_page_bytes, part(*pages, layer, page));
}

int32_t pm_model_forward(pm_model* model, pm_pages* pages, const pm_step* step) {
  return guarded<int32_t>(1, [&] {
    require(pages->model == model, "The pages are another model's.");
    check_step(*model, *step);
    model->forward(*pages, *step);
    return 0;
  });
}

int32_t pm_model_head(pm_model* model, int32_t first_row, int32_t num_rows, int32_t num_token_ids, float* logits,
                      int32_t* greedy_ids, uint8_t* is_finite) {
  return guarded<int32_t>(1, [&] {
    require(first_row >= 0 && num_rows >= 0 && first_row + num_rows <= model->num_hidden_rows,
            "The last step kept fewer rows than that.");
    model->head_rows(first_row, num_rows, num_token_ids, logits, greedy_ids, is_finite);
    return 0;
  });
}

void pm_model_hidden(const pm_model* model, float* out) {
  int32_t width = model->config.hidden_size;
  for (int32_t row = 0; row < model->num_hidden_rows; row++) {
    const bf16* from = model->work.last_hidden.data() + (int64_t)row * model->head->k_padded;
    for (int32_t i = 0; i < width; i++) {
      uint32_t bits = (uint32_t)from[i] << 16;
      std::memcpy(out + (int64_t)row * width + i, &bits, 4);
    }
  }
}

void pm_model_take_times(pm_model* model, double* seconds) {
  std::copy_n(model->seconds, kNumPhases, seconds);
  std::fill_n(model->seconds, kNumPhases, 0.0);
}
