// Prints what this CPU, real or emulated, can run: one name a line.
#include <stdio.h>

#include <initializer_list>

#include "cpu.h"

int main() {
  for (const char* isa : {"amx", "avx512", "avx512_vnni", "avx2", "generic"})
    if (pointsman::can_run(isa)) puts(isa);
}
