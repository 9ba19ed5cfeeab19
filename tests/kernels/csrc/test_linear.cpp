// Every kind of weight on every instruction set: against sums in double, and bit for bit however a call is cut.

#include "check.h"
#include "weight_case.h"

using namespace pointsman;

namespace {

constexpr int32_t kNumRows = 130;
constexpr int32_t kOutputs = 70;  // 5 panels, padded to 3 pairs
constexpr int32_t kPairs = 3;
constexpr int32_t kOutStride = kPairs * kPair + 5;

// Rows as one table prepares them. stride > k: linears take padded rows.
struct Inputs {
  int32_t num_rows, stride;
  std::vector<bf16> values;
  std::vector<int8_t> quantised;
  std::vector<float> scales, sums;
  bool is_offset = false;
  Rows rows = {};

  Inputs(const KernelTable& table, const PackedWeight& weight, int32_t num_rows, Random& random)
      : num_rows(num_rows), stride(weight.k_padded), values((size_t)num_rows * stride) {
    for (int32_t row = 0; row < num_rows; row++) {
      float size = row % 7 == 3 ? 0.0f : expf(4.0f * random.uniform());
      for (int32_t i = 0; i < weight.k; i++) values[(size_t)row * stride + i] = bf16_of(size * random.uniform());
    }
    rows.values = values.data();
    rows.stride = stride;
    if (weight.kind == WeightKind::int8) quantise_rows(table);
    if (weight.kind == WeightKind::grouped) sum_all_groups(table);
  }

  void quantise_rows(const KernelTable& table) {
    quantised.resize(values.size());
    scales.resize(num_rows);
    for (int32_t row = 0; row < num_rows; row++)
      table.quantise_row(&values[(size_t)row * stride], stride, &quantised[(size_t)row * stride], &scales[row]);
    is_offset = quantised[3 * stride] != 0;  // a row of zeros
    rows.quantised = quantised.data();
    rows.scales = scales.data();
  }

  void sum_all_groups(const KernelTable& table) {
    int32_t halves = stride / kGroup * 2;
    sums.resize((size_t)num_rows * halves);
    for (int32_t row = 0; row < num_rows; row++)
      table.sum_groups(&values[(size_t)row * stride], stride, &sums[(size_t)row * halves]);
    rows.sums = sums.data();
  }

  // What a linear multiplies with.
  double value(int32_t row, int32_t k) const {
    size_t at = (size_t)row * stride + k;
    if (quantised.empty()) return float_of(values[at]);
    int32_t q = is_offset ? (int32_t)(uint8_t)quantised[at] - 128 : quantised[at];
    return (double)q * scales[row];
  }
};

LinearCall store_call(const PackedWeight& weight, const Inputs& inputs, std::vector<float>& out) {
  LinearCall call = {};
  call.weight = &weight;
  call.in = inputs.rows;
  call.epilogue = Epilogue::store;
  call.out = out.data();
  call.out_stride = kOutStride;
  return call;
}

void check_quantisation(const KernelTable& table, const WeightCase& c, const PackedWeight& weight,
                        const Inputs& inputs) {
  for (int32_t row = 0; row < inputs.num_rows && !inputs.quantised.empty(); row++) {
    for (int32_t k = 0; k < weight.k_padded; k++) {
      size_t at = (size_t)row * inputs.stride + k;
      double step = inputs.scales[row];
      double difference = fabs(inputs.value(row, k) - float_of(inputs.values[at]));
      CHECK(difference <= 0.50001 * step, "%s %s row %d k %d: off by %g of a step %g", table.name, c.name, row, k,
            difference, step);
    }
  }
}

void check_against_double(const KernelTable& table, const WeightCase& c, const PackedWeight& weight,
                          const Inputs& inputs, const std::vector<float>& out) {
  std::vector<float> w(weight.k);
  for (int32_t n = 0; n < weight.n; n++) {
    unpack_row(weight, n, w.data());
    for (int32_t row = 0; row < inputs.num_rows; row++) {
      double expected = weight.bias ? weight.bias[n] : 0, size = fabs(expected);
      for (int32_t k = 0; k < weight.k; k++) {
        double product = w[k] * inputs.value(row, k);
        expected += product;
        // Grouped sums take the minimum apart from the rest.
        size += fabs(product) + (weight.has_min ? fabs(inputs.value(row, k)) : 0);
      }
      double difference = fabs(out[(size_t)row * kOutStride + n] - expected);
      CHECK(difference <= 2e-6 * size, "%s %s row %d n %d: %g for %g, off by %g of %g", table.name, c.name, row, n,
            out[(size_t)row * kOutStride + n], expected, difference, size);
    }
  }
  for (int32_t row = 0; row < inputs.num_rows; row++)
    for (int32_t n = weight.n; n < weight.n_padded; n++)
      CHECK(out[(size_t)row * kOutStride + n] == 0, "%s %s: padded column %d", table.name, c.name, n);
}

// Rows [first_row, first_row + num_rows) of pairs [first_pair, last_pair) equal what single rows gave; the rest stays.
void check_cut(const LinearCall& single, const KernelTable& table, const char* name, int32_t first_row,
               int32_t num_rows, int32_t first_pair, int32_t last_pair) {
  std::vector<float> out((size_t)kNumRows * kOutStride, -7.0f);
  LinearCall call = single;
  call.out = out.data();
  table.linear(call, first_pair, last_pair, first_row, first_row + num_rows);
  for (int32_t row = 0; row < kNumRows; row++) {
    for (int32_t column = 0; column < kOutStride; column++) {
      bool is_inside = row >= first_row && row < first_row + num_rows && column >= first_pair * kPair &&
                       column < last_pair * kPair;
      size_t at = (size_t)row * kOutStride + column;
      float expected = is_inside ? single.out[at] : -7.0f;
      CHECK(!memcmp(&out[at], &expected, 4), "%s %s rows %d+%d pairs %d-%d: row %d column %d is %g, not %g", table.name,
            name, first_row, num_rows, first_pair, last_pair, row, column, out[at], expected);
    }
  }
}

void check_all_cuts(const LinearCall& single, const KernelTable& table, const char* name) {
  for (int32_t num_rows = 1; num_rows <= kNumRows; num_rows += num_rows < 40 ? 1 : 9)
    check_cut(single, table, name, (kNumRows - num_rows) / 3, num_rows, 0, kPairs);
  check_cut(single, table, name, 0, kNumRows, 0, kPairs);
  for (int32_t first = 0; first < kPairs; first++)
    for (int32_t last = first + 1; last <= kPairs; last++) check_cut(single, table, name, 11, 23, first, last);
}

void check_kind(const KernelTable& table, const WeightCase& c, int32_t k, bool has_bias) {
  Random random = {(uint64_t)k};
  TestWeight weight(c, kOutputs, k, has_bias, random);
  Inputs inputs(table, weight.packed, kNumRows, random);
  std::vector<float> out((size_t)kNumRows * kOutStride);
  LinearCall call = store_call(weight.packed, inputs, out);
  for (int32_t row = 0; row < kNumRows; row++) table.linear(call, 0, kPairs, row, row + 1);
  check_quantisation(table, c, weight.packed, inputs);
  check_against_double(table, c, weight.packed, inputs, out);
  check_all_cuts(call, table, c.name);
}

double activation(Activation kind, double x) {
  if (kind == Activation::silu) return x / (1 + exp(-x));
  return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
}

void check_epilogues(const KernelTable& table) {
  Random random = {5};
  const WeightCase& c = weight_cases()[0];
  TestWeight weight(c, kOutputs, 96, true, random);
  Inputs inputs(table, weight.packed, 5, random);
  std::vector<float> stored((size_t)5 * kOutStride), added((size_t)5 * kOutStride, 3.0f);
  LinearCall call = store_call(weight.packed, inputs, stored);
  table.linear(call, 0, kPairs, 0, 5);

  call.epilogue = Epilogue::add;
  call.out = added.data();
  table.linear(call, 0, kPairs, 0, 5);
  for (int32_t row = 0; row < 5; row++)
    for (int32_t n = 0; n < kPairs * kPair; n++) {
      size_t at = (size_t)row * kOutStride + n;
      CHECK(added[at] == 3.0f + stored[at], "%s: add, row %d n %d", table.name, row, n);
    }

  for (Activation kind : {Activation::silu, Activation::gelu_tanh}) {
    std::vector<bf16> gated((size_t)5 * kOutStride);
    call.epilogue = Epilogue::gate;
    call.activation = kind;
    call.gated = gated.data();
    table.linear(call, 0, kPairs, 0, 5);
    for (int32_t row = 0; row < 5; row++)
      for (int32_t n = 0; n < kPairs * kPanel; n++) {
        size_t gate = (size_t)row * kOutStride + n / kPanel * kPair + n % kPanel;
        double expected = activation(kind, stored[gate]) * stored[gate + kPanel];
        double is = float_of(gated[(size_t)row * kOutStride + n]);
        CHECK(fabs(is - expected) <= 0.005 * fabs(expected) + 1e-5 * fabs(stored[gate + kPanel]),
              "%s: gate %d, row %d n %d: %g, not %g", table.name, (int)kind, row, n, is, expected);
      }
  }
}

// A number that is none must not get lost on its way into a row's quantised values or sums.
void check_non_finite(const KernelTable& table) {
  for (float bad : {(float)NAN, (float)INFINITY}) {
    for (int kind : {0, 1, 2}) {
      Random random = {9};
      TestWeight weight(weight_cases()[kind], kOutputs, 64, false, random);
      Inputs inputs(table, weight.packed, 8, random);
      uint32_t bits;
      memcpy(&bits, &bad, 4);
      inputs.values[40] = (bf16)(bits >> 16);
      if (kind == 1) inputs.quantise_rows(table);
      if (kind == 2) inputs.sum_all_groups(table);
      std::vector<float> out((size_t)8 * kOutStride);
      table.linear(store_call(weight.packed, inputs, out), 0, kPairs, 0, 8);
      CHECK(!isfinite(out[0]), "%s kind %d: %g came out as %g", table.name, kind, bad, out[0]);
      CHECK(isfinite(out[kOutStride]), "%s kind %d: another row got it", table.name, kind);
    }
  }
}

}  // namespace

int main() {
  for (const KernelTable* table : tables_to_test()) {
    table->enter();
    for (const WeightCase& c : weight_cases()) {
      bool has_large_blocks = block_values(c.type) == 256;
      check_kind(*table, c, has_large_blocks ? 512 : 96, false);
      check_kind(*table, c, has_large_blocks ? 256 : 160, true);
    }
    check_epilogues(*table);
    check_non_finite(*table);
    table->leave();
    printf("%s: linear checked\n", table->name);
  }
  return finish_checks();
}
