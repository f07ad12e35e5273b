// The definitions of the operations on a cache's rows in plain MLX operations.
#include "composed.h"

namespace mlx_h2o_c::composed {

namespace {

constexpr float least_norm = 1e-12F;  // a key of zeros gets the cosine 0, not NaN

Value normalised(const Value& vectors) {
  const Value norm = vectors.then(mlx_square).then(mlx_sum_axis, -1, true).then(mlx_sqrt);
  return vectors / norm.at_least(number(least_norm));
}

// Writes `rows` [B, H, L, E] to the slots [B, H, L] of the stored rows.
std::vector<Array> put(const Rows& stored, const std::vector<Array>& rows, mlx_array slots,
                       mlx_stream s) {
  const Array expanded = call(mlx_expand_dims, slots, -1, s);
  std::vector<Array> result;
  for (size_t i = 0; i < rows.size(); ++i) {
    const Array at = broadcast(expanded, shape_of(rows[i]), s);
    result.push_back(call(mlx_put_along_axis, stored.parts[i], at, rows[i], 2, s));
  }
  return result;
}

std::vector<Array> as_stored(const Rows& stored, mlx_array rows, Side side,
                             decltype(encode_rows)* encode, mlx_stream s) {
  if (stored.codes()) return encode({rows, stored.bits, side, s});
  if (!stored.packed()) return items(vector_of({rows}));
  return results(mlx_quantize, rows, some(stored.group_size), some(stored.bits), "affine",
                 mlx_array{}, s);
}

}  // namespace

Array key_diversity(const KeyDiversityRequest& r) {
  const Value directions = normalised(Value(r.keys, r.stream).as(MLX_FLOAT32));
  const Value mean = normalised(directions.then(mlx_mean_axis, 2, true));
  const Value cosines = directions.then(mlx_matmul, mean.then(mlx_swapaxes, -1, -2));
  return cosines.then(mlx_squeeze_axis, -1).then(mlx_negative);
}

Written as_stored(const AppendRequest& r, decltype(encode_rows)* encode) {
  return {as_stored(r.keys, r.new_keys, Side::keys, encode, r.stream),
          as_stored(r.values, r.new_values, Side::values, encode, r.stream)};
}

Written quantize_append(const AppendRequest& r) { return appended(r, as_stored(r)); }

Written appended(const AppendRequest& r, const Written& fresh) {
  const mlx_stream s = r.stream;
  const Array last = scalar(static_cast<uint32_t>(r.keys.count() - 1), MLX_UINT32);
  const Array slots = call(mlx_minimum, r.slots, last, s);
  Written result{put(r.keys, fresh.keys, slots, s), put(r.values, fresh.values, slots, s)};
  // Tie the arrays of one step together: evaluating the first array of the keys evaluates the rest,
  // whose graphs would otherwise grow.
  std::vector<mlx_array> others(result.keys.begin() + 1, result.keys.end());
  others.insert(others.end(), result.values.begin(), result.values.end());
  result.keys[0] = tied(result.keys[0], others);
  return result;
}

}  // namespace mlx_h2o_c::composed
