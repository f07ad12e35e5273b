// What a decode step does beside attention: scores taken in and the worst row found block by block,
// and one row of each head written over.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "accumulation_kernel.h"
#include "check.h"
#include "elements.h"
#include "row_kernel.h"
#include "selection_cases.h"

namespace mlx_h2o::test {

inline kernels::SimdTarget random_target(Random& random) {
  for (;;) {
    const kernels::SimdTarget target = random.choose(kernels::kSimdTargets);
    if (kernels::is_supported(target)) return target;
  }
}

/// Blocks in any order join to the row that a sort by the whole order puts last.
inline void test_worst_row(Random& random, int cases, Report& report) {
  static constexpr float kZeros[] = {0.0f, -0.0f};
  for (int i = 0; i < cases; ++i) {
    const int rows = random.between(1, 400);
    const int block_rows = random.between(1, 200);
    const kernels::SimdTarget target = random_target(random);
    const int recent = random.between(0, 2 * rows);
    const auto zones = kernels::Zones::of(
        random.between(0, 5), random.one_in(2) ? std::optional<int>(recent) : std::nullopt);
    std::vector<float> importance;
    std::vector<float> scores;
    std::vector<int32_t> positions;
    const int group = random.between(1, 9);
    // What goes first is often not there, or nothing else would ever be the worst.
    const int padding = random.one_in(2) ? 60 : 100'000;
    const int unscored = random.one_in(2) ? 3 : 100'000;
    const int spread = random.one_in(2) ? 2 : 0;  // 0: all positions are among a few
    for (int row = 0; row < rows; ++row) {
      importance.push_back(random.one_in(unscored) ? std::numeric_limits<float>::quiet_NaN()
                           : random.one_in(2)      ? random.choose(kZeros)
                                                   : std::fabs(random.normal()));
      positions.push_back(random.one_in(padding) ? -random.between(1, 3)
                                                 : spread * row + random.between(0, 9));
    }
    for (size_t n = positions.size() - 1; n > 0; --n) {
      std::swap(positions[n],
                positions[static_cast<size_t>(random.between(0, static_cast<int>(n)))]);
    }
    for (int n = 0; n < rows * group; ++n) {
      scores.push_back(random.one_in(3) ? -std::numeric_limits<float>::infinity()
                                        : static_cast<float>(random.between(-2, 2)));
    }
    std::vector<float> expected = importance;
    kernels::AccumulationArguments whole{};
    whole.batch = whole.heads = whole.query_count = 1;
    whole.group = group;
    whole.rows = rows;
    whole.scores = scores.data();
    whole.score_strides[1] = rows;
    whole.importance = expected.data();
    whole.decay = kernels::Decay::of(0.9);
    kernels::accumulate_scores(whole, target);

    kernels::Worst found;
    const int blocks = (rows + block_rows - 1) / block_rows;
    const int turn = random.between(0, blocks - 1);
    for (int n = 0; n < blocks; ++n) {
      kernels::ScoredBlock block;
      block.first = (n + turn) % blocks * block_rows;
      block.count = std::min(block_rows, rows - block.first);
      block.group = group;
      block.scores = scores.data() + block.first;
      block.stride = rows;
      block.decay = whole.decay;
      block.importance = importance.data() + block.first;
      block.positions = positions.data() + block.first;
      block.zones = zones;
      kernels::Worst own;
      kernels::accumulate_block(block, target, own);
      found.join(own);
    }
    if (std::memcmp(importance.data(), expected.data(), importance.size() * sizeof(float)) != 0) {
      report.mismatch("importance by blocks of target %s, case %d", kernels::target_name(target),
                      i);
    }
    const auto order = retention_order(importance.data(), positions.data(), rows, zones.sink_size,
                                       zones.recent_start == std::numeric_limits<int32_t>::max()
                                           ? std::nullopt
                                           : std::optional<int>(recent));
    if (found.slot != order.back()) {
      report.mismatch("worst row of target %s, case %d, N=%d: found %u, expected %u",
                      kernels::target_name(target), i, rows, found.slot, order.back());
    }
  }
}

/// A row is written where it should be, and the statistics follow what is stored.
inline void test_row_writing(Random& random, int cases, Report& report) {
  static constexpr int kBits[] = {2, 3, 4, 5, 6, 8};
  static constexpr ElementType kTypes[] = {ElementType::float32, ElementType::float16,
                                           ElementType::bfloat16};
  for (int i = 0; i < cases; ++i) {
    const bool packed = random.one_in(2);
    const ElementType type = random.choose(kTypes);
    const kernels::SimdTarget target = random_target(random);
    const int heads = random.between(1, 3);
    const int rows = random.between(1, 5);
    const int bits = random.choose(kBits);
    const int group_size = 32 * random.between(1, 2);
    const int width = packed ? group_size * random.between(1, 2) : random.between(1, 40);
    const auto total = static_cast<size_t>(heads * rows);
    Elements dense(type, total * static_cast<size_t>(width));
    Elements scales(type, total * static_cast<size_t>(packed ? width / group_size : 1));
    Elements biases(type, scales.count());
    std::vector<uint32_t> words(
        total * static_cast<size_t>(width) * static_cast<size_t>(bits) / 32 + 1);
    for (size_t n = 0; n < dense.count(); ++n) dense.set(n, random.normal());
    for (size_t n = 0; n < scales.count(); ++n) scales.set(n, 0.25f);
    for (uint32_t& word : words) word = static_cast<uint32_t>(random.between(0, 1 << 30));
    words.resize(words.size() - 1);
    Elements fresh(type, static_cast<size_t>(heads * width));
    for (size_t n = 0; n < fresh.count(); ++n) fresh.set(n, random.normal());

    kernels::RowArguments a{};
    a.batch = 1;
    a.heads = heads;
    a.rows = rows;
    a.keys = {type, width};
    if (packed) {
      a.keys.packed = {words.data(), scales.data(), biases.data(), bits, group_size};
    } else {
      a.keys.dense = dense.data();
    }
    Elements values(type, total);
    a.values = {type, 1};
    a.values.dense = values.data();
    a.new_keys = fresh.data();
    a.new_values = fresh.data();
    a.new_key_strides[1] = a.new_value_strides[1] = width;
    std::vector<uint32_t> slots;
    for (int head = 0; head < heads; ++head) {
      slots.push_back(random.one_in(4) ? UINT32_MAX
                                       : static_cast<uint32_t>(random.between(0, rows - 1)));
    }
    a.slots = slots.data();
    a.slot_strides[1] = 1;
    a.position = 7;
    std::vector<float> importance(total, 1.0f);
    std::vector<int32_t> positions(total, 0);
    a.importance = importance.data();
    a.positions = positions.data();
    const auto read = [&](size_t row) {
      std::vector<float> result(static_cast<size_t>(width));
      if (packed) {
        kernels::dequantize_row(
            type, kernels::packed_row(type, a.keys.packed, width, static_cast<int64_t>(row)), width,
            result.data());
      }
      for (size_t d = 0; !packed && d < result.size(); ++d) {
        result[d] = dense.read(row * result.size() + d);
      }
      return result;
    };
    const auto inverse_norm = [](const std::vector<float>& row) {
      double squares = 0;
      for (float value : row) squares += static_cast<double>(value) * static_cast<double>(value);
      return 1 / std::max(std::sqrt(squares), 1e-12);
    };
    const auto statistics = [&](std::vector<float>& sums, std::vector<float>& norms) {
      sums.assign(static_cast<size_t>(heads * width), 0.0f);
      norms.clear();
      for (size_t row = 0; row < total; ++row) {
        const std::vector<float> key = read(row);
        norms.push_back(static_cast<float>(inverse_norm(key)));
        const size_t head = row / static_cast<size_t>(rows);
        for (size_t d = 0; d < key.size(); ++d) sums[head * key.size() + d] += key[d] * norms[row];
      }
    };
    std::vector<float> sums, norms, expected_sums, expected_norms;
    statistics(sums, norms);
    a.key_sum = sums.data();
    a.inverse_norms = norms.data();
    kernels::write_rows(a, target);
    statistics(expected_sums, expected_norms);
    for (size_t n = 0; n < sums.size(); ++n) {
      if (std::abs(sums[n] - expected_sums[n]) <= 1e-4f) continue;
      report.mismatch("key sum of case %d: found %g, expected %g", i, static_cast<double>(sums[n]),
                      static_cast<double>(expected_sums[n]));
    }
    const float steps = packed ? static_cast<float>((1 << bits) - 1) : 0;
    for (int head = 0; head < heads; ++head) {
      const auto slot = std::min(slots[static_cast<size_t>(head)], static_cast<uint32_t>(rows - 1));
      const size_t row = static_cast<size_t>(head * rows) + slot;
      const std::vector<float> found = read(row);
      for (size_t d = 0; d < found.size(); ++d) {
        const float wanted = fresh.read(static_cast<size_t>(head) * found.size() + d);
        const float tolerance = packed ? 8 / steps + 0.1f : 0;  // of values within [-4, 4] or so
        if (std::abs(found[d] - wanted) <= tolerance) continue;
        report.mismatch("row written, case %d, %d bits: found %g, expected %g", i, bits,
                        static_cast<double>(found[d]), static_cast<double>(wanted));
      }
      if (!std::isnan(importance[row]) || positions[row] != 7) {
        report.mismatch("row written, case %d: position %d", i, positions[row]);
      }
      if (std::abs(norms[row] - expected_norms[row]) > 1e-4f * expected_norms[row]) {
        report.mismatch("inverse norm of case %d", i);
      }
    }
    const auto unscored = std::count_if(importance.begin(), importance.end(),
                                        [](float value) { return std::isnan(value); });
    if (unscored != heads)
      report.mismatch("rows written, case %d: %ld", i, static_cast<long>(unscored));
  }
}

}  // namespace mlx_h2o::test
