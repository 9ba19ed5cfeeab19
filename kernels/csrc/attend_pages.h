// Where the positions of a split lie in the pages, and int8 pages widened to bf16.
#pragma once

#include "ops.h"
#include "vec.h"

namespace pointsman {
namespace {

constexpr int kTile = 16;             // positions of one vector of scores
constexpr int kBlock = 2 * kTile;     // positions that are read together; a block lies in one page
constexpr int kBlockValues = kBlock * kMaxHeadDim;

// Positions [first, last) of the split, counted from its start.
struct Span {
  int32_t first, last;
};

PM_INLINE bool is_empty(Span span) { return span.first >= span.last; }

PM_INLINE Span clip(Span span, int32_t first, int32_t last) {
  return {span.first > first ? span.first : first, span.last < last ? span.last : last};
}

// The bytes of a position and of the block it starts: K's tiles and V's pairs both lie in the order of the positions.
PM_INLINE int32_t value_bytes(const KvHead& kv) { return kv.kind == KvKind::int8 ? 1 : 2; }

PM_INLINE const uint8_t* page_of(const AttendCall& call, int32_t position) {
  int32_t page = call.pages[(call.split_start + position) / call.kv.page_size];
  return call.kv.base + page * call.kv.page_stride;
}

PM_INLINE int64_t offset_in_page(const AttendCall& call, int32_t position) {
  int32_t slot = (call.split_start + position) % call.kv.page_size;
  return (int64_t)slot * call.kv.head_dim * value_bytes(call.kv);
}

// position: a multiple of 16.
PM_INLINE const uint8_t* keys_at(const AttendCall& call, int32_t position) {
  return page_of(call, position) + offset_in_page(call, position);
}

// position: even.
PM_INLINE const uint8_t* values_at(const AttendCall& call, int32_t position) {
  return page_of(call, position) + call.kv.v_offset + offset_in_page(call, position);
}

// 16 scales of an int8 page. position: a multiple of 16. The scales of positions not yet written may be anything.
PM_INLINE f32x16 scales_at(const AttendCall& call, int64_t scales_offset, int32_t position) {
  int32_t slot = (call.split_start + position) % call.kv.page_size;
  return load_f32((const float*)(page_of(call, position) + scales_offset) + slot);
}

// Into L2: the few misses that L1 can keep track of are left to the loads. 1.6 times as fast as into L1.
PM_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 1); }

// Exact: bf16 holds 8 bits.
PM_INLINE void widen16(const uint8_t* bytes, bf16* out) {
#if defined(__AVX512F__)
  __m512 wide = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)bytes)));
  _mm256_storeu_si256((__m256i*)out, _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)wide, 16)));
#elif defined(__SSE2__)
  const __m128i zero = _mm_setzero_si128(), values = _mm_loadu_si128((const __m128i*)bytes);
  const __m128i half[2] = {_mm_unpacklo_epi8(zero, values), _mm_unpackhi_epi8(zero, values)};  // * 2^8, in 16 bits
  for (int i = 0; i < 2; i++) {
    __m128i low = _mm_srai_epi32(_mm_unpacklo_epi16(zero, half[i]), 24);
    __m128i high = _mm_srai_epi32(_mm_unpackhi_epi16(zero, half[i]), 24);
    low = _mm_srai_epi32(_mm_castps_si128(_mm_cvtepi32_ps(low)), 16);
    high = _mm_srai_epi32(_mm_castps_si128(_mm_cvtepi32_ps(high)), 16);
    _mm_storeu_si128((__m128i*)(out + 8 * i), _mm_packs_epi32(low, high));
  }
#else
  for (int i = 0; i < 16; i++) out[i] = f32_to_bf16((int8_t)bytes[i]);
#endif
}

// n: a multiple of 64. Asks for the bytes at `next` meanwhile.
PM_INLINE void widen(const uint8_t* bytes, const uint8_t* next, int32_t n, bf16* out) {
  for (int32_t i = 0; i < n; i += 64) {
    prefetch(next + i);
    for (int j = i; j < i + 64; j += 16) widen16(bytes + j, out + j);
  }
}

// n values of K or V as bf16: of a bf16 page itself, of an int8 one a widened copy, made while `next` is asked for.
PM_INLINE const bf16* as_bf16(const AttendCall& call, const uint8_t* data, const uint8_t* next, int32_t n, bf16* copy) {
  if (call.kv.kind == KvKind::bf16) return (const bf16*)data;
  widen(data, next, n, copy);
  return copy;
}

}  // namespace
}  // namespace pointsman
