// The definition of the moving average of scores, one value per (sequence, KV head, row), in the
// operations and in the order of python/mlx_h2o/ema.py: 1 - a is computed in double precision,
// then rounded once.
#include <cmath>

#include "composed.h"

namespace mlx_h2o_c::composed {

namespace {

// Over the unmasked query heads of each group, and which pairs have one: [B, H, L, N].
struct GroupMean {
  Array mean;
  Array unmasked;  // empty: all
};

GroupMean group_mean(const AccumulateRequest& r) {
  const mlx_stream s = r.stream;
  const int heads = mlx_array_dim(r.importance, 1);
  const int group = mlx_array_dim(r.scores, 1) / heads;
  const Array grouped = reshape(r.scores,
                                {mlx_array_dim(r.scores, 0), heads, group,
                                 mlx_array_dim(r.scores, 2), mlx_array_dim(r.scores, 3)},
                                s);
  GroupMean result;
  if (!r.masked) {
    const Array sum = call(mlx_sum_axis, grouped, 2, false, s);
    result.mean = call(mlx_divide, sum, number(static_cast<float>(group)), s);
    return result;
  }
  const Array seen = call(mlx_greater, grouped, number(-INFINITY), s);
  const Array count = call(mlx_sum_axis, seen, 2, false, s);
  const Array sum = call(mlx_sum_axis, call(mlx_where, seen, grouped, number(0), s), 2, false, s);
  result.mean = call(mlx_divide, sum, call(mlx_maximum, count, integer(1), s), s);
  result.unmasked = call(mlx_greater, count, integer(0), s);
  return result;
}

Array one_query(const AccumulateRequest& r, const GroupMean& group) {
  const mlx_stream s = r.stream;
  const Array fresh = call(mlx_abs, call(mlx_squeeze_axis, group.mean, 2, s), s);
  const Array kept = call(mlx_multiply, number(static_cast<float>(r.decay)), r.importance, s);
  const Array added = call(mlx_multiply, number(static_cast<float>(1 - r.decay)), fresh, s);
  Array result =
      call(mlx_where, call(mlx_isnan, r.importance, s), fresh, call(mlx_add, kept, added, s), s);
  if (group.unmasked.empty()) {
    return result;
  }
  return call(mlx_where, call(mlx_squeeze_axis, group.unmasked, 2, s), result, r.importance, s);
}

// The recurrence unrolled: query i of a row weighs a^(unmasked queries after i).
Array many_queries(const AccumulateRequest& r, const GroupMean& group) {
  const mlx_stream s = r.stream;
  const Array all = call(mlx_equal, group.mean, group.mean, s);  // every score is finite
  const mlx_array unmasked = group.unmasked.empty() ? all : group.unmasked;
  const Array so_far =
      call(mlx_cumsum, call(mlx_astype, unmasked, MLX_INT32, s), 2, false, true, s);
  const int last = mlx_array_dim(r.scores, 2);
  const Array count = call(mlx_squeeze_axis, slice(so_far, 2, last - 1, last, s), 2, s);
  const Array unscored = call(mlx_isnan, r.importance, s);
  // (1 - a) for every query but the one that sets the value of an unscored row.
  const Array sets = call(mlx_logical_and, call(mlx_expand_dims, unscored, 2, s),
                          call(mlx_equal, so_far, integer(1), s), s);
  const Array share = call(mlx_where, sets, number(1), number(static_cast<float>(1 - r.decay)), s);
  const Array decay = number(static_cast<float>(r.decay));
  const Array after = call(mlx_subtract, call(mlx_expand_dims, count, 2, s), so_far, s);
  const Array weight = call(mlx_power, decay, upcast(after, s), s);
  const Array weighed =
      call(mlx_multiply, call(mlx_multiply, weight, share, s), call(mlx_abs, group.mean, s), s);
  const Array added =
      call(mlx_sum_axis, call(mlx_where, unmasked, weighed, number(0), s), 2, false, s);
  const Array kept =
      call(mlx_multiply, call(mlx_power, decay, upcast(count, s), s), r.importance, s);
  const Array result = call(mlx_where, unscored, added, call(mlx_add, kept, added, s), s);
  return call(mlx_where, call(mlx_greater, count, integer(0), s), result, r.importance, s);
}

}  // namespace

Array accumulate_scores(const AccumulateRequest& request) {
  const GroupMean group = group_mean(request);
  return mlx_array_dim(request.scores, 2) == 1 ? one_query(request, group)
                                               : many_queries(request, group);
}

}  // namespace mlx_h2o_c::composed
