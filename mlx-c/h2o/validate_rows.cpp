// Operations on the rows of a cache: moving average, ranks, replacement.
#include <algorithm>

#include "checks.h"
#include "validate.h"

namespace mlx_h2o_c {

namespace {

constexpr int last_position = (1 << 30) - 1;
constexpr auto accumulate_name = "accumulate_scores";
constexpr auto replace_name = "replace_worst";

void check_importance(const char* op, mlx_array importance, int batch, int rows) {
  check_present(op, {"importance", importance, "[B, H, N]"});
  const Shape shape = shape_of(importance);
  const bool fits = shape.size() == 3 && shape[0] == batch && shape[2] == rows && shape[1] > 0;
  if (!fits || mlx_array_dtype(importance) != MLX_FLOAT32) {
    fail(op, "importance is ", found_text(importance),
         ", expected float32 [B, H, N] with B = ", batch, ", N = ", rows, ".");
  }
}

void check_query_count(const char* op, int found) {
  if (found > most_scored_queries) {
    fail(op, "found ", found, " queries, expected at most ", most_scored_queries, ".");
  }
}

void check_dense(const char* op, const char* name, mlx_array array) {
  if (mlx_array_ndim(array) != 4 || has_empty_axis(array) || !is_float(array)) {
    fail(op, name, " are ", found_text(array),
         ", expected float32, float16 or bfloat16 with 4 dimensions, every size at least 1.");
  }
}

// The dtype of the rows before they were packed.
mlx_dtype dtype_of(const Rows& rows) { return mlx_array_dtype(rows.parts[rows.packed() ? 1 : 0]); }

void check_per_row(const char* op, const char* name, mlx_array array, mlx_dtype dtype,
                   const Shape& rows) {
  check_present(op, {name, array, "[B, H, N]"});
  if (shape_of(array) != rows || mlx_array_dtype(array) != dtype) {
    fail(op, name, " are ", found_text(array), ", expected ", dtype_name(dtype),
         " [B, H, N] = ", shape_text(rows), ".");
  }
}

void check_new_row(const char* name, mlx_array found, const Rows& stored, const Shape& rows) {
  check_present(replace_name, {(std::string("new ") + name).c_str(), found, "[B, H, 1, D]"});
  const Shape expected = {rows[0], rows[1], 1, stored.size};
  const mlx_dtype dtype = dtype_of(stored);
  if (shape_of(found) != expected || mlx_array_dtype(found) != dtype) {
    fail(replace_name, "new ", name, " are ", found_text(found), ", expected ", dtype_name(dtype),
         " ", shape_text(expected), " as the ", name, ".");
  }
}

RankedBy check_ranks(const char* ranked_by, mlx_array ranks) {
  const char* op = replace_name;
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

}  // namespace

AccumulateRequest accumulate_request(mlx_array importance, mlx_array scores, double decay,
                                     bool masked, mlx_stream stream) {
  const char* op = accumulate_name;
  check_present(op, {"scores", scores, "[B, Hq, Lq, N]"});
  if (mlx_array_ndim(scores) != 4 || has_empty_axis(scores) ||
      mlx_array_dtype(scores) != MLX_FLOAT32) {
    fail(op, "scores are ", found_text(scores),
         ", expected float32 [B, Hq, Lq, N], every size at least 1.");
  }
  const Shape found = shape_of(scores);
  check_importance(op, importance, found[0], found[3]);
  const int heads = mlx_array_dim(importance, 1);
  if (found[1] % heads != 0) {
    fail(op, "scores have ", found[1], " heads, expected a multiple of the ", heads,
         " heads of importance.");
  }
  check_query_count(op, found[2]);
  check_decay(op, decay);
  return {importance, scores, decay, masked, stream, runs_on_gpu(op, stream)};
}

AttentionAccumulateRequest attention_accumulate_request(AttentionRequest attention,
                                                        mlx_array importance, double decay) {
  const char* op = attention.op;
  check_importance(op, importance, attention.batch, attention.rows);
  if (mlx_array_dim(importance, 1) != attention.kv_heads) {
    fail(op, "importance has ", mlx_array_dim(importance, 1), " heads, expected ",
         attention.kv_heads, " as the keys.");
  }
  check_query_count(op, attention.length);
  check_decay(op, decay);
  return {std::move(attention), importance, decay};
}

KeyDiversityRequest key_diversity_request(mlx_array keys, mlx_stream stream) {
  const char* op = "key_diversity";
  check_present(op, {"keys", keys, "[B, H, N, D]"});
  if (mlx_array_ndim(keys) != 4 || has_empty_axis(keys) || !is_float(keys)) {
    fail(op, "keys are ", found_text(keys),
         ", expected float32, float16 or bfloat16 [B, H, N, D], every size at least 1.");
  }
  return {keys, stream, runs_on_gpu(op, stream)};
}

ReplaceRequest replace_request(Rows keys, Rows values, mlx_array importance, mlx_array positions,
                               mlx_array new_keys, mlx_array new_values, int position,
                               int sink_size, mlx_optional_int recent_start, const char* ranked_by,
                               mlx_array ranks, mlx_stream stream) {
  const char* op = replace_name;
  for (const auto& [name, stored] : {std::pair("keys", &keys), std::pair("values", &values)}) {
    if (!stored->packed()) {
      check_dense(op, name, stored->parts[0]);
    }
  }
  Shape rows = shape_of(keys.parts[0]), value_rows = shape_of(values.parts[0]);
  if (!std::equal(rows.begin(), rows.begin() + 3, value_rows.begin())) {
    fail(op, "keys and values have shapes ", shape_text(rows), " and ", shape_text(value_rows),
         ", expected the same [B, H, N].");
  }
  rows.pop_back();
  const RankedBy by = check_ranks(ranked_by, ranks);
  check_per_row(op, "importance", importance, MLX_FLOAT32, rows);
  check_per_row(op, "positions", positions, MLX_INT32, rows);
  if (by == RankedBy::array) {
    check_per_row(op, "ranks", ranks, MLX_FLOAT32, rows);
  }
  check_new_row("keys", new_keys, keys, rows);
  check_new_row("values", new_values, values, rows);
  if (position < 0 || position > last_position) {
    fail(op, "position is ", position, ", expected 0 to 2**30 - 1.");
  }
  check_sink_size(op, sink_size);
  return {std::move(keys),
          std::move(values),
          importance,
          positions,
          new_keys,
          new_values,
          position,
          sink_size,
          value_of(recent_start),
          by,
          ranks,
          stream,
          runs_on_gpu(op, stream)};
}

}  // namespace mlx_h2o_c
