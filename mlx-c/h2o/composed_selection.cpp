// The definition of the selection of rows in plain MLX operations.
#include <cstdint>

#include "arrays.h"
#include "composed.h"

namespace mlx_h2o_c::composed {

namespace {

// Classes of rows, the worst first, in the two upper bits of the retention key.
enum Class : int32_t { padding, unscored, scored, protected_row };

constexpr int position_bits = 30;

// uint32 in the order of the float32 scores; -0 and +0 are the same.
Array ordered_bits(mlx_array scores, mlx_stream s) {
  const Array bits = call(mlx_view, call(mlx_add, scores, number(0), s), MLX_UINT32, s);
  const Array sign = scalar(uint32_t{1} << 31, MLX_UINT32);
  return call(mlx_where, call(mlx_greater_equal, bits, sign, s), call(mlx_bitwise_invert, bits, s),
              call(mlx_bitwise_or, bits, sign, s), s);
}

Array row_class(Class value) { return scalar<int32_t>(value, MLX_INT32); }

// uint64 [B, H, N], higher is kept longer, distinct within a head:
// class << 62 | ordered score << 30 | (2^30 - 1 - position). Only the class of scored rows carries
// a score, and padding has its slot in the place of a position.
Array retention_key(const RetentionRequest& r) {
  const mlx_stream s = r.stream;
  const Array is_padding = call(mlx_less, r.positions, scalar<int32_t>(0, MLX_INT32), s);
  Array is_protected = call(mlx_less, r.positions, scalar<int32_t>(r.sink_size, MLX_INT32), s);
  if (r.recent_start.ctx != nullptr) {
    const Array start = beside_rows(r.recent_start, s);
    is_protected =
        call(mlx_logical_or, is_protected, call(mlx_greater_equal, r.positions, start, s), s);
  }
  Array classes =
      call(mlx_where, call(mlx_isnan, r.scores, s), row_class(unscored), row_class(scored), s);
  classes = call(mlx_where, is_protected, row_class(protected_row), classes, s);
  classes = call(mlx_where, is_padding, row_class(padding), classes, s);

  const Array is_scored = call(mlx_equal, classes, row_class(scored), s);
  const Array ranked =
      call(mlx_where, is_scored, ordered_bits(r.scores, s), scalar<uint32_t>(0, MLX_UINT32), s);
  const Array slots = range(0, r.rows, MLX_INT32, s);
  const Array place = call(mlx_subtract, scalar<int32_t>((1 << position_bits) - 1, MLX_INT32),
                           call(mlx_where, is_padding, slots, r.positions, s), s);

  const auto shifted = [s](mlx_array part, uint64_t bits) {
    return call(mlx_left_shift, call(mlx_astype, part, MLX_UINT64, s), scalar(bits, MLX_UINT64), s);
  };
  const Array upper = call(mlx_bitwise_or, shifted(classes, 62), shifted(ranked, position_bits), s);
  return call(mlx_bitwise_or, upper, call(mlx_astype, place, MLX_UINT64, s), s);
}

}  // namespace

Array beside_rows(mlx_array numbers, mlx_stream s) {
  const int shape[] = {-1, 1, 1};
  return call(mlx_reshape, numbers, shape, size_t{3}, s);
}

Array keep_indices(const RetentionRequest& r) {
  const mlx_stream s = r.stream;
  if (r.count == 0) {
    return broadcast(range(0, r.rows, MLX_UINT32, s), {r.batch, r.heads, r.rows}, s);
  }
  const Array order = call(mlx_argpartition_axis, retention_key(r), r.count, -1, s);
  const Array kept = slice(order, 2, r.count, r.rows, s);
  return call(mlx_astype, call(mlx_sort_axis, kept, -1, s), MLX_UINT32, s);
}

Array evict_indices(const RetentionRequest& r) {
  const mlx_stream s = r.stream;
  if (r.count == 1) {
    return call(mlx_astype, call(mlx_argmin_axis, retention_key(r), -1, true, s), MLX_UINT32, s);
  }
  const Array order = call(mlx_argsort_axis, retention_key(r), -1, s);
  return call(mlx_astype, slice(order, 2, 0, r.count, s), MLX_UINT32, s);
}

}  // namespace mlx_h2o_c::composed
