// The compositions, also for back ends that do a part of an operation themselves.
#pragma once

#include "request.h"

namespace mlx_h2o_c::composed {

// The rows in float32.
Value dense(const Rows& rows, mlx_stream s);
// scale * q.k + mask + row_bias, float32 [B, Hq, Lq, N], -inf where the pair is masked.
Value logits(const AttentionRequest& request);

// exp(scores - peak), their total with the sinks, and the peak: [B, Hq, L, N or 1].
struct Softmax {
  Value weights;
  Value total;
  Value peak;
};
// Where a query has nothing to attend to, the weights are 0, and the total is, without a sink.
Softmax softmax(const Value& scores, mlx_array sinks, int heads, mlx_stream s);
AttentionResult attention(const AttentionRequest& request);

Array prefill_scores(const PrefillRequest& request);
Array accumulate_scores(const AccumulateRequest& request);
// The importance plus the weights that all queries and query heads of a KV head give to each row.
Array add_mass(const AttentionAccumulateRequest& request, mlx_array scores, mlx_array lse);

Array keep_indices(const RetentionRequest& request);
// One number for all sequences, or one each, as [] or [B, 1, 1].
Value per_sequence(mlx_array numbers, mlx_stream s);

Array key_diversity(const KeyDiversityRequest& request);
Folded fold(const FoldRequest& request);
Written quantize_append(const AppendRequest& request);
// Words and norms, and what they stand for.
std::vector<Array> encode_rows(const EncodeRequest& request);
Array decode_rows(const DecodeRequest& request);
// The new rows as the stored ones are; `encode` makes the codes.
Written as_stored(const AppendRequest& request, decltype(encode_rows)* encode = encode_rows);
// With these, as they are stored, in the slots of the request.
Written appended(const AppendRequest& request, const Written& fresh);

}  // namespace mlx_h2o_c::composed
