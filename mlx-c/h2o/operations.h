// A checked request is served by the best back end, or by the one that was named.
#pragma once

#include "request.h"

namespace mlx_h2o_c {

AttentionResult serve(const AttentionRequest& request);
Array keep_indices(const RetentionRequest& request);
Array evict_indices(const RetentionRequest& request);
Array accumulate_scores(const AccumulateRequest& request);
AttentionAccumulated attention_and_accumulate(const AttentionAccumulateRequest& request);
Array key_diversity(const KeyDiversityRequest& request);
Replaced replace_worst(const ReplaceRequest& request);
Appended quantize_append(const AppendRequest& request);
Array prefill_scores(const PrefillRequest& request);

}  // namespace mlx_h2o_c
