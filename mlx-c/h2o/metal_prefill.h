// Scores of a long chunk as Metal launches.
#pragma once

#include "request.h"

namespace mlx_h2o_c::metal {

Array prefill_scores(const PrefillRequest& request);

}  // namespace mlx_h2o_c::metal
