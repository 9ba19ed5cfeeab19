#include "attention_plan.h"

#include <algorithm>

namespace pointsman {

namespace {

constexpr int64_t kMaxPartialBytes = 64 << 20;

// Tokens [first, last) in blocks whose rows fit into one attend().
void cut(int32_t request, int32_t first, int32_t last, int32_t group, std::vector<QueryBlock>* blocks) {
  int32_t num_tokens = std::max(1, kMaxRows / group);
  for (; first < last; first += num_tokens)
    blocks->push_back({request, first, std::min(first + num_tokens, last)});
}

// Whether a request reads a page that another one fills in this step, one token each: a block is found by others as
// soon as the step that fills it is laid out. It has the same place in all tables.
bool has_read_of_filled_page(const pm_step& step, int32_t page_size) {
  for (int32_t writer = 0; writer < step.num_reqs; writer++) {
    int32_t position = step.positions[step.qo_indptr[writer]], place = position / page_size;
    if (position % page_size != page_size - 1) continue;
    int32_t page = step.kv_indices[step.kv_indptr[writer] + place];
    for (int32_t r = 0; r < step.num_reqs; r++) {
      int32_t index = step.kv_indptr[r] + place;
      if (r != writer && index < step.kv_indptr[r + 1] && step.kv_indices[index] == page) return true;
    }
  }
  return false;
}

}  // namespace

AttentionPlan plan_attention(const pm_step& step, int32_t group, int32_t num_kv_heads, int32_t head_dim,
                             int32_t page_size, int num_threads) {
  AttentionPlan plan;
  bool is_all_decode = true;
  int32_t longest = 0;
  for (int32_t r = 0; r < step.num_reqs; r++) {
    int32_t first = step.qo_indptr[r], last = step.qo_indptr[r + 1];
    cut(r, first, last, group, &plan.blocks);
    is_all_decode &= last - first == 1;
    longest = std::max(longest, step.kv_lens[r]);
  }
  plan.num_splits = (longest + kSplit - 1) / kSplit;
  int64_t split_bytes = (int64_t)step.num_tokens * group * num_kv_heads * (head_dim + 2) * sizeof(float);
  int64_t max_splits = kMaxPartialBytes / split_bytes;
  if (step.num_reqs > 1) {
    int64_t shared = (int64_t)step.num_common_pages * page_size / kSplit;
    plan.num_shared_splits = (int32_t)std::min({shared, max_splits, (int64_t)plan.num_splits});
  }
  if (plan.num_shared_splits) cut(0, 0, step.num_tokens, group, &plan.shared_blocks);
  bool has_few_blocks = (int64_t)plan.blocks.size() * num_kv_heads < 2 * num_threads && num_threads > 1;
  plan.is_split = has_few_blocks && plan.num_splits > 1 && plan.num_splits <= max_splits;
  plan.stores_within = is_all_decode && !plan.is_split && !has_read_of_filled_page(step, page_size);
  return plan;
}

}  // namespace pointsman
