// The compositions, also for back ends that do a part of an operation themselves.
#pragma once

#include "request.h"

namespace mlx_h2o_c::composed {

// The rows in float32.
Array dense(const Rows& rows, mlx_stream s);
// scale * q.k + mask as float32 [B, Hq, Lq, N], -inf where the pair is masked.
Array logits(const AttentionRequest& request);

// exp(scores - peak), their total with the sinks, and the peak: [B, Hq, L, N or 1].
struct Softmax {
  Array weights;
  Array total;
  Array peak;
};
// Where a query has nothing to attend to, the weights are 0, and the total is, without a sink.
Softmax softmax(const Array& scores, mlx_array sinks, int heads, mlx_stream s);
// scale * probe.k of every key, masked or not.
Array probe_scores(const AttentionRequest& request);
AttentionResult attention(const AttentionRequest& request);

// One number for all sequences, or one each, as it broadcasts against [B, H, N].
Array beside_rows(mlx_array numbers, mlx_stream s);
Array keep_indices(const RetentionRequest& request);
Array evict_indices(const RetentionRequest& request);

Array accumulate_scores(const AccumulateRequest& request);
Array key_diversity(const KeyDiversityRequest& request);
// What rows are ranked by, float32 [B, H, N].
Array ranks(const ReplaceRequest& request);
Replaced replace_worst(const ReplaceRequest& request);
// A row as the stored ones are.
std::vector<Array> as_stored(const Rows& stored, mlx_array row, mlx_stream s);
// Keys and values with the new row, as it is stored, in the slots; `rest` holds the others.
Replaced replaced(const ReplaceRequest& request, mlx_array slots, const std::vector<Array>& new_key,
                  const std::vector<Array>& new_value, Replaced rest);

Appended quantize_append(const AppendRequest& request);
// Packed rows, which replace what they were made of, in the slots of the stored ones.
Appended written(const AppendRequest& request, const std::vector<Array>& keys,
                 const std::vector<Array>& values);
// Words, scales and biases.
std::vector<Array> quantized(mlx_array rows, int bits, int group_size, mlx_stream s);

Array prefill_scores(const PrefillRequest& request);

}  // namespace mlx_h2o_c::composed
