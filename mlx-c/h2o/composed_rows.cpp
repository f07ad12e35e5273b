// The definitions of the operations on a cache's rows in plain MLX operations.
#include <cmath>

#include "composed.h"

namespace mlx_h2o_c::composed {

namespace {

constexpr float least_norm = 1e-12F;  // a key of zeros gets the cosine 0, not NaN

Array normalised(const Array& vectors, mlx_stream s) {
  const Array squares = call(mlx_sum_axis, call(mlx_square, vectors, s), -1, true, s);
  const Array norm = call(mlx_sqrt, squares, s);
  return call(mlx_divide, vectors, call(mlx_maximum, norm, number(least_norm), s), s);
}

// `rows` [B, H, L, E] in the slots [B, H, L] of the stored ones.
std::vector<Array> put(const Rows& stored, const std::vector<Array>& rows, mlx_array slots,
                       mlx_stream s) {
  const Array expanded = call(mlx_expand_dims, slots, -1, s);
  std::vector<Array> result;
  for (size_t i = 0; i < rows.size(); ++i) {
    const Array at = broadcast(expanded,
                               {mlx_array_dim(slots, 0), mlx_array_dim(slots, 1),
                                mlx_array_dim(slots, 2), mlx_array_dim(rows[i], 3)},
                               s);
    result.push_back(call(mlx_put_along_axis, stored.parts[i], at, rows[i], 2, s));
  }
  return result;
}

std::vector<Array> as_stored(const Rows& stored, mlx_array rows, mlx_stream s) {
  if (!stored.packed()) {
    std::vector<Array> parts;
    parts.push_back(copied(rows));
    return parts;
  }
  ArrayVector packed(mlx_vector_array_new());
  check(mlx_quantize(packed.out(), rows, mlx_optional_int{stored.group_size, true},
                     mlx_optional_int{stored.bits, true}, "affine", mlx_array{}, s));
  return items(packed);
}

// With the new rows, as they are stored, in the slots. The rows of one step hang together: whoever
// evaluates the first array of the keys evaluates the rest, and `others`, or their graph would
// grow.
Written written(const StoredRows& r, mlx_array slots, const Written& fresh,
                std::vector<mlx_array> others) {
  Written result{put(r.keys, fresh.keys, slots, r.stream),
                 put(r.values, fresh.values, slots, r.stream)};
  others.insert(others.end(), result.keys.begin() + 1, result.keys.end());
  others.insert(others.end(), result.values.begin(), result.values.end());
  result.keys[0] = tied(result.keys[0], others);
  return result;
}

}  // namespace

Array key_diversity(const KeyDiversityRequest& r) {
  const mlx_stream s = r.stream;
  const Array directions = normalised(upcast(r.keys, s), s);
  const Array mean = normalised(call(mlx_mean_axis, directions, 2, true, s), s);
  const Array cosines = call(mlx_matmul, directions, call(mlx_swapaxes, mean, -1, -2, s), s);
  return call(mlx_negative, call(mlx_squeeze_axis, cosines, -1, s), s);
}

Array per_sequence(mlx_array numbers, mlx_stream s) {
  return mlx_array_ndim(numbers) == 0 ? copied(numbers)
                                      : reshape(numbers, {mlx_array_dim(numbers, 0), 1, 1}, s);
}

Array ranks(const ReplaceRequest& r) {
  const mlx_stream s = r.stream;
  switch (r.ranked_by) {
    case RankedBy::age:
      // The age, not the position: float32 holds every age in a cache, but not every position of
      // a sequence beyond 2^24 tokens.
      return upcast(call(mlx_subtract, r.positions, per_sequence(r.position, s), s), s);
    case RankedBy::key_diversity:
      return key_diversity({dense(r.keys, s), s, r.on_gpu});
    default:
      return copied(r.ranked_by == RankedBy::array ? r.ranks : r.importance);
  }
}

Written as_stored(const StoredRows& r) {
  return {as_stored(r.keys, r.new_keys, r.stream), as_stored(r.values, r.new_values, r.stream)};
}

Replaced replace_worst(const ReplaceRequest& r) {
  const mlx_stream s = r.stream;
  const Array by = ranks(r);
  const int batch = mlx_array_dim(by, 0), heads = mlx_array_dim(by, 1);
  const Array slots = evict_indices(
      {by, r.positions, batch, heads, r.keys.count, 1, r.sink_size, r.recent_start, s, r.on_gpu});
  const Array position = per_sequence(r.position, s);
  return replaced(r, slots, as_stored(r),
                  call(mlx_put_along_axis, r.importance, slots, number(NAN), 2, s),
                  call(mlx_put_along_axis, r.positions, slots, position, 2, s));
}

Replaced replaced(const ReplaceRequest& r, mlx_array slots, const Written& fresh, Array importance,
                  Array positions) {
  Written rows = written(r, slots, fresh, {importance, positions});
  return {std::move(rows), std::move(importance), std::move(positions)};
}

Written quantize_append(const AppendRequest& r) { return appended(r, as_stored(r)); }

Written appended(const AppendRequest& r, const Written& fresh) {
  const Array last = scalar(static_cast<uint32_t>(r.keys.count - 1), MLX_UINT32);
  return written(r, call(mlx_minimum, r.slots, last, r.stream), fresh, {});
}

}  // namespace mlx_h2o_c::composed
