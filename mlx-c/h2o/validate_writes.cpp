// Rows that are written into their slots: the replacement of the worst one, and the quantisation
// of new ones.
#include "validate.h"

namespace mlx_h2o_c {

namespace {

constexpr const char* part_names[] = {"words", "scales", "biases"};

// [B, H, N] of stored rows, whose new ones have `dtype`.
struct Layout {
  Shape rows;
  mlx_dtype dtype;
};

// Stored rows of either kind, and what they say of the new ones.
Rows stored_rows(const char* op, const std::string& name, mlx_vector_array vector, mlx_array fresh,
                 int bits, int group_size, Layout* layout) {
  Rows rows{parts_of(op, name.c_str(), vector), 0, group_size, 0, 0};
  check_present(op, {"new " + name, fresh, "[B, H, 1, D]"});
  const mlx_array first = rows.parts[0];
  if (rows.parts.size() == 1) {
    check_float_rows(op, {name, first, "with 4 dimensions"});
    rows.size = mlx_array_dim(first, 3);
    layout->dtype = mlx_array_dtype(first);
  } else {
    if (mlx_array_ndim(first) != 4 || has_empty_axis(first) ||
        mlx_array_dtype(first) != MLX_UINT32) {
      fail(op, "words of the ", name, " are ", found_text(first),
           ", expected uint32 [B, H, N, D * bits / 32], every size at least 1.");
    }
    rows.bits = bits;
    rows.size = packed_width(op, "words of the " + name, first, bits, group_size);
    layout->dtype = mlx_array_dtype(fresh);
  }
  rows.count = mlx_array_dim(first, 2);
  Shape expected = shape_of(first);
  expected[3] = rows.size / group_size;
  for (size_t i = 1; i < rows.parts.size(); ++i) {
    const mlx_array part = rows.parts[i];
    if (shape_of(part) != expected || mlx_array_dtype(part) != layout->dtype || !is_float(part)) {
      fail(op, part_names[i], " of the ", name, " are ", found_text(part), ", expected ",
           text_of(expected), " in the dtype of the new rows, ", dtype_name(fresh), ".");
    }
  }
  expected.pop_back();
  layout->rows = expected;
  return rows;
}

void check_new_row(const char* op, const char* name, mlx_array found, const Rows& stored,
                   const Layout& layout) {
  const Shape expected = {layout.rows[0], layout.rows[1], 1, stored.size};
  if (shape_of(found) != expected || mlx_array_dtype(found) != layout.dtype) {
    fail(op, "new ", name, " are ", found_text(found), ", expected ", dtype_name(layout.dtype), " ",
         text_of(expected), " as the ", name, ".");
  }
}

RankedBy rank_named(const char* op, const char* ranked_by, mlx_array ranks) {
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

// Words, scales and biases that fit each other and the new rows.
Rows appended_rows(const char* op, const char* name, mlx_vector_array stored, mlx_array fresh,
                   int bits, int group_size) {
  if (stored.ctx == nullptr || mlx_vector_array_size(stored) != 3) {
    fail(op, "quantised ", name, " must be a vector of words, scales and biases.");
  }
  const Shape added = shape_of(fresh);
  const int width = added[3];
  if (width % group_size != 0) {
    fail(op, "rows of the ", name, " have ", width,
         " elements, expected a multiple of group_size = ", group_size, ".");
  }
  Rows rows{items(stored), bits, group_size, 0, width};
  rows.count = mlx_array_ndim(rows.parts[0]) == 4 ? mlx_array_dim(rows.parts[0], 2) : 0;
  for (size_t i = 0; i < 3; ++i) {
    const mlx_array part = rows.parts[i];
    const mlx_dtype dtype = i == 0 ? MLX_UINT32 : mlx_array_dtype(fresh);
    const int64_t last = i == 0 ? int64_t{width} * bits / 32 : width / group_size;
    const Shape expected = {added[0], added[1], rows.count, static_cast<int>(last)};
    if (shape_of(part) != expected || mlx_array_dtype(part) != dtype || rows.count == 0) {
      fail(op, part_names[i], " of the ", name, " are ", found_text(part), ", expected ",
           dtype_name(dtype), " (", added[0], ", ", added[1], ", N, ", last, "), N at least 1.");
    }
  }
  return rows;
}

}  // namespace

ReplaceRequest replace_request(const char* op, mlx_vector_array keys, mlx_vector_array values,
                               const Packing& packing, const char* ranked_by, ReplaceRequest r) {
  check_packing(op, packing);
  Layout layout, value_layout;
  const int size = packing.group_size;
  r.keys = stored_rows(op, "keys", keys, r.new_keys, packing.bits, size, &layout);
  r.values =
      stored_rows(op, "values", values, r.new_values, value_bits(packing), size, &value_layout);
  check_both_packed(op, r.keys.packed(), r.values.packed());
  const Shape& rows = layout.rows;
  if (value_layout.rows != rows) {
    Shape k = rows, v = value_layout.rows;
    k.push_back(r.keys.size);
    v.push_back(r.values.size);
    check_same(op, "keys and values have shapes", k, v, "the same [B, H, N]");
  }
  r.ranked_by = rank_named(op, ranked_by, r.ranks);
  check_array(op, {"importance", r.importance, "[B, H, N]"}, MLX_FLOAT32, rows);
  check_array(op, {"positions", r.positions, "[B, H, N]"}, MLX_INT32, rows);
  if (r.ranked_by == RankedBy::array) {
    check_array(op, {"ranks", r.ranks, "[B, H, N]"}, MLX_FLOAT32, rows);
  }
  check_new_row(op, "keys", r.new_keys, r.keys, layout);
  check_new_row(op, "values", r.new_values, r.values, value_layout);
  check_present(op, {"position", r.position, "[] or [B]"});
  check_per_sequence(op, "position", r.position, rows[0]);
  check_sink_size(op, r.sink_size);
  check_per_sequence(op, "recent_start", r.recent_start, rows[0]);
  r.on_gpu = runs_on_gpu(op, r.stream);
  return r;
}

AppendRequest append_request(const char* op, mlx_vector_array keys, mlx_vector_array values,
                             const Packing& packing, AppendRequest r) {
  check_packing(op, packing);
  check_float_rows(op, {"new keys", r.new_keys, "[B, H, L, D]"});
  check_float_rows(op, {"new values", r.new_values, "[B, H, L, D]"});
  Shape added = shape_of(r.new_keys);
  const Shape of_values = shape_of(r.new_values);
  if (!std::equal(added.begin(), added.begin() + 3, of_values.begin())) {
    check_same(op, "new keys and values have shapes", added, of_values, "the same [B, H, L]");
  }
  added.pop_back();
  const int size = packing.group_size;
  r.keys = appended_rows(op, "keys", keys, r.new_keys, packing.bits, size);
  r.values = appended_rows(op, "values", values, r.new_values, value_bits(packing), size);
  if (r.keys.count != r.values.count) {
    fail(op, "keys and values have ", r.keys.count, " and ", r.values.count,
         " rows, expected the same.");
  }
  check_array(op, {"slots", r.slots, "[B, H, L]"}, MLX_UINT32, added);
  r.on_gpu = runs_on_gpu(op, r.stream);
  return r;
}

}  // namespace mlx_h2o_c
