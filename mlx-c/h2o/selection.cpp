// The public functions on the scores and positions of rows: their moving average, ranks, and which
// of them stay.
#include "mlx_h2o/c/selection.h"

#include "backend.h"
#include "boundary.h"
#include "mlx_h2o/c/rows.h"
#include "validate.h"

using namespace mlx_h2o_c;

namespace {

void check_average(const char* op, mlx_array importance, int batch, int rows) {
  check_present(op, {"importance", importance, "[B, H, N]"});
  const Shape shape = shape_of(importance);
  const bool fits = shape.size() == 3 && shape[0] == batch && shape[2] == rows && shape[1] > 0;
  expect(fits && dtype_of(importance) == MLX_FLOAT32, op, "importance is ", importance,
         ", expected float32 [B, H, N] with B = ", batch, ", N = ", rows, ".");
}

// What the recurrence takes beside the average.
void check_recurrence(const char* op, int queries, double decay) {
  constexpr int most = 128;  // queries of a chunk that are scored at once
  expect(queries <= most, op, "found ", queries, " queries, expected at most ", most, ".");
  check_decay(op, decay);
}

}  // namespace

int mlx_h2o_keep_indices(mlx_array* res, mlx_array scores, mlx_array positions, int keep,
                         int sink_size, mlx_array recent_start, mlx_stream s) {
  return operation("keep_indices", {{"res", res}}, [&](const char* op) {
    const Named rows[] = {{"scores", scores, "[B, H, N]"}, {"positions", positions, "[B, H, N]"}};
    for (const Named& named : rows) check_present(op, named);
    for (const Named& named : rows) check_rank(op, named, 3);
    const Shape shape = shape_of(scores);
    check_same(op, "scores and positions have shapes", shape, shape_of(positions));
    check_not_empty(op, rows[0]);
    expect(dtype_of(scores) == MLX_FLOAT32, op, "scores are ", dtype_of(scores),
           ", expected float32.");
    expect(dtype_of(positions) == MLX_INT32, op, "positions are ", dtype_of(positions),
           ", expected int32.");
    expect(keep >= 1 && keep <= shape[2], op, "keep is ", keep, ", expected 1 to N = ", shape[2],
           ".");
    check_zones(op, sink_size, recent_start, shape[0]);
    give(res, serve(op, &Backend::keep_indices,
                    RetentionRequest{scores, positions, shape[0], shape[1], shape[2],
                                     shape[2] - keep, sink_size, recent_start, s}));
  });
}

int mlx_h2o_accumulate_scores(mlx_array* res, mlx_array importance, mlx_array scores, double decay,
                              bool masked, mlx_stream s) {
  return operation("accumulate_scores", {{"res", res}}, [&](const char* op) {
    check_rows(op, {"scores", scores, "[B, Hq, Lq, N]"}, MLX_FLOAT32);
    const Shape found = shape_of(scores);
    check_average(op, importance, found[0], found[3]);
    const int heads = mlx_array_dim(importance, 1);
    expect(found[1] % heads == 0, op, "scores have ", found[1],
           " heads, expected a multiple of the ", heads, " heads of importance.");
    check_recurrence(op, found[2], decay);
    give(res, serve(op, &Backend::accumulate_scores,
                    AccumulateRequest{importance, scores, decay, masked, s}));
  });
}

int mlx_h2o_attention_and_accumulate(mlx_array* out, mlx_array* new_importance, mlx_array queries,
                                     mlx_vector_array keys, mlx_vector_array values,
                                     mlx_array importance, float scale, const char* kind,
                                     double decay, const char* mask_mode, mlx_array mask_arr,
                                     mlx_array sinks, mlx_array row_bias, int bits, int group_size,
                                     mlx_optional_int v_bits, float sparse_v_threshold,
                                     mlx_stream s) {
  const Places places = {{"out", out}, {"new_importance", new_importance}};
  return operation("attention_and_accumulate", places, [&](const char* op) {
    AttentionRequest attention =
        any_attention_request(op, queries, keys, values, {bits, group_size, v_bits},
                              {scale, mask_mode, mask_arr, sinks, s, sparse_v_threshold, row_bias});
    check_average(op, importance, attention.batch, attention.rows);
    expect(mlx_array_dim(importance, 1) == attention.kv_heads, op, "importance has ",
           mlx_array_dim(importance, 1), " heads, expected ", attention.kv_heads, " as the keys.");
    check_recurrence(op, attention.length, decay);
    const bool mass = is_mass(op, kind);
    attention.return_lse = mass;
    const AttentionAccumulated result =
        attend_and_accumulate({std::move(attention), importance, mass, decay});
    give(out, result.out);
    give(new_importance, result.importance);
  });
}

int mlx_h2o_key_diversity(mlx_array* res, mlx_array keys, mlx_stream s) {
  return operation("key_diversity", {{"res", res}}, [&](const char* op) {
    check_rows(op, {"keys", keys, "[B, H, N, D]"});
    give(res, serve(op, &Backend::key_diversity, KeyDiversityRequest{keys, s}));
  });
}
