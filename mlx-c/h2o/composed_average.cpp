// The definition of the moving average of scores, one value per (sequence, KV head, row), with the
// operations and the order of python/mlx_h2o/operations/composed/accumulating.py: 1 - a is computed
// in double precision, then rounded once.
#include <cmath>

#include "composed.h"

namespace mlx_h2o_c::composed {

namespace {

// The mean over the unmasked query heads of each group, and which pairs have one: [B, H, L, N].
struct GroupMean {
  Value mean;
  Value unmasked;
};

GroupMean group_mean(const AccumulateRequest& r) {
  const Shape sizes = shape_of(r.scores);
  const int heads = mlx_array_dim(r.importance, 1), group = sizes[1] / heads;
  const Value grouped =
      Value(r.scores, r.stream).reshaped({sizes[0], heads, group, sizes[2], sizes[3]});
  if (!r.masked) {
    Value mean = grouped.then(mlx_sum_axis, 2, false) / number(group);
    return {std::move(mean), {Array(), r.stream}};
  }
  const Value seen = grouped.then(mlx_greater, number(-INFINITY));
  const Value count = seen.then(mlx_sum_axis, 2, false);
  const Value sum = seen.where(grouped, number(0)).then(mlx_sum_axis, 2, false);
  return {sum / count.at_least(integer(1)), count.then(mlx_greater, integer(0))};
}

Value one_query(const AccumulateRequest& r, const GroupMean& group) {
  const Value before(r.importance, r.stream);
  const Value fresh = group.mean.then(mlx_squeeze_axis, 2).then(mlx_abs);
  const Value moved = before * number(r.decay) + fresh * number(1 - r.decay);
  Value result = before.then(mlx_isnan).where(fresh, moved);
  if (group.unmasked.empty()) return result;
  return group.unmasked.then(mlx_squeeze_axis, 2).where(result, before);
}

// The recurrence unrolled: query i of a row has the weight a^(unmasked queries after i).
Value many_queries(const AccumulateRequest& r, const GroupMean& group) {
  const Value before(r.importance, r.stream);
  const Value all = group.mean.then(mlx_equal, group.mean);  // all true: every score is finite
  const Value& unmasked = group.unmasked.empty() ? all : group.unmasked;
  const Value so_far = unmasked.as(MLX_INT32).then(mlx_cumsum, 2, false, true);
  const int last = mlx_array_dim(r.scores, 2);
  const Value count = so_far.sliced(2, last - 1, last).then(mlx_squeeze_axis, 2);
  const Value unscored = before.then(mlx_isnan);
  // (1 - a) for every query except the one that sets the first value of an unscored row.
  const Value sets =
      unscored.then(mlx_expand_dims, 2).then(mlx_logical_and, so_far.then(mlx_equal, integer(1)));
  const Value share = sets.where(number(1), number(1 - r.decay));
  const Value decay(number(r.decay), r.stream);
  const Value after = count.then(mlx_expand_dims, 2) - so_far;
  const Value weighed =
      decay.then(mlx_power, after.as(MLX_FLOAT32)) * share * group.mean.then(mlx_abs);
  const Value added = unmasked.where(weighed, number(0)).then(mlx_sum_axis, 2, false);
  const Value kept = decay.then(mlx_power, count.as(MLX_FLOAT32)) * before;
  const Value result = unscored.where(added, kept + added);
  return count.then(mlx_greater, integer(0)).where(result, before);
}

}  // namespace

Array accumulate_scores(const AccumulateRequest& request) {
  const GroupMean group = group_mean(request);
  return mlx_array_dim(request.scores, 2) == 1 ? one_query(request, group)
                                               : many_queries(request, group);
}

}  // namespace mlx_h2o_c::composed
