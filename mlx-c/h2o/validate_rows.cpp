// Operations on the rows of a cache: moving average and ranks.
#include "checks.h"
#include "validate.h"

namespace mlx_h2o_c {

namespace {

constexpr auto accumulate_name = "accumulate_scores";

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

}  // namespace mlx_h2o_c
