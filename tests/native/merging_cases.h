// Rows that merge, against the definition in plain double arithmetic.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "cache_cases.h"
#include "check.h"
#include "merging_kernel.h"

namespace mlx_h2o::test {

// The rows of one head, and what becomes of them.
struct MergingHead {
  std::vector<std::vector<double>> keys, values;
  std::vector<double> counts;
  std::vector<int> positions;
  std::vector<bool> leaves;  // those that go first, into none

  int rows() const { return static_cast<int>(keys.size()); }

  static double product(const std::vector<double>& one, const std::vector<double>& other) {
    return std::inner_product(one.begin(), one.end(), other.begin(), 0.0);
  }
  static double mean_square(const std::vector<std::vector<double>>& rows) {
    double sum = 0;
    for (const auto& row : rows) sum += product(row, row);
    return sum / static_cast<double>(rows.size());
  }

  std::vector<double> masses() const {
    std::vector<double> mean(keys[0].size());
    for (size_t row = 0; row < keys.size(); ++row) {
      const double scale = std::sqrt(counts[row] / product(keys[row], keys[row]));
      for (size_t d = 0; d < mean.size(); ++d) mean[d] += scale * keys[row][d];
    }
    const double length = std::sqrt(product(mean, mean));
    std::vector<double> found;
    for (size_t row = 0; row < keys.size(); ++row) {
      const double norm = std::sqrt(product(keys[row], keys[row]));
      found.push_back(counts[row] * std::exp(-3 * product(keys[row], mean) / (norm * length)));
    }
    return found;
  }

  // The cheapest merger of each row with one behind it: cost and partner, -1 for none.
  void partners(int sinks, int recent, std::vector<double>& costs, std::vector<int>& with) const {
    const std::vector<double> mass = masses();
    const double of_keys = mean_square(keys) / std::pow(keys[0].size(), 2.0);
    const double of_values = 1 / mean_square(values);
    costs.assign(keys.size(), std::numeric_limits<double>::infinity());
    with.assign(keys.size(), -1);
    const auto apart = [](const std::vector<double>& one, const std::vector<double>& other) {
      double sum = 0;
      for (size_t d = 0; d < one.size(); ++d) sum += std::pow(one[d] - other[d], 2.0);
      return sum;
    };
    for (size_t i = 0; i < keys.size(); ++i) {
      for (size_t j = i + 1; j < keys.size(); ++j) {
        const bool free = !leaves[i] && !leaves[j] &&
                          std::min(positions[i], positions[j]) >= sinks &&
                          std::max(positions[i], positions[j]) < recent;
        if (!free) continue;
        const double cost =
            std::sqrt(mass[i] * mass[j] / (mass[i] + mass[j])) *
            (of_keys * apart(keys[i], keys[j]) + of_values * apart(values[i], values[j]));
        if (cost < costs[i]) {
          costs[i] = cost;
          with[i] = static_cast<int>(j);
        }
      }
    }
    for (size_t i = 0; i < keys.size(); ++i) {
      if (leaves[i] && positions[i] >= sinks && positions[i] < recent) costs[i] = 0;
    }
  }
};

inline void test_merging(Random& random, int cases, Report& report) {
  for (int i = 0; i < cases; ++i) {
    kernels::MergingArguments a{};
    a.batch = random.between(1, 2);
    a.heads = random.between(1, 2);
    a.rows = random.between(4, 24);
    a.width = random.between(2, 40);
    a.value_width = random.between(1, 20);
    a.type = kernels::ElementType::float32;
    a.sink_size = random.between(0, 2);
    const int32_t recent = a.rows - random.between(0, 1);
    a.recent_start = &recent;
    const int free = recent - a.sink_size;
    a.keep = a.rows - random.between(1, std::max(1, free / 2));
    const int heads = a.batch * a.heads;
    const auto cells = static_cast<size_t>(heads) * static_cast<size_t>(a.rows);
    std::vector<float> keys(cells * static_cast<size_t>(a.width));
    std::vector<float> values(cells * static_cast<size_t>(a.value_width));
    std::vector<float> bias(cells);
    std::vector<int32_t> positions;
    for (float& value : keys) value = random.normal() + 0.3f;
    for (float& value : values) value = random.normal();
    for (float& value : bias) {
      value = random.between(0, 9) == 0 ? std::nanf("")
                                        : std::log(static_cast<float>(random.between(1, 5)));
    }
    for (int head = 0; head < heads; ++head) {
      std::vector<int32_t> order(static_cast<size_t>(a.rows));
      std::iota(order.begin(), order.end(), 0);
      for (int row = a.rows - 1; row > 0; --row) {
        std::swap(order[static_cast<size_t>(row)],
                  order[static_cast<size_t>(random.between(0, row))]);
      }
      positions.insert(positions.end(), order.begin(), order.end());
    }
    const auto strides = [&](int64_t* to, int64_t width) {
      to[2] = width;
      to[1] = width * a.rows;
      to[0] = to[1] * a.heads;
    };
    strides(a.key_strides, a.width);
    strides(a.value_strides, a.value_width);
    strides(a.bias_strides, 1);
    strides(a.position_strides, 1);
    a.keys = keys.data();
    a.values = values.data();
    a.bias = bias.data();
    a.positions = positions.data();
    const auto gone = static_cast<size_t>(heads) * static_cast<size_t>(a.going());
    std::vector<uint32_t> kept(cells - gone), into(gone);
    std::vector<float> new_keys(gone * static_cast<size_t>(a.width));
    std::vector<float> new_values(gone * static_cast<size_t>(a.value_width)), new_bias(gone);
    std::vector<int32_t> new_positions(gone);
    a.kept = kept.data();
    a.into = into.data();
    a.new_keys = new_keys.data();
    a.new_values = new_values.data();
    a.new_bias = new_bias.data();
    a.new_positions = new_positions.data();
    kernels::SimdTarget target;
    do {
      target = random.choose(kernels::kSimdTargets);
    } while (!kernels::is_supported(target));
    kernels::mergers(a, target);

    for (int head = 0; head < heads; ++head) {
      MergingHead rows;
      for (int row = 0; row < a.rows; ++row) {
        const auto cell = static_cast<size_t>(head * a.rows + row);
        const float* key = keys.data() + cell * static_cast<size_t>(a.width);
        const float* value = values.data() + cell * static_cast<size_t>(a.value_width);
        rows.keys.emplace_back(key, key + a.width);
        rows.values.emplace_back(value, value + a.value_width);
        rows.leaves.push_back(std::isnan(bias[cell]));
        rows.counts.push_back(std::isnan(bias[cell]) ? 1 : std::exp(double{bias[cell]}));
        rows.positions.push_back(positions[cell]);
      }
      std::vector<double> costs;
      std::vector<int> with;
      rows.partners(a.sink_size, recent, costs, with);
      std::vector<bool> stays(static_cast<size_t>(a.rows), false);
      const uint32_t* first = kept.data() + head * a.keep;
      for (int place = 0; place < a.keep; ++place) stays[first[place]] = true;
      double dearest = 0;
      double cheapest = std::numeric_limits<double>::infinity();
      for (int row = 0; row < a.rows; ++row) {
        const double cost = costs[static_cast<size_t>(row)];
        if (!stays[static_cast<size_t>(row)]) dearest = std::max(dearest, cost);
        if (stays[static_cast<size_t>(row)]) cheapest = std::min(cheapest, cost);
      }
      if (dearest > cheapest * (1 + 1e-4)) {
        report.mismatch("merged rows of target %s, case %d: cost up to %g, one that stays costs %g",
                        kernels::target_name(target), i, dearest, cheapest);
      }
      const std::vector<double> mass = rows.masses();
      std::vector<int> going;
      for (int row = 0; row < a.rows; ++row) {
        if (!stays[static_cast<size_t>(row)]) going.push_back(row);
      }
      const auto end = [&](int row) {
        while (!stays[static_cast<size_t>(row)] && with[static_cast<size_t>(row)] >= 0) {
          row = with[static_cast<size_t>(row)];
        }
        return row;
      };
      for (size_t place = 0; place < going.size(); ++place) {
        const size_t at = static_cast<size_t>(head) * going.size() + place;
        const int to = end(going[place]);
        double count = rows.counts[static_cast<size_t>(to)];
        double total = mass[static_cast<size_t>(to)];
        double key = total * rows.keys[static_cast<size_t>(to)][0];
        double value = total * rows.values[static_cast<size_t>(to)].back();
        int position = rows.positions[static_cast<size_t>(to)];
        for (const int other : going) {
          if (other == to || end(other) != to) continue;
          const auto one = static_cast<size_t>(other);
          count += rows.counts[one];
          total += mass[one];
          key += mass[one] * rows.keys[one][0];
          value += mass[one] * rows.values[one].back();
          position = std::min(position, rows.positions[one]);
        }
        const double found_value = new_values[(at + 1) * static_cast<size_t>(a.value_width) - 1];
        const bool same = into[at] == static_cast<uint32_t>(to) &&
                          near(new_bias[at], std::log(count), 1e-5) &&
                          near(new_keys[at * static_cast<size_t>(a.width)], key / total, 1e-4) &&
                          near(found_value, value / total, 1e-4) && new_positions[at] == position;
        if (!same) {
          report.mismatch(
              "merger of target %s, case %d: row %d into %u, bias %g, position %d; "
              "expected into %d, %g, %d",
              kernels::target_name(target), i, going[place], into[at],
              static_cast<double>(new_bias[at]), new_positions[at], to, std::log(count), position);
        }
      }
    }
  }
}

}  // namespace mlx_h2o::test
