// The definitions of the operations on a cache's rows in plain MLX operations.
#include <cmath>

#include "arrays.h"
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
Array put(mlx_array stored, mlx_array slots, mlx_array rows, mlx_stream s) {
  std::vector<int> shape(4);
  for (int axis = 0; axis < 4; ++axis) {
    shape[axis] = mlx_array_dim(rows, axis);
  }
  const Array at = broadcast(call(mlx_expand_dims, slots, -1, s), shape, s);
  return call(mlx_put_along_axis, stored, at, rows, 2, s);
}

std::vector<Array> put_all(const Rows& stored, const std::vector<Array>& rows, mlx_array slots,
                           mlx_stream s) {
  std::vector<Array> result;
  for (size_t i = 0; i < rows.size(); ++i) {
    result.push_back(put(stored.parts[i], slots, rows[i], s));
  }
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

Array ranks(const ReplaceRequest& r) {
  Array ranks;
  switch (r.ranked_by) {
    case RankedBy::age:
      // The age, not the position: float32 holds every age in a cache, but not every position of
      // a sequence beyond 2^24 tokens.
      return upcast(call(mlx_subtract, r.positions, beside_rows(r.position, r.stream), r.stream),
                    r.stream);
    case RankedBy::key_diversity:
      return key_diversity({dense(r.keys, r.stream), r.stream, r.on_gpu});
    case RankedBy::array:
      check(mlx_array_set(ranks.out(), r.ranks));
      return ranks;
    default:
      check(mlx_array_set(ranks.out(), r.importance));
      return ranks;
  }
}

Replaced replace_worst(const ReplaceRequest& r) {
  const mlx_stream s = r.stream;
  const Array by = ranks(r);
  const int batch = mlx_array_dim(by, 0), heads = mlx_array_dim(by, 1);
  const Array slots = evict_indices({by, r.positions, batch, heads, mlx_array_dim(by, 2), 1,
                                     r.sink_size, r.recent_start, s, r.on_gpu});
  const Array position = broadcast(beside_rows(r.position, s), {batch, heads, 1}, s);
  Replaced rest;
  rest.importance = call(mlx_put_along_axis, r.importance, slots, number(NAN), 2, s);
  rest.positions = call(mlx_put_along_axis, r.positions, slots, position, 2, s);
  return replaced(r, slots, as_stored(r.keys, r.new_keys, s), as_stored(r.values, r.new_values, s),
                  std::move(rest));
}

std::vector<Array> as_stored(const Rows& stored, mlx_array row, mlx_stream s) {
  if (stored.packed()) {
    return quantized(row, stored.bits, stored.group_size, s);
  }
  std::vector<Array> parts(1);
  check(mlx_array_set(parts[0].out(), row));
  return parts;
}

Replaced replaced(const ReplaceRequest& r, mlx_array slots, const std::vector<Array>& new_key,
                  const std::vector<Array>& new_value, Replaced rest) {
  rest.keys = put_all(r.keys, new_key, slots, r.stream);
  rest.values = put_all(r.values, new_value, slots, r.stream);
  std::vector<mlx_array> others = {rest.importance, rest.positions};
  for (size_t i = 1; i < rest.keys.size(); ++i) {
    others.insert(others.end(), {rest.keys[i], rest.values[i]});
  }
  // Whoever evaluates the keys evaluates these too: else the graph of every step would hang on
  // them.
  rest.keys[0] = tied(rest.keys[0], others);
  return rest;
}

std::vector<Array> quantized(mlx_array rows, int bits, int group_size, mlx_stream s) {
  ArrayVector packed(mlx_vector_array_new());
  check(mlx_quantize(packed.out(), rows, mlx_optional_int{group_size, true},
                     mlx_optional_int{bits, true}, "affine", mlx_array{}, s));
  std::vector<Array> parts;
  for (size_t i = 0; i < 3; ++i) {
    parts.push_back(item(packed, i));
  }
  return parts;
}

Appended quantize_append(const AppendRequest& r) {
  return written(r, quantized(r.new_keys, r.keys.bits, r.keys.group_size, r.stream),
                 quantized(r.new_values, r.values.bits, r.values.group_size, r.stream));
}

Appended written(const AppendRequest& r, const std::vector<Array>& keys,
                 const std::vector<Array>& values) {
  const mlx_stream s = r.stream;
  const Array last = scalar(static_cast<uint32_t>(r.keys.count - 1), MLX_UINT32);
  const Array slots = call(mlx_minimum, r.slots, last, s);
  Appended result{put_all(r.keys, keys, slots, s), put_all(r.values, values, slots, s)};
  // The rows of one step hang together, or the graph of what nobody reads would grow.
  result.keys[0] = tied(result.keys[0], {result.keys[1], result.keys[2], result.values[0],
                                         result.values[1], result.values[2]});
  return result;
}

}  // namespace mlx_h2o_c::composed
