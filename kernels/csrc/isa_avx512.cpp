// The kernels for AVX-512 with VNNI and BF16.
#define PM_ISA_NAME "avx512"
#define PM_ISA_TABLE avx512_table
#include "isa_body.h"
