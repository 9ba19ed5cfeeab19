// What an instruction set provides: the table of functions that the forward pass calls, and what they take.
//
// Every function's result for a row depends on that row alone: not on the other rows, on how a call's rows or columns
// were cut, or on the thread. Sums run in one fixed order: along k for linears, along absolute positions for attention.
#pragma once

#include <stdint.h>

namespace pointsman {

typedef uint16_t bf16;

enum class WeightKind : int32_t { bf16 = 0, int8 = 1, grouped = 2 };
enum class Activation : int32_t { silu = 0, gelu_tanh = 1 };
enum class KvKind : int32_t { bf16 = 0, int8 = 1 };

constexpr int kPanel = 16;        // output columns in one vector
constexpr int kPair = 32;         // output columns that a linear computes together: two panels
constexpr int kGroup = 32;        // inputs that share a scale in grouped weights
constexpr int kSplit = 512;       // positions of one partial softmax; a multiple of every page size
constexpr int kMaxHeadDim = 256;
constexpr int kMaxRows = 64;      // query rows of one attend() call

static constexpr int32_t round_up(int32_t n, int32_t to) { return (n + to - 1) / to * to; }

// A linear's weight in tiles of 16 columns (outputs), panel after panel; inputs run along a panel.
//
//   bf16     [n/16][k/32] tiles of 1 KiB: [16 pairs of k][16 n][2]             what TDPBF16PS and VDPBF16PS load
//   int8     [n/16][k/64] tiles of 1 KiB: [16 quads of k][16 n][4]             what TDPBSSD and VPDPBUSD load
//   grouped  [n/16][k/32] groups: 512 bytes, with 4 bits 256, in rows of [16 n] 32 bits:
//
//              bit         0    4    8   12   16   20   24   28
//              4 bits     k0   k2   k4   k6   k1   k3   k5   k7     row j: k0 = 8 j
//              8 bits     k0        k2        k1        k3          row j: k0 = 4 j
//
//            so that a shift leaves a pair of k in the low bits of two halves;
//            then 16 scales, then 16 minima if has_min, each fp16 or fp32.     weight = scale * (q - zero) + min
//
// k is padded with zeros to a multiple of 64, n to a multiple of 32.
// With gate and up stacked, 16 rows of gate and 16 of up alternate, so that a pair holds both of the same 16 outputs.
struct PackedWeight {
  WeightKind kind;
  int32_t n, k;                  // as the model has them; gate and up count both
  int32_t n_padded, k_padded;
  int32_t bits;                  // grouped: 4 or 8
  int32_t zero;                  // grouped
  int32_t has_min;               // grouped
  int32_t has_f32_scales;        // grouped: else fp16
  int32_t scales_per_group;      // grouped: 1, or 2 where each half of a group has its own (Q6_K)
  int64_t panel_bytes;           // from one panel of 16 columns to the next
  uint8_t* data;                 // 64-byte aligned
  float* scales;                 // int8: [n_padded]
  int32_t* compensation;         // int8: [n_padded], 128 * the sum of a column, for activations stored as x + 128
  float* bias;                   // [n_padded] or null
};

// Bytes of one group of a grouped panel.
static inline int32_t group_bytes(const PackedWeight& w) {
  int32_t scale_bytes = (w.has_f32_scales ? 4 : 2) * kPanel * w.scales_per_group;
  return kGroup * kPanel * w.bits / 8 + scale_bytes * (w.has_min ? 2 : 1);
}

// A linear's input. Which members are set goes by the weight's kind.
struct Rows {
  const bf16* values;            // bf16, grouped: [rows][stride]
  const int8_t* quantised;       // int8: [rows][stride] as quantise_row() of the same table left it
  const float* scales;           // int8: [rows]
  const float* sums;             // grouped with minima: [rows][stride / kGroup * 2], as sum_groups() left them
  int32_t stride;                // elements; the weight's k_padded, the padding is zero
};

enum class Epilogue : int32_t {
  store = 0,                     // out[row][n] = y
  add = 1,                       // out[row][n] += y
  gate = 2,                      // out[row][n / 2] = bf16(act(gate) * up)
};

struct LinearCall {
  const PackedWeight* weight;
  Rows in;
  Epilogue epilogue;
  Activation activation;
  float* out;                    // store, add: [rows][out_stride]; columns from n to n_padded are written too
  bf16* gated;                   // gate: [rows][out_stride]
  int64_t out_stride;            // elements
};

// Where the K and V of one layer and one KV head lie in the pages.
//
//   page   [kv head][K | V]
//   K      [token / 16][d / 2][16 tokens][2]      a vector holds one pair of d for 16 tokens
//   V      [token / 2][d][2]                      a vector holds one pair of tokens for 16 d
//
// d is padded with zeros to a multiple of 32. int8: the same order in bytes, then a float scale per token, K's and V's.
struct KvHead {
  uint8_t* base;                 // of this head in page 0
  int64_t page_stride;           // bytes
  int64_t v_offset;              // bytes from K to V
  int64_t k_scales_offset;       // int8: bytes from K to [page_size] floats
  int64_t v_scales_offset;
  int32_t page_size;             // tokens: 32, 64 or 128
  int32_t head_dim;              // padded
  KvKind kind;
};

// One split of one KV head for up to kMaxRows query rows: a partial softmax.
struct AttendCall {
  KvHead kv;
  const int32_t* pages;          // the request's page ids, from position 0 on
  int32_t split_start;           // absolute position, a multiple of kSplit
  int32_t num_rows;
  const bf16* q;                 // [num_rows][head_dim]
  const int32_t* first;          // [num_rows], first position that the row sees (window), absolute
  const int32_t* last;           // [num_rows], one behind the last that it sees, absolute
  float scale;
  float soft_cap;                // 0 = off
  float* max;                    // out [num_rows]; -inf where the row sees nothing of the split
  float* sum;                    // out [num_rows], of exp(score - max); 0 where it sees nothing
  float* out;                    // out [num_rows][head_dim], not yet divided by the sum; zeros where it sees nothing
  void* scratch;                 // attend_scratch_bytes, 64-byte aligned, the thread's own
};

// One token's row of the fused qkv projection, to be normed, rotated and stored.
struct QkvCall {
  float* qkv;                    // [q heads | k heads | v heads][head_dim] of this token; q and k are overwritten
  const float* q_norm;           // [head_dim] or null
  const float* k_norm;
  const float* cos_sin;          // [head_dim]: cos of head_dim / 2 angles, then their sin
  float eps;
  int32_t head_dim;              // not padded
  int32_t head_dim_padded;
};

// Every function works on one row or item; who calls it for which is the caller's business.
struct KernelTable {
  const char* name;
  int64_t attend_scratch_bytes;

  // The thread is about to call, or has called, functions of this table: AMX sets up and releases its tiles.
  void (*enter)();
  void (*leave)();

  // out = x / rms(x) * weight. out: [width_padded], zero from width on.
  void (*rmsnorm)(const float* x, const float* weight, float eps, int32_t width, int32_t width_padded, bf16* out);
  // residual += y / rms(y) * weight
  void (*add_rmsnorm)(const float* y, const float* weight, float eps, int32_t width, float* residual);
  // One scale for the row: x = scale * q. width: padded, a multiple of 64. out in the form that linear() wants.
  void (*quantise_row)(const bf16* x, int32_t width, int8_t* out, float* scale);
  // The sum of each half group of kGroup values. width: padded, a multiple of 64.
  void (*sum_groups)(const bf16* x, int32_t width, float* sums);
  // y = x weight^T + bias for column pairs [first_pair, last_pair) and rows [first_row, last_row).
  void (*linear)(const LinearCall& call, int32_t first_pair, int32_t last_pair, int32_t first_row, int32_t last_row);
  // Queries of heads [first_head, last_head) to out: [heads][head_dim_padded], first_head's first.
  void (*store_q)(const QkvCall& call, int32_t first_head, int32_t last_head, bf16* out);
  // K at call.qkv + k_offset and V at call.qkv + v_offset (floats) into the slot of a page.
  void (*store_kv)(const QkvCall& call, int64_t k_offset, int64_t v_offset, const KvHead& kv, int32_t page, int32_t offset);
  void (*attend)(const AttendCall& call);
  // Fold a partial softmax into (max, sum, out), in the order of the positions. Nothing so far: max -inf, the rest 0.
  void (*merge)(float* max, float* sum, float* out, float part_max, float part_sum, const float* part_out, int32_t head_dim);
  // out = bf16(acc / sum), head_dim not padded.
  void (*finish)(const float* acc, float sum, int32_t head_dim, bf16* out);
  // Greatest of values[0, n) and its lowest index; whether all are finite.
  void (*scan_logits)(const float* values, int32_t n, float* best, int32_t* index, int32_t* is_finite);
  // values = cap * tanh(values / cap)
  void (*soft_cap)(float* values, int32_t n, float cap);
};

// Null where the library was built without it. Whether this CPU can run it is cpu.h's.
const KernelTable* amx_table();
const KernelTable* avx512_table();        // with BF16 and VNNI
const KernelTable* avx512_vnni_table();   // without BF16
const KernelTable* avx2_table();
const KernelTable* generic_table();

}  // namespace pointsman
