// The kernels for AVX2 with FMA and F16C.
#define PM_ISA_NAME "avx2"
#define PM_ISA_TABLE avx2_table
#include "isa_body.h"
