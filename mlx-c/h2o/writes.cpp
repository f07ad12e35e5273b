// The public functions that write rows into their slots: the replacement of the worst one, and the
// quantisation of new ones.
#include <algorithm>

#include "backend.h"
#include "boundary.h"
#include "codes.h"
#include "mlx_h2o/c/rows.h"
#include "validate.h"

using namespace mlx_h2o_c;

namespace {

constexpr const char* part_names[] = {"words", "scales", "biases"};

// Whether the axes before the last are the same; `what` and `expected` as in check_same.
void check_same_rows(const char* op, const char* what, const Shape& one, const Shape& other,
                     const char* expected) {
  const bool same = std::equal(one.begin(), one.end() - 1, other.begin());
  if (!same) check_same(op, what, one, other, expected);
}

// Of either kind.
Rows stored_rows(const char* op, const std::string& name, mlx_vector_array vector, mlx_array fresh,
                 const Packing& packing) {
  Rows rows{parts_of(op, name.c_str(), vector), 0, packing.group_size, 0};
  expect(!rows.codes(), op, name, " are words and norms, expected 1 array, or words, scales and ",
         "biases.");
  check_present(op, {"new " + name, fresh, "[B, H, 1, D]"});
  const mlx_array first = rows.parts[0];
  if (rows.parts.size() == 1) {
    check_rows(op, {name, first, "with 4 dimensions"});
    rows.size = mlx_array_dim(first, 3);
  } else {
    const std::string words = "words of the " + name;
    check_rows(op, {words, first, "[B, H, N, D * bits / 32]"}, MLX_UINT32);
    rows.bits = packing.bits;
    rows.size = packed_width(op, words, first, packing);
  }
  Shape shape = shape_of(first);
  shape[3] = rows.size / rows.group_size;
  for (size_t i = 1; i < rows.parts.size(); ++i) {
    const mlx_array part = rows.parts[i];
    expect(shape_of(part) == shape && dtype_of(part) == dtype_of(fresh) && is_float(part), op,
           part_names[i], " of the ", name, " are ", part, ", expected ", shape,
           " in the dtype of the new rows, ", dtype_of(fresh), ".");
  }
  return rows;
}

void check_new_row(const char* op, const char* name, mlx_array found, const Rows& stored) {
  Shape expected = stored.shape();
  expected[2] = 1;
  expect(shape_of(found) == expected && dtype_of(found) == stored.dtype(), op, "new ", name,
         " are ", found, ", expected ", stored.dtype(), " ", expected, " as the ", name, ".");
}

RankedBy rank_named(const char* op, const char* ranked_by, mlx_array ranks) {
  const std::string name = ranked_by == nullptr || *ranked_by == 0 ? "importance" : ranked_by;
  const char* const known[] = {"importance", "array", "age", "key_diversity"};  // as in RankedBy
  const auto found = std::find(std::begin(known), std::end(known), name);
  expect(found != std::end(known), op, "ranked_by is '", name,
         "', expected 'importance', 'age', 'key_diversity' or 'array'.");
  const RankedBy by = static_cast<RankedBy>(found - std::begin(known));
  expect(by != RankedBy::array || ranks.ctx != nullptr, op,
         "ranked_by is 'array' and ranks an empty handle, expected ranks.");
  expect(by == RankedBy::array || ranks.ctx == nullptr, op, "ranked_by is '",
         ranked_by == nullptr ? "" : ranked_by,
         "' and ranks an array, expected ranked_by 'array'.");
  return by;
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
  const auto [bits, group_size, value_bits] = packing;
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

int mlx_h2o_replace_worst(mlx_vector_array* new_keys, mlx_vector_array* new_values,
                          mlx_array* new_importance, mlx_array* new_positions,
                          mlx_vector_array keys, mlx_vector_array values, mlx_array importance,
                          mlx_array positions, mlx_array key, mlx_array value, mlx_array position,
                          int sink_size, mlx_array recent_start, const char* ranked_by,
                          mlx_array ranks, int bits, int group_size, mlx_optional_int v_bits,
                          mlx_stream s) {
  const Places places = {{"new_keys", new_keys},
                         {"new_values", new_values},
                         {"new_importance", new_importance},
                         {"new_positions", new_positions}};
  return operation("replace_worst", places, [&](const char* op) {
    const Packing packing = {bits, group_size, v_bits};
    check_packing(op, packing);
    Rows k = stored_rows(op, "keys", keys, key, packing);
    Rows v = stored_rows(op, "values", values, value, packing.of_values());
    check_both_packed(op, k.packed(), v.packed());
    Shape shape = k.shape();
    check_same_rows(op, "keys and values have shapes", shape, v.shape(), "the same [B, H, N]");
    shape.pop_back();
    const RankedBy by = rank_named(op, ranked_by, ranks);
    check_array(op, {"importance", importance, "[B, H, N]"}, MLX_FLOAT32, shape);
    check_array(op, {"positions", positions, "[B, H, N]"}, MLX_INT32, shape);
    if (by == RankedBy::array) check_array(op, {"ranks", ranks, "[B, H, N]"}, MLX_FLOAT32, shape);
    check_new_row(op, "keys", key, k);
    check_new_row(op, "values", value, v);
    check_per_sequence(op, "position", position, shape[0]);
    check_zones(op, sink_size, recent_start, shape[0]);
    StoredRows rows = {std::move(k), std::move(v), key, value, s};
    const ReplaceRequest request = {std::move(rows), importance,   positions, position,
                                    sink_size,       recent_start, by,        ranks};
    const Replaced result = serve(op, &Backend::replace_worst, request);
    give(new_keys, result.keys);
    give(new_values, result.values);
    give(new_importance, result.importance);
    give(new_positions, result.positions);
  });
}

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
              AppendRequest{{std::move(k), std::move(v), key_rows, value_rows, s}, slots});
    give(new_keys, result.keys);
    give(new_values, result.values);
  });
}
