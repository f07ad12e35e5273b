// The public function that quantises new rows into their slots.
#include <algorithm>

#include "backend.h"
#include "boundary.h"
#include "codes.h"
#include "mlx_h2o/c/rows.h"
#include "validate.h"

using namespace mlx_h2o_c;

namespace {

// Whether the axes before the last are the same; `what` and `expected` as in check_same.
void check_same_rows(const char* op, const char* what, const Shape& one, const Shape& other,
                     const char* expected) {
  const bool same = std::equal(one.begin(), one.end() - 1, other.begin());
  if (!same) check_same(op, what, one, other, expected);
}

// One array of rows: what a message calls it, its dtype, and the size of its last axis.
struct Part {
  const char* name;
  mlx_dtype dtype;
  int64_t last;
};

// Of rows like the new ones, stored in so many arrays.
std::vector<Part> layout(const char* op, const char* name, size_t count, mlx_array fresh,
                         const Packing& packing) {
  const auto [bits, group_size, v_bits] = packing;
  const int width = mlx_array_dim(fresh, 3);
  const mlx_dtype dtype = dtype_of(fresh);
  const Part words = {"words", MLX_UINT32, int64_t{width} * bits / 32};
  if (count == 1) return {{"rows", dtype, width}};
  if (count == 2) {
    expect(bits <= 4 && codes_fit(width), op, "rows of the ", name, " have ", width,
           " elements and codes of ", bits,
           " bits, expected a power of two from 32 to 1024, and 2, 3 or 4 bits.");
    return {words, {"norms", MLX_FLOAT32, 1}};
  }
  expect(width % group_size == 0, op, "rows of the ", name, " have ", width,
         " elements, expected a multiple of group_size = ", group_size, ".");
  const int groups = width / group_size;
  return {words, {"scales", dtype, groups}, {"biases", dtype, groups}};
}

// Arrays that fit each other and the new rows.
Rows appended_rows(const char* op, const char* name, mlx_vector_array stored, mlx_array fresh,
                   const Packing& packing) {
  const size_t count = stored.ctx == nullptr ? 0 : mlx_vector_array_size(stored);
  expect(
      count >= 1 && count <= 3, op, "quantised ", name,
      " must be a vector of words, scales and biases, of words and norms, or of the rows alone.");
  const Shape added = shape_of(fresh);
  Rows rows{items(stored), count == 1 ? 0 : packing.bits, count == 3 ? packing.group_size : 0,
            added[3]};
  const int length = mlx_array_ndim(rows.parts[0]) == 4 ? rows.count() : 0;
  const std::vector<Part> expected = layout(op, name, count, fresh, packing);
  for (size_t i = 0; i < count; ++i) {
    const auto [part, dtype, last] = expected[i];
    const mlx_array found = rows.parts[i];
    const Shape shape = {added[0], added[1], length, static_cast<int>(last)};
    expect(shape_of(found) == shape && dtype_of(found) == dtype && length > 0, op, part, " of the ",
           name, " are ", found, ", expected ", dtype, " (", added[0], ", ", added[1], ", N, ",
           last, "), N at least 1.");
  }
  return rows;
}

}  // namespace

int mlx_h2o_quantize_append(mlx_vector_array* new_keys, mlx_vector_array* new_values,
                            mlx_vector_array keys, mlx_vector_array values, mlx_array key_rows,
                            mlx_array value_rows, mlx_array slots, int bits, int group_size,
                            mlx_optional_int v_bits, mlx_stream s) {
  const Places places = {{"new_keys", new_keys}, {"new_values", new_values}};
  return operation("quantize_append", places, [&](const char* op) {
    const Packing packing = {bits, group_size, v_bits};
    check_packing(op, packing);
    check_rows(op, {"new keys", key_rows, "[B, H, L, D]"});
    check_rows(op, {"new values", value_rows, "[B, H, L, D]"});
    Shape added = shape_of(key_rows);
    check_same_rows(op, "new keys and values have shapes", added, shape_of(value_rows),
                    "the same [B, H, L]");
    added.pop_back();
    Rows k = appended_rows(op, "keys", keys, key_rows, packing);
    Rows v = appended_rows(op, "values", values, value_rows, packing.of_values());
    expect(k.count() == v.count(), op, "keys and values have ", k.count(), " and ", v.count(),
           " rows, expected the same.");
    check_array(op, {"slots", slots, "[B, H, L]"}, MLX_UINT32, added);
    const Written result =
        serve(op, &Backend::quantize_append,
              AppendRequest{std::move(k), std::move(v), key_rows, value_rows, slots, s});
    give(new_keys, result.keys);
    give(new_values, result.values);
  });
}
