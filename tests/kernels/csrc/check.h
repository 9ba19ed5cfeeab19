// What the kernels' test programs share: a check that prints what failed, random numbers, and the tables to test.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <vector>

#include "cpu.h"
#include "ops.h"

inline int num_failures = 0;

// CHECK(condition, "format", ...): the test goes on, so that one run shows all that is wrong.
#define CHECK(condition, ...)                               \
  do {                                                      \
    if (!(condition) && ++num_failures <= 20) {             \
      printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      printf(__VA_ARGS__);                                  \
      printf("\n");                                         \
    }                                                       \
  } while (0)

inline int check_failures() { return num_failures; }

// The program's exit status.
inline int finish_checks() {
  if (num_failures) printf("%d checks failed\n", num_failures);
  return num_failures ? 1 : 0;
}

// The same numbers on every machine.
struct Random {
  uint64_t state;

  uint32_t bits() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33) ^ (uint32_t)(state >> 20);
  }
  int32_t below(int32_t n) { return (int32_t)(bits() % (uint32_t)n); }
  // In [-1, 1).
  float uniform() { return (float)(int32_t)(bits() << 8 >> 8) / 8388608.0f - 1.0f; }
};

inline float float_of(pointsman::bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline pointsman::bf16 bf16_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return (pointsman::bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Every table that this library holds and this CPU runs.
inline std::vector<const pointsman::KernelTable*> tables_to_test() {
  using namespace pointsman;
  std::vector<const KernelTable*> tables;
  for (auto table_of : {generic_table, avx2_table, avx512_vnni_table, avx512_table, amx_table})
    if (can_run(table_of()->name)) tables.push_back(table_of());
  return tables;
}
