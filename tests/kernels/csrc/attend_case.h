// Requests for the tests of attention: pages in random order, all that nobody wrote poisoned, and an oracle in double.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <random>
#include <vector>

#include "../../../kernels/csrc/ops.h"

using pointsman::AttendCall;
using pointsman::kSplit;
using pointsman::KvHead;
using pointsman::KvKind;

struct Config {
  int head_dim, page_size, num_rows, context, split, window;  // window 0: none
  float soft_cap;
  KvKind kind;
  bool is_causal;  // rows see up to different positions; else all see the whole context
};

inline uint16_t to_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float from_bits(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

struct Aligned {
  void* data;
  explicit Aligned(size_t bytes) : data(aligned_alloc(64, (bytes + 63) / 64 * 64)) {}
  Aligned(const Aligned&) = delete;
  ~Aligned() { free(data); }
};

// K, V and queries of one request as plain numbers.
struct Request {
  Config config;
  std::vector<float> k, v;                // [context][head_dim], as stored: bf16, or int8 without the scale
  std::vector<float> k_scales, v_scales;  // [context], 1 for bf16
  std::vector<uint16_t> q;                // [num_rows][head_dim]
  std::vector<int32_t> first, last;       // absolute
};

inline Request create_request(const Config& c, std::mt19937& random) {
  std::normal_distribution<float> normal;
  Request r{c, {}, {}, {}, {}, {}, {}, {}};
  bool is_int8 = c.kind == KvKind::int8;
  auto value = [&] {
    return is_int8 ? (float)((int)(random() % 255) - 127) : from_bits(to_bits(normal(random)));
  };
  for (int i = 0; i < c.context * c.head_dim; i++) r.k.push_back(value()), r.v.push_back(value());
  for (int i = 0; i < c.context; i++) {
    r.k_scales.push_back(is_int8 ? 0.01f + 0.02f * (random() % 100) / 100 : 1);
    r.v_scales.push_back(is_int8 ? 0.01f + 0.02f * (random() % 100) / 100 : 1);
  }
  for (int i = 0; i < c.num_rows * c.head_dim; i++) r.q.push_back(to_bits(normal(random)));
  for (int row = 0; row < c.num_rows; row++) {
    int last = c.is_causal ? 1 + (int)(random() % c.context) : c.context;
    if (c.is_causal && row == 0) last = c.context;
    r.last.push_back(last);
    r.first.push_back(c.window > 0 ? std::max(0, last - c.window) : 0);
  }
  return r;
}

// The request in pages. Everything outside positions [first, last), other pages too, is NaN (int8: NaN scales).
struct Pages {
  KvHead kv;
  std::vector<int32_t> ids;  // of just as many positions as are needed
  Aligned memory;

  static int64_t bytes_of_half(const Config& c) {
    int64_t n = (int64_t)c.page_size * c.head_dim;
    return c.kind == KvKind::int8 ? n + c.page_size * 4 : n * 2;
  }
  // Two heads to a page, of which the second is used; three pages more than needed.
  static int64_t page_bytes(const Config& c) { return 4 * bytes_of_half(c); }
  static int num_pages(const Config& c, int last) { return (last + c.page_size - 1) / c.page_size; }

  Pages(const Request& r, int first, int last, std::mt19937& random)
      : memory((num_pages(r.config, last) + 3) * page_bytes(r.config)) {
    const Config& c = r.config;
    bool is_int8 = c.kind == KvKind::int8;
    int pages = num_pages(c, last), half_values = c.page_size * c.head_dim;
    for (int64_t i = 0; i < (pages + 3) * page_bytes(c) / 2; i++) ((uint16_t*)memory.data)[i] = 0x7fc1;
    std::vector<int32_t> order;
    for (int i = 0; i < pages + 3; i++) order.push_back(i);
    std::shuffle(order.begin(), order.end(), random);
    ids.assign(order.begin(), order.begin() + pages);
    ids.shrink_to_fit();
    kv = {(uint8_t*)memory.data + 2 * bytes_of_half(c), page_bytes(c), bytes_of_half(c), half_values,
          bytes_of_half(c) + half_values, c.page_size, c.head_dim, c.kind};
    for (int position = first; position < last; position++) {
      uint8_t* page = kv.base + ids[position / c.page_size] * kv.page_stride;
      int slot = position % c.page_size;
      for (int d = 0; d < c.head_dim; d++) {
        int k_at = slot / 16 * 16 * c.head_dim + d / 2 * 32 + slot % 16 * 2 + d % 2;
        int v_at = slot / 2 * 2 * c.head_dim + d * 2 + slot % 2;
        put(page, is_int8, k_at, r.k[position * c.head_dim + d]);
        put(page + kv.v_offset, is_int8, v_at, r.v[position * c.head_dim + d]);
      }
      if (is_int8) {
        memcpy(page + kv.k_scales_offset + slot * 4, &r.k_scales[position], 4);
        memcpy(page + kv.v_scales_offset + slot * 4, &r.v_scales[position], 4);
      }
    }
  }

  static void put(uint8_t* half, bool is_int8, int at, float value) {
    if (is_int8) half[at] = (uint8_t)(int8_t)value;
    else ((uint16_t*)half)[at] = to_bits(value);
  }
};

// What attend() gave for some rows.
struct Result {
  std::vector<float> max, sum, out;

  bool is_same(int row, const Result& other, int other_row) const {
    size_t d = out.size() / max.size();
    return memcmp(&max[row], &other.max[other_row], 4) == 0 && memcmp(&sum[row], &other.sum[other_row], 4) == 0 &&
           memcmp(&out[row * d], &other.out[other_row * d], d * 4) == 0;
  }
};

inline Result run(const Request& r, const Pages& pages, const std::vector<int>& rows, void (*attend)(const AttendCall&),
                  void* scratch) {
  const Config& c = r.config;
  std::vector<uint16_t> q;
  std::vector<int32_t> first, last;
  for (int row : rows) {
    q.insert(q.end(), r.q.begin() + row * c.head_dim, r.q.begin() + (row + 1) * c.head_dim);
    first.push_back(r.first[row]), last.push_back(r.last[row]);
  }
  int n = (int)rows.size();
  Result result{std::vector<float>(n, NAN), std::vector<float>(n, NAN), std::vector<float>(n * c.head_dim, NAN)};
  float scale = 1 / sqrtf((float)c.head_dim);
  attend({pages.kv, pages.ids.data(), c.split * kSplit, n, q.data(), first.data(), last.data(), scale, c.soft_cap,
          result.max.data(), result.sum.data(), result.out.data(), scratch});
  return result;
}

// One row in double precision.
struct Oracle {
  double max = -INFINITY, sum = 0;
  std::vector<double> out, magnitude;  // magnitude: the same sum of |v|, for the error that rounding may cause

  Oracle(const Request& r, int row) {
    const Config& c = r.config;
    int begin = std::max(r.first[row], c.split * kSplit), end = std::min(r.last[row], (c.split + 1) * kSplit);
    std::vector<double> scores;
    for (int p = begin; p < end; p++) {
      double score = 0;
      for (int d = 0; d < c.head_dim; d++)
        score += (double)from_bits(r.q[row * c.head_dim + d]) * r.k[p * c.head_dim + d];
      score *= r.k_scales[p] / sqrt((double)c.head_dim);
      if (c.soft_cap != 0) score = c.soft_cap * tanh(score / c.soft_cap);
      scores.push_back(score);
      max = std::max(max, score);
    }
    out.assign(c.head_dim, 0), magnitude.assign(c.head_dim, 0);
    for (int p = begin; p < end; p++) {
      double weight = exp(scores[p - begin] - max);
      sum += weight;
      for (int d = 0; d < c.head_dim; d++) {
        double value = weight * r.v_scales[p] * r.v[p * c.head_dim + d];
        out[d] += value, magnitude[d] += fabs(value);
      }
    }
  }
};
