// AMX's tiles in software, for CPUs without: the kernels of amx_*.h, compiled with -DPM_EMULATE_AMX, run on this.
//
// After Intel's Software Developer's Manual, volume 2: LDTILECFG, TILELOADD, TILESTORED, TILEZERO, TDPBF16PS, TDPBSSD
// and TDPBUSD, with what makes them fault: that aborts here, with the reason. Memory is touched within a tile's
// configured shape only, byte for byte, so that AddressSanitizer sees what a CPU would touch.
//
// Needs AVX-512F: products and sums of TDPBF16PS are this CPU's own FMA with MXCSR set as the manual says (denormals
// are zeros, coming in and going out; to the nearest, ties to even).
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

namespace amx_emulation {
namespace {

constexpr int kTiles = 8, kMaxTileRows = 16, kMaxRowBytes = 64;

struct Tile {
  int rows, row_bytes;  // as configured
  alignas(64) uint8_t data[kMaxTileRows][kMaxRowBytes];
};

struct State {
  bool configured;
  Tile tiles[kTiles];
};

inline State& state() {
  static thread_local State of_this_thread;
  return of_this_thread;
}

inline void require(bool holds, const char* otherwise) {
  if (holds) return;
  fprintf(stderr, "AMX would fault: %s\n", otherwise);
  abort();
}

inline Tile& tile(int index) {
  require(state().configured, "tiles are used before they are configured, or after they were released");
  Tile& t = state().tiles[index];
  require(t.rows > 0, "the configuration gives this tile no rows");
  return t;
}

// 64 bytes: palette, start row, 14 reserved, 16 x 2 bytes a row, 16 x rows.
inline void load_config(const void* config) {
  const uint8_t* bytes = (const uint8_t*)config;
  require(bytes[0] == 1, "the only palette with tiles is 1");
  for (int i = 1; i < 16; i++) require(bytes[i] == 0, "the start row and the reserved bytes must be 0");
  State& s = state();
  for (int i = 0; i < 16; i++) {
    int row_bytes = bytes[16 + 2 * i] | bytes[17 + 2 * i] << 8, rows = bytes[48 + i];
    require((rows == 0) == (row_bytes == 0), "a tile needs both rows and bytes, or neither");
    require(rows <= kMaxTileRows && row_bytes <= kMaxRowBytes, "a tile has at most 16 rows of 64 bytes");
    require(i < kTiles || rows == 0, "there are 8 tiles");
    if (i < kTiles) s.tiles[i].rows = rows, s.tiles[i].row_bytes = row_bytes;
  }
  for (Tile& t : s.tiles) memset(t.data, 0, sizeof(t.data));
  s.configured = true;
}

inline void release() {
  memset((void*)&state(), 0, sizeof(State));
}

inline void zero(int index) { memset(tile(index).data, 0, sizeof(Tile::data)); }

inline void load(int index, const void* base, int64_t stride) {
  Tile& t = tile(index);
  memset(t.data, 0, sizeof(t.data));
  for (int row = 0; row < t.rows; row++) memcpy(t.data[row], (const uint8_t*)base + row * stride, t.row_bytes);
}

inline void store(int index, void* base, int64_t stride) {
  const Tile& t = tile(index);
  for (int row = 0; row < t.rows; row++) memcpy((uint8_t*)base + row * stride, t.data[row], t.row_bytes);
}

inline void check_shapes(int c, int a, int b) {
  require(c != a && c != b && a != b, "the three tiles of a product must differ");
  require(tile(c).row_bytes % 4 == 0 && tile(a).row_bytes % 4 == 0 && tile(b).row_bytes % 4 == 0,
          "the rows of a product's tiles are whole dwords");
  require(tile(c).rows == tile(a).rows, "sums and first factor need as many rows");
  require(tile(c).row_bytes == tile(b).row_bytes, "sums and second factor need as many columns");
  require(tile(a).row_bytes / 4 == tile(b).rows, "the first factor's columns are not the second one's rows");
}

// Denormals are zeros both ways, nothing is signalled, to the nearest: what the manual says of TDPBF16PS.
class TileRounding {
 public:
  TileRounding() : before_(_mm_getcsr()) { _mm_setcsr(0x9fc0); }
  ~TileRounding() { _mm_setcsr(before_); }

 private:
  unsigned before_;
};

// Volatile, so that no compiler moves them out of a TileRounding.
inline __m512 fma(__m512 a, __m512 b, __m512 sum) {
  asm volatile("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}
inline __m512 add(__m512 a, __m512 b) {
  __m512 sum;
  asm volatile("vaddps %2, %1, %0" : "=v"(sum) : "v"(a), "v"(b));
  return sum;
}

inline __m512 even_floats(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline __m512 odd_floats(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)));
}

// Even and odd products are summed apart over the tile's pairs, each by FMA; then c += even + odd, two roundings.
inline void dot_bf16(int c, int a, int b) {
  check_shapes(c, a, b);
  TileRounding rounding;
  Tile& sums = tile(c);
  for (int row = 0; row < sums.rows; row++) {
    __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
    for (int k = 0; k < tile(b).rows; k++) {
      int32_t pair;
      memcpy(&pair, tile(a).data[row] + 4 * k, 4);
      __m512i x = _mm512_set1_epi32(pair), w = _mm512_load_si512(tile(b).data[k]);
      even = fma(even_floats(x), even_floats(w), even);
      odd = fma(odd_floats(x), odd_floats(w), odd);
    }
    __m512 sum = add(_mm512_load_ps(sums.data[row]), add(even, odd));
    const __mmask16 columns = (__mmask16)((1u << sums.row_bytes / 4) - 1);
    _mm512_store_ps(sums.data[row], _mm512_maskz_mov_ps(columns, sum));
  }
}

// First factor's bytes of type A, second's of type B; dwords wrap around.
template <typename A, typename B>
inline void dot_bytes(int c, int a, int b) {
  check_shapes(c, a, b);
  Tile& sums = tile(c);
  for (int row = 0; row < sums.rows; row++)
    for (int k = 0; k < tile(b).rows; k++)
      for (int n = 0; n < sums.row_bytes / 4; n++) {
        uint32_t sum;
        memcpy(&sum, sums.data[row] + 4 * n, 4);
        for (int i = 0; i < 4; i++) sum += (uint32_t)((A)tile(a).data[row][4 * k + i] * (B)tile(b).data[k][4 * n + i]);
        memcpy(sums.data[row] + 4 * n, &sum, 4);
      }
}

}  // namespace
}  // namespace amx_emulation
