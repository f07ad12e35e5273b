// The compositions, also for back ends that do a part of an operation themselves.
#pragma once

#include <functional>

#include "request.h"

namespace mlx_h2o_c::composed {

// The rows in float32, or in another dtype.
Value dense(const Rows& rows, mlx_stream s, mlx_dtype dtype = MLX_FLOAT32);
// scale * q.k + mask + row_bias, float32 [B, Hq, Lq, N], -inf where the pair is masked.
Value logits(const AttentionRequest& request);
// bool [Lq, N]: the last query sees the last key.
Value causal_mask(const AttentionRequest& request);
// The softmax over the last axis of scores [B, Hq, L, N], with sinks in its denominator: 0 where a
// query has nothing to attend to.
Value weights(const Value& scores, mlx_array sinks);
AttentionResult attention(const AttentionRequest& request);

struct Range {
  int first;
  int last;
};
// Some queries and some keys of a request, with their values; to be computed after `after`: without
// an order MLX may begin many parts before it ends the first.
AttentionRequest part_of(const AttentionRequest& request, Range queries, Range keys,
                         mlx_array after = {});
// All of it, with what its parts would each make: rows in this dtype, and the mask of a causal one.
AttentionRequest unpacked(const AttentionRequest& request, mlx_dtype dtype);
// What `attend` makes of blocks of the queries of an unpacked request, one after the other.
Array in_blocks(const AttentionRequest& request,
                const std::function<Array(const AttentionRequest&)>& attend);

Array prefill_scores(const AccumulatingRequest& request);
Array accumulate_scores(const AccumulateRequest& request);
// The importance plus the weights that all queries and query heads of a KV head give to each row.
Array add_mass(const AccumulatingRequest& request, mlx_array scores, mlx_array lse);

Array keep_indices(const RetentionRequest& request);

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
