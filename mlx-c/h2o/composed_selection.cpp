// The definition of the selection of rows in plain MLX operations.
#include "composed.h"

namespace mlx_h2o_c::composed {

namespace {

// Classes of rows, the worst first, in the two upper bits of the retention key.
enum Class : int32_t { padding, unscored, scored, protected_row };

constexpr int position_bits = 30;

// uint32 in the order of the float32 scores; -0 and +0 are the same.
Value ordered_bits(const Value& scores) {
  const Value bits = (scores + number(0)).then(mlx_view, MLX_UINT32);
  const Array sign = scalar(uint32_t{1} << 31, MLX_UINT32);
  return bits.then(mlx_greater_equal, sign)
      .where(bits.then(mlx_bitwise_invert), bits.then(mlx_bitwise_or, sign));
}

// uint64 [B, H, N], higher is kept longer, distinct within a head:
// class << 62 | ordered score << 30 | (2^30 - 1 - position). Only the class of scored rows carries
// a score, and padding has its slot in the place of a position.
Value retention_key(const RetentionRequest& r) {
  const mlx_stream s = r.stream;
  const Value scores(r.scores, s), positions(r.positions, s);
  const Value is_padding = positions.then(mlx_less, integer(0));
  Value is_protected = positions.then(mlx_less, integer(r.sink_size));
  if (r.recent_start.ctx != nullptr) {
    const Value is_recent = positions.then(mlx_greater_equal, per_sequence(r.recent_start, s));
    is_protected = is_protected.then(mlx_logical_or, is_recent);
  }
  Value classes = scores.then(mlx_isnan).where(integer(unscored), integer(scored));
  classes = is_protected.where(integer(protected_row), classes);
  classes = is_padding.where(integer(padding), classes);

  const Value ranked = classes.then(mlx_equal, integer(scored))
                           .where(ordered_bits(scores), scalar(uint32_t{0}, MLX_UINT32));
  const Value place = Value(integer((1 << position_bits) - 1), s) -
                      is_padding.where(range(0, r.rows, MLX_INT32, s), positions);
  const auto shifted = [](const Value& part, uint64_t bits) {
    return part.as(MLX_UINT64).then(mlx_left_shift, scalar(bits, MLX_UINT64));
  };
  const Value upper = shifted(classes, 62).then(mlx_bitwise_or, shifted(ranked, position_bits));
  return upper.then(mlx_bitwise_or, place.as(MLX_UINT64));
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
