#include "merging_kernel.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "half.h"
#include "key_diversity_kernel.h"
#include "selection_kernel.h"
#include "thread_pool.h"

namespace mlx_h2o::kernels {
namespace {

constexpr float kSharpness = 3;  // of the ranks in the masses
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The rows of one head that may merge, in order of slots.
struct Free {
  std::vector<int> slots;
  std::vector<float> vectors;  // in whole vectors of the widest target, padded with zeros
  std::vector<float> squares;
  std::vector<float> masses;
};

#define MLX_H2O_SWEEPS "merging_sweeps.h"
#include "simd_each_target.h"
#undef MLX_H2O_SWEEPS

// One head of a call.
struct Head {
  const MergingArguments& a;
  int64_t batch, head;

  int64_t at(const int64_t* strides, int row) const {
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
  int32_t position(int row) const { return a.positions[at(a.position_strides, row)]; }
  bool leaves(int row) const { return std::isnan(a.bias[at(a.bias_strides, row)]); }
  float count(int row) const {
    return leaves(row) ? 1.0f : std::exp(a.bias[at(a.bias_strides, row)]);
  }
  bool is_free(int row) const {
    return !leaves(row) && position(row) >= a.sink_size &&
           position(row) < a.recent_start[batch * a.recent_start_stride];
  }
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

int64_t padded_width(const MergingArguments& a) { return (a.width + a.value_width + 15) / 16 * 16; }

template <typename T>
Free free_rows(const Head& head, const float* masses) {
  const MergingArguments& a = head.a;
  const int64_t width = padded_width(a);
  const float size = static_cast<float>(a.width);
  const float of_keys = std::sqrt(mean_square<T>(head, a.width, &Head::key<T>)) / size;
  const float of_values =
      1 / std::sqrt(std::max(mean_square<T>(head, a.value_width, &Head::value<T>), 1e-12f));
  Free free;
  for (int row = 0; row < a.rows; ++row) {
    if (head.is_free(row)) free.slots.push_back(row);
  }
  free.vectors.resize(free.slots.size() * static_cast<size_t>(width), 0.0f);
  for (size_t i = 0; i < free.slots.size(); ++i) {
    const int row = free.slots[i];
    float* vector = free.vectors.data() + static_cast<int64_t>(i) * width;
    copy_scaled(head.key<T>(row), a.width, of_keys, vector);
    copy_scaled(head.value<T>(row), a.value_width, of_values, vector + a.width);
    float square = 0;
    for (int64_t d = 0; d < width; ++d) square += vector[d] * vector[d];
    free.squares.push_back(square);
    free.masses.push_back(masses[row]);
  }
  return free;
}

template <typename T>
void search(const Head& head, SimdTarget target, const float* masses, float* costs, int* partners) {
  std::fill(costs, costs + head.a.rows, kInfinity);
  for (int row = 0; row < head.a.rows; ++row) {
    partners[row] = row;
    if (head.leaves(row)) costs[row] = std::numeric_limits<float>::quiet_NaN();
  }
  const Free free = free_rows<T>(head, masses);
  std::vector<float> found(free.slots.size(), kInfinity);
  std::vector<int> with(free.slots.size(), 0);
  MLX_H2O_CALL_TARGET(target, find_partners(free, padded_width(head.a), found.data(), with.data()));
  for (size_t i = 0; i < free.slots.size(); ++i) {
    if (found[i] == kInfinity) continue;
    costs[free.slots[i]] = found[i];
    partners[free.slots[i]] = free.slots[static_cast<size_t>(with[i])];
  }
}

// new_rows[place] = the mean of the row at `into` and of those that go there, by mass.
template <typename T>
void merge_rows(const Head& head, int width, const T* (Head::*row_of)(int) const,
                const std::vector<int>& going, const std::vector<int>& into, const float* masses,
                T* new_rows) {
  std::vector<float> sums(static_cast<size_t>(width));
  for (size_t place = 0; place < going.size(); ++place) {
    const int to = into[place];
    float total = masses[to];
    copy_scaled((head.*row_of)(to), width, total, sums.data());
    for (size_t i = 0; i < going.size(); ++i) {
      if (into[i] != to || going[i] == to) continue;
      const T* row = (head.*row_of)(going[i]);
      const float mass = masses[going[i]];
      total += mass;
      for (int d = 0; d < width; ++d) sums[static_cast<size_t>(d)] += mass * to_float(row[d]);
    }
    for (int d = 0; d < width; ++d) {
      new_rows[static_cast<int64_t>(place) * width + d] =
          round_to<T>(sums[static_cast<size_t>(d)] / total);
    }
  }
}

template <typename T>
void merge_head(const Head& head, const float* masses, const int* partners) {
  const MergingArguments& a = head.a;
  const int64_t index = head.batch * a.heads + head.head;
  const uint32_t* kept = a.kept + index * a.keep;
  std::vector<int> going;
  for (int row = 0, next = 0; row < a.rows; ++row) {
    if (next < a.keep && kept[next] == static_cast<uint32_t>(row)) {
      ++next;
    } else {
      going.push_back(row);
    }
  }
  std::vector<int> follow(static_cast<size_t>(a.rows));
  for (int row = 0; row < a.rows; ++row) follow[static_cast<size_t>(row)] = row;
  for (const int row : going) follow[static_cast<size_t>(row)] = partners[row];
  std::vector<int> into;
  for (const int row : going) {  // partners lie behind, so that there is an end
    int to = row;
    while (follow[static_cast<size_t>(to)] != to) to = follow[static_cast<size_t>(to)];
    into.push_back(to);
  }
  const int64_t first = index * a.going();
  merge_rows<T>(head, a.width, &Head::key<T>, going, into, masses,
                static_cast<T*>(a.new_keys) + first * a.width);
  merge_rows<T>(head, a.value_width, &Head::value<T>, going, into, masses,
                static_cast<T*>(a.new_values) + first * a.value_width);
  for (size_t place = 0; place < going.size(); ++place) {
    const int to = into[place];
    float count = head.count(to);
    int32_t position = head.position(to);
    for (size_t i = 0; i < going.size(); ++i) {
      if (into[i] != to || going[i] == to) continue;
      count += head.count(going[i]);
      position = std::min(position, head.position(going[i]));
    }
    const auto at = static_cast<int64_t>(place) + first;
    a.into[at] = static_cast<uint32_t>(to);
    a.new_bias[at] = std::log(count);
    a.new_positions[at] = position;
  }
}

template <typename T>
void merge_all(const MergingArguments& a, SimdTarget target) {
  const int64_t heads = int64_t{a.batch} * a.heads;
  std::vector<float> masses(static_cast<size_t>(heads * a.rows)), costs(masses.size());
  std::vector<int> partners(masses.size());
  const auto of = [&](int64_t index) { return Head{a, index / a.heads, index % a.heads}; };
  std::vector<float> weights(masses.size());  // of rows in the mean key
  for (int64_t index = 0; index < heads; ++index) {
    const Head head = of(index);
    for (int row = 0; row < a.rows; ++row) {
      weights[static_cast<size_t>(index * a.rows + row)] = std::sqrt(head.count(row));
    }
  }
  KeyDiversityArguments ranks{a.batch, a.heads, a.rows,        a.width,       a.type,
                              a.keys,  {},      masses.data(), weights.data()};
  std::copy(a.key_strides, a.key_strides + 3, ranks.key_strides);
  key_diversity(ranks, target);
  parallel_for(heads, [&](int64_t index) {
    const Head head = of(index);
    float* own = masses.data() + index * a.rows;
    for (int row = 0; row < a.rows; ++row) {
      own[row] = head.count(row) * std::exp(kSharpness * own[row]);
    }
    search<T>(head, target, own, costs.data() + index * a.rows, partners.data() + index * a.rows);
  });
  SelectionArguments selection{};
  selection.batch = a.batch;
  selection.heads = a.heads;
  selection.rows = a.rows;
  selection.scores = costs.data();
  selection.score_strides[0] = int64_t{a.heads} * a.rows;
  selection.score_strides[1] = a.rows;
  selection.score_strides[2] = 1;
  selection.positions = a.positions;
  std::copy(a.position_strides, a.position_strides + 3, selection.position_strides);
  selection.sink_size = a.sink_size;
  selection.recent_start = a.recent_start;
  selection.recent_start_stride = a.recent_start_stride;
  keep_indices(selection, a.keep, a.kept);
  parallel_for(heads, [&](int64_t index) {
    merge_head<T>(of(index), masses.data() + index * a.rows, partners.data() + index * a.rows);
  });
}

}  // namespace

void mergers(const MergingArguments& arguments, SimdTarget target) {
  switch (arguments.type) {
    case ElementType::float32:
      return merge_all<float>(arguments, target);
    case ElementType::float16:
      return merge_all<Float16>(arguments, target);
    case ElementType::bfloat16:
      return merge_all<BFloat16>(arguments, target);
  }
}

}  // namespace mlx_h2o::kernels
