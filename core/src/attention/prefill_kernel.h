// Scores of a long chunk of queries, one number per key, on plain memory: no MLX in here.
#pragma once

#include "attention/attention_kernel.h"

namespace mlx_h2o::kernels {

/// Sets the importance to the attention mass of all queries, or updates the moving average in it.
/// Uses batch, query_heads, kv_heads, query_count, key_count, width, type, queries, keys, their
/// strides, the mask, sinks, row_bias, scale, causal, mass, importance and decay.
///
/// The average takes the queries in order, group by group, like accumulate_block. The mass of a key
/// is the sum of exp(score - lse) over queries and heads. Each thread holds only a block of logits
/// in memory, or for the mass `key_count` logits of a few rows. The threads of thread_pool.h share
/// the work; the results do not depend on their number.
void prefill_scores(const AttentionArguments& arguments, SimdTarget target);

}  // namespace mlx_h2o::kernels
