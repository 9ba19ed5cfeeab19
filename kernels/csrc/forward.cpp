// The forward pass of one step: every thread walks the same stages, and takes chunks of each as it comes.
//
//   embed | norm -> qkv -> into the pages -> attention -> o -> norm -> gate, up -> down | ... | final norm of the rows
//
// A bar between stages is a barrier. With few rows each thread norms them for itself instead of waiting for another.

#include <algorithm>
#include <cmath>

#include "attention_plan.h"
#include "clock.h"
#include "model.h"
#include "pack.h"

namespace pointsman {

namespace {

constexpr int32_t kFewRows = 2;
constexpr int kStagesPerLayer = 12;
constexpr int32_t kRowBlock = 128;
constexpr int64_t kFoldFloats = 2 * kMaxRows * (kMaxHeadDim + 2);

// A linear's input in the form that its kind takes, in memory that all threads share or that is a thread's own.
struct InputBuffers {
  bf16* values;
  int8_t* quantised;
  float* scales;
  float* sums;
};

// Sums even where this weight has no minima: k or v, which may read the same rows, may have some.
void prepare(const KernelTable& table, const PackedWeight& weight, const InputBuffers& in, int32_t row) {
  int32_t width = weight.k_padded;
  const bf16* x = in.values + (int64_t)row * width;
  if (weight.kind == WeightKind::int8) {
    table.quantise_row(x, width, in.quantised + (int64_t)row * width, in.scales + row);
  } else if (weight.kind == WeightKind::grouped) {
    table.sum_groups(x, width, in.sums + (int64_t)row * width / kGroup * 2);
  }
}

// Whether it reads no more of its input than the values.
bool reads_values_alone(const PackedWeight& weight) {
  return weight.kind == WeightKind::bf16 || (weight.kind == WeightKind::grouped && !weight.has_min);
}

Rows rows_of(const PackedWeight& weight, const InputBuffers& in) {
  return Rows{in.values, in.quantised, in.scales, in.sums, weight.k_padded};
}

// One thread's walk through a step.
class Walk {
 public:
  Walk(pm_model& model, const pm_pages& pages, const pm_step& step, const AttentionPlan& plan, int thread)
      : model_(model),
        pages_(pages),
        step_(step),
        plan_(plan),
        table_(*model.machine->table),
        pool_(model.machine->pool),
        work_(model.work),
        own_(model.work.of_threads[thread]),
        thread_(thread),
        has_few_rows_(step.num_tokens <= kFewRows && model.layers[0].mlp_post_norm.is_empty()),
        next_dispenser_(model.work.dispensers.data()),
        mark_(now()) {}

  void run() {
    table_.enter();
    embed();
    for (size_t layer = 0; layer < model_.layers.size(); layer++) run_layer((int32_t)layer);
    keep_hidden();
    tick(kOther);
    table_.leave();
  }

 private:
  void run_layer(int32_t index) {
    const Layer& layer = model_.layers[index];
    norm(layer.input_norm, index ? &model_.layers[index - 1].mlp_post_norm : nullptr, *layer.qkv[0]);
    project_qkv(layer);
    tick(kQkv);
    attend(layer, index);
    tick(kAttention);
    prepare_shared(*layer.o, work_.attended.data());
    add_linear(*layer.o, work_.attended.data(), layer.attn_post_norm);
    tick(kO);
    norm(layer.mlp_norm, &layer.attn_post_norm, *layer.gate_up);
    run_gate_up(*layer.gate_up);
    tick(kGateUp);
    prepare_shared(*layer.down, work_.gated.data());
    add_linear(*layer.down, work_.gated.data(), layer.mlp_post_norm);
    tick(kDown);
  }

  // ---------------------------------------------------------------- rows
  void embed() {
    own_rows([this](int32_t row) {
      float* out = work_.residual.data() + (int64_t)row * model_.hidden_stride;
      if (step_.embeddings) {
        std::copy_n(step_.embeddings + (int64_t)row * model_.config.hidden_size, model_.config.hidden_size, out);
        return;
      }
      embed_token(step_.token_ids[row], out);
    });
    pool_.barrier();
    tick(kOther);
  }

  void embed_token(int32_t token_id, float* out) {
    int32_t width = model_.config.hidden_size;
    float scale = model_.config.embed_scale;
    if (model_.config.embedding) {
      const bf16* row = model_.config.embedding + (int64_t)token_id * width;
      for (int32_t i = 0; i < width; i++) {
        uint32_t bits = (uint32_t)row[i] << 16;
        memcpy(out + i, &bits, 4);
      }
    } else {
      unpack_row(*model_.head, token_id, out);
    }
    if (scale != 1.0f)
      for (int32_t i = 0; i < width; i++) out[i] *= scale;
  }

  // What the last linears left in `projected` is added first where it has a norm of its own (Gemma).
  void norm(const Buffer<float>& weight, const Buffer<float>* post_norm, const PackedWeight& reader) {
    bool adds = post_norm && !post_norm->is_empty();
    InputBuffers in = inputs();
    auto work = [&](int32_t row) {
      float* x = work_.residual.data() + (int64_t)row * model_.hidden_stride;
      if (adds) {
        const float* y = work_.projected.data() + (int64_t)row * model_.hidden_stride;
        table_.add_rmsnorm(y, post_norm->data(), model_.config.eps, model_.config.hidden_size, x);
      }
      bf16* out = in.values + (int64_t)row * reader.k_padded;
      table_.rmsnorm(x, weight.data(), model_.config.eps, model_.config.hidden_size, reader.k_padded, out);
      prepare(table_, reader, in, row);
    };
    if (has_few_rows_) {
      for (int32_t row = 0; row < step_.num_tokens; row++) work(row);
      return;
    }
    own_rows(work);
    pool_.barrier();
  }

  // `values` is complete; what a linear takes beside them is made of whole rows.
  void prepare_shared(const PackedWeight& weight, bf16* values) {
    if (reads_values_alone(weight)) return;
    InputBuffers in = inputs();
    in.values = values;
    if (has_few_rows_) {
      for (int32_t row = 0; row < step_.num_tokens; row++) prepare(table_, weight, in, row);
      return;
    }
    own_rows([&](int32_t row) { prepare(table_, weight, in, row); });
    pool_.barrier();
  }

  // The wanted rows, normed, in the form that the head reads.
  void keep_hidden() {
    add_last_projected();
    const PackedWeight& head = *model_.head;
    InputBuffers in{work_.last_hidden.data(), work_.quantised.data(), work_.scales.data(), work_.sums.data()};
    split(step_.num_logit_rows, [&](int32_t row) {
      const float* x = work_.residual.data() + (int64_t)step_.logit_rows[row] * model_.hidden_stride;
      bf16* out = in.values + (int64_t)row * head.k_padded;
      table_.rmsnorm(x, model_.final_norm.data(), model_.config.eps, model_.config.hidden_size, head.k_padded, out);
      prepare(table_, head, in, row);
    });
  }

  void add_last_projected() {
    const Buffer<float>& post_norm = model_.layers.back().mlp_post_norm;
    if (post_norm.is_empty()) return;
    own_rows([&](int32_t row) {
      int64_t start = (int64_t)row * model_.hidden_stride;
      table_.add_rmsnorm(work_.projected.data() + start, post_norm.data(), model_.config.eps, model_.config.hidden_size,
                         work_.residual.data() + start);
    });
    pool_.barrier();
  }

  // ---------------------------------------------------------------- linears
  InputBuffers inputs() {
    if (has_few_rows_) return {own_.values.data(), own_.quantised.data(), own_.scales.data(), own_.sums.data()};
    return {work_.normed.data(), work_.quantised.data(), work_.scales.data(), work_.sums.data()};
  }

  void project_qkv(const Layer& layer) {
    int64_t offsets[3] = {0, model_.qkv_layout.k, model_.qkv_layout.v};
    for (int i = 0; i < layer.num_qkv; i++) {
      const PackedWeight& weight = *layer.qkv[i];
      LinearCall call = {};
      call.weight = &weight;
      call.in = rows_of(weight, inputs());
      call.epilogue = Epilogue::store;
      call.out = work_.qkv.data() + offsets[i];
      call.out_stride = model_.qkv_layout.stride;
      run_linear(call);
    }
    pool_.barrier();
  }

  // residual += x weight^T, or projected = that where a norm comes first.
  void add_linear(const PackedWeight& weight, bf16* values, const Buffer<float>& post_norm) {
    InputBuffers in = inputs();
    in.values = values;
    LinearCall call = {};
    call.weight = &weight;
    call.in = rows_of(weight, in);
    call.epilogue = post_norm.is_empty() ? Epilogue::add : Epilogue::store;
    call.out = post_norm.is_empty() ? work_.residual.data() : work_.projected.data();
    call.out_stride = model_.hidden_stride;
    run_linear(call);
    pool_.barrier();
  }

  void run_gate_up(const PackedWeight& weight) {
    LinearCall call = {};
    call.weight = &weight;
    call.in = rows_of(weight, inputs());
    call.epilogue = Epilogue::gate;
    call.activation = (Activation)model_.config.activation;
    call.gated = work_.gated.data();
    call.out_stride = model_.gated_stride;
    run_linear(call);
    pool_.barrier();
  }

  // Pairs of panels in chunks, each with all rows or with one block of them after the other, so that the chunk's
  // weights are still in the second-level cache for the next block.
  void run_linear(const LinearCall& call) {
    Dispenser& dispenser = *next_dispenser_++;
    const int32_t num_pairs = call.weight->n_padded / kPair, num_rows = step_.num_tokens, threads = pool_.size();
    const bool has_many_rows = num_rows > kRowBlock / 2;
    const int32_t row_block = has_many_rows ? kRowBlock : num_rows;
    const int32_t chunk = has_many_rows ? std::clamp(num_pairs / (3 * threads), 1, 8)
                                        : std::clamp(num_pairs / (12 * threads), 1, 16);
    const int32_t row_blocks = (num_rows + row_block - 1) / row_block, chunks = (num_pairs + chunk - 1) / chunk;
    for (int item, last; dispenser.take(1, chunks * row_blocks, &item, &last);) {
      int32_t pair = item / row_blocks * chunk, row = item % row_blocks * row_block;
      table_.linear(call, pair, std::min(pair + chunk, num_pairs), row, std::min(row + row_block, num_rows));
    }
  }

  // ---------------------------------------------------------------- attention
  void attend(const Layer& layer, int32_t index) {
    int32_t num_shared = layer.window_left < 0 ? plan_.num_shared_splits : 0;
    bool stores_within = plan_.stores_within && !num_shared;
    if (!stores_within) {
      own_rows([&](int32_t token) {
        for (int32_t h = 0; h < model_.config.num_kv_heads; h++) store_token(layer, index, token, h);
      });
      pool_.barrier();
      if (num_shared) attend_shared(layer, index, num_shared);
      if (plan_.is_split) attend_splits(layer, index, num_shared);
      if (num_shared || plan_.is_split) pool_.barrier();
    }
    Dispenser& dispenser = *next_dispenser_++;
    int32_t num_heads = model_.config.num_kv_heads, num_items = (int32_t)plan_.blocks.size() * num_heads;
    for (int item, last; dispenser.take(1, num_items, &item, &last);) {
      // The last blocks of a prompt see the most: they come first.
      const QueryBlock& block = plan_.blocks[plan_.blocks.size() - 1 - item / num_heads];
      if (stores_within) store_token(layer, index, block.first_token, item % num_heads);
      attend_block(layer, index, block, item % num_heads, plan_.is_split ? plan_.num_splits : num_shared);
    }
    pool_.barrier();
  }

  bf16* query(int32_t token, int32_t kv_head) {
    int64_t rows = ((int64_t)kv_head * step_.num_tokens + token) * model_.group;
    return work_.q.data() + rows * model_.head_dim_padded;
  }

  void store_token(const Layer& layer, int32_t index, int32_t token, int32_t kv_head) {
    QkvCall call = {};
    call.qkv = work_.qkv.data() + token * model_.qkv_layout.stride;
    call.q_norm = layer.q_norm.is_empty() ? nullptr : layer.q_norm.data();
    call.k_norm = layer.k_norm.is_empty() ? nullptr : layer.k_norm.data();
    call.cos_sin = model_.rope[layer.rope] + (int64_t)step_.positions[token] * model_.config.head_dim;
    call.eps = model_.config.eps;
    call.head_dim = model_.config.head_dim;
    call.head_dim_padded = model_.head_dim_padded;
    int64_t head = (int64_t)kv_head * call.head_dim;
    int32_t slot = step_.slot_mapping[token];
    table_.store_q(call, kv_head * model_.group, (kv_head + 1) * model_.group, query(token, kv_head));
    table_.store_kv(call, model_.qkv_layout.k + head, model_.qkv_layout.v + head, pages_.head(index, kv_head),
                    slot / pages_.page_size, slot % pages_.page_size);
  }

  // Partial results lie at [split][kv head][token][head of the group].
  int64_t partial_row(int32_t split, int32_t kv_head, int32_t token) {
    return (((int64_t)split * model_.config.num_kv_heads + kv_head) * step_.num_tokens + token) * model_.group;
  }

  void attend_shared(const Layer& layer, int32_t index, int32_t num_splits) {
    Dispenser& dispenser = *next_dispenser_++;
    int32_t num_heads = model_.config.num_kv_heads, per_block = num_heads * num_splits;
    for (int item, last; dispenser.take(1, (int)plan_.shared_blocks.size() * per_block, &item, &last);) {
      // All rows of a split one after the other: its keys stay in the cache.
      int32_t block = item % (int32_t)plan_.shared_blocks.size(), rest = item / (int32_t)plan_.shared_blocks.size();
      attend_partial(layer, index, plan_.shared_blocks[block], rest % num_heads, rest / num_heads);
    }
  }

  void attend_splits(const Layer& layer, int32_t index, int32_t num_shared) {
    Dispenser& dispenser = *next_dispenser_++;
    int32_t num_heads = model_.config.num_kv_heads, per_block = num_heads * plan_.num_splits;
    for (int item, last; dispenser.take(1, (int)plan_.blocks.size() * per_block, &item, &last);) {
      const QueryBlock& block = plan_.blocks[item / per_block];
      int32_t split = item % plan_.num_splits, first_split, last_split;
      visible_splits(layer, block, &first_split, &last_split);
      if (split >= std::max(num_shared, first_split) && split < last_split)
        attend_partial(layer, index, block, item / plan_.num_splits % num_heads, split);
    }
  }

  void attend_partial(const Layer& layer, int32_t index, const QueryBlock& block, int32_t kv_head, int32_t split) {
    int64_t row = partial_row(split, kv_head, block.first_token);
    attend_split(layer, index, block, kv_head, split, work_.partial_max.data() + row, work_.partial_sum.data() + row,
                 work_.partial_out.data() + row * model_.head_dim_padded);
  }

  // Fold all splits of a block, in order; those before `num_partial` have been computed.
  void attend_block(const Layer& layer, int32_t index, const QueryBlock& block, int32_t kv_head, int32_t num_partial) {
    const int32_t group = model_.group, dim = model_.head_dim_padded;
    const int32_t num_rows = (block.last_token - block.first_token) * group;
    float* max = own_.fold.data();
    float* sum = max + kMaxRows;
    float* out = sum + kMaxRows;
    float* part_max = out + kMaxRows * kMaxHeadDim;
    float* part_sum = part_max + kMaxRows;
    float* part_out = part_sum + kMaxRows;
    std::fill_n(max, num_rows, -INFINITY);
    std::fill_n(sum, num_rows, 0.0f);
    std::fill_n(out, (int64_t)num_rows * dim, 0.0f);
    int32_t first, last;
    visible_splits(layer, block, &first, &last);
    for (int32_t split = first; split < last; split++) {
      const float *from_max = part_max, *from_sum = part_sum, *from_out = part_out;
      if (split < num_partial) {
        int64_t row = partial_row(split, kv_head, block.first_token);
        from_max = work_.partial_max.data() + row;
        from_sum = work_.partial_sum.data() + row;
        from_out = work_.partial_out.data() + row * dim;
      } else {
        attend_split(layer, index, block, kv_head, split, part_max, part_sum, part_out);
      }
      for (int32_t r = 0; r < num_rows; r++)
        table_.merge(max + r, sum + r, out + (int64_t)r * dim, from_max[r], from_sum[r], from_out + (int64_t)r * dim,
                     dim);
    }
    const int32_t head_dim = model_.config.head_dim;
    for (int32_t r = 0; r < num_rows; r++) {
      int64_t token = block.first_token + r / group, head = kv_head * group + r % group;
      table_.finish(out + (int64_t)r * dim, sum[r], head_dim,
                    work_.attended.data() + token * model_.attended_stride + head * head_dim);
    }
  }

  void attend_split(const Layer& layer, int32_t index, const QueryBlock& block, int32_t kv_head, int32_t split,
                    float* max, float* sum, float* out) {
    int32_t rows[2][kMaxRows];
    AttendCall call = {};
    call.kv = pages_.head(index, kv_head);
    call.pages = step_.kv_indices + step_.kv_indptr[block.request];
    call.split_start = split * kSplit;
    call.num_rows = (block.last_token - block.first_token) * model_.group;
    call.q = query(block.first_token, kv_head);
    for (int32_t r = 0; r < call.num_rows; r++) {
      rows[1][r] = step_.positions[block.first_token + r / model_.group] + 1;
      rows[0][r] = layer.window_left < 0 ? 0 : std::max(0, rows[1][r] - 1 - layer.window_left);
    }
    call.first = rows[0];
    call.last = rows[1];
    call.scale = model_.config.sm_scale;
    call.soft_cap = model_.config.attn_soft_cap;
    call.max = max;
    call.sum = sum;
    call.out = out;
    call.scratch = model_.machine->attend_scratch[thread_].data();
    table_.attend(call);
  }

  // The splits that some row of the block sees.
  void visible_splits(const Layer& layer, const QueryBlock& block, int32_t* first, int32_t* last) {
    int32_t earliest = step_.positions[block.first_token] - layer.window_left;
    *first = layer.window_left < 0 ? 0 : std::max(0, earliest) / kSplit;
    *last = step_.positions[block.last_token - 1] / kSplit + 1;
  }

  // ---------------------------------------------------------------- threads
  // Runs work(i) for this thread's part of 0 .. n - 1.
  template <class Work>
  void split(int32_t n, Work work) {
    int64_t threads = pool_.size();
    for (int64_t i = n * thread_ / threads; i < n * (thread_ + 1) / threads; i++) work((int32_t)i);
  }

  template <class Work>
  void own_rows(Work work) {
    split(step_.num_tokens, work);
  }

  void tick(Phase phase) {
    if (thread_ != 0) return;
    double time = now();
    model_.seconds[phase] += time - mark_;
    mark_ = time;
  }

  pm_model& model_;
  const pm_pages& pages_;
  const pm_step& step_;
  const AttentionPlan& plan_;
  const KernelTable& table_;
  Pool& pool_;
  Workspace& work_;
  ThreadSpace& own_;
  const int thread_;
  const bool has_few_rows_;
  Dispenser* next_dispenser_;
  double mark_;
};

void size_thread_spaces(pm_model& model) {
  model.work.of_threads.resize(model.machine->pool.size());
  for (ThreadSpace& own : model.work.of_threads) {
    int64_t values = (int64_t)kFewRows * model.widest_input, groups = values / kGroup;
    own.values.grow(values);
    own.quantised.grow(values);
    own.scales.grow(kFewRows);
    own.sums.grow(groups * 2);
    own.fold.grow(kFoldFloats);
  }
}

void size_workspace(pm_model& model, const pm_step& step, const AttentionPlan& plan) {
  Workspace& work = model.work;
  int64_t tokens = step.num_tokens, rows = std::max(step.num_tokens, step.num_logit_rows);
  int64_t heads = model.config.num_q_heads, groups = model.widest_input / kGroup;
  work.residual.grow(tokens * model.hidden_stride);
  work.projected.grow(tokens * model.hidden_stride);
  work.normed.grow(tokens * model.widest_input);
  work.qkv.grow(tokens * model.qkv_layout.stride);
  work.q.grow(tokens * heads * model.head_dim_padded);
  work.attended.grow(tokens * model.attended_stride);
  work.gated.grow(tokens * model.gated_stride);
  work.quantised.grow(rows * model.widest_input);
  work.scales.grow(rows);
  work.sums.grow(rows * groups * 2);
  work.last_hidden.grow((int64_t)step.num_logit_rows * model.head->k_padded);
  int64_t partial = (int64_t)(plan.is_split ? plan.num_splits : plan.num_shared_splits) * tokens * heads;
  work.partial_max.grow(partial);
  work.partial_sum.grow(partial);
  work.partial_out.grow(partial * model.head_dim_padded);
  std::vector<Dispenser> fresh(model.layers.size() * kStagesPerLayer + 1);
  work.dispensers.swap(fresh);
}

}  // namespace

}  // namespace pointsman

using namespace pointsman;

void pm_model::forward(const pm_pages& pages, const pm_step& step) {
  AttentionPlan plan = plan_attention(step, group, config.num_kv_heads, head_dim_padded, pages.page_size,
                                      machine->pool.size());
  size_workspace(*this, step, plan);
  size_thread_spaces(*this);
  num_hidden_rows = step.num_logit_rows;
  machine->pool.run([&](int thread) { Walk(*this, pages, step, plan, thread).run(); });
}
