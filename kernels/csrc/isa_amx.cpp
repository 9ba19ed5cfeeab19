// The kernels for AMX with BF16 and INT8, beside AVX-512 with VNNI and BF16.
#include "amx_attend.h"
#include "amx_linear.h"
#include "elementwise.h"
#include "ops.h"

namespace pointsman {

namespace {

const KernelTable kTable = {
    "amx",      kAmxAttendScratchBytes, enter_tiles, leave_tiles, rmsnorm, add_rmsnorm, quantise_row, sum_groups,
    amx_linear, store_q,                store_kv,    amx_attend,  merge,   finish,      scan_logits,  soft_cap,
};

}  // namespace

const KernelTable* amx_table() { return &kTable; }

}  // namespace pointsman
