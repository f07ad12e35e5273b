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

// 1 / |key|, float32 [B, H, N], of keys in float32.
Array inverse_norms(mlx_array keys, mlx_stream s) {
  const Array squares = call(mlx_sum_axis, call(mlx_square, keys, s), -1, false, s);
  const Array norms = call(mlx_maximum, call(mlx_sqrt, squares, s), number(least_norm), s);
  return call(mlx_divide, number(1), norms, s);
}

Rows with_parts(const Rows& like, std::vector<Array> parts) {
  return {std::move(parts), like.bits, like.group_size, 1, like.size};
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
      return upcast(call(mlx_subtract, r.positions, integer(r.position), r.stream), r.stream);
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

Array slots_of(const ReplaceRequest& r, Array (*choose)(const RetentionRequest&)) {
  const mlx_stream s = r.stream;
  const int rows = mlx_array_dim(r.positions, 2);
  if (r.worst.ctx != nullptr) {
    // A slot beyond the end is the last: nothing writes out of bounds.
    const Array last = scalar(static_cast<uint32_t>(rows - 1), MLX_UINT32);
    return call(mlx_expand_dims, call(mlx_minimum, r.worst, last, s), -1, s);
  }
  const Array by = ranks(r);
  return choose({by, r.positions, mlx_array_dim(by, 0), mlx_array_dim(by, 1), rows, 1, r.sink_size,
                 r.recent_start, s, r.on_gpu});
}

Replaced replace_worst(const ReplaceRequest& r) {
  const Array slots = slots_of(r, evict_indices);
  const std::vector<Array> key = as_stored(r.keys, r.new_keys, r.stream);
  Replaced rest = marked(r, slots);
  if (r.key_sum.ctx != nullptr) {
    KeyStatistics updated = updated_statistics(r, slots, key);
    rest.key_sum = std::move(updated.key_sum);
    rest.inverse_norms = std::move(updated.inverse_norms);
  }
  return replaced(r, slots, key, as_stored(r.values, r.new_values, r.stream), std::move(rest));
}

Replaced marked(const ReplaceRequest& r, mlx_array slots) {
  const mlx_stream s = r.stream;
  Replaced result;
  result.importance = call(mlx_put_along_axis, r.importance, slots, number(NAN), 2, s);
  result.positions = call(mlx_put_along_axis, r.positions, slots, integer(r.position), 2, s);
  return result;
}

KeyStatistics updated_statistics(const ReplaceRequest& r, mlx_array slots,
                                 const std::vector<Array>& new_key) {
  const mlx_stream s = r.stream;
  std::vector<Array> gone, fresh(new_key.size());
  for (size_t i = 0; i < new_key.size(); ++i) {
    const mlx_array stored = r.keys.parts[i];
    const std::vector<int> shape = {mlx_array_dim(slots, 0), mlx_array_dim(slots, 1), 1,
                                    mlx_array_dim(stored, 3)};
    const Array at = broadcast(call(mlx_expand_dims, slots, -1, s), shape, s);
    gone.push_back(call(mlx_take_along_axis, stored, at, 2, s));
    check(mlx_array_set(fresh[i].out(), new_key[i]));
  }
  const Array old_rows = dense(with_parts(r.keys, std::move(gone)), s);
  const Array new_rows = dense(with_parts(r.keys, std::move(fresh)), s);
  const Array old_norms = call(mlx_take_along_axis, r.inverse_norms, slots, 2, s);
  const Array new_norms = inverse_norms(new_rows, s);
  const auto scaled = [s](mlx_array rows, mlx_array norms) {
    return call(mlx_multiply, rows, call(mlx_expand_dims, norms, -1, s), s);
  };
  const Array change =
      call(mlx_subtract, scaled(new_rows, new_norms), scaled(old_rows, old_norms), s);
  return {call(mlx_add, r.key_sum, call(mlx_squeeze_axis, change, 2, s), s),
          call(mlx_put_along_axis, r.inverse_norms, slots, new_norms, 2, s)};
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
  if (!rest.key_sum.empty()) {
    others.insert(others.end(), {rest.key_sum, rest.inverse_norms});
  }
  // Whoever evaluates the keys evaluates these too: else the graph of every step would hang on
  // them.
  rest.keys[0] = tied(rest.keys[0], others);
  return rest;
}

KeyStatistics key_statistics(const KeyStatisticsRequest& r) {
  const mlx_stream s = r.stream;
  const Array keys = dense(r.keys, s);
  Array norms = inverse_norms(keys, s);
  const Array directions = call(mlx_multiply, keys, call(mlx_expand_dims, norms, -1, s), s);
  return {call(mlx_sum_axis, directions, 2, false, s), std::move(norms)};
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
