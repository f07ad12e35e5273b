// Checks that the two operations with a moving average share.
#pragma once

#include <mlx/array.h>

namespace mlx_h2o {

/// Queries of one call that a moving average takes in at most.
inline constexpr int kMaxScoredQueries = 128;

void check_decay(const char* operation, double decay);

void check_query_count(const char* operation, int found);

/// float32 [batch, H, rows], with H a divisor of the query heads.
void check_importance(const char* operation, const mlx::core::array& importance, int batch,
                      int rows, int query_heads);

}  // namespace mlx_h2o
