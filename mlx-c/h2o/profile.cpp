// Rows shared out over layers, in the arithmetic of python/mlx_h2o/lm/profile.py.
#include "mlx_h2o/c/profile.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <set>

#include "boundary.h"
#include "settings.h"

using namespace mlx_h2o_c;

namespace {

constexpr auto profile_name = "profile";
using Counts = std::vector<int64_t>;

// So many rows, each of which lowers the loss of a layer by `gain`.
struct Edge {
  double gain;
  int64_t rows;
  size_t layer;
};

template <class Number>
void check_ascending(const char* what, const Number* numbers, size_t count, double end) {
  double last = 0;
  for (size_t i = 0; i < count; ++i) {
    const auto number = static_cast<double>(numbers[i]);
    expect(number > last && number < end, profile_name, what, " hold ", number,
           ", expected numbers that ascend, above 0 and below ", end, ".");
    last = number;
  }
}

const char* checked_profile(const mlx_h2o_profile& p) {
  expect(p.loss != nullptr && p.rows != nullptr && p.shares != nullptr, profile_name,
         "loss, rows or shares are NULL, expected numbers.");
  expect(p.layers > 0 && p.row_count > 0 && p.share_count > 0, profile_name, "found ", p.layers,
         " layers, ", p.row_count, " numbers of rows and ", p.share_count,
         " shares, expected at least 1 each.");
  const float* end = p.loss + p.layers * p.row_count * p.share_count;
  const bool whole = std::all_of(p.loss, end, [](float loss) { return std::isfinite(loss); });
  expect(whole, profile_name,
         "there is no number for some layers, expected a finished calibration.");
  check_ascending("rows", p.rows, p.row_count, p.tokens);
  check_ascending("shares", p.shares, p.share_count, 1 + 1e-6);
  return known_policy(profile_name, p.policy);
}

const float* losses(const mlx_h2o_profile& p, size_t layer, size_t rows) {
  return p.loss + (layer * p.row_count + rows) * p.share_count;
}

// The edges of the lower convex hull of the losses, from `least` rows on.
std::vector<Edge> hull(const mlx_h2o_profile& p, size_t layer, int64_t least) {
  Counts rows(p.rows, p.rows + p.row_count);
  std::vector<double> best;
  for (size_t n = 0; n < p.row_count; ++n) {
    const float* all = losses(p, layer, n);
    best.push_back(std::max(*std::min_element(all, all + p.share_count), 0.0F));
  }
  rows.push_back(p.tokens);  // a whole document loses nothing
  best.push_back(0);
  std::vector<Edge> edges;
  int64_t start = least;  // below the first point as behind it
  for (size_t here = 0; here < p.row_count;) {
    const auto gain_to = [&](size_t n) {
      return (best[here] - best[n]) / static_cast<double>(rows[n] - rows[here]);
    };
    size_t next = here + 1;
    for (size_t n = next; n < rows.size(); ++n) {
      if (gain_to(n) >= gain_to(next)) next = n;
    }
    if (rows[next] > start) {
      edges.push_back({std::max(gain_to(next), 0.0), rows[next] - start, layer});
      start = rows[next];
    }
    here = next;
  }
  return edges;
}

// `rows` in proportion to the weights, whole ones, the earlier ahead where they do not divide.
void give_parts(int64_t rows, const Counts& weights, Counts& given) {
  const int64_t total = std::max<int64_t>(1, std::accumulate(weights.begin(), weights.end(), 0LL));
  int64_t sum = 0, before = 0;
  for (size_t layer = 0; layer < weights.size(); ++layer) {
    sum += weights[layer];
    const int64_t end = (sum * rows + total - 1) / total;
    given[layer] += end - before;
    before = end;
  }
}

Counts shared_rows(const mlx_h2o_profile& p, int64_t total_rows, int64_t least) {
  Counts given(p.layers, least);
  std::vector<Edge> edges;
  const bool measured = total_rows >= static_cast<int64_t>(p.layers) * p.rows[0];
  for (size_t layer = 0; layer < p.layers && measured; ++layer) {
    for (const Edge& edge : hull(p, layer, least)) edges.push_back(edge);
  }
  std::set<double, std::greater<>> gains;
  for (const Edge& edge : edges) gains.insert(edge.gain);
  const auto left = [&] { return total_rows - std::accumulate(given.begin(), given.end(), 0LL); };
  for (const double gain : gains) {
    Counts wanted(p.layers, 0);
    int64_t all = 0;
    for (const Edge& edge : edges) {
      if (edge.gain != gain) continue;
      wanted[edge.layer] += edge.rows;
      all += edge.rows;
    }
    give_parts(std::min<int64_t>(left(), all), wanted, given);
  }
  give_parts(left(), Counts(p.layers, 1), given);
  return given;
}

// The settings of a layer of so many rows: the recent share that lost least near them, and a window
// no smaller than was measured.
mlx_h2o_config settings_of(const mlx_h2o_profile& p, size_t layer, int64_t rows,
                           mlx_h2o_config config, const char* policy) {
  const auto far = [&](size_t n) {
    return std::abs(std::log(static_cast<double>(rows) / p.rows[n]));
  };
  size_t near = 0;
  for (size_t n = 1; n < p.row_count; ++n) {
    if (far(n) < far(near)) near = n;
  }
  const float* all = losses(p, layer, near);
  const double share = p.shares[std::min_element(all, all + p.share_count) - all];
  const int64_t free = rows - config.sink_size;
  const auto wanted = static_cast<int64_t>(std::nearbyint(share * static_cast<double>(free)));
  const int64_t measured = std::max<int64_t>(p.recent_size, wanted);
  const int64_t recent = std::max<int64_t>(1, std::min(free, measured));
  const bool follows = config.evict_every.has_value &&
                       config.evict_every.value == std::max(1, config.max_kv_size / 32);
  if (follows) config.evict_every = {0, false};
  config.max_kv_size = static_cast<int>(rows);
  config.heavy_size = some(free - recent);
  config.recent_size = {0, false};
  config.policy = recent < free ? policy : "window";
  return checked_settings(config);
}

}  // namespace

int mlx_h2o_profile_check(mlx_h2o_profile profile) {
  return operation(profile_name, {}, [&](auto) { checked_profile(profile); });
}

int mlx_h2o_profile_share(mlx_h2o_config* res, mlx_h2o_profile profile, int total_rows,
                          mlx_h2o_config config) {
  return operation(profile_name, {{"res", res}}, [&](const char* op) {
    const char* policy = checked_profile(profile);
    expect(config.sink_size >= 0, op, "sink_size is ", config.sink_size, ", expected 0 or more.");
    const auto layers = static_cast<int64_t>(profile.layers);
    const int64_t fewest = int64_t{config.sink_size} + 1;
    expect(total_rows >= layers * fewest, op, "found ", total_rows, " rows for ", layers,
           " layers, expected at least ", fewest, " for each.");
    // Fewer were not measured.
    const int64_t measured = std::min<int64_t>(profile.rows[0], total_rows / layers);
    const Counts rows = shared_rows(profile, total_rows, std::max(fewest, measured));
    std::vector<mlx_h2o_config> found;
    for (size_t layer = 0; layer < rows.size(); ++layer) {
      found.push_back(settings_of(profile, layer, rows[layer], config, policy));
    }
    std::copy(found.begin(), found.end(), res);
  });
}
