// AMX's tile instructions. With -DPM_EMULATE_AMX a model of them in software, for tests on CPUs without AMX.
//
// Not through immintrin.h: gcc 12 believes that its _tile_loadconfig() reads 8 bytes, and that _tile_loadd() reads no
// memory, and drops or moves the stores of what they load.
#pragma once

#include <immintrin.h>

#include "vec.h"
#if defined(PM_EMULATE_AMX)
#include "amx_emulation.h"
#endif

namespace pointsman {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileRowBytes = 64;
constexpr int kTileBytes = kTileRows * kTileRowBytes;
constexpr int kTileK = 32;  // bf16 in a tile's row: the sums of TDPBF16PS are rounded once per so many k

// How the eight tiles are used everywhere, and with how many rows:
//
//   0 1   sums of the first row tile     4   first factor, first row tile      6 7   second factor: 16 columns each
//   2 3   of the second                  5   second row tile
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  // second: 0 if only one row tile is used; its tiles are left out then.
  TileConfig(int first, int second) {
    const int with[8] = {first, first, second, second, first, second, kTileRows, kTileRows};
    for (int i = 0; i < 8; i++)
      if (with[i] > 0) rows[i] = (uint8_t)with[i], row_bytes[i] = kTileRowBytes;
  }
};
static_assert(sizeof(TileConfig) == 64, "LDTILECFG reads 64 bytes");

// All tiles are zero after it.
PM_INLINE void configure_tiles(const TileConfig& config) {
#if defined(PM_EMULATE_AMX)
  amx_emulation::load_config(&config);
#else
  asm volatile("ldtilecfg %0" ::"m"(config));
#endif
}

// Gives the tiles back: a switch to another thread need not save them.
PM_INLINE void release_tiles() {
#if defined(PM_EMULATE_AMX)
  amx_emulation::release();
#else
  asm volatile("tilerelease");
#endif
}

// The table's enter(): vectors on this thread take denormals for zeros from now on, as TDPBF16PS always does, so that
// both give the same bits. Who uses tiles configures them.
static thread_local uint32_t mode_before_tiles;

static void enter_tiles() {
  const uint32_t kDenormalsAreZeros = 0x0040, kFlushToZero = 0x8000;
  mode_before_tiles = _mm_getcsr();
  _mm_setcsr(mode_before_tiles | kDenormalsAreZeros | kFlushToZero);
}

static void leave_tiles() {
  release_tiles();
  _mm_setcsr(mode_before_tiles);
}

template <int kIndex>
PM_INLINE void zero_tile() {
#if defined(PM_EMULATE_AMX)
  amx_emulation::zero(kIndex);
#else
  asm volatile("tilezero %%tmm%c0" ::"i"(kIndex));
#endif
}

// stride: bytes from row to row.
template <int kIndex>
PM_INLINE void load_tile(const void* base, int64_t stride) {
#if defined(PM_EMULATE_AMX)
  amx_emulation::load(kIndex, base, stride);
#else
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(base), "r"(stride), "i"(kIndex) : "memory");
#endif
}

template <int kIndex>
PM_INLINE void store_tile(void* base, int64_t stride) {
#if defined(PM_EMULATE_AMX)
  amx_emulation::store(kIndex, base, stride);
#else
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(base), "r"(stride), "i"(kIndex) : "memory");
#endif
}

// kC += kA kB.
template <int kC, int kA, int kB>
PM_INLINE void dot_tiles_bf16() {
#if defined(PM_EMULATE_AMX)
  amx_emulation::dot_bf16(kC, kA, kB);
#else
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
#endif
}

// The first factor unsigned, the second signed.
template <int kC, int kA, int kB>
PM_INLINE void dot_tiles_u8s8() {
#if defined(PM_EMULATE_AMX)
  amx_emulation::dot_bytes<uint8_t, int8_t>(kC, kA, kB);
#else
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
#endif
}

// Both signed.
template <int kC, int kA, int kB>
PM_INLINE void dot_tiles_s8s8() {
#if defined(PM_EMULATE_AMX)
  amx_emulation::dot_bytes<int8_t, int8_t>(kC, kA, kB);
#else
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
#endif
}

}  // namespace
}  // namespace pointsman
