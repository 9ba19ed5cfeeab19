// The whole numbers of grouped weights, opened: q - zero as what linears multiply with.
//
// q has up to 8 bits and so has q - zero, whose magnitude is at most 255: a bf16 holds it exactly.
#pragma once

#include "lanes.h"

namespace pointsman {
namespace {

// Of members, which PM_INLINE's static does not suit.
#define PM_MEMBER inline __attribute__((always_inline))

constexpr int kGroupPairs = kGroup / 2;

// 32 bits of a column hold 16 / kBits pairs: pair r's first number at bit kBits * r, its second 16 bits above.
template <int kBits>
constexpr int kPairsInRow = 16 / kBits;

// Numbers by arithmetic: q in the lowest bits of a float's fraction makes 2^23 + q of 2^23.
template <int kBits>
struct Opener {
  Floats shift;

  explicit Opener(int32_t zero) : shift(broadcast_float(8388608.0f + (float)zero)) {}

  PM_MEMBER Floats number(Ints dwords, int bit) const {
    Ints q = and_or(shift_right_32(dwords, bit), broadcast_int((1 << kBits) - 1), broadcast_int(0x4b000000));
    return subtract(as_floats(q), shift);
  }

  PM_MEMBER Bf16Pairs pair(Ints dwords, int r) const {
    Floats even = number(dwords, kBits * r), odd = number(dwords, 16 + kBits * r);
#if defined(__AVX512BF16__)
    return bit_or(shift_right_32(as_ints(even), 16), as_ints(odd));  // the lower halves are zero
#else
    return {even, odd};
#endif
  }
};

#if defined(__AVX512F__)

// 4 bits look their number up: of an index only the lowest 4 bits count, or 5 in a table that is there twice.
template <>
struct Opener<4> {
#if defined(__AVX512BF16__)
  Ints table;

  explicit Opener(int32_t zero) {
    alignas(64) bf16 numbers[32];
    for (int i = 0; i < 32; i++) numbers[i] = f32_to_bf16((float)(i % 16 - zero));
    table = load_ints(numbers);
  }
  PM_MEMBER Bf16Pairs pair(Ints dwords, int r) const {
    return _mm512_permutexvar_epi16(shift_right_16(dwords, 4 * r), table);
  }
#else
  Floats table;

  explicit Opener(int32_t zero) {
    alignas(64) float numbers[16];
    for (int i = 0; i < 16; i++) numbers[i] = (float)(i - zero);
    table = load_floats(numbers);
  }
  PM_MEMBER Bf16Pairs pair(Ints dwords, int r) const {
    return {_mm512_permutexvar_ps(shift_right_32(dwords, 4 * r), table),
            _mm512_permutexvar_ps(shift_right_32(dwords, 16 + 4 * r), table)};
  }
#endif
};

#endif

}  // namespace
}  // namespace pointsman
