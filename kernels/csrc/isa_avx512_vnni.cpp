// The kernels for AVX-512 with VNNI, without BF16.
#define PM_ISA_NAME "avx512_vnni"
#define PM_ISA_TABLE avx512_vnni_table
#include "isa_body.h"
