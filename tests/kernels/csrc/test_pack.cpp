// Packed weights: every value where the layout says, whatever the sources and the order of their rows.
//
//   test_pack [FILE]     FILE: blocks and what they stand for, as gguf_cases.py writes them

#include "check.h"
#include "huge_pages.h"
#include "weight_case.h"

using namespace pointsman;

namespace {

// A packed weight that is freed with its scope.
struct Packed {
  PackedWeight weight = {};
  explicit Packed(const PackJob& job) {
    const char* fault = begin_pack(job, &weight);
    CHECK(!fault, "%s", fault);
    if (!fault) pack_panels(job, 0, num_panels(weight), &weight);
  }
  ~Packed() { free_packed(&weight); }
  Packed(const Packed&) = delete;
};

std::vector<float> source_row(const PackSource& source, int32_t row, int32_t k) {
  std::vector<float> values(k);
  read_row(source, row, k, values.data());
  return values;
}

bool is_equal(const std::vector<float>& a, const std::vector<float>& b) {
  for (size_t i = 0; i < a.size(); i++)
    if (!(a[i] == b[i])) return false;
  return a.size() == b.size();
}

// Every packed row against the row of the sources that it should hold; rows behind the last, and -1, are zeros.
void check_rows(const char* name, const PackJob& job, const PackedWeight& weight) {
  for (int32_t n = 0; n < weight.n_padded; n++) {
    int32_t row = n >= job.n ? -1 : job.row_order ? job.row_order[n] : n;
    std::vector<float> expected(job.k), is(job.k);
    const PackSource* source = job.sources;
    while (row >= source->num_rows) row -= source++->num_rows;
    if (row >= 0) expected = source_row(*source, row, job.k);
    unpack_row(weight, n, is.data());
    CHECK(is_equal(is, expected), "%s: packed row %d", name, n);
  }
}

void check_grouped_types() {
  Random random = {3};
  for (const WeightCase& c : weight_cases()) {
    if (c.format != PackFormat::grouped) continue;
    for (int32_t k : {256, 512}) {
      std::vector<uint8_t> data = random_source(c.type, 40, k, random);
      PackSource source = {data.data(), c.type, 40};
      PackJob job = {PackFormat::grouped, 40, k, &source, 1, nullptr, nullptr};
      Packed packed(job);
      check_rows(c.name, job, packed.weight);
    }
  }
}

// Types that share no layout get one that holds all of them, exactly.
void check_mixed_types() {
  Random random = {4};
  const SourceType mixes[][3] = {{SourceType::q4_k, SourceType::q6_k, SourceType::q5_k},
                                 {SourceType::q4_0, SourceType::q8_0, SourceType::q4_0},
                                 {SourceType::q4_0, SourceType::q4_1, SourceType::q5_1},
                                 {SourceType::q4_0, SourceType::q4_1, SourceType::q4_1},
                                 {SourceType::q4_0, SourceType::q4_k, SourceType::q8_0}};
  for (const auto& mix : mixes) {
    std::vector<std::vector<uint8_t>> data;
    std::vector<PackSource> sources;
    for (SourceType type : mix) data.push_back(random_source(type, 9, 256, random));
    for (int i = 0; i < 3; i++) sources.push_back({data[i].data(), mix[i], 9});
    PackJob job = {PackFormat::grouped, 27, 256, sources.data(), 3, nullptr, nullptr};
    Packed packed(job);
    check_rows("mixed", job, packed.weight);
  }
}

// Gate and up: 16 rows of one, 16 of the other, and zeros where both end.
void check_row_order() {
  Random random = {5};
  const int32_t half = 40, k = 96;
  std::vector<uint8_t> gate = random_source(SourceType::bf16, half, k, random);
  std::vector<uint8_t> up = random_source(SourceType::bf16, half, k, random);
  const PackSource sources[] = {{gate.data(), SourceType::bf16, half}, {up.data(), SourceType::bf16, half}};
  std::vector<int32_t> order;
  for (int32_t start = 0; start < half; start += 16)
    for (int32_t source = 0; source < 2; source++)
      for (int32_t i = start; i < start + 16; i++) order.push_back(i < half ? source * half + i : -1);
  PackJob job = {PackFormat::bf16, (int32_t)order.size(), k, sources, 2, order.data(), nullptr};
  Packed packed(job);
  check_rows("gate and up", job, packed.weight);
  CHECK(packed.weight.n == 96 && packed.weight.k_padded == 128, "n %d, k_padded %d", packed.weight.n,
        packed.weight.k_padded);
}

// The drawings in ops.h, index by index.
void check_layouts() {
  Random random = {6};
  const int32_t n = 40, k = 96;
  std::vector<uint8_t> data = random_source(SourceType::f32, n, k, random);
  PackSource source = {data.data(), SourceType::f32, n};
  Packed as_bf16({PackFormat::bf16, n, k, &source, 1, nullptr, nullptr});
  Packed as_int8({PackFormat::int8, n, k, &source, 1, nullptr, nullptr});
  Packed as_int4({PackFormat::int4, n, k, &source, 1, nullptr, nullptr});
  for (int32_t row = 0; row < n; row++) {
    std::vector<float> values = source_row(source, row, k), unpacked(k);
    int32_t panel = row / 16, lane = row % 16, sum = 0;
    const PackedWeight& w8 = as_int8.weight;
    for (int32_t i = 0; i < k; i++) {
      const bf16* tile = (const bf16*)(as_bf16.weight.data + panel * as_bf16.weight.panel_bytes) + i / 32 * 512;
      CHECK(tile[i % 32 / 2 * 32 + lane * 2 + i % 2] == bf16_of(values[i]), "bf16 row %d k %d", row, i);
      const int8_t* tile8 = (const int8_t*)(w8.data + panel * w8.panel_bytes) + i / 64 * 1024;
      int32_t q = tile8[i % 64 / 4 * 64 + lane * 4 + i % 4];
      CHECK(fabs(q * w8.scales[row] - values[i]) <= 0.501 * w8.scales[row], "int8 row %d k %d", row, i);
      sum += q;
    }
    CHECK(w8.compensation[row] == 128 * sum, "row %d: %d, not %d", row, w8.compensation[row], 128 * sum);
    const PackedWeight& w4 = as_int4.weight;
    unpack_row(w4, row, unpacked.data());
    for (int32_t i = 0; i < k; i++) {
      const uint8_t* group = w4.data + panel * w4.panel_bytes + i / 32 * (256 + 64);
      uint32_t bits;
      memcpy(&bits, group + i % 32 / 8 * 64 + lane * 4, 4);
      const int bit_of_value[] = {0, 16, 4, 20, 8, 24, 12, 28};
      int32_t q = bits >> bit_of_value[i % 8] & 15;
      uint16_t halves[32];
      memcpy(halves, group + 256, 64);
      float value = f16_to_f32(halves[lane]) * (float)q;
      CHECK(unpacked[i] == value + f16_to_f32(halves[16 + lane]), "int4 row %d k %d", row, i);
    }
  }
}

// A group of 8 bits, each value of which tells its place.
void check_layout_of_8_bits() {
  const int32_t rows = 32;
  std::vector<uint8_t> data((size_t)rows * 34);
  for (int32_t row = 0; row < rows; row++) {
    const uint16_t one = f32_to_f16(1.0f);
    memcpy(&data[(size_t)row * 34], &one, 2);
    for (int i = 0; i < kGroup; i++) data[(size_t)row * 34 + 2 + i] = (uint8_t)(i * 3 + row);
  }
  PackSource source = {data.data(), SourceType::q8_0, rows};
  Packed packed({PackFormat::grouped, rows, kGroup, &source, 1, nullptr, nullptr});
  for (int32_t row = 0; row < rows; row++)
    for (int i = 0; i < kGroup; i++) {
      const uint8_t* quad = packed.weight.data + row / 16 * packed.weight.panel_bytes + i / 4 * 64 + row % 16 * 4;
      const int byte_of_value[] = {0, 2, 1, 3};
      CHECK(quad[byte_of_value[i % 4]] == i * 3 + row + 128, "row %d k %d", row, i);
    }
}

// What cutting the plain range into 15 steps loses, in exact arithmetic.
double plain_error(const float* x) {
  float low = x[0], high = x[0];
  for (int i = 1; i < kGroup; i++) low = fminf(low, x[i]), high = fmaxf(high, x[i]);
  double step = ((double)high - low) / 15, error = 0;
  for (int i = 0; i < kGroup; i++) {
    double q = rint((x[i] - low) / step);
    error += (low + q * step - x[i]) * (low + q * step - x[i]);
  }
  return error;
}

// Weights are about normal: there the search is worth a tenth of the squared error.
void check_int4_error() {
  Random random = {7};
  const int32_t n = 64, k = 512;
  std::vector<float> values((size_t)n * k), row(k);
  for (float& value : values) {
    value = 0.1f;
    for (int i = 0; i < 12; i++) value += 0.02f * random.uniform();
  }
  PackSource source = {values.data(), SourceType::f32, n};
  Packed packed({PackFormat::int4, n, k, &source, 1, nullptr, nullptr});
  double error = 0, plain = 0;
  for (int32_t i = 0; i < n; i++) {
    unpack_row(packed.weight, i, row.data());
    for (int32_t j = 0; j < k; j++) error += pow(row[j] - values[(size_t)i * k + j], 2);
    for (int32_t j = 0; j < k; j += kGroup) plain += plain_error(&values[(size_t)i * k + j]);
  }
  printf("int4: squared error %.3f of the plain range's\n", error / plain);
  CHECK(error < 0.92 * plain, "%g of %g", error, plain);
}

void check_constant_groups() {
  for (float constant : {0.0f, 0.25f, -3.0f}) {
    std::vector<float> values(64, constant), row(64);
    PackSource source = {values.data(), SourceType::f32, 1};
    for (PackFormat format : {PackFormat::int4, PackFormat::int8}) {
      Packed packed({format, 1, 64, &source, 1, nullptr, nullptr});
      unpack_row(packed.weight, 0, row.data());
      for (float value : row) CHECK(fabsf(value - constant) < 1e-6f, "%g became %g", constant, value);
    }
  }
}

void check_panels_apart() {
  Random random = {8};
  for (const WeightCase& c : weight_cases()) {
    std::vector<uint8_t> data = random_source(c.type, 100, 256, random);
    std::vector<float> bias(100, 0.5f);
    PackSource source = {data.data(), c.type, 100};
    PackJob job = {c.format, 100, 256, &source, 1, nullptr, bias.data()};
    Packed whole(job);
    PackedWeight parts;
    CHECK(!plan_pack(job, &parts), "%s", c.name);
    int64_t bytes = packed_bytes(parts, true);
    void* memory = alloc_huge((size_t)bytes);
    place_packed(job, memory, &parts);
    for (int32_t panel = num_panels(parts); panel-- > 0;) pack_panels(job, panel, panel + 1, &parts);
    CHECK(!memcmp(whole.weight.data, parts.data, (size_t)bytes), "%s", c.name);
    CHECK(parts.bias[99] == 0.5f && parts.bias[100] == 0.0f, "%s", c.name);
    free_huge(memory, (size_t)bytes);
  }
}

void check_faults() {
  std::vector<uint8_t> data(4096);
  PackSource plain = {data.data(), SourceType::f32, 4}, blocks = {data.data(), SourceType::q8_0, 4};
  const int32_t order[] = {0, 4};
  PackedWeight weight;
  CHECK(begin_pack({PackFormat::bf16, 5, 64, &plain, 1, nullptr, nullptr}, &weight), "too few rows");
  CHECK(begin_pack({PackFormat::bf16, 2, 64, &plain, 1, order, nullptr}, &weight), "a row beyond the last");
  CHECK(begin_pack({PackFormat::grouped, 4, 64, &plain, 1, nullptr, nullptr}, &weight), "no groups");
  CHECK(begin_pack({PackFormat::grouped, 4, 48, &blocks, 1, nullptr, nullptr}, &weight), "half a block");
  CHECK(begin_pack({PackFormat::int4, 4, 48, &plain, 1, nullptr, nullptr}, &weight), "half a group");
  CHECK(begin_pack({PackFormat::bf16, 0, 64, &plain, 1, nullptr, nullptr}, &weight), "no rows");
}

void check_halves() {
  for (uint32_t bits = 0; bits < 65536; bits++) {
    float value = f16_to_f32((uint16_t)bits);
    if (isnan(value)) continue;
    CHECK(f32_to_f16(value) == bits, "%x is %g", bits, value);
    double expected = (bits & 0x7c00) == 0 ? ldexp(bits & 1023, -24)
                                           : ldexp((bits & 1023) + 1024, (int)(bits >> 10 & 31) - 25);
    if (isfinite(value)) CHECK(fabs(value) == expected, "%x is %g", bits, value);
    // Half way to the next goes to the even one.
    if ((bits & 0x7fff) >= 0x7bff) continue;
    float between = 0.5f * (value + f16_to_f32((uint16_t)(bits + 1)));
    CHECK(f32_to_f16(between) == ((bits + 1) & ~1u), "%g", between);
  }
}

// FILE: cases of [type, rows, k, bytes of blocks] as int32, the blocks, the floats that they stand for.
void check_file(const char* path) {
  FILE* file = fopen(path, "rb");
  CHECK(file, "%s cannot be read", path);
  int32_t header[4], num_cases = 0;
  while (file && fread(header, 4, 4, file) == 4) {
    auto [type, rows, k, bytes] = header;
    std::vector<uint8_t> blocks(bytes);
    std::vector<float> expected((size_t)rows * k), row(k);
    size_t read = fread(blocks.data(), 1, blocks.size(), file) + fread(expected.data(), 4, expected.size(), file);
    CHECK(read == blocks.size() + expected.size(), "%s ends early", path);
    PackSource source = {blocks.data(), (SourceType)type, rows};
    Packed packed({PackFormat::grouped, rows, k, &source, 1, nullptr, nullptr});
    for (int32_t i = 0; i < rows; i++) {
      unpack_row(packed.weight, i, row.data());
      for (int32_t j = 0; j < k; j++) {
        float is = row[j], should = expected[(size_t)i * k + j];
        CHECK(is == should, "type %d row %d k %d: %.9g, not %.9g", type, i, j, is, should);
      }
    }
    num_cases++;
  }
  if (file) fclose(file);
  CHECK(num_cases == 8, "%d cases", num_cases);
}

}  // namespace

int main(int argc, char** argv) {
  check_grouped_types();
  check_mixed_types();
  check_row_order();
  check_layouts();
  check_layout_of_8_bits();
  check_int4_error();
  check_constant_groups();
  check_panels_apart();
  check_faults();
  check_halves();
  if (argc > 1) check_file(argv[1]);
  return finish_checks();
}
