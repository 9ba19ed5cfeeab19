// Linears as the C interface has them: packed by all threads, and run on their own for tests and benches.

#include <algorithm>
#include <memory>
#include <stdexcept>

#include "linears.h"
#include "pack.h"
#include "vec.h"

namespace pointsman {

namespace {

SourceType source_type(int32_t storage) {
  switch (storage) {
    case PM_F32: return SourceType::f32;
    case PM_BF16: return SourceType::bf16;
    case PM_F16: return SourceType::f16;
    case PM_Q8_0: return SourceType::q8_0;
    case PM_Q4_0: return SourceType::q4_0;
    case PM_Q4_1: return SourceType::q4_1;
    case PM_Q5_0: return SourceType::q5_0;
    case PM_Q5_1: return SourceType::q5_1;
    case PM_Q4_K: return SourceType::q4_k;
    case PM_Q5_K: return SourceType::q5_k;
    case PM_Q6_K: return SourceType::q6_k;
    default: throw std::invalid_argument("A source is stored in a way that this library does not know.");
  }
}

PackFormat pack_format(int32_t target) {
  switch (target) {
    case PM_TO_BF16: return PackFormat::bf16;
    case PM_TO_INT8: return PackFormat::int8;
    case PM_TO_INT4: return PackFormat::int4;
    case PM_AS_STORED: return PackFormat::grouped;
    default: throw std::invalid_argument("A linear is to become something that this library does not know.");
  }
}

std::vector<PackSource> list_sources(const pm_linear_config& config) {
  std::vector<PackSource> sources;
  for (int32_t i = 0; i < config.num_sources; i++)
    sources.push_back({config.sources[i].data, source_type(config.sources[i].storage), config.sources[i].num_rows});
  return sources;
}

PackJob make_job(const pm_linear_config& config, const std::vector<PackSource>& sources) {
  return {pack_format(config.target), config.n, config.k, sources.data(), config.num_sources,
          config.row_order, config.bias};
}

// Returns the bytes that the planned weight takes.
int64_t plan(const PackJob& job, PackedWeight* weight) {
  if (const char* problem = plan_pack(job, weight)) throw std::invalid_argument(problem);
  return packed_bytes(*weight, job.bias != nullptr);
}

}  // namespace

int64_t plan_linear_bytes(const pm_linear_config& config) {
  const std::vector<PackSource> sources = list_sources(config);
  PackedWeight weight;
  return plan(make_job(config, sources), &weight);
}

pm_linear* make_linear(pm_machine* machine, const pm_linear_config& config) {
  const std::vector<PackSource> sources = list_sources(config);
  const PackJob job = make_job(config, sources);
  auto linear = std::make_unique<pm_linear>();
  linear->machine = machine;
  linear->num_bytes = plan(job, &linear->weight);
  void* memory = machine->arena.alloc(linear->num_bytes);
  if (!memory) throw std::bad_alloc();
  place_packed(job, memory, &linear->weight);
  Dispenser dispenser;
  machine->pool.run([&](int) {
    for (int first, last; dispenser.take(2, num_panels(linear->weight), &first, &last);)
      pack_panels(job, first, last, &linear->weight);
  });
  return linear.release();
}

void run_linear(const pm_linear& linear, const float* x, int32_t num_rows, float* out) {
  const PackedWeight& weight = linear.weight;
  const KernelTable& table = *linear.machine->table;
  const int64_t width = weight.k_padded, groups = width / kGroup;
  Buffer<bf16> values(num_rows * width);
  Buffer<int8_t> quantised(num_rows * width);
  Buffer<float> scales(num_rows), sums(num_rows * groups * 2), sums_out((int64_t)num_rows * weight.n_padded);
  for (int32_t row = 0; row < num_rows; row++) {
    for (int32_t i = 0; i < weight.k; i++) values[row * width + i] = f32_to_bf16(x[(int64_t)row * weight.k + i]);
    if (weight.kind == WeightKind::int8)
      table.quantise_row(&values[row * width], weight.k_padded, &quantised[row * width], &scales[row]);
    if (weight.kind == WeightKind::grouped)
      table.sum_groups(&values[row * width], weight.k_padded, &sums[row * groups * 2]);
  }
  LinearCall call = {};
  call.weight = &weight;
  call.in = {values.data(), quantised.data(), scales.data(), sums.data(), weight.k_padded};
  call.epilogue = Epilogue::store;
  call.out = sums_out.data();
  call.out_stride = weight.n_padded;
  Dispenser dispenser;
  linear.machine->pool.run([&](int) {
    table.enter();
    for (int first, last; dispenser.take(1, weight.n_padded / kPair, &first, &last);)
      table.linear(call, first, last, 0, num_rows);
    table.leave();
  });
  for (int32_t row = 0; row < num_rows; row++)
    std::copy_n(sums_out.data() + (int64_t)row * weight.n_padded, weight.n, out + (int64_t)row * weight.n);
}

}  // namespace pointsman
