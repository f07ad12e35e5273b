// Rows that are quantised into their slots.
#include <algorithm>

#include "checks.h"
#include "validate.h"

namespace mlx_h2o_c {

namespace {

constexpr auto append_name = "quantize_append";

// Words, scales and biases that fit each other and the new rows, with the words of Python.
Rows check_stored(const char* name, mlx_vector_array stored, mlx_array fresh, int bits,
                  int group_size) {
  const char* op = append_name;
  if (stored.ctx == nullptr || mlx_vector_array_size(stored) != 3) {
    fail(op, "quantised ", name, " must be a vector of words, scales and biases.");
  }
  const Shape added = shape_of(fresh);
  const int width = added[3];
  if (width % group_size != 0) {
    fail(op, "rows of the ", name, " have ", width,
         " elements, expected a multiple of group_size = ", group_size, ".");
  }
  Rows rows;
  rows.parts.resize(3);
  for (size_t i = 0; i < 3; ++i) {
    check(mlx_vector_array_get(rows.parts[i].out(), stored, i));
  }
  rows.bits = bits;
  rows.group_size = group_size;
  rows.count = mlx_array_ndim(rows.parts[0]) == 4 ? mlx_array_dim(rows.parts[0], 2) : 0;
  rows.size = width;
  static const char* const parts[] = {"words", "scales", "biases"};
  for (size_t i = 0; i < 3; ++i) {
    const mlx_array part = rows.parts[i];
    const mlx_dtype dtype = i == 0 ? MLX_UINT32 : mlx_array_dtype(fresh);
    const int64_t last = i == 0 ? int64_t{width} * bits / 32 : width / group_size;
    const Shape expected = {added[0], added[1], rows.count, static_cast<int>(last)};
    if (shape_of(part) != expected || mlx_array_dtype(part) != dtype || rows.count == 0) {
      fail(op, parts[i], " of the ", name, " are ", found_text(part), ", expected ",
           dtype_name(dtype), " (", added[0], ", ", added[1], ", N, ", last, "), N at least 1.");
    }
  }
  return rows;
}

}  // namespace

AppendRequest append_request(mlx_vector_array keys, mlx_vector_array values, mlx_array new_keys,
                             mlx_array new_values, mlx_array slots, const Packing& packing,
                             mlx_stream stream) {
  const char* op = append_name;
  check_packing(op, packing);
  for (const auto& [name, fresh] : {std::pair("keys", new_keys), std::pair("values", new_values)}) {
    check_present(op, {(std::string("new ") + name).c_str(), fresh, "[B, H, L, D]"});
    if (mlx_array_ndim(fresh) != 4 || has_empty_axis(fresh) || !is_float(fresh)) {
      fail(op, "new ", name, " are ", found_text(fresh),
           ", expected float32, float16 or bfloat16 [B, H, L, D], every size at least 1.");
    }
  }
  Shape added = shape_of(new_keys), of_values = shape_of(new_values);
  if (!std::equal(added.begin(), added.begin() + 3, of_values.begin())) {
    fail(op, "new keys and values have shapes ", shape_text(added), " and ", shape_text(of_values),
         ", expected the same [B, H, L].");
  }
  added.pop_back();
  Rows k = check_stored("keys", keys, new_keys, packing.bits, packing.group_size);
  Rows v = check_stored("values", values, new_values, value_bits(packing), packing.group_size);
  if (k.count != v.count) {
    fail(op, "keys and values have ", k.count, " and ", v.count, " rows, expected the same.");
  }
  check_present(op, {"slots", slots, "[B, H, L]"});
  if (shape_of(slots) != added || mlx_array_dtype(slots) != MLX_UINT32) {
    fail(op, "slots are ", found_text(slots), ", expected uint32 [B, H, L] = ", shape_text(added),
         ".");
  }
  return {std::move(k), std::move(v), new_keys, new_values, slots, stream, runs_on_gpu(op, stream)};
}

}  // namespace mlx_h2o_c
