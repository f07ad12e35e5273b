// Rows that are folded, against the definition in plain double arithmetic.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "cache_cases.h"
#include "check.h"
#include "folding/folding_kernel.h"

namespace mlx_h2o::test {

// Rows [heads, rows, width] of a call, one head after the other.
struct FoldingRows {
  std::vector<float> elements;
  int rows, width;

  FoldingRows(Random& random, int heads, int row_count, int row_width)
      : elements(static_cast<size_t>(heads * row_count * row_width)),
        rows(row_count),
        width(row_width) {
    for (float& element : elements) element = random.normal();
  }

  double at(int head, int row, int d) const {
    return elements[static_cast<size_t>((head * rows + row) * width + d)];
  }
  double mean_square(int head) const {
    double sum = 0;
    for (int row = 0; row < rows; ++row) {
      for (int d = 0; d < width; ++d) sum += at(head, row, d) * at(head, row, d);
    }
    return sum / rows;
  }
  double apart(int head, int one, int other) const {
    double sum = 0;
    for (int d = 0; d < width; ++d) sum += std::pow(at(head, one, d) - at(head, other, d), 2.0);
    return sum;
  }
};

inline void test_folding(Random& random, int cases, Report& report) {
  for (int i = 0; i < cases; ++i) {
    kernels::FoldingArguments a{};
    a.batch = random.between(1, 2);
    a.heads = random.between(1, 2);
    a.rows = random.between(2, 24);
    a.width = random.between(2, 40);
    a.value_width = random.between(1, 20);
    a.keep = random.between(1, a.rows - 1);
    a.share = random.between(0, 1) == 0 ? 1 : 0.5;
    a.type = kernels::ElementType::float32;
    const int heads = a.batch * a.heads;
    const auto cells = static_cast<size_t>(heads) * static_cast<size_t>(a.rows);
    const FoldingRows keys(random, heads, a.rows, a.width);
    const FoldingRows values(random, heads, a.rows, a.value_width);
    std::vector<float> bias(cells), mass(cells), weights(cells);
    std::vector<uint8_t> eligible(cells);
    for (size_t cell = 0; cell < cells; ++cell) {
      bias[cell] = std::log(static_cast<float>(random.between(1, 5)));
      mass[cell] = std::fabs(random.normal());
      weights[cell] = random.between(0, 9) == 0 ? std::nanf("") : std::fabs(random.normal());
      eligible[cell] = random.between(0, 2) > 0 && !std::isnan(weights[cell]);
    }
    std::vector<uint32_t> kept;
    for (int head = 0; head < heads; ++head) {
      int left = a.keep;
      for (int row = 0; row < a.rows; ++row) {
        if (random.between(1, a.rows - row) > left) continue;
        kept.push_back(static_cast<uint32_t>(row));
        --left;
      }
    }
    set_strides(a.key_strides, a.width, a.rows, a.heads);
    set_strides(a.value_strides, a.value_width, a.rows, a.heads);
    for (int64_t* each : {a.bias_strides, a.mass_strides, a.weight_strides, a.eligible_strides}) {
      set_strides(each, 1, a.rows, a.heads);
    }
    set_strides(a.kept_strides, 1, a.keep, a.heads);
    a.keys = keys.elements.data();
    a.values = values.elements.data();
    a.bias = bias.data();
    a.mass = mass.data();
    a.weights = weights.data();
    a.eligible = reinterpret_cast<const bool*>(eligible.data());
    a.kept = kept.data();
    const auto gone = static_cast<size_t>(heads) * static_cast<size_t>(a.going());
    std::vector<uint32_t> into(gone);
    std::vector<float> new_keys(gone * static_cast<size_t>(a.width));
    std::vector<float> new_values(gone * static_cast<size_t>(a.value_width));
    std::vector<float> new_bias(gone), new_mass(gone);
    a.into = into.data();
    a.new_keys = new_keys.data();
    a.new_values = new_values.data();
    a.new_bias = new_bias.data();
    a.new_mass = new_mass.data();
    const kernels::SimdTarget target = random_target(random);
    kernels::fold(a, target);

    for (int head = 0; head < heads; ++head) {
      const auto cell = [&](int row) { return static_cast<size_t>(head * a.rows + row); };
      std::vector<bool> stays(static_cast<size_t>(a.rows), false);
      for (int place = 0; place < a.keep; ++place) {
        stays[kept[static_cast<size_t>(head * a.keep + place)]] = true;
      }
      std::vector<int> going;
      for (int row = 0; row < a.rows; ++row) {
        if (!stays[static_cast<size_t>(row)]) going.push_back(row);
      }
      const double of_keys = keys.mean_square(head) / std::pow(a.width, 2.0);
      const double of_values = 1 / values.mean_square(head);
      const auto apart = [&](int one, int other) {
        return of_keys * keys.apart(head, one, other) + of_values * values.apart(head, one, other);
      };
      const size_t first = static_cast<size_t>(head) * going.size();
      std::vector<int> targets;
      for (size_t place = 0; place < going.size(); ++place) {
        const int row = going[place];
        double least = std::numeric_limits<double>::infinity();
        for (int other = 0; other < a.rows && !std::isnan(weights[cell(row)]); ++other) {
          const bool open = stays[static_cast<size_t>(other)] && eligible[cell(other)] != 0;
          if (open) least = std::min(least, apart(row, other));
        }
        const auto found = static_cast<int>(into[first + place]);
        targets.push_back(found);
        const bool none =
            least == std::numeric_limits<double>::infinity() || (a.share < 1 && found == row);
        const bool open = stays[static_cast<size_t>(found)] && eligible[cell(found)] != 0;
        const bool right = none ? found == row : open && apart(row, found) <= least * (1 + 1e-4);
        if (!right) {
          report.mismatch("nearest of target %s, case %d: row %d into %d",
                          kernels::target_name(target), i, row, found);
        }
      }
      for (size_t place = 0; place < going.size(); ++place) {
        const int to = targets[place];
        double total = 0, key = 0, value = 0, count = 0, sum = 0;
        const auto add = [&](int row) {
          const float own = weights[cell(row)];
          const double weight = own > 1e-9f ? own : 1e-9f;
          total += weight;
          key += weight * keys.at(head, row, 0);
          value += weight * values.at(head, row, a.value_width - 1);
          count += std::exp(double{bias[cell(row)]});
          sum += mass[cell(row)];
        };
        add(to);
        for (size_t other = 0; other < going.size(); ++other) {
          if (targets[other] == to && going[other] != to) add(going[other]);
        }
        const size_t at = first + place;
        const double found_value = new_values[(at + 1) * static_cast<size_t>(a.value_width) - 1];
        const bool same = near(new_bias[at], std::log(count), 1e-5) &&
                          near(new_mass[at], sum, 1e-5) &&
                          near(new_keys[at * static_cast<size_t>(a.width)], key / total, 1e-4) &&
                          near(found_value, value / total, 1e-4);
        if (!same) {
          report.mismatch("folded row of target %s, case %d: bias %g, mass %g; expected %g, %g",
                          kernels::target_name(target), i, static_cast<double>(new_bias[at]),
                          static_cast<double>(new_mass[at]), std::log(count), sum);
        }
      }
    }
  }
}

}  // namespace mlx_h2o::test
