// Cuts a step's attention into blocks of query rows and decides which splits are computed apart.
#pragma once

#include "model.h"

namespace pointsman {

AttentionPlan plan_attention(const pm_step& step, int32_t group, int32_t num_kv_heads, int32_t head_dim,
                             int32_t page_size, int num_threads);

}  // namespace pointsman
