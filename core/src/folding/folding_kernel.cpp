#include "folding/folding_kernel.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "cpu/thread_pool.h"

namespace mlx_h2o::kernels {
namespace {

constexpr float kLeastWeight = 1e-9f;

// Some rows of a head as scaled vectors, whose distances decide which rows are folded into which.
struct Features {
  std::vector<int> slots;
  std::vector<float> vectors;  // padded with zeros to whole vectors of the widest target
  std::vector<float> squares;
};

#define MLX_H2O_SWEEPS "folding/folding_sweeps.h"
#include "cpu/simd_each_target.h"
#undef MLX_H2O_SWEEPS

// One head of a call.
struct Head {
  const FoldingArguments& a;
  int64_t batch, head;

  int64_t at(const int64_t* strides, int64_t row) const {
    return batch * strides[0] + head * strides[1] + row * strides[2];
  }
  template <typename T>
  const T* key(int row) const {
    return static_cast<const T*>(a.keys) + at(a.key_strides, row);
  }
  template <typename T>
  const T* value(int row) const {
    return static_cast<const T*>(a.values) + at(a.value_strides, row);
  }
  float bias(int row) const { return a.bias[at(a.bias_strides, row)]; }
  float mass(int row) const { return a.mass[at(a.mass_strides, row)]; }
  bool is_folded(int row) const { return !std::isnan(a.weights[at(a.weight_strides, row)]); }
  float weight(int row) const {
    const float own = a.weights[at(a.weight_strides, row)];
    return own > kLeastWeight ? own : kLeastWeight;
  }
  bool is_eligible(int row) const { return a.eligible[at(a.eligible_strides, row)]; }
  int kept(int place) const { return static_cast<int>(a.kept[at(a.kept_strides, place)]); }
};

template <typename T>
float mean_square(const Head& head, int width, const T* (Head::*row_of)(int) const) {
  double total = 0;
  for (int row = 0; row < head.a.rows; ++row) {
    const T* elements = (head.*row_of)(row);
    float square = 0;
    for (int d = 0; d < width; ++d) square += to_float(elements[d]) * to_float(elements[d]);
    total += square;
  }
  return static_cast<float>(total / head.a.rows);
}

template <typename T>
void copy_scaled(const T* from, int width, float factor, float* to) {
  for (int d = 0; d < width; ++d) to[d] = factor * to_float(from[d]);
}

// The factors that scale keys and values in these vectors.
struct Factors {
  float of_keys, of_values;
};

template <typename T>
Factors factors_of(const Head& head) {
  const FoldingArguments& a = head.a;
  const float values = mean_square<T>(head, a.value_width, &Head::value<T>);
  return {std::sqrt(mean_square<T>(head, a.width, &Head::key<T>)) / static_cast<float>(a.width),
          1 / std::sqrt(std::max(values, 1e-12f))};
}

template <typename T>
void fill(const Head& head, Factors factors, Features& rows) {
  const FoldingArguments& a = head.a;
  const int64_t width = padded(a.width + a.value_width);
  rows.vectors.assign(rows.slots.size() * static_cast<size_t>(width), 0.0f);
  for (size_t i = 0; i < rows.slots.size(); ++i) {
    float* vector = rows.vectors.data() + static_cast<int64_t>(i) * width;
    copy_scaled(head.key<T>(rows.slots[i]), a.width, factors.of_keys, vector);
    copy_scaled(head.value<T>(rows.slots[i]), a.value_width, factors.of_values, vector + a.width);
    float square = 0;
    for (int64_t d = 0; d < width; ++d) square += vector[d] * vector[d];
    rows.squares.push_back(square);
  }
}

// The weighted mean of the row at slot `to` and of others.
template <typename T>
void fold_rows(const Head& head, int width, const T* (Head::*row_of)(int) const, int to,
               const std::vector<int>& others, T* new_row) {
  std::vector<float> sums(static_cast<size_t>(width));
  float total = head.weight(to);
  copy_scaled((head.*row_of)(to), width, total, sums.data());
  for (const int other : others) {
    const T* row = (head.*row_of)(other);
    const float weight = head.weight(other);
    total += weight;
    for (int d = 0; d < width; ++d) sums[static_cast<size_t>(d)] += weight * to_float(row[d]);
  }
  for (int d = 0; d < width; ++d) new_row[d] = round_to<T>(sums[static_cast<size_t>(d)] / total);
}

template <typename T>
void fold_head(const Head& head, SimdTarget target) {
  const FoldingArguments& a = head.a;
  Features going, stayers;
  for (int row = 0, next = 0; row < a.rows; ++row) {
    if (next < a.keep && head.kept(next) == row) {
      ++next;
      if (head.is_eligible(row)) stayers.slots.push_back(row);
    } else if (static_cast<int>(going.slots.size()) < a.going()) {  // even if `kept` is wrong
      going.slots.push_back(row);
    }
  }
  std::vector<int> into = going.slots;
  if (!stayers.slots.empty()) {
    const Factors factors = factors_of<T>(head);
    fill<T>(head, factors, going);
    fill<T>(head, factors, stayers);
    std::vector<int> nearest(going.slots.size(), -1);
    std::vector<float> apart(going.slots.size());
    MLX_H2O_CALL_TARGET(target, find_nearest(going, stayers, padded(a.width + a.value_width),
                                             nearest.data(), apart.data()));
    std::vector<size_t> order;
    for (size_t i = 0; i < into.size(); ++i) {
      if (apart[i] < kInfinity && head.is_folded(going.slots[i])) order.push_back(i);
    }
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t one, size_t other) { return apart[one] < apart[other]; });
    const auto most = static_cast<size_t>(std::ceil(a.share * a.going()));
    for (size_t place = 0; place < std::min(most, order.size()); ++place) {
      const size_t i = order[place];
      into[i] = stayers.slots[static_cast<size_t>(nearest[i])];
    }
  }
  const int64_t first = (head.batch * a.heads + head.head) * a.going();
  for (size_t place = 0; place < into.size(); ++place) {
    const int to = into[place];
    std::vector<int> others;  // that are folded into this row
    for (size_t i = 0; i < into.size(); ++i) {
      if (into[i] == to && going.slots[i] != to) others.push_back(going.slots[i]);
    }
    const auto at = static_cast<int64_t>(place) + first;
    fold_rows<T>(head, a.width, &Head::key<T>, to, others,
                 static_cast<T*>(a.new_keys) + at * a.width);
    fold_rows<T>(head, a.value_width, &Head::value<T>, to, others,
                 static_cast<T*>(a.new_values) + at * a.value_width);
    float count = std::exp(head.bias(to)), mass = head.mass(to);
    for (const int other : others) {
      count += std::exp(head.bias(other));
      mass += head.mass(other);
    }
    a.into[at] = static_cast<uint32_t>(to);
    a.new_bias[at] = std::log(count);
    a.new_mass[at] = mass;
  }
}

}  // namespace

void fold(const FoldingArguments& a, SimdTarget target) {
  with_type(a.type, [&](auto zero) {
    parallel_for(int64_t{a.batch} * a.heads, [&](int64_t index) {
      fold_head<decltype(zero)>(Head{a, index / a.heads, index % a.heads}, target);
    });
  });
}

}  // namespace mlx_h2o::kernels
