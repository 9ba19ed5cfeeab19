// Numbers for the tests of AMX: ordinary ones, and those that tell one way of summing or rounding from another.
#pragma once

#include <math.h>

#include <functional>
#include <random>
#include <vector>

#include "vec.h"

inline std::mt19937 chance(5);

inline float uniform(float low, float high) { return std::uniform_real_distribution<float>(low, high)(chance); }
inline int pick(int n) { return std::uniform_int_distribution<int>(0, n - 1)(chance); }

// What values a test is made of. Inputs may be anything; weights are finite, as those of a model are.
struct Values {
  const char* name;
  std::function<bf16()> input, weight;
  bool is_finite;
};

inline bf16 sign_bit() { return (bf16)(pick(2) << 15); }
inline bf16 normal() { return f32_to_bf16(uniform(-1, 1)); }
inline bf16 tiny() { return f32_to_bf16(ldexpf(uniform(-1, 1), -50 - pick(30))); }  // products of them are denormal
inline bf16 denormal() { return (bf16)(sign_bit() | pick(0x80)); }
inline bf16 denormal_at_times() { return pick(2) ? denormal() : normal(); }
inline bf16 huge() { return f32_to_bf16(ldexpf(uniform(-1, 1), 60 + pick(60))); }
inline bf16 opposite() { return f32_to_bf16(pick(2) ? 1000.5f : -1000.5f); }
inline bf16 mostly_three() { return pick(4) ? f32_to_bf16(3.0f) : normal(); }       // sums of it with opposites cancel
inline bf16 any_finite() { return (bf16)(sign_bit() | pick(0x7f80)); }
inline bf16 infinite_at_times() { return pick(200) ? normal() : (bf16)(sign_bit() | 0x7f80); }
inline bf16 nan_at_times() { return pick(200) ? normal() : (bf16)0x7fc0; }
inline bf16 zero_or_tiny() { return pick(2) ? sign_bit() : tiny(); }

inline const Values kValues[] = {
    {"normal", normal, normal, true},
    {"tiny", tiny, tiny, true},
    {"denormal", denormal_at_times, denormal_at_times, true},
    {"huge", huge, huge, false},
    {"cancelling", opposite, mostly_three, true},
    {"any finite", any_finite, any_finite, false},
    {"infinite inputs", infinite_at_times, normal, false},
    {"NaN inputs", nan_at_times, normal, false},
    {"signed zeros", zero_or_tiny, zero_or_tiny, true},
};

// Any NaN is as good as another: which one comes out, no manual says.
inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  for (size_t i = 0; i < a.size(); i++)
    if (memcmp(&a[i], &b[i], 4) != 0 && !(isnan(a[i]) && isnan(b[i]))) {
      printf("  at %zu: %a and %a\n", i, a[i], b[i]);
      return false;
    }
  return true;
}
