// The software model of AMX's tiles against a scalar one of its own; with -mamx-tile ..., also against the real tiles.
#include <float.h>
#include <math.h>
#include <stdio.h>

#include <vector>

#include "amx_emulation.h"
#include "amx_tiles.h"
#include "amx_values.h"
#include "check.h"
#include "cpu.h"

using namespace pointsman;

namespace {

// Two factors and their sums, as many bytes as tiles can have.
struct Product {
  alignas(64) uint8_t sums[16][64], first[16][64], second[16][64];
};

template <typename T>
T element(const uint8_t (&tile)[16][64], int row, int index) {
  T value;
  memcpy(&value, tile[row] + index * sizeof(T), sizeof(T));
  return value;
}

std::vector<float> floats_of(const Product& p) {
  std::vector<float> values(256);
  memcpy(values.data(), p.sums, 1024);
  return values;
}

Product random_product(const Values& values) {
  Product p;
  for (int i = 0; i < 512; i++) {
    bf16 input = values.input(), weight = values.weight();
    memcpy(p.first[0] + 2 * i, &input, 2), memcpy(p.second[0] + 2 * i, &weight, 2);
  }
  for (int i = 0; i < 256; i++) {
    float sum = bf16_to_f32(values.input());
    memcpy(p.sums[0] + 4 * i, &sum, 4);
  }
  return p;
}

float without_denormals(float x) { return fabsf(x) < FLT_MIN ? copysignf(0, x) : x; }

// One output of TDPBF16PS by hand.
float scalar_dot(const Product& p, int row, int column, int pairs) {
  float parts[2] = {0, 0};
  for (int k = 0; k < pairs; k++)
    for (int half = 0; half < 2; half++) {
      float x = without_denormals(bf16_to_f32(element<bf16>(p.first, row, 2 * k + half)));
      float w = without_denormals(bf16_to_f32(element<bf16>(p.second, k, 2 * column + half)));
      parts[half] = without_denormals(fmaf(x, w, parts[half]));
    }
  float sum = without_denormals(element<float>(p.sums, row, column));
  return without_denormals(sum + without_denormals(parts[0] + parts[1]));
}

template <typename A, typename B>
int32_t scalar_dot_bytes(const Product& p, int row, int column, int quads) {
  uint32_t sum = element<uint32_t>(p.sums, row, column);
  for (int k = 0; k < quads; k++)
    for (int i = 0; i < 4; i++)
      sum += (uint32_t)(element<A>(p.first, row, 4 * k + i) * element<B>(p.second, k, 4 * column + i));
  return (int32_t)sum;
}

// A product's shape: the tiles 0, 4 and 6.
struct Shape {
  int rows, depth, columns;  // depth: pairs or quads

  TileConfig config() const {
    TileConfig c(1, 0);
    c.rows[0] = c.rows[4] = (uint8_t)rows, c.rows[6] = (uint8_t)depth;
    c.row_bytes[0] = c.row_bytes[6] = (uint16_t)(4 * columns), c.row_bytes[4] = (uint16_t)(4 * depth);
    return c;
  }
};

void load_emulated(const Product& p, const Shape& shape) {
  TileConfig config = shape.config();
  amx_emulation::load_config(&config);
  amx_emulation::load(0, p.sums, 64), amx_emulation::load(4, p.first, 64), amx_emulation::load(6, p.second, 64);
}

void check_bf16(const Values& values, const Shape& shape) {
  Product p = random_product(values), expected = p;
  for (int row = 0; row < shape.rows; row++)
    for (int column = 0; column < shape.columns; column++) {
      float sum = scalar_dot(p, row, column, shape.depth);
      memcpy(expected.sums[row] + 4 * column, &sum, 4);
    }
  load_emulated(p, shape);
  amx_emulation::dot_bf16(0, 4, 6);
  amx_emulation::store(0, p.sums, 64);
  CHECK(same_bits(floats_of(p), floats_of(expected)), "%s, %d x %d x %d", values.name, shape.rows, shape.depth,
        shape.columns);
}

template <typename A, typename B>
void check_bytes(const Shape& shape) {
  Product p = random_product(kValues[5]), expected = p;
  for (int row = 0; row < shape.rows; row++)
    for (int column = 0; column < shape.columns; column++) {
      int32_t sum = scalar_dot_bytes<A, B>(p, row, column, shape.depth);
      memcpy(expected.sums[row] + 4 * column, &sum, 4);
    }
  load_emulated(p, shape);
  amx_emulation::dot_bytes<A, B>(0, 4, 6);
  amx_emulation::store(0, p.sums, 64);
  CHECK(memcmp(p.sums, expected.sums, 1024) == 0, "bytes, %d x %d x %d", shape.rows, shape.depth, shape.columns);
}

#if defined(__AMX_TILE__)

enum class Dot { bf16, u8s8, s8s8 };

// On real tiles, then on the model.
void check_hardware(Dot dot, const Values& values, const Shape& shape) {
  Product real = random_product(values), model = real;
  configure_tiles(shape.config());
  load_tile<0>(real.sums, 64), load_tile<4>(real.first, 64), load_tile<6>(real.second, 64);
  if (dot == Dot::bf16) dot_tiles_bf16<0, 4, 6>();
  if (dot == Dot::u8s8) dot_tiles_u8s8<0, 4, 6>();
  if (dot == Dot::s8s8) dot_tiles_s8s8<0, 4, 6>();
  store_tile<0>(real.sums, 64);
  release_tiles();
  load_emulated(model, shape);
  if (dot == Dot::bf16) amx_emulation::dot_bf16(0, 4, 6);
  if (dot == Dot::u8s8) amx_emulation::dot_bytes<uint8_t, int8_t>(0, 4, 6);
  if (dot == Dot::s8s8) amx_emulation::dot_bytes<int8_t, int8_t>(0, 4, 6);
  amx_emulation::store(0, model.sums, 64);
  bool same = dot == Dot::bf16 ? same_bits(floats_of(real), floats_of(model)) : !memcmp(real.sums, model.sums, 1024);
  CHECK(same, "the CPU's product %d differs from the model's: %s, %d x %d x %d", (int)dot, values.name, shape.rows,
        shape.depth, shape.columns);
}

void check_this_cpu() {
  CHECK(can_run("amx"), "this CPU has no AMX");
  if (!can_run("amx")) return;
  for (const Values& values : kValues)
    for (int i = 0; i < 100; i++)
      for (Dot dot : {Dot::bf16, Dot::u8s8, Dot::s8s8})
        check_hardware(dot, values, i ? Shape{1 + pick(16), 1 + pick(16), 1 + pick(16)} : Shape{16, 16, 16});
}

#endif

}  // namespace

int main() {
  for (const Values& values : kValues)
    for (int i = 0; i < 50; i++) {
      Shape shape = i ? Shape{1 + pick(16), 1 + pick(16), 1 + pick(16)} : Shape{16, 16, 16};
      check_bf16(values, shape);
      check_bytes<uint8_t, int8_t>(shape);
      check_bytes<int8_t, int8_t>(shape);
    }
#if defined(__AMX_TILE__)
  check_this_cpu();
#endif
  return finish_checks();
}
