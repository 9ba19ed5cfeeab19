// The amx table's linear(): against sums in double, and bit for bit against itself for other numbers of rows.
//
// With -DPM_EMULATE_AMX on tiles in software.
#include "amx_linear.h"

#include <float.h>
#include <math.h>

#include <algorithm>
#include <vector>

#include "aligned.h"
#include "amx_values.h"
#include "check.h"
#include "cpu.h"

using namespace pointsman;

namespace {

// A linear, unpacked and packed.
struct Case {
  int32_t n, k, k_padded, n_padded;
  std::vector<bf16> plain;       // [n][k]
  std::vector<int8_t> quantised;
  std::vector<double> exact;     // grouped: [n][k], the weights
  Aligned<uint8_t> data;
  Aligned<float> scales, bias;
  Aligned<int32_t> compensation;
  PackedWeight weight = {};

  Case(int32_t n, int32_t k) : n(n), k(k), k_padded(round_up(k, 64)), n_padded(round_up(n, 32)) {
    weight.n = n, weight.k = k, weight.n_padded = n_padded, weight.k_padded = k_padded;
  }
};

Case bf16_case(int32_t n, int32_t k, const Values& values) {
  Case c(n, k);
  c.weight.panel_bytes = (int64_t)c.k_padded * 32;
  c.data = Aligned<uint8_t>(c.n_padded / 16 * c.weight.panel_bytes);
  c.plain.resize((size_t)n * k);
  for (bf16& w : c.plain) w = values.weight();
  for (int32_t row = 0; row < n; row++)
    for (int32_t i = 0; i < k; i++) {
      bf16* panel = (bf16*)(c.data.data() + row / 16 * c.weight.panel_bytes);
      panel[i / 2 * 32 + row % 16 * 2 + i % 2] = c.plain[(size_t)row * k + i];
    }
  c.weight.data = c.data.data();
  return c;
}

Case int8_case(int32_t n, int32_t k) {
  Case c(n, k);
  c.weight.kind = WeightKind::int8;
  c.weight.panel_bytes = (int64_t)c.k_padded * 16;
  c.data = Aligned<uint8_t>(c.n_padded / 16 * c.weight.panel_bytes);
  c.scales = Aligned<float>(c.n_padded), c.compensation = Aligned<int32_t>(c.n_padded);
  c.quantised.resize((size_t)n * k);
  for (int8_t& w : c.quantised) w = (int8_t)(pick(255) - 127);
  for (int32_t row = 0; row < n; row++) {
    c.scales[row] = uniform(0.001f, 0.1f);
    for (int32_t i = 0; i < k; i++) {
      int8_t w = c.quantised[(size_t)row * k + i];
      c.data[row / 16 * c.weight.panel_bytes + i / 4 * 64 + row % 16 * 4 + i % 4] = (uint8_t)w;
      c.compensation[row] += 128 * w;
    }
  }
  c.weight.data = c.data.data(), c.weight.scales = c.scales.data(), c.weight.compensation = c.compensation.data();
  return c;
}

// With scales, and minima, in floats behind each group's numbers.
Case grouped_case(int32_t n, int32_t k, int32_t bits, int32_t zero, bool has_min) {
  Case c(n, k);
  PackedWeight& w = c.weight;
  w.kind = WeightKind::grouped, w.bits = bits, w.zero = zero, w.has_min = has_min;
  w.has_f32_scales = 1, w.scales_per_group = 1;
  w.panel_bytes = (int64_t)c.k_padded / kGroup * group_bytes(w);
  c.data = Aligned<uint8_t>(c.n_padded / 16 * w.panel_bytes);
  c.exact.resize((size_t)n * k);
  const int32_t scales_at = kGroup * kPanel * bits / 8, pairs = 16 / bits;
  for (int32_t row = 0; row < n; row++)
    for (int32_t i = 0; i < k; i++) {
      uint8_t* group = c.data.data() + row / 16 * w.panel_bytes + i / kGroup * group_bytes(w);
      float* scales = (float*)(group + scales_at) + row % 16;
      if (i % kGroup == 0) scales[0] = uniform(0.001f, 0.1f);
      if (i % kGroup == 0 && has_min) scales[16] = uniform(-1, 1);
      int32_t q = pick(1 << bits), in_group = i % kGroup, bit = in_group % 2 * 16 + in_group / 2 % pairs * bits;
      group[in_group / 2 / pairs * 64 + row % 16 * 4 + bit / 8] |= (uint8_t)(q << bit % 8);
      c.exact[(size_t)row * k + i] = (double)scales[0] * (q - zero) + (has_min ? scales[16] : 0);
    }
  w.data = c.data.data();
  return c;
}

void add_bias(Case& c) {
  c.bias = Aligned<float>(c.n_padded);
  for (int32_t i = 0; i < c.n; i++) c.bias[i] = uniform(-1, 1);
  c.weight.bias = c.bias.data();
}

struct Inputs {
  int32_t rows;
  Aligned<bf16> values;
  Aligned<int8_t> quantised;
  Aligned<float> scales, sums;
};

Inputs inputs_of(const Case& c, int32_t rows, const Values& values) {
  Inputs in = {rows, Aligned<bf16>((size_t)rows * c.k_padded), Aligned<int8_t>((size_t)rows * c.k_padded),
               Aligned<float>(rows), Aligned<float>((size_t)rows * c.k_padded / 16)};
  for (int32_t row = 0; row < rows; row++) {
    for (int32_t i = 0; i < c.k; i++) in.values[(size_t)row * c.k_padded + i] = values.input();
    if (c.weight.kind == WeightKind::grouped)
      sum_groups(&in.values[(size_t)row * c.k_padded], c.k_padded, &in.sums[(size_t)row * c.k_padded / 16]);
    if (c.weight.kind == WeightKind::int8)
      quantise_row(&in.values[(size_t)row * c.k_padded], c.k_padded, &in.quantised[(size_t)row * c.k_padded],
                   &in.scales[row]);
  }
  return in;
}

LinearCall call_of(const Case& c, const Inputs& in, int32_t first_row = 0) {
  LinearCall call = {};
  call.weight = &c.weight;
  call.in.values = in.values.data() + (size_t)first_row * c.k_padded;
  call.in.quantised = in.quantised.data() + (size_t)first_row * c.k_padded;
  call.in.scales = in.scales.data() + first_row;
  call.in.sums = in.sums.data() + (size_t)first_row * c.k_padded / 16;
  call.in.stride = c.k_padded;
  call.out_stride = c.n_padded;
  return call;
}

// In calls of `step` rows; each call's inputs are memory of its own, so that a sanitizer sees a read beyond its rows.
std::vector<float> run(const Case& c, const Inputs& in, int32_t step, int32_t pairs_per_call) {
  std::vector<float> out((size_t)in.rows * c.n_padded, -1);
  for (int32_t row = 0; row < in.rows; row += step) {
    int32_t rows = std::min(step, in.rows - row);
    LinearCall call = call_of(c, in, row);
    std::vector<bf16> own_values(call.in.values, call.in.values + (size_t)rows * c.k_padded);
    std::vector<int8_t> own_bytes(call.in.quantised, call.in.quantised + (size_t)rows * c.k_padded);
    call.in.values = own_values.data(), call.in.quantised = own_bytes.data();
    call.out = out.data() + (size_t)row * c.n_padded;
    for (int32_t pair = 0; pair < c.n_padded / kPair; pair += pairs_per_call)
      amx_linear(call, pair, std::min(pair + pairs_per_call, c.n_padded / kPair), 0, rows);
  }
  return out;
}

double exact_sum(const Case& c, const Inputs& in, int32_t row, int32_t n, double* magnitude) {
  double sum = 0;
  *magnitude = 0;
  for (int32_t i = 0; i < c.k; i++) {
    const size_t w = (size_t)n * c.k + i, x = (size_t)row * c.k_padded + i;
    double product;
    if (c.weight.kind == WeightKind::grouped) product = c.exact[w] * bf16_to_f32(in.values[x]);
    else if (c.weight.kind == WeightKind::int8) product = (double)c.quantised[w] * ((uint8_t)in.quantised[x] - 128);
    else product = (double)bf16_to_f32(c.plain[w]) * bf16_to_f32(in.values[x]);
    sum += product, *magnitude += fabs(product);
    // Grouped sums take the minimum apart from the rest.
    if (c.weight.has_min) *magnitude += fabs(bf16_to_f32(in.values[x]));
  }
  if (c.weight.kind != WeightKind::int8) return sum;
  *magnitude = fabs(sum * c.scales[n] * in.scales[row]);
  return sum * c.scales[n] * in.scales[row];
}

void check_against_doubles(const Case& c, const Inputs& in, const std::vector<float>& out) {
  const double lost_denormals = 2.0 * c.k * FLT_MIN;  // each product and each sum may lose one
  for (int32_t row = 0; row < in.rows; row++)
    for (int32_t n = 0; n < c.n; n++) {
      double magnitude, sum = exact_sum(c, in, row, n, &magnitude);
      if (c.weight.bias) sum += c.bias[n], magnitude += fabs(c.bias[n]);
      float y = out[(size_t)row * c.n_padded + n];
      CHECK(fabs(y - sum) <= 1e-5 * magnitude + lost_denormals, "row %d, output %d: %g, not %g", row, n, y, sum);
    }
}

void check_rows_alone_and_together(Case c, int32_t rows, const Values& values) {
  Inputs in = inputs_of(c, rows, values);
  std::vector<float> alone = run(c, in, 1, 64);
  for (int32_t step : {2, 3, 5, 16, 17, 31, 32, 33, 50, 64, 70})
    if (step <= rows || step == 2) {
      bool same = same_bits(alone, run(c, in, step, 64)) && same_bits(alone, run(c, in, step, 1)) &&
                  same_bits(alone, run(c, in, step, 5));
      CHECK(same, "%s, n %d, k %d, %d rows together", values.name, c.n, c.k, step);
    }
  if (values.is_finite) check_against_doubles(c, in, alone);
}

// gate and add, whose formulas are epilogue.h's: rows alone as rows together.
void check_epilogue(Epilogue epilogue, Activation activation) {
  Case c = bf16_case(96, 128, kValues[0]);
  Inputs in = inputs_of(c, 37, kValues[0]);
  std::vector<float> sums[2];
  std::vector<bf16> gated[2];
  for (int together = 0; together < 2; together++) {
    sums[together].assign(37 * 96, 0.25f), gated[together].assign(37 * 48, 0);
    LinearCall call = call_of(c, in);
    call.epilogue = epilogue, call.activation = activation;
    call.out = sums[together].data(), call.gated = gated[together].data();
    call.out_stride = epilogue == Epilogue::gate ? 48 : 96;
    for (int32_t row = 0; row < 37; row += together ? 37 : 1) amx_linear(call, 0, 3, row, together ? 37 : row + 1);
  }
  CHECK(same_bits(sums[0], sums[1]) && gated[0] == gated[1], "epilogue %d", (int)epilogue);
  CHECK(epilogue == Epilogue::gate ? gated[0][5] != 0 : sums[0][5] != 0.25f, "epilogue %d", (int)epilogue);
}

}  // namespace

int main() {
#if !defined(PM_EMULATE_AMX)
  CHECK(can_run("amx"), "this CPU has no AMX: compile with -DPM_EMULATE_AMX");
  if (!can_run("amx")) return finish_checks();
#endif
  enter_tiles();
  for (const Values& values : kValues) check_rows_alone_and_together(bf16_case(160, 200, values), 70, values);
  check_rows_alone_and_together(bf16_case(352, 1400, kValues[0]), 70, kValues[0]);  // k in chunks, with a shorter last
  Case with_bias = bf16_case(33, 64, kValues[0]);
  add_bias(with_bias);
  check_rows_alone_and_together(std::move(with_bias), 35, kValues[0]);
  check_rows_alone_and_together(int8_case(160, 200), 70, kValues[0]);
  check_rows_alone_and_together(int8_case(352, 2700), 70, kValues[0]);
  for (const Values& values : kValues) {
    check_rows_alone_and_together(grouped_case(96, 200, 4, 0, true), 70, values);
    check_rows_alone_and_together(grouped_case(96, 200, 8, 128, false), 70, values);
  }
  Case grouped_with_bias = grouped_case(33, 64, 4, 8, false);
  add_bias(grouped_with_bias);
  check_rows_alone_and_together(std::move(grouped_with_bias), 35, kValues[0]);
  check_epilogue(Epilogue::add, Activation::silu);
  check_epilogue(Epilogue::gate, Activation::silu);
  check_epilogue(Epilogue::gate, Activation::gelu_tanh);
  leave_tiles();
  return finish_checks();
}
