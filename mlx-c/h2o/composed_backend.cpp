// The back end "composed": every definition, everywhere.
#include "backend.h"
#include "composed.h"

namespace mlx_h2o_c {

namespace {

std::string always() { return ""; }
std::string nothing_refused(const AttentionRequest& /* request */) { return ""; }

}  // namespace

const Backend composed_backend = {
    "composed",
    always,
    nothing_refused,
    composed::attention,
    composed::keep_indices,
    composed::evict_indices,
    composed::accumulate_scores,
    nullptr,  // attention, then the best moving average
    nullptr,
    composed::key_diversity,
    composed::replace_worst,
    composed::quantize_append,
    composed::prefill_scores,
};

}  // namespace mlx_h2o_c
