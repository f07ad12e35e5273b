// The definition of folding in plain MLX operations, with the operations and the order of
// python/mlx_h2o/operations/composed/folding.py. All arithmetic is float32.
#include <cmath>

#include "composed.h"

namespace mlx_h2o_c::composed {

namespace {

constexpr float least_weight = 1e-9F;
constexpr uint32_t above_every_slot = UINT32_MAX;

Value mean_square(const Value& rows) {
  return rows.then(mlx_square).then(mlx_sum_axis, 3, true).then(mlx_mean_axis, 2, true);
}

// Vectors [B, H, N, D + Dv] whose squared distances measure how differently attention treats rows.
Value features(const FoldRequest& r) {
  const Value keys = Value(r.keys, r.stream).as(MLX_FLOAT32);
  const Value values = Value(r.values, r.stream).as(MLX_FLOAT32);
  const auto size = static_cast<float>(mlx_array_dim(r.keys, 3));
  const Value of_keys = (mean_square(keys) / number(size * size)).then(mlx_sqrt);
  const Value of_values = mean_square(values).at_least(number(1e-12F)).then(mlx_rsqrt);
  const ArrayVector both = vector_of({keys * of_keys, values * of_values});
  return {call(mlx_concatenate_axis, both, 3, r.stream), r.stream};
}

// The rows in the slots `at` [B, H, n].
Value at_slots(const Value& rows, const Value& at) {
  if (mlx_array_ndim(rows) == 3) return rows.then(mlx_take_along_axis, at, 2);
  return rows.then(mlx_take_along_axis, at.then(mlx_expand_dims, 3), 2);
}

}  // namespace

Folded fold(const FoldRequest& r) {
  const mlx_stream s = r.stream;
  const Shape shape = shape_of(r.bias);
  const int going_rows = shape[2] - mlx_array_dim(r.kept, 2);
  const Value kept =
      Value(r.kept, s).then(mlx_minimum, scalar(static_cast<uint32_t>(shape[2] - 1), MLX_UINT32));
  const Value all(broadcast(range(0, shape[2], MLX_UINT32, s), shape, s), s);
  const Value marked = all.then(mlx_put_along_axis, kept, scalar(above_every_slot, MLX_UINT32), 2);
  const Value going = marked.then(mlx_sort_axis, 2).sliced(2, 0, going_rows);
  const Value stays = marked.then(mlx_equal, scalar(above_every_slot, MLX_UINT32));

  const Value vectors = features(r);
  const Value squares = vectors.then(mlx_square).then(mlx_sum_axis, 3, false);
  const Value free = stays.then(mlx_logical_and, r.eligible)
                         .then(mlx_logical_and, squares.then(mlx_less, number(INFINITY)))
                         .then(mlx_expand_dims, 2);
  const Value products =
      at_slots(vectors, going).then(mlx_matmul, vectors.then(mlx_swapaxes, 2, 3));
  const Value apart =
      free.where(squares.then(mlx_expand_dims, 2) - products * number(2), number(INFINITY));
  const Value weighed(r.weights, s);
  Value least = apart.then(mlx_min_axis, 3, false) + at_slots(squares, going);
  least = (least + at_slots(weighed, going)).then(mlx_isnan).where(number(INFINITY), least);
  Value lost = least.then(mlx_equal, number(INFINITY));
  if (r.share < 1) {
    const Array most = integer(static_cast<int>(std::ceil(r.share * going_rows)));
    const Value place = least.then(mlx_argsort_axis, 2).then(mlx_argsort_axis, 2).as(MLX_INT32);
    lost = lost.then(mlx_logical_or, place.then(mlx_greater_equal, most));
  }
  const Value nearest =
      lost.where(scalar(above_every_slot, MLX_UINT32), apart.then(mlx_argmin_axis, 3, false));
  Value into = lost.where(going, nearest);

  // All sums side by side; a mean is a weighted sum over the sum of the weights.
  const auto column = [](const Value& each) { return each.then(mlx_expand_dims, 3); };
  const Value weights =
      column(weighed.then(mlx_isnan).where(number(0), weighed).at_least(number(least_weight)));
  const Value count = column(Value(r.bias, s).then(mlx_exp)), mass = column(Value(r.mass, s));
  const ArrayVector all_parts =
      vector_of({weights * r.keys, weights * r.values, weights, count, mass});
  const Value meets = column(into).then(mlx_equal, nearest.then(mlx_expand_dims, 2));
  Value whole(call(mlx_concatenate_axis, all_parts, 3, s), s);
  const Value added = column(lost).where(number(0), at_slots(whole, going));  // 0 * NaN is NaN
  whole = at_slots(whole, into) + meets.as(MLX_FLOAT32).then(mlx_matmul, added);
  const int size = mlx_array_dim(r.keys, 3), end = size + mlx_array_dim(r.values, 3);
  const Value total = whole.sliced(3, end, end + 1);
  return {std::move(into), (whole.sliced(3, 0, size) / total).as(dtype_of(r.keys)),
          (whole.sliced(3, size, end) / total).as(dtype_of(r.values)),
          whole.sliced(3, end + 1, end + 2).then(mlx_log).then(mlx_squeeze_axis, 3),
          whole.sliced(3, end + 2, end + 3).then(mlx_squeeze_axis, 3)};
}

}  // namespace mlx_h2o_c::composed
