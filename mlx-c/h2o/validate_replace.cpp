// Replacement of the worst row.
#include "checks.h"
#include "validate.h"

namespace mlx_h2o_c {

namespace {

constexpr auto op = "replace_worst";

// Of stored rows, packed or not.
struct Layout {
  Shape rows;  // [B, H, N]
  int width;
  mlx_dtype dtype;  // of new rows
};

Layout dense_layout(const char* name, mlx_array array) {
  if (mlx_array_ndim(array) != 4 || has_empty_axis(array) || !is_float(array)) {
    fail(op, name, " are ", found_text(array),
         ", expected float32, float16 or bfloat16 with 4 dimensions, every size at least 1.");
  }
  Shape shape = shape_of(array);
  const int width = shape[3];
  shape.pop_back();
  return {shape, width, mlx_array_dtype(array)};
}

Layout packed_layout(const char* name, const std::vector<Array>& parts, mlx_array fresh, int bits,
                     int group_size) {
  const mlx_array words = parts[0];
  if (mlx_array_ndim(words) != 4 || has_empty_axis(words) || mlx_array_dtype(words) != MLX_UINT32) {
    fail(op, "words of the ", name, " are ", found_text(words),
         ", expected uint32 [B, H, N, D * bits / 32], every size at least 1.");
  }
  const int64_t packed = int64_t{32} * mlx_array_dim(words, 3);
  const int64_t width = packed / bits;
  if (packed % bits != 0 || width % group_size != 0) {
    fail(op, "words of the ", name, " have ", mlx_array_dim(words, 3), " words per row, which at ",
         bits, " bits is not a multiple of the group size ", group_size, ".");
  }
  Shape expected = shape_of(words);
  expected[3] = static_cast<int>(width / group_size);
  const char* const names[] = {"scales", "biases"};
  for (size_t i = 0; i < 2; ++i) {
    const mlx_array part = parts[i + 1];
    if (shape_of(part) != expected || mlx_array_dtype(part) != mlx_array_dtype(fresh) ||
        !is_float(part)) {
      fail(op, names[i], " of the ", name, " are ", found_text(part), ", expected ",
           shape_text(expected), " in the dtype of the new rows, ", dtype_name(fresh), ".");
    }
  }
  expected.pop_back();
  return {expected, static_cast<int>(width), mlx_array_dtype(fresh)};
}

void check_array(const char* name, mlx_array array, const Shape& shape, mlx_dtype dtype,
                 const char* layout) {
  check_present(op, {name, array, layout});
  if (shape_of(array) != shape || mlx_array_dtype(array) != dtype) {
    fail(op, name, " are ", found_text(array), ", expected ", dtype_name(dtype), " ", layout, " = ",
         shape_text(shape), ".");
  }
}

void check_new_row(const char* name, mlx_array found, const Layout& stored) {
  const Shape expected = {stored.rows[0], stored.rows[1], 1, stored.width};
  if (shape_of(found) != expected || mlx_array_dtype(found) != stored.dtype) {
    fail(op, "new ", name, " are ", found_text(found), ", expected ", dtype_name(stored.dtype), " ",
         shape_text(expected), " as the ", name, ".");
  }
}

RankedBy rank_named(const char* ranked_by, mlx_array ranks) {
  const std::string name = ranked_by == nullptr ? "" : ranked_by;
  static const std::pair<const char*, RankedBy> known[] = {
      {"", RankedBy::importance},
      {"importance", RankedBy::importance},
      {"age", RankedBy::age},
      {"key_diversity", RankedBy::key_diversity},
      {"array", RankedBy::array}};
  for (const auto& [known_name, value] : known) {
    if (name != known_name) {
      continue;
    }
    if (value == RankedBy::array && ranks.ctx == nullptr) {
      fail(op, "ranked_by is 'array' and ranks an empty handle, expected ranks.");
    }
    if (value != RankedBy::array && ranks.ctx != nullptr) {
      fail(op, "ranked_by is '", name, "' and ranks an array, expected ranked_by 'array'.");
    }
    return value;
  }
  fail(op, "ranked_by is '", name, "', expected 'importance', 'age', 'key_diversity' or 'array'.");
}

Rows stored_rows(const char* name, mlx_vector_array vector, mlx_array fresh, int bits,
                 int group_size, Layout* layout) {
  Rows rows;
  rows.parts = parts_of(op, name, vector);
  const bool packed = rows.parts.size() == 3;
  check_present(op, {(std::string("new ") + name).c_str(), fresh, "[B, H, 1, D]"});
  *layout = packed ? packed_layout(name, rows.parts, fresh, bits, group_size)
                   : dense_layout(name, rows.parts[0]);
  rows.bits = packed ? bits : 0;
  rows.group_size = group_size;
  rows.count = layout->rows[2];
  rows.size = layout->width;
  return rows;
}

}  // namespace

ReplaceRequest replace_request(mlx_vector_array keys, mlx_vector_array values,
                               const Packing& packing, const ReplaceArguments& a) {
  check_packing(op, packing);
  Layout layout, value_layout;
  const int size = packing.group_size;
  Rows k = stored_rows("keys", keys, a.new_keys, packing.bits, size, &layout);
  Rows v = stored_rows("values", values, a.new_values, value_bits(packing), size, &value_layout);
  if (k.packed() != v.packed()) {
    fail(op,
         k.packed() ? "keys are packed and values are not" : "values are packed and keys are not",
         ", expected both or none.");
  }
  const Shape& rows = layout.rows;
  if (value_layout.rows != rows) {
    fail(op, "keys and values have shapes ", shape_text({rows[0], rows[1], rows[2], layout.width}),
         " and ",
         shape_text({value_layout.rows[0], value_layout.rows[1], value_layout.rows[2],
                     value_layout.width}),
         ", expected the same [B, H, N].");
  }
  const RankedBy by = rank_named(a.ranked_by, a.ranks);
  check_array("importance", a.importance, rows, MLX_FLOAT32, "[B, H, N]");
  check_array("positions", a.positions, rows, MLX_INT32, "[B, H, N]");
  if (by == RankedBy::array) {
    check_array("ranks", a.ranks, rows, MLX_FLOAT32, "[B, H, N]");
  }
  check_new_row("keys", a.new_keys, layout);
  check_new_row("values", a.new_values, value_layout);
  check_present(op, {"position", a.position, "[] or [B]"});
  check_per_sequence(op, "position", a.position, rows[0]);
  check_zones(op, a.sink_size, a.recent_start, rows[0]);
  const bool on_gpu = runs_on_gpu(op, a.stream);
  return {std::move(k), std::move(v), a.importance, a.positions,    a.new_keys,
          a.new_values, a.position,   a.sink_size,  a.recent_start, by,
          a.ranks,      a.stream,     on_gpu};
}

}  // namespace mlx_h2o_c
