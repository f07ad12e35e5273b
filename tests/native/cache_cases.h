// Moving averages, key diversity and quantised rows against plain double arithmetic.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "check.h"
#include "elements.h"
#include "quantized/quantization_kernel.h"
#include "rows/accumulation_kernel.h"
#include "rows/key_diversity_kernel.h"

namespace mlx_h2o::test {

inline void test_accumulation(Random& random, int cases, Report& report) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (int i = 0; i < cases; ++i) {
    // Some calls are large enough for several threads.
    const int rows = random.one_in(10) ? random.between(500, 6000) : random.between(1, 40);
    const double decay = random.between(0, 99) / 100.0;
    kernels::AccumulationArguments a{};
    a.batch = random.between(1, 2);
    a.heads = random.between(1, 3);
    a.group = random.between(1, 4);
    a.query_count = random.between(1, 9);
    a.rows = rows;
    a.decay = kernels::Decay::of(decay);
    const int64_t query = rows + random.between(0, 2);
    set_strides(a.score_strides, query, a.query_count, a.heads * a.group);
    // Ends with the last row that may be read.
    const int64_t slack = query - rows;
    std::vector<float> scores(static_cast<size_t>(a.batch * a.score_strides[0] - slack));
    const bool masked = random.one_in(2);
    for (float& score : scores) {
      score = !masked            ? random.normal()
              : random.one_in(4) ? -std::numeric_limits<float>::infinity()
              : random.one_in(9) ? nan
                                 : random.normal();
    }
    std::vector<float> importance(static_cast<size_t>(a.batch * a.heads * rows));
    for (float& value : importance) value = random.one_in(3) ? nan : std::fabs(random.normal());
    const std::vector<float> before = importance;
    a.scores = scores.data();
    a.importance = importance.data();
    const kernels::SimdTarget target = random_target(random);
    kernels::accumulate_scores(a, target);
    for (size_t cell = 0; cell < before.size(); ++cell) {
      const auto row = static_cast<int64_t>(cell) % rows;
      const auto head = static_cast<int64_t>(cell) / rows % a.heads;
      const auto batch = static_cast<int64_t>(cell) / rows / a.heads;
      double expected = before[cell];
      for (int q = 0; q < a.query_count; ++q) {
        double sum = 0;
        int count = 0;
        for (int member = 0; member < a.group; ++member) {
          const int64_t at = batch * a.score_strides[0] +
                             (head * a.group + member) * a.score_strides[1] + q * query + row;
          const float score = scores[static_cast<size_t>(at)];
          if (!(score > -std::numeric_limits<float>::infinity())) continue;
          sum += score;
          ++count;
        }
        if (count == 0) continue;
        const double s = std::fabs(sum / count);
        expected = std::isnan(expected) ? s : decay * expected + (1 - decay) * s;
      }
      if (!near(importance[cell], expected, 1e-5)) {
        report.mismatch("importance of target %s, case %d, row %zu: found %g, expected %g",
                        kernels::target_name(target), i, cell,
                        static_cast<double>(importance[cell]), expected);
      }
    }
  }
}

inline void test_key_diversity(Random& random, int cases, Report& report) {
  for (int i = 0; i < cases; ++i) {
    kernels::KeyDiversityArguments a{};
    a.batch = 1;
    a.heads = random.between(1, 2);
    a.rows = random.one_in(10) ? random.between(1000, 2000) : random.between(1, 20);
    a.width = random.between(1, 40);
    a.type = kernels::ElementType::float32;
    const int64_t stride = a.width + random.between(0, 3);
    set_strides(a.key_strides, stride, a.rows, a.heads);
    std::vector<float> keys(static_cast<size_t>(a.heads * a.key_strides[1] - (stride - a.width)));
    for (float& value : keys) value = random.normal() + 0.5f;
    a.keys = keys.data();
    std::vector<float> found(static_cast<size_t>(a.heads * a.rows));
    a.result = found.data();
    for (kernels::SimdTarget target : kernels::kSimdTargets) {
      if (!kernels::is_supported(target)) continue;
      kernels::key_diversity(a, target);
      for (int head = 0; head < a.heads; ++head) {
        const float* first = keys.data() + head * a.key_strides[1];
        std::vector<double> norms, mean(static_cast<size_t>(a.width));
        for (int row = 0; row < a.rows; ++row) {
          double square = 0;
          for (int d = 0; d < a.width; ++d) square += std::pow(first[row * stride + d], 2.0);
          norms.push_back(std::sqrt(square));
          for (int d = 0; d < a.width; ++d) {
            mean[static_cast<size_t>(d)] += first[row * stride + d] / norms.back();
          }
        }
        double length = 0;
        for (double value : mean) length += value * value;
        if (length < 1e-3) continue;  // keys that cancel have no direction
        for (int row = 0; row < a.rows; ++row) {
          double product = 0;
          for (int d = 0; d < a.width; ++d) {
            product += first[row * stride + d] * mean[static_cast<size_t>(d)];
          }
          const double expected = -product / (norms[static_cast<size_t>(row)] * std::sqrt(length));
          const double value = found[static_cast<size_t>(head * a.rows + row)];
          if (!near(value, expected, 1e-5)) {
            report.mismatch("key diversity of target %s, case %d: found %g, expected %g",
                            kernels::target_name(target), i, value, expected);
          }
        }
      }
    }
  }
}

inline void test_quantization(Random& random, int cases, Report& report) {
  static constexpr int kBits[] = {2, 3, 4, 5, 6, 8};
  for (int i = 0; i < cases; ++i) {
    kernels::QuantizationArguments a{};
    a.batch = 1;
    a.heads = random.between(1, 2);
    // Some calls are large enough for several threads.
    const bool large = random.one_in(10);
    a.new_rows = large ? 200 : random.between(1, 2);
    a.rows = a.new_rows + random.between(1, 2);
    const int group_size = 32 << random.between(0, 2);
    const int width = group_size * random.between(1, 3);
    const int bits = random.choose(kBits);
    set_strides(a.from_strides, width, a.new_rows, a.heads);
    set_strides(a.slot_strides, 1, a.new_rows, a.heads);
    std::vector<float> from(static_cast<size_t>(a.heads * a.from_strides[1]));
    for (float& value : from) value = random.normal();
    std::vector<uint32_t> slots;
    for (int head = 0; head < a.heads; ++head) {
      const int first = random.between(0, 1);
      for (int row = 0; row < a.new_rows; ++row) {
        slots.push_back(static_cast<uint32_t>(first + row));
      }
      slots.back() = UINT32_MAX;
    }
    const int words_per_row = width * bits / 32;
    const int groups = width / group_size;
    const auto total = static_cast<size_t>(a.heads * a.rows);
    std::vector<uint32_t> words(total * static_cast<size_t>(words_per_row));
    std::vector<float> scales(total * static_cast<size_t>(groups));
    std::vector<float> biases(scales.size());
    a.from = from.data();
    a.slots = slots.data();
    a.to = {kernels::ElementType::float32, width};
    a.to.packed = {words.data(), scales.data(), biases.data(), bits, group_size};
    const kernels::SimdTarget target = random_target(random);
    kernels::quantize_rows(a, target);
    for (int head = 0; head < a.heads; ++head) {
      for (int row = 0; row < a.new_rows; ++row) {
        const uint32_t slot = std::min(slots[static_cast<size_t>(head * a.new_rows + row)],
                                       static_cast<uint32_t>(a.rows - 1));
        const size_t stored = static_cast<size_t>(head * a.rows) + slot;
        for (int d = 0; d < width; ++d) {
          const double level =
              entry(words.data() + stored * static_cast<size_t>(words_per_row), d, bits);
          const size_t group =
              stored * static_cast<size_t>(groups) + static_cast<size_t>(d / group_size);
          const float value = from[static_cast<size_t>(head * a.from_strides[1] + row * width + d)];
          const float steps = std::rint((value - biases[group]) / scales[group]);
          const float expected =
              std::min(std::max(steps, 0.0f), static_cast<float>((1 << bits) - 1));
          if (level != static_cast<double>(expected)) {
            report.mismatch("quantised value of target %s, case %d, %d bits: found %g, expected %g",
                            kernels::target_name(target), i, bits, level,
                            static_cast<double>(expected));
          }
        }
      }
    }
  }
}

}  // namespace mlx_h2o::test
