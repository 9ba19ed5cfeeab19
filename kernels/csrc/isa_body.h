// One instruction set's table, made of the bodies that this file's compiler flags decide about.
//
// Everything but the table is in an anonymous namespace: the linker must not share code between instruction sets.
#pragma once

#include "attend.h"
#include "elementwise.h"
#include "linear.h"
#include "ops.h"

namespace pointsman {

namespace {

void enter() {}
void leave() {}

const KernelTable kTable = {
    PM_ISA_NAME, kAttendScratchBytes, enter,    leave,  rmsnorm, add_rmsnorm, quantise_row, sum_groups,
    linear,      store_q,             store_kv, attend, merge,   finish,      scan_logits,  soft_cap,
};

}  // namespace

const KernelTable* PM_ISA_TABLE() { return &kTable; }

}  // namespace pointsman
