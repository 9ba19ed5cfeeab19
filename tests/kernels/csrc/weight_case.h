// Weights of every kind for the tests: random sources, packed.
#pragma once

#include "check.h"
#include "pack.h"
#include "source_blocks.h"

struct WeightCase {
  const char* name;
  pointsman::PackFormat format;
  pointsman::SourceType type;
};

inline const std::vector<WeightCase>& weight_cases() {
  using namespace pointsman;
  static const std::vector<WeightCase> cases = {
      {"bf16", PackFormat::bf16, SourceType::f32},      {"int8", PackFormat::int8, SourceType::f32},
      {"int4", PackFormat::int4, SourceType::bf16},     {"q8_0", PackFormat::grouped, SourceType::q8_0},
      {"q4_0", PackFormat::grouped, SourceType::q4_0},  {"q4_1", PackFormat::grouped, SourceType::q4_1},
      {"q5_0", PackFormat::grouped, SourceType::q5_0},  {"q5_1", PackFormat::grouped, SourceType::q5_1},
      {"q4_k", PackFormat::grouped, SourceType::q4_k},  {"q5_k", PackFormat::grouped, SourceType::q5_k},
      {"q6_k", PackFormat::grouped, SourceType::q6_k},
  };
  return cases;
}

// Where a block keeps its halves: all else in it may be any bits.
inline std::vector<int> offsets_of_halves(pointsman::SourceType type) {
  using pointsman::SourceType;
  if (type == SourceType::q6_k) return {208};
  if (type == SourceType::q8_0 || type == SourceType::q4_0 || type == SourceType::q5_0) return {0};
  return {0, 2};
}

// num_rows rows of k random values in the given type.
inline std::vector<uint8_t> random_source(pointsman::SourceType type, int32_t num_rows, int32_t k, Random& random) {
  using namespace pointsman;
  int32_t num_blocks = num_rows * (k / block_values(type)), bytes = block_bytes(type);
  std::vector<uint8_t> data((size_t)num_blocks * bytes);
  for (int32_t i = 0; i < num_blocks; i++) {
    uint8_t* block = data.data() + (size_t)i * bytes;
    float value = random.uniform();
    uint16_t half = f32_to_f16(value), brain = bf16_of(value);
    if (type == SourceType::f32) memcpy(block, &value, 4);
    if (type == SourceType::bf16) memcpy(block, &brain, 2);
    if (type == SourceType::f16) memcpy(block, &half, 2);
    if (!has_groups(type)) continue;
    for (int32_t j = 0; j < bytes; j++) block[j] = (uint8_t)random.bits();
    for (int offset : offsets_of_halves(type)) {
      half = f32_to_f16(random.uniform() * 0.01f);
      memcpy(block + offset, &half, 2);
    }
  }
  return data;
}

// A packed weight and what it was made from.
struct TestWeight {
  std::vector<uint8_t> data;
  std::vector<float> bias;
  pointsman::PackedWeight packed;

  TestWeight(const WeightCase& c, int32_t n, int32_t k, bool has_bias, Random& random) {
    using namespace pointsman;
    data = random_source(c.type, n, k, random);
    for (int32_t i = 0; has_bias && i < n; i++) bias.push_back(random.uniform());
    PackSource source = {data.data(), c.type, n};
    PackJob job = {c.format, n, k, &source, 1, nullptr, has_bias ? bias.data() : nullptr};
    const char* fault = begin_pack(job, &packed);
    CHECK(!fault, "%s: %s", c.name, fault);
    pack_panels(job, 0, num_panels(packed), &packed);
  }
  ~TestWeight() { pointsman::free_packed(&packed); }
  TestWeight(const TestWeight&) = delete;
};
