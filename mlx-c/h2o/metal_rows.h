// Operations on a cache's rows as Metal launches.
#pragma once

#include "request.h"

namespace mlx_h2o_c::metal {

Array accumulate_scores(const AccumulateRequest& request);
Array keep_indices(const RetentionRequest& request);
Array evict_indices(const RetentionRequest& request);
Replaced replace_worst(const ReplaceRequest& request);
Appended quantize_append(const AppendRequest& request);

}  // namespace mlx_h2o_c::metal
