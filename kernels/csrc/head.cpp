// The head: logits of rows that the last step kept, the likeliest id of each, and whether all are finite.

#include <algorithm>
#include <cmath>
#include <vector>

#include "clock.h"
#include "model.h"

namespace pointsman {

namespace {

constexpr int32_t kHeadPairs = 4;  // of panels, whose logits are looked at together
constexpr int32_t kColumns = kHeadPairs * kPair;

// What a thread has seen of one row's logits.
struct Seen {
  float best = -INFINITY;
  int32_t best_id = 0;
  bool is_finite = true;

  // Of equal logits the lowest id wins, in whatever order the threads came by them.
  void add(const Seen& other) {
    if (other.best > best || (other.best == best && other.best_id < best_id))
      best = other.best, best_id = other.best_id;
    is_finite &= other.is_finite;
  }
};

struct HeadCall {
  const pm_model& model;
  const KernelTable& table;
  LinearCall linear;
  int32_t num_rows, num_token_ids;
  float* logits;  // [num_rows][vocab_size], or null
};

LinearCall linear_of(const pm_model& model, int32_t first_row) {
  const PackedWeight& weight = *model.head;
  const Workspace& work = model.work;
  const int64_t stride = weight.k_padded, groups = stride / kGroup;
  LinearCall call = {};
  call.weight = &weight;
  call.in = {work.last_hidden.data() + first_row * stride, work.quantised.data() + first_row * stride,
             work.scales.data() + first_row, work.sums.data() + first_row * groups * 2, weight.k_padded};
  call.epilogue = Epilogue::store;
  call.out_stride = kColumns;
  return call;
}

// The logits of columns from `column` on: values [kColumns], of which the vocabulary may end.
void look_at(const HeadCall& call, int32_t row, int32_t column, float* values, Seen* seen) {
  const pm_model_config& config = call.model.config;
  int32_t columns = std::min(kColumns, config.vocab_size - column);
  if (config.final_soft_cap != 0) call.table.soft_cap(values, columns, config.final_soft_cap);
  if (call.logits) std::copy_n(values, columns, call.logits + (int64_t)row * config.vocab_size + column);
  int32_t known = std::min(columns, call.num_token_ids - column);
  if (known <= 0) return;
  Seen here;
  int32_t index, is_finite;
  call.table.scan_logits(values, known, &here.best, &index, &is_finite);
  here.best_id = column + index;
  here.is_finite = is_finite != 0;
  seen->add(here);
}

// One thread's part: chunks as they come. seen: [num_rows].
void walk_head(const HeadCall& call, Dispenser& dispenser, float* block, Seen* seen) {
  call.table.enter();
  LinearCall linear = call.linear;
  const int32_t num_pairs = linear.weight->n_padded / kPair;
  for (int first, last; dispenser.take(kHeadPairs, num_pairs, &first, &last);) {
    int32_t column = first * kPair;
    linear.out = block - column;
    call.table.linear(linear, first, last, 0, call.num_rows);
    for (int32_t row = 0; row < call.num_rows; row++)
      look_at(call, row, column, block + (int64_t)row * kColumns, seen + row);
  }
  call.table.leave();
}

}  // namespace

}  // namespace pointsman

using namespace pointsman;

void pm_model::head_rows(int32_t first_row, int32_t num_rows, int32_t num_token_ids, float* logits,
                         int32_t* greedy_ids, uint8_t* is_finite) {
  if (num_rows == 0) return;
  double start = now();
  Pool& pool = machine->pool;
  HeadCall call = {*this, *machine->table, linear_of(*this, first_row), num_rows, num_token_ids, logits};
  for (ThreadSpace& own : work.of_threads) own.logits.grow((int64_t)num_rows * kColumns);
  std::vector<Seen> seen((size_t)pool.size() * num_rows);
  Dispenser dispenser;
  pool.run([&](int thread) {
    walk_head(call, dispenser, work.of_threads[thread].logits.data(), &seen[(size_t)thread * num_rows]);
  });
  for (int32_t row = 0; row < num_rows; row++) {
    for (int thread = 1; thread < pool.size(); thread++) seen[row].add(seen[(size_t)thread * num_rows + row]);
    greedy_ids[row] = seen[row].best_id;
    is_finite[row] = seen[row].is_finite;
  }
  seconds[kHead] += now() - start;
}
