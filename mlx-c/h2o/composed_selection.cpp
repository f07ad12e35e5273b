// The definition of the selection of rows in plain MLX operations.
#include "composed.h"

namespace mlx_h2o_c::composed {

namespace {

// The ranks of protected rows (above every score), of unscored rows and of padding (below the bits
// of -inf).
constexpr int32_t first = INT32_MAX, unscored = 1 - first, padding = -first;

// int64 [B, H, N], rank << 32 - position: higher is kept longer, distinct within a head. Padding
// uses its slot as position.
Value retention_key(const RetentionRequest& r) {
  const mlx_stream s = r.stream;
  const Value scores(r.scores, s), positions(r.positions, s);
  const Value is_padding = positions.then(mlx_less, integer(0));
  Value is_protected = positions.then(mlx_less, integer(r.sink_size));
  if (r.recent_start.ctx != nullptr) {
    const Value start = Value(r.recent_start, s).reshaped({-1, 1, 1});
    const Value is_recent = positions.then(mlx_greater_equal, start);
    is_protected = is_protected.then(mlx_logical_or, is_recent);
  }
  // Maps scores to int32 in the same order; -0 and +0 are equal.
  const Value bits = (scores + number(0)).then(mlx_view, MLX_INT32);
  Value ranks =
      bits.then(mlx_less, integer(0)).where(bits.then(mlx_bitwise_xor, integer(first)), bits);
  ranks = scores.then(mlx_isnan).where(integer(unscored), ranks);
  ranks = is_protected.where(integer(first), ranks);
  ranks = is_padding.where(integer(padding), ranks);
  const Value place = is_padding.where(range(0, r.rows, MLX_INT32, s), positions);
  return ranks.as(MLX_INT64).then(mlx_left_shift, scalar(int64_t{32}, MLX_INT64)) - place;
}

}  // namespace

Array keep_indices(const RetentionRequest& r) {
  if (r.count == 0) {
    return broadcast(range(0, r.rows, MLX_UINT32, r.stream), {r.batch, r.heads, r.rows}, r.stream);
  }
  const Value order = retention_key(r).then(mlx_argpartition_axis, r.count, -1);
  return order.sliced(2, r.count, r.rows).then(mlx_sort_axis, -1).as(MLX_UINT32);
}

}  // namespace mlx_h2o_c::composed
