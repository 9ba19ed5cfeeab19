// What this CPU and its operating system can run. Compiled with baseline flags: it must work everywhere.
#pragma once

namespace pointsman {

// Whether the table of this name ("amx", "avx512", "avx512_vnni", "avx2", "generic") may be used here. False for names
// unknown. Asking for "amx" also asks Linux, once, to let this process use tiles.
bool can_run(const char* isa);

// "Intel(R) Xeon(R) ..." as the CPU says it, without spaces around; empty where it does not say.
const char* cpu_brand();

}  // namespace pointsman
