// Linears as the C interface has them.
#pragma once

#include "model.h"

namespace pointsman {

// Packs a linear with all threads. Throws std::invalid_argument where the config makes no sense.
pm_linear* make_linear(pm_machine* machine, const pm_linear_config& config);

// The bytes that make_linear() would take. Throws as it does.
int64_t plan_linear_bytes(const pm_linear_config& config);

// out[num_rows][n] = x[num_rows][k] weight^T + bias.
void run_linear(const pm_linear& linear, const float* x, int32_t num_rows, float* out);

}  // namespace pointsman
