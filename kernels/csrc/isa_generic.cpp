// The kernels for any x86-64.
#define PM_ISA_NAME "generic"
#define PM_ISA_TABLE generic_table
#include "isa_body.h"
