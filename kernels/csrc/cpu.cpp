#include "cpu.h"

#include <cpuid.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace pointsman {
namespace {

struct Registers {
  uint32_t a, b, c, d;
};

// All zero where the CPU does not know the leaf: then no feature is there.
Registers cpuid(uint32_t leaf, uint32_t subleaf = 0) {
  Registers r = {0, 0, 0, 0};
  if (!__get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d)) return {0, 0, 0, 0};
  return r;
}

bool has(uint32_t value, int bit) { return (value >> bit & 1) != 0; }

// Which registers the operating system saves for a thread. A CPU may have vectors that the system does not know.
uint64_t saved_state() {
  const int kOsxsave = 27;
  if (!has(cpuid(1).c, kOsxsave)) return 0;
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));  // by hand: the intrinsic wants -mxsave
  return (uint64_t)high << 32 | low;
}

bool saves(uint64_t mask) { return (saved_state() & mask) == mask; }

constexpr uint64_t kYmm = 0x6;           // xmm and the upper halves of ymm
constexpr uint64_t kZmm = kYmm | 0xe0;   // and k registers, the upper halves of zmm0-15, zmm16-31
constexpr uint64_t kTiles = 0x60000;     // the tiles' configuration, and their data

bool has_avx2() {
  uint32_t c = cpuid(1).c;
  bool avx_fma_f16c = has(c, 28) && has(c, 12) && has(c, 29);
  bool popcnt = has(c, 23);  // gcc takes it for granted with AVX
  return avx_fma_f16c && popcnt && has(cpuid(7).b, 5) && saves(kYmm);
}

bool has_avx512_vnni() {
  Registers r = cpuid(7);
  bool f_dq_bw_vl = has(r.b, 16) && has(r.b, 17) && has(r.b, 30) && has(r.b, 31);
  return has_avx2() && f_dq_bw_vl && has(r.c, 11) && saves(kZmm);
}

bool has_avx512_bf16() {
  const bool has_subleaf_1 = cpuid(7).a >= 1;
  return has_avx512_vnni() && has_subleaf_1 && has(cpuid(7, 1).a, 5);
}

// Linux gives a process the 8 KiB of tiles only when asked. It refuses where a signal stack is too small for them.
bool may_use_tiles() {
  const long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool has_amx() {
#if defined(PM_EMULATE_AMX)
  return has_avx512_bf16();  // a library for tests: its tiles are software
#endif
  uint32_t d = cpuid(7).d;
  bool bf16_tile_int8 = has(d, 22) && has(d, 24) && has(d, 25);
  if (!has_avx512_bf16() || !bf16_tile_int8 || !saves(kTiles)) return false;
  static const bool allowed = may_use_tiles();
  return allowed;
}

struct InstructionSet {
  const char* name;
  bool (*is_there)();
};

const InstructionSet kSets[] = {
    {"amx", has_amx},   {"avx512", has_avx512_bf16},         {"avx512_vnni", has_avx512_vnni},
    {"avx2", has_avx2}, {"generic", [] { return true; }},
};

struct Brand {
  char text[49];

  Brand() : text() {
    if (cpuid(0x80000000).a < 0x80000004) return;
    for (uint32_t i = 0; i < 3; i++) {
      Registers r = cpuid(0x80000002 + i);
      memcpy(text + 16 * i, &r, 16);
    }
    trim();
  }

  void trim() {
    size_t end = strlen(text), start = strspn(text, " ");
    while (end > start && text[end - 1] == ' ') end--;
    memmove(text, text + start, end - start);
    text[end - start] = 0;
  }
};

}  // namespace

bool can_run(const char* isa) {
  for (const InstructionSet& set : kSets)
    if (strcmp(set.name, isa) == 0) return set.is_there();
  return false;
}

const char* cpu_brand() {
  static const Brand brand;
  return brand.text;
}

}  // namespace pointsman
