// The definition of rows that merge in plain MLX operations, in those and in the order of
// python/mlx_h2o/operations/merging.py. All arithmetic is float32.
#include <algorithm>
#include <cmath>

#include "backend.h"
#include "composed.h"

namespace mlx_h2o_c::composed {

namespace {

constexpr float mass_sharpness = 3;  // of the ranks in the masses
constexpr int pairs_together = 1 << 19;
constexpr uint32_t above_every_slot = UINT32_MAX;

Value float_rows(mlx_array rows, mlx_stream s) { return Value(rows, s).as(MLX_FLOAT32); }

Value mean_square(const Value& rows) {
  return rows.then(mlx_square).then(mlx_sum_axis, 3, true).then(mlx_mean_axis, 2, true);
}

// Vectors [B, H, N, D + Dv] whose squared distance is what a merger changes.
Value merger_features(const MergeRequest& r) {
  const Value keys = float_rows(r.keys, r.stream), values = float_rows(r.values, r.stream);
  const auto size = static_cast<float>(mlx_array_dim(r.keys, 3));
  const Value of_keys = (mean_square(keys) / number(size * size)).then(mlx_sqrt);
  const Value of_values = mean_square(values).at_least(number(1e-12F)).then(mlx_rsqrt);
  const ArrayVector both = vector_of({keys * of_keys, values * of_values});
  return {call(mlx_concatenate_axis, both, 3, r.stream), r.stream};
}

// Of each row with one in a later slot: [B, H, N].
struct Cheapest {
  Value costs;  // infinity where none may merge
  Value slots;
};

Cheapest cheapest_mergers(const MergeRequest& r, const Value& mass, const Value& leaves) {
  const mlx_stream s = r.stream;
  const Value positions(r.positions, s), vectors = merger_features(r);
  const Value free =
      positions.then(mlx_greater_equal, integer(r.sink_size))
          .then(mlx_logical_and, positions.then(mlx_less, per_sequence(r.recent_start, s)))
          .then(mlx_logical_and, leaves.then(mlx_logical_not));
  const Value squares = vectors.then(mlx_square).then(mlx_sum_axis, 3, false);
  const int rows = mlx_array_dim(r.keys, 2), together = std::max(16, pairs_together / rows);
  std::vector<Array> costs, slots;
  for (int start = 0; start < rows; start += together) {
    const int stop = std::min(start + together, rows);
    const auto here = [&](const Value& all) {
      return all.sliced(2, start, stop).then(mlx_expand_dims, 3);
    };
    const auto later = [&](const Value& all) {
      return all.sliced(2, start, rows).then(mlx_expand_dims, 2);
    };
    const Value products =
        vectors.sliced(2, start, stop)
            .then(mlx_matmul, vectors.sliced(2, start, rows).then(mlx_swapaxes, 2, 3));
    const Value apart = here(squares) + later(squares) - products * number(2);
    const Value one = here(mass), other = later(mass);
    Value cost = (one * other / (one + other)).then(mlx_sqrt) * apart.at_least(number(0));
    if (r.shared) {
      cost = {broadcast(cost.then(mlx_mean_axis, 1, true), shape_of(cost), s), s};
    }
    const Value first = Value(range(0, stop - start, MLX_INT32, s), s).reshaped({stop - start, 1});
    const Value pair = Value(range(0, rows - start, MLX_INT32, s), s)
                           .then(mlx_greater, first)
                           .then(mlx_logical_and, here(free))
                           .then(mlx_logical_and, later(free));
    cost = pair.where(cost, number(INFINITY));
    costs.push_back(cost.then(mlx_min_axis, 3, false));
    const Array before = scalar(static_cast<uint32_t>(start), MLX_UINT32);
    slots.push_back(cost.then(mlx_argmin_axis, 3, false) + before);
  }
  const auto joined = [&](const std::vector<Array>& parts) {
    const ArrayVector all = vector_of(std::vector<mlx_array>(parts.begin(), parts.end()));
    return Value(call(mlx_concatenate_axis, all, 2, s), s);
  };
  return {joined(costs), joined(slots)};
}

// The rows at `at` [B, H, n].
Value at_slots(const Value& rows, const Value& at) {
  if (mlx_array_ndim(rows) == 3) return rows.then(mlx_take_along_axis, at, 2);
  Shape shape = shape_of(rows);
  shape[2] = mlx_array_dim(at, 2);
  const Value wide = at.then(mlx_expand_dims, 3).then(mlx_broadcast_to, shape.data(), shape.size());
  return rows.then(mlx_take_along_axis, wide, 2);
}

// Where the rows that go merge into: slots that stay. A row whose partner goes too follows it; one
// without a partner is its own target.
Value merger_targets(const Cheapest& found, const Value& all, const Value& going) {
  const Value partners = found.costs.then(mlx_equal, number(INFINITY)).where(all, found.slots);
  Value follow = all.then(mlx_put_along_axis, going, at_slots(partners, going), 2);
  for (int left = mlx_array_dim(going, 2); left > 0; left /= 2) follow = at_slots(follow, follow);
  return at_slots(follow, going);
}

}  // namespace

Merged mergers(const MergeRequest& r) {
  const mlx_stream s = r.stream;
  const int batch = mlx_array_dim(r.keys, 0), heads = mlx_array_dim(r.keys, 1);
  const int rows = mlx_array_dim(r.keys, 2), going_rows = rows - r.keep;
  const Value bias(r.bias, s), positions(r.positions, s), leaves = bias.then(mlx_isnan);
  const Value counts = leaves.where(number(1), bias.then(mlx_exp));
  const Value roots = counts.then(mlx_sqrt), ranks = diversity(r.keys, &roots, s);
  const Value mass = counts * (ranks * number(mass_sharpness)).then(mlx_exp);
  const Cheapest cheapest = cheapest_mergers(r, mass, leaves);
  const Value order = leaves.where(number(NAN), cheapest.costs);
  Array kept = serve("mergers", &Backend::keep_indices,
                     RetentionRequest{order, r.positions, batch, heads, rows, going_rows,
                                      r.sink_size, r.recent_start, s});
  const Value all(broadcast(range(0, rows, MLX_UINT32, s), {batch, heads, rows}, s), s);
  const Value going = all.then(mlx_put_along_axis, kept, scalar(above_every_slot, MLX_UINT32), 2)
                          .then(mlx_sort_axis, 2)
                          .sliced(2, 0, going_rows);
  Value into = merger_targets(cheapest, all, going);

  // [B, H, r, r]: whether a row goes to this target.
  const Value stays = into.then(mlx_not_equal, going).then(mlx_expand_dims, 2);
  const Value meets = into.then(mlx_expand_dims, 3)
                          .then(mlx_equal, into.then(mlx_expand_dims, 2))
                          .then(mlx_logical_and, stays);
  const Value same = meets.as(MLX_FLOAT32);
  const auto summed = [&](const Value& of_going) { return same.then(mlx_matmul, of_going); };
  const Value there = at_slots(mass, into).then(mlx_expand_dims, 3);
  const Value here = at_slots(mass, going).then(mlx_expand_dims, 3);
  const auto mean = [&](mlx_array given) {
    const Value all_rows(given, s);
    const Value sum = there * at_slots(all_rows, into) + summed(here * at_slots(all_rows, going));
    return (sum / (there + summed(here))).as(dtype_of(given));
  };
  const Value added = summed(at_slots(counts, going).then(mlx_expand_dims, 3));
  const Value gone =
      meets.where(at_slots(positions, going).then(mlx_expand_dims, 2), integer(INT32_MAX));
  return {std::move(kept),
          copied(into),
          mean(r.keys),
          mean(r.values),
          (at_slots(counts, into) + added.then(mlx_squeeze_axis, 3)).then(mlx_log),
          at_slots(positions, into).then(mlx_minimum, gone.then(mlx_min_axis, 3, false))};
}

}  // namespace mlx_h2o_c::composed
