// Scores of a long chunk of queries, one number per key, on plain memory: no MLX in here.
#pragma once

#include <cstdint>

#include "attention/attention_kernel.h"

namespace mlx_h2o::kernels {

/// One call. Of `attention` count: batch, query_heads, kv_heads, query_count, key_count, width,
/// type, queries, keys and their strides, the mask, sinks, row_bias, scale, causal, and decay.
struct PrefillArguments {
  AttentionArguments attention;
  bool mass;      // the attention mass of all queries; else the moving average of their scores
  float* result;  // [batch, kv_heads, key_count], contiguous; the average so far, if that is wanted
};

/// The average takes the queries in order, group by group, as accumulate_block does. The mass of a
/// key is the sum of exp(score - lse) over queries and heads. No more than a block of logits per
/// thread is in memory, for the mass `key_count` logits of some rows. The work is shared by the
/// threads of thread_pool.h; the results do not depend on their number.
void prefill_scores(const PrefillArguments& arguments, SimdTarget target);

}  // namespace mlx_h2o::kernels
