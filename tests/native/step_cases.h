// What a decode step does beside attention: scores taken in block by block, the worst row found,
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

/// The row that a sort by the whole order puts last; and blocks in any order make one importance.
inline void test_worst_row(Random& random, int cases, Report& report) {
  static constexpr float kZeros[] = {0.0f, -0.0f};
  for (int i = 0; i < cases; ++i) {
    const int rows = random.between(1, 400);
    const int block_rows = random.between(1, 200);
    const kernels::SimdTarget target = random_target(random);
    const int recent = random.between(0, 2 * rows);
    kernels::Zones zones{random.between(0, 5)};
    if (random.one_in(2)) zones.recent_start = recent;
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

    const int blocks = (rows + block_rows - 1) / block_rows;
    const int turn = random.between(0, blocks - 1);
    for (int n = 0; n < blocks; ++n) {
      kernels::ScoredBlock block;
      const int first = (n + turn) % blocks * block_rows;
      block.count = std::min(block_rows, rows - first);
      block.group = group;
      block.scores = scores.data() + first;
      block.stride = rows;
      block.decay = whole.decay;
      block.importance = importance.data() + first;
      kernels::accumulate_block(block, target);
    }
    if (std::memcmp(importance.data(), expected.data(), importance.size() * sizeof(float)) != 0) {
      report.mismatch("importance by blocks of target %s, case %d", kernels::target_name(target),
                      i);
    }
    const kernels::Worst found =
        kernels::find_worst(importance.data(), positions.data(), rows, zones, target);
    const auto order = retention_order(importance.data(), positions.data(), rows, zones);
    if (found.slot != order.back()) {
      report.mismatch("worst row of target %s, case %d, N=%d: found %u, expected %u",
                      kernels::target_name(target), i, rows, found.slot, order.back());
    }
  }
}

/// A row is written where it should be, at the position of its sequence.
inline void test_row_writing(Random& random, int cases, Report& report) {
  static constexpr int kBits[] = {2, 3, 4, 5, 6, 8};
  static constexpr ElementType kTypes[] = {ElementType::float32, ElementType::float16,
                                           ElementType::bfloat16};
  for (int i = 0; i < cases; ++i) {
    const bool packed = random.one_in(2);
    const ElementType type = random.choose(kTypes);
    const kernels::SimdTarget target = random_target(random);
    const int batch = random.between(1, 2);
    const int heads = random.between(1, 3);
    const int rows = random.between(1, 5);
    const int bits = random.choose(kBits);
    const int group_size = 32 * random.between(1, 2);
    const int width = packed ? group_size * random.between(1, 2) : random.between(1, 40);
    const int all_heads = batch * heads;
    const auto total = static_cast<size_t>(all_heads * rows);
    Elements dense(type, total * static_cast<size_t>(width));
    Elements scales(type, total * static_cast<size_t>(packed ? width / group_size : 1));
    Elements biases(type, scales.count());
    std::vector<uint32_t> words(
        total * static_cast<size_t>(width) * static_cast<size_t>(bits) / 32 + 1);
    for (size_t n = 0; n < dense.count(); ++n) dense.set(n, random.normal());
    for (size_t n = 0; n < scales.count(); ++n) scales.set(n, 0.25f);
    for (uint32_t& word : words) word = static_cast<uint32_t>(random.between(0, 1 << 30));
    words.resize(words.size() - 1);
    Elements fresh(type, static_cast<size_t>(all_heads * width));
    for (size_t n = 0; n < fresh.count(); ++n) fresh.set(n, random.normal());

    kernels::RowArguments a{};
    a.batch = batch;
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
    a.new_key_strides[0] = a.new_value_strides[0] = heads * width;
    a.new_key_strides[1] = a.new_value_strides[1] = width;
    std::vector<uint32_t> slots;
    for (int head = 0; head < all_heads; ++head) {
      slots.push_back(static_cast<uint32_t>(random.between(0, rows - 1)));
    }
    a.slots = slots.data();
    const std::vector<int32_t> places{7, 11};
    a.position = places.data();
    a.position_stride = random.between(0, 1);
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
    kernels::write_rows(a, target);
    const float steps = packed ? static_cast<float>((1 << bits) - 1) : 0;
    for (int head = 0; head < all_heads; ++head) {
      const uint32_t slot = slots[static_cast<size_t>(head)];
      const int32_t place = places[static_cast<size_t>(head / heads * a.position_stride)];
      const size_t row = static_cast<size_t>(head * rows) + slot;
      const std::vector<float> found = read(row);
      for (size_t d = 0; d < found.size(); ++d) {
        const float wanted = fresh.read(static_cast<size_t>(head) * found.size() + d);
        const float tolerance = packed ? 8 / steps + 0.1f : 0;  // of values within [-4, 4] or so
        if (std::abs(found[d] - wanted) <= tolerance) continue;
        report.mismatch("row written, case %d, %d bits: found %g, expected %g", i, bits,
                        static_cast<double>(found[d]), static_cast<double>(wanted));
      }
      if (!std::isnan(importance[row]) || positions[row] != place) {
        report.mismatch("row written, case %d: position %d", i, positions[row]);
      }
    }
    const auto unscored = std::count_if(importance.begin(), importance.end(),
                                        [](float value) { return std::isnan(value); });
    if (unscored != all_heads)
      report.mismatch("rows written, case %d: %ld", i, static_cast<long>(unscored));
  }
}

}  // namespace mlx_h2o::test
