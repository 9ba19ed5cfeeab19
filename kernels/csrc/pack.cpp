#include "pack.h"

#include <string.h>

#include <cmath>
#include <vector>

#include "huge_pages.h"
#include "source_blocks.h"
#include "vec.h"

namespace pointsman {
namespace {

constexpr int kLevels4 = 15;  // the greatest of 4 bits

int32_t source_rows(const PackJob& job) {
  int32_t rows = 0;
  for (int32_t i = 0; i < job.num_sources; i++) rows += job.sources[i].num_rows;
  return rows;
}

const char* find_fault(const PackJob& job) {
  if (job.n <= 0 || job.k <= 0) return "A weight needs at least one row and one column.";
  for (int32_t i = 0; i < job.num_sources; i++) {
    SourceType type = job.sources[i].type;
    if (type < SourceType::f32 || type > SourceType::q6_k) return "A source has a type that SourceType does not list.";
    if (job.k % block_values(type))
      return "A row must be made of whole blocks; store this tensor in a type with smaller blocks.";
    if (job.format == PackFormat::grouped && !has_groups(type))
      return "A source of plain numbers has no groups to keep; pack it as bf16, int8 or int4.";
  }
  int32_t rows = source_rows(job);
  if (!job.row_order && rows < job.n) return "The sources have fewer rows than the weight.";
  for (int32_t i = 0; job.row_order && i < job.n; i++)
    if (job.row_order[i] < -1 || job.row_order[i] >= rows) return "row_order names a row that no source has.";
  return nullptr;
}

int32_t greater(int32_t a, int32_t b) { return a > b ? a : b; }

// What holds every source's groups as they are. Where their zeros differ the values move up to the greatest zero.
GroupLayout common_layout(const PackJob& job) {
  if (job.format == PackFormat::int4) return {4, 0, 1, 0, 1};
  GroupLayout common = layout_of(job.sources[0].type);
  for (int32_t i = 1; i < job.num_sources; i++) {
    GroupLayout layout = layout_of(job.sources[i].type);
    if (layout.zero != common.zero) common.bits = 8;
    common.bits = greater(common.bits, layout.bits);
    common.zero = greater(common.zero, layout.zero);
    common.has_min = greater(common.has_min, layout.has_min);
    common.has_f32_scales = greater(common.has_f32_scales, layout.has_f32_scales);
    common.scales_per_group = greater(common.scales_per_group, layout.scales_per_group);
  }
  return common;
}

struct RowPlace {
  const PackSource* source;  // null: a row of zeros
  int32_t row;
};

RowPlace find_row(const PackJob& job, int32_t packed_row) {
  if (packed_row >= job.n) return {nullptr, 0};
  int32_t row = job.row_order ? job.row_order[packed_row] : packed_row;
  if (row < 0) return {nullptr, 0};
  const PackSource* source = job.sources;
  while (row >= source->num_rows) row -= source++->num_rows;
  return {source, row};
}

const uint8_t* row_start(const PackSource& source, int32_t row, int32_t k) {
  int64_t row_bytes = (int64_t)(k / block_values(source.type)) * block_bytes(source.type);
  return (const uint8_t*)source.data + row * row_bytes;
}

float group_value(const GroupValues& group, int32_t zero, int32_t i) {
  int half = i / 16;
  return group.scale[half] * (float)((int32_t)group.q[i] - zero) + group.min[half];
}

void read_grouped_row(const PackSource& source, const uint8_t* data, int32_t k, float* out) {
  int32_t zero = layout_of(source.type).zero;
  for (int32_t start = 0; start < k; start += kGroup) {
    GroupValues group;
    read_group(source.type, data, start / kGroup, &group);
    for (int32_t i = 0; i < kGroup; i++) out[start + i] = group_value(group, zero, i);
  }
}

// The packed row as floats.
void read_packed_row(const PackJob& job, int32_t packed_row, float* out) {
  RowPlace place = find_row(job, packed_row);
  if (place.source) return read_row(*place.source, place.row, job.k, out);
  for (int32_t i = 0; i < job.k; i++) out[i] = 0.0f;
}

// [k / 2][16 n][2]
void pack_bf16_panel(const PackJob& job, int32_t panel, PackedWeight* weight) {
  bf16* data = (bf16*)(weight->data + panel * weight->panel_bytes);
  std::vector<float> values(job.k);
  for (int lane = 0; lane < kPanel; lane++) {
    read_packed_row(job, panel * kPanel + lane, values.data());
    for (int32_t i = 0; i < job.k; i++) data[i / 2 * 32 + lane * 2 + i % 2] = f32_to_bf16(values[i]);
  }
}

// NaN where any value is no finite number: fmax would pass over a NaN.
float greatest_magnitude(const float* values, int32_t n) {
  float greatest = 0.0f, zeros = 0.0f;
  for (int32_t i = 0; i < n; i++) {
    greatest = std::fmax(greatest, std::fabs(values[i]));
    zeros += values[i] * 0.0f;
  }
  return greatest + zeros;
}

// [k / 4][16 n][4]
void pack_int8_panel(const PackJob& job, int32_t panel, PackedWeight* weight) {
  int8_t* data = (int8_t*)(weight->data + panel * weight->panel_bytes);
  std::vector<float> values(job.k);
  for (int lane = 0; lane < kPanel; lane++) {
    read_packed_row(job, panel * kPanel + lane, values.data());
    float greatest = greatest_magnitude(values.data(), job.k);
    bool is_zero = greatest < 1e-30f;
    // A row that is not finite has a scale of NaN, so that whoever uses it sees it, and no values.
    float factor = is_zero || std::isnan(greatest) ? 0.0f : 127.0f / greatest;
    int32_t sum = 0;
    for (int32_t i = 0; i < job.k; i++) {
      int8_t q = factor > 0 ? (int8_t)std::nearbyint(values[i] * factor) : 0;
      data[i / 4 * 64 + lane * 4 + i % 4] = q;
      sum += q;
    }
    weight->scales[panel * kPanel + lane] = is_zero ? 0.0f : greatest / 127.0f;
    weight->compensation[panel * kPanel + lane] = 128 * sum;
  }
}

// The nearest of 0 to 15.
PM_INLINE f32x16 to_levels(f32x16 x) {
  f32x16 clipped = min16(max16(x, splat(0.0f)), splat((float)kLevels4));
  return __builtin_convertvector(__builtin_convertvector(clipped + 0.5f, i32x16), f32x16);
}

struct Line {
  float scale, min, error;  // the squared error, less what all lines share
};

// A group around the middle of its range, which keeps sums in floats precise.
struct CentredGroup {
  f32x16 x[2];
  float middle, range, sum;

  explicit CentredGroup(const float* values) {
    float low = values[0], high = values[0];  // by comparison: fmin() and fmax() are calls, to tell numbers from NaN
    for (int i = 1; i < kGroup; i++) {
      low = values[i] < low ? values[i] : low;
      high = values[i] > high ? values[i] : high;
    }
    middle = 0.5f * (low + high);
    range = high - low;
    for (int half = 0; half < 2; half++) x[half] = load_f32(values + half * 16) - middle;
    sum = sum16(x[0] + x[1]);
  }
};

// The scale and minimum that fit best if the range is cut into `levels` steps: values beyond 0 to 15 clip.
Line fit_line(const CentredGroup& group, float levels) {
  f32x16 q_sums = {}, qq_sums = {}, xq_sums = {};
  for (const f32x16& x : group.x) {
    f32x16 q = to_levels(x * (levels / group.range) + 0.5f * kLevels4);
    q_sums += q, qq_sums += q * q, xq_sums += x * q;
  }
  float sum_q = sum16(q_sums), sum_qq = sum16(qq_sums), sum_xq = sum16(xq_sums);
  float spread = kGroup * sum_qq - sum_q * sum_q;
  if (!(spread > 0)) return {0, 0, HUGE_VALF};
  float scale = (kGroup * sum_xq - sum_q * group.sum) / spread;
  float min = (group.sum - scale * sum_q) / kGroup;
  return {scale, min + group.middle, -scale * sum_xq - min * group.sum};
}

// Plain range to a fifth narrower: what outliers lose by clipping, the others win by finer steps.
Line best_line(const float* values) {
  CentredGroup group(values);
  Line best = {0, group.middle, HUGE_VALF};
  if (!std::isfinite(group.sum)) return {0, NAN, HUGE_VALF};  // min and max pass over a NaN
  if (!(group.range > 0)) return best;
  for (float levels = 14.75f; levels < 18.0f; levels += 0.75f) {
    Line line = fit_line(group, levels);
    if (line.error < best.error) best = line;
  }
  return best;
}

void quantise_group4(const float* x, GroupValues* out) {
  Line line = best_line(x);
  float scale = f16_to_f32(f32_to_f16(line.scale)), min = f16_to_f32(f32_to_f16(line.min));
  float factor = scale > 0 ? 1.0f / scale : 0.0f;
  for (int half = 0; half < 2; half++) out->scale[half] = scale, out->min[half] = min;
  for (int half = 0; half < kGroup; half += 16) {
    f32x16 q = to_levels((load_f32(x + half) - min) * factor);
    for (int i = 0; i < 16; i++) out->q[half + i] = (uint8_t)q[i];
  }
}

void store_scale(const PackedWeight& weight, float value, int64_t index, uint8_t* to) {
  if (weight.has_f32_scales) {
    memcpy(to + index * 4, &value, 4);
  } else {
    uint16_t half = f32_to_f16(value);
    memcpy(to + index * 2, &half, 2);
  }
}

float load_scale(const PackedWeight& weight, int64_t index, const uint8_t* from) {
  if (!weight.has_f32_scales) {
    uint16_t half;
    memcpy(&half, from + index * 2, 2);
    return f16_to_f32(half);
  }
  float value;
  memcpy(&value, from + index * 4, 4);
  return value;
}

// Where a group of 16 columns keeps its scales; the minima follow them.
int32_t scales_offset(const PackedWeight& weight) { return kGroup * kPanel * weight.bits / 8; }

// Where value i of a group lies in its column's 32 bits of a row; the rows of 4 bits hold 4 pairs of k, of 8 bits 2.
int bit_of(const PackedWeight& weight, int i) { return i % 2 * 16 + i / 2 % (16 / weight.bits) * weight.bits; }

// The byte of value i, and with 4 bits the shift of its nibble.
int32_t byte_of(const PackedWeight& weight, int lane, int i) {
  return i * weight.bits / 32 * 64 + lane * 4 + bit_of(weight, i) / 8;
}
int nibble_shift(const PackedWeight& weight, int i) { return bit_of(weight, i) % 8; }

void store_group(const PackedWeight& weight, const GroupValues& values, int32_t zero, int lane, uint8_t* group) {
  int32_t shift_up = weight.zero - zero;
  for (int i = 0; i < kGroup; i++)
    group[byte_of(weight, lane, i)] |= (uint8_t)((values.q[i] + shift_up) << nibble_shift(weight, i));
  uint8_t* scales = group + scales_offset(weight);
  for (int half = 0; half < weight.scales_per_group; half++) {
    store_scale(weight, values.scale[half], half * kPanel + lane, scales);
    if (weight.has_min) store_scale(weight, values.min[half], (weight.scales_per_group + half) * kPanel + lane, scales);
  }
}

void pack_grouped_panel(const PackJob& job, int32_t panel, PackedWeight* weight) {
  uint8_t* data = weight->data + panel * weight->panel_bytes;
  const int32_t bytes = group_bytes(*weight);
  std::vector<float> values(job.k);
  for (int lane = 0; lane < kPanel; lane++) {
    RowPlace place = find_row(job, panel * kPanel + lane);
    if (!place.source) continue;
    const SourceType type = place.source->type;
    const uint8_t* row = row_start(*place.source, place.row, job.k);
    if (job.format == PackFormat::int4) read_row(*place.source, place.row, job.k, values.data());
    for (int32_t index = 0; index < job.k / kGroup; index++) {
      GroupValues group;
      if (job.format == PackFormat::int4) {
        quantise_group4(values.data() + index * kGroup, &group);
      } else {
        read_group(type, row, index, &group);
      }
      int32_t zero = job.format == PackFormat::int4 ? 0 : layout_of(type).zero;
      store_group(*weight, group, zero, lane, data + (int64_t)index * bytes);
    }
  }
}

int64_t data_bytes(const PackedWeight& weight) { return num_panels(weight) * weight.panel_bytes; }

void unpack_grouped_row(const PackedWeight& weight, const uint8_t* panel, int lane, float* out) {
  const int32_t bytes = group_bytes(weight), mask = weight.bits == 4 ? 15 : 255;
  for (int32_t start = 0; start < weight.k; start += kGroup) {
    const uint8_t* group = panel + (int64_t)(start / kGroup) * bytes;
    const uint8_t* scales = group + scales_offset(weight);
    GroupValues values;
    for (int half = 0; half < 2; half++) {
      int32_t part = half * (weight.scales_per_group - 1);
      values.scale[half] = load_scale(weight, part * kPanel + lane, scales);
      int32_t min_index = (weight.scales_per_group + part) * kPanel + lane;
      values.min[half] = weight.has_min ? load_scale(weight, min_index, scales) : 0.0f;
    }
    for (int i = 0; i < kGroup; i++) {
      values.q[i] = group[byte_of(weight, lane, i)] >> nibble_shift(weight, i) & mask;
      out[start + i] = group_value(values, weight.zero, i);
    }
  }
}

}  // namespace

void read_row(const PackSource& source, int32_t row, int32_t k, float* out) {
  const uint8_t* data = row_start(source, row, k);
  switch (source.type) {
    case SourceType::f32:
      memcpy(out, data, (size_t)k * 4);
      return;
    case SourceType::bf16:
      for (int32_t i = 0; i < k; i++) out[i] = bf16_to_f32(((const bf16*)data)[i]);
      return;
    case SourceType::f16:
      for (int32_t i = 0; i < k; i++) out[i] = f16_to_f32(((const uint16_t*)data)[i]);
      return;
    default:
      read_grouped_row(source, data, k, out);
  }
}

const char* plan_pack(const PackJob& job, PackedWeight* weight) {
  if (const char* fault = find_fault(job)) return fault;
  *weight = {};
  weight->n = job.n;
  weight->k = job.k;
  weight->n_padded = round_up(job.n, kPair);
  weight->k_padded = round_up(job.k, 64);
  if (job.format == PackFormat::bf16) {
    weight->kind = WeightKind::bf16;
    weight->panel_bytes = (int64_t)weight->k_padded * kPanel * 2;
  } else if (job.format == PackFormat::int8) {
    weight->kind = WeightKind::int8;
    weight->panel_bytes = (int64_t)weight->k_padded * kPanel;
  } else {
    if (job.k % kGroup) return "Groups need a multiple of 32 columns; pack this weight as bf16 or int8.";
    GroupLayout layout = common_layout(job);
    weight->kind = WeightKind::grouped;
    weight->bits = layout.bits;
    weight->zero = layout.zero;
    weight->has_min = layout.has_min;
    weight->has_f32_scales = layout.has_f32_scales;
    weight->scales_per_group = layout.scales_per_group;
    weight->panel_bytes = (int64_t)weight->k_padded / kGroup * group_bytes(*weight);
  }
  return nullptr;
}

// [panels][int8: scales, compensation][bias]
int64_t packed_bytes(const PackedWeight& weight, bool has_bias) {
  int64_t vectors = (weight.kind == WeightKind::int8 ? 2 : 0) + (has_bias ? 1 : 0);
  return data_bytes(weight) + vectors * weight.n_padded * 4;
}

void place_packed(const PackJob& job, void* memory, PackedWeight* weight) {
  weight->data = (uint8_t*)memory;
  float* behind = (float*)(weight->data + data_bytes(*weight));
  if (weight->kind == WeightKind::int8) {
    weight->scales = behind;
    weight->compensation = (int32_t*)(behind + weight->n_padded);
    behind += 2 * weight->n_padded;
  }
  if (!job.bias) return;
  weight->bias = behind;
  memcpy(weight->bias, job.bias, (size_t)job.n * 4);
}

const char* begin_pack(const PackJob& job, PackedWeight* weight) {
  if (const char* fault = plan_pack(job, weight)) return fault;
  void* memory = alloc_huge((size_t)packed_bytes(*weight, job.bias));
  if (!memory) return "There is not enough memory for the weights; choose a smaller model or a smaller weight format.";
  place_packed(job, memory, weight);
  return nullptr;
}

void free_packed(PackedWeight* weight) {
  free_huge(weight->data, (size_t)packed_bytes(*weight, weight->bias));
  *weight = {};
}

void pack_panels(const PackJob& job, int32_t first_panel, int32_t last_panel, PackedWeight* weight) {
  for (int32_t panel = first_panel; panel < last_panel; panel++) {
    if (weight->kind == WeightKind::bf16) {
      pack_bf16_panel(job, panel, weight);
    } else if (weight->kind == WeightKind::int8) {
      pack_int8_panel(job, panel, weight);
    } else {
      pack_grouped_panel(job, panel, weight);
    }
  }
}

void unpack_row(const PackedWeight& weight, int32_t packed_row, float* out) {
  const int lane = packed_row % kPanel;
  const uint8_t* panel = weight.data + packed_row / kPanel * weight.panel_bytes;
  if (weight.kind == WeightKind::bf16) {
    const bf16* data = (const bf16*)panel + lane * 2;
    for (int32_t i = 0; i < weight.k; i++) out[i] = bf16_to_f32(data[i / 2 * 32 + i % 2]);
  } else if (weight.kind == WeightKind::int8) {
    const int8_t* data = (const int8_t*)panel + lane * 4;
    for (int32_t i = 0; i < weight.k; i++) out[i] = weight.scales[packed_row] * data[i / 4 * 64 + i % 4];
  } else {
    unpack_grouped_row(weight, panel, lane, out);
  }
}

}  // namespace pointsman
