// The compositions; back ends that implement only a part of an operation use them too.
#pragma once

#include <functional>

#include "request.h"

namespace mlx_h2o_c::composed {

// The rows, unpacked, in float32 or another dtype.
Value dense(const Rows& rows, mlx_stream s, mlx_dtype dtype = MLX_FLOAT32);
// scale * q.k + mask + row_bias, float32 [B, Hq, Lq, N], -inf where the pair is masked.
Value logits(const AttentionRequest& request);
// bool [Lq, N], bottom-right aligned: the last query sees the last key.
Value causal_mask(const AttentionRequest& request);
// The softmax over the last axis of scores [B, Hq, L, N], with sinks in its denominator; 0 for a
// query that sees nothing.
Value weights(const Value& scores, mlx_array sinks);
AttentionResult attention(const AttentionRequest& request);

struct Range {
  int first;
  int last;
};
// Some queries and some keys of a request, with their values, to be computed after `after`: without
// an order, MLX may start many parts before it finishes the first.
AttentionRequest part_of(const AttentionRequest& request, Range queries, Range keys,
                         mlx_array after = {});
// The whole request, with the work that its parts share: rows unpacked, and a causal mask built.
AttentionRequest unpacked(const AttentionRequest& request, mlx_dtype dtype);
// Applies `attend` to blocks of queries of an unpacked request, one after the other.
Array in_blocks(const AttentionRequest& request,
                const std::function<Array(const AttentionRequest&)>& attend);

Array prefill_scores(const AccumulatingRequest& request);
Array accumulate_scores(const AccumulateRequest& request);
// The importance plus the weights of all queries and query heads of a KV head, for each row.
Array add_mass(const AccumulatingRequest& request, mlx_array scores, mlx_array lse);

Array keep_indices(const RetentionRequest& request);

Array key_diversity(const KeyDiversityRequest& request);
Folded fold(const FoldRequest& request);
Written quantize_append(const AppendRequest& request);
// Rows to words and norms, and back.
std::vector<Array> encode_rows(const EncodeRequest& request);
Array decode_rows(const DecodeRequest& request);
// The new rows in the format of the stored ones; `encode` makes the codes.
Written as_stored(const AppendRequest& request, decltype(encode_rows)* encode = encode_rows);
// Writes `fresh`, rows in the stored format, to the slots of the request.
Written appended(const AppendRequest& request, const Written& fresh);

}  // namespace mlx_h2o_c::composed
