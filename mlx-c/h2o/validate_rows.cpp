// The moving average of scores, ranks, and the selection of rows.
#include "validate.h"

namespace mlx_h2o_c {

namespace {

// Queries of a chunk that are scored at once.
constexpr int most_scored_queries = 128;

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

void check_dtype(const char* op, const Named& named, mlx_dtype dtype) {
  if (mlx_array_dtype(named.array) != dtype) {
    fail(op, named.name, " are ", dtype_name(named.array), ", expected ", dtype_name(dtype), ".");
  }
}

}  // namespace

AccumulateRequest accumulate_request(const char* op, mlx_array importance, mlx_array scores,
                                     double decay, bool masked, mlx_stream stream) {
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

KeyDiversityRequest key_diversity_request(const char* op, mlx_array keys, mlx_stream stream) {
  check_float_rows(op, {"keys", keys, "[B, H, N, D]"});
  return {keys, stream, runs_on_gpu(op, stream)};
}

RetentionRequest retention_request(const char* op, mlx_array scores, mlx_array positions,
                                   const char* name, int number, int sink_size,
                                   mlx_array recent_start, mlx_stream stream) {
  const Named rows[] = {{"scores", scores, "[B, H, N]"}, {"positions", positions, "[B, H, N]"}};
  for (const Named& named : rows) {
    check_present(op, named);
  }
  for (const Named& named : rows) {
    check_rank(op, named, 3);
  }
  const Shape shape = shape_of(scores);
  check_same(op, "scores and positions have shapes", shape, shape_of(positions));
  check_not_empty(op, rows[0]);
  check_dtype(op, rows[0], MLX_FLOAT32);
  check_dtype(op, rows[1], MLX_INT32);
  if (number < 1 || number > shape[2]) {
    fail(op, name, " is ", number, ", expected 1 to N = ", shape[2], ".");
  }
  check_sink_size(op, sink_size);
  check_per_sequence(op, "recent_start", recent_start, shape[0]);
  return {scores, positions, shape[0],     shape[1], shape[2],
          number, sink_size, recent_start, stream,   runs_on_gpu(op, stream)};
}

}  // namespace mlx_h2o_c
