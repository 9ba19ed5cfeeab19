// Whole steps of a small model through the C interface: three threads leave the bits that one leaves. Under the thread
// sanitizer, a barrier that is missing between two stages is a race that it reports.

#include <numeric>

#include "abi.h"
#include "check.h"

namespace {

constexpr int32_t kHidden = 96, kHeads = 4, kKvHeads = 2, kHeadDim = 32, kIntermediate = 80, kVocab = 203;
constexpr int32_t kLayers = 2, kPageSize = 32, kPages = 64, kPositions = 1024;

std::vector<float> random_floats(int64_t count, float spread, Random& random) {
  std::vector<float> values(count);
  for (float& value : values) value = random.uniform() * spread;
  return values;
}

// A model with weights from one seed, and its pages.
struct Model {
  pm_machine* machine;
  std::vector<pm_linear*> linears;
  pm_model* model;
  pm_pages* pages;
  std::vector<float> rope, norm = std::vector<float>(kHidden, 1.0f);

  Model(const char* isa, int num_threads, int32_t target, bool has_post_norms) {
    Random random = {7};
    machine = pm_machine_create(isa, num_threads);
    std::vector<pm_layer> layers(kLayers);
    for (int32_t i = 0; i < kLayers; i++) {
      pm_layer& layer = layers[i];
      layer.qkv[0] = linear((kHeads + 2 * kKvHeads) * kHeadDim, kHidden, target, random);
      layer.o = linear(kHidden, kHeads * kHeadDim, target, random);
      layer.gate_up = linear(2 * kIntermediate, kHidden, target, random);
      layer.down = linear(kHidden, kIntermediate, target == PM_TO_INT4 ? PM_TO_INT8 : target, random);
      layer.input_norm = layer.mlp_norm = norm.data();
      if (has_post_norms) layer.attn_post_norm = layer.mlp_post_norm = norm.data();
      layer.window_left = i % 2 ? 40 : -1;
    }
    pm_model_config config = {};
    config.layers = layers.data(), config.num_layers = kLayers, config.hidden_size = kHidden;
    config.num_q_heads = kHeads, config.num_kv_heads = kKvHeads, config.head_dim = kHeadDim;
    config.intermediate_size = kIntermediate, config.vocab_size = kVocab;
    config.eps = 1e-5f, config.embed_scale = 1.0f, config.sm_scale = 0.18f;
    config.final_norm = norm.data(), config.head = linear(kVocab, kHidden, target, random);
    model = pm_model_create(machine, &config);
    CHECK(model, "%s", pm_last_error());
    rope = random_floats((int64_t)kPositions * kHeadDim, 1.0f, random);
    pm_model_set_rope(model, 0, rope.data(), kPositions);
    pages = pm_pages_create(model, kPages, kPageSize, PM_KV_BF16);
  }

  ~Model() {
    pm_pages_destroy(pages);
    pm_model_destroy(model);
    for (pm_linear* linear : linears) pm_linear_destroy(linear);
    pm_machine_destroy(machine);
  }

  const pm_linear* linear(int32_t n, int32_t k, int32_t target, Random& random) {
    std::vector<float> values = random_floats((int64_t)n * k, 0.3f, random);
    std::vector<int32_t> order(n);
    std::iota(order.begin(), order.end(), 0);
    pm_source source = {values.data(), PM_F32, n};
    pm_linear_config config = {&source, 1, k, n, order.data(), nullptr, target};
    linears.push_back(pm_linear_create(machine, &config));
    CHECK(linears.back(), "%s", pm_last_error());
    return linears.back();
  }
};

struct Request {
  std::vector<int32_t> pages;
  int32_t num_computed;
  int32_t num_tokens;  // of the step
};

// Runs a step of the requests; returns the logits of their last tokens.
std::vector<float> run_step(Model& m, const std::vector<Request>& requests, int32_t num_common_pages) {
  std::vector<int32_t> qo = {0}, kv = {0}, indices, lens, ids, positions, slots, rows;
  for (const Request& request : requests) {
    int32_t len = request.num_computed + request.num_tokens, num_pages = (len + kPageSize - 1) / kPageSize;
    for (int32_t at = request.num_computed; at < len; at++) {
      ids.push_back((at * 37 + 11) % kVocab);
      positions.push_back(at);
      slots.push_back(request.pages[at / kPageSize] * kPageSize + at % kPageSize);
    }
    indices.insert(indices.end(), request.pages.begin(), request.pages.begin() + num_pages);
    lens.push_back(len), qo.push_back((int32_t)ids.size()), kv.push_back((int32_t)indices.size());
    rows.push_back((int32_t)ids.size() - 1);
  }
  int32_t num_reqs = (int32_t)requests.size();
  pm_step step = {};
  step.num_reqs = step.num_logit_rows = num_reqs;
  step.num_tokens = (int32_t)ids.size(), step.num_common_pages = num_common_pages;
  step.qo_indptr = qo.data(), step.kv_indptr = kv.data(), step.kv_indices = indices.data();
  step.kv_lens = lens.data(), step.token_ids = ids.data(), step.positions = positions.data();
  step.slot_mapping = slots.data(), step.logit_rows = rows.data();
  CHECK(pm_model_forward(m.model, m.pages, &step) == 0, "%s", pm_last_error());
  std::vector<float> logits((size_t)num_reqs * kVocab);
  std::vector<int32_t> greedy(num_reqs);
  std::vector<uint8_t> is_finite(num_reqs);
  int32_t status = pm_model_head(m.model, 0, num_reqs, kVocab, logits.data(), greedy.data(), is_finite.data());
  CHECK(status == 0, "%s", pm_last_error());
  for (uint8_t finite : is_finite) CHECK(finite, "logits are not finite");
  return logits;
}

// Pages [first, first + 20), the first num_shared of them another request's.
Request request_of(int32_t first, int32_t num_shared, int32_t num_computed, int32_t num_tokens) {
  Request request = {{}, num_computed, num_tokens};
  for (int32_t i = 0; i < 20; i++) request.pages.push_back(i < num_shared ? i : first + i - num_shared);
  return request;
}

// A long prompt, a chunk beside decodes, one and two rows, few blocks and many, a shared prefix, a page that is filled
// and read in the same step.
std::vector<std::vector<float>> run_steps(Model& m) {
  std::vector<std::vector<float>> found;
  found.push_back(run_step(m, {request_of(0, 0, 0, 560)}, 0));
  found.push_back(run_step(m, {request_of(0, 0, 560, 1)}, 0));
  found.push_back(run_step(m, {request_of(0, 0, 561, 1), request_of(20, 16, 512, 1)}, 0));
  found.push_back(run_step(m, {request_of(0, 0, 562, 1), request_of(20, 16, 513, 1), request_of(30, 16, 512, 1)}, 16));
  found.push_back(run_step(m, {request_of(0, 0, 563, 1), request_of(40, 0, 0, 70)}, 0));
  found.push_back(run_step(m, {request_of(60, 0, 0, 31)}, 0));
  found.push_back(run_step(m, {{{60}, 31, 1}, {{60, 61}, 32, 1}, {{62}, 0, 1}}, 0));
  return found;
}

void compare_threads(const char* isa, int32_t target, bool has_post_norms) {
  Model one(isa, 1, target, has_post_norms), three(isa, 3, target, has_post_norms);
  std::vector<std::vector<float>> expected = run_steps(one), found = run_steps(three);
  for (size_t step = 0; step < expected.size(); step++)
    CHECK(memcmp(expected[step].data(), found[step].data(), expected[step].size() * sizeof(float)) == 0,
          "%s, target %d, post norms %d: step %d differs with threads", isa, target, has_post_norms, (int)step);
}

}  // namespace

int main() {
  for (const pointsman::KernelTable* table : tables_to_test())
    for (int32_t target : {PM_TO_BF16, PM_TO_INT8, PM_TO_INT4})
      for (bool has_post_norms : {false, true}) compare_threads(table->name, target, has_post_norms);
  return finish_checks();
}
