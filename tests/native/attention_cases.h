// Random attention calls against a float64 reference, on every SIMD target of the machine.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "attention/attention_kernel.h"
#include "cache_cases.h"
#include "check.h"
#include "elements.h"
#include "mlx_h2o/threads.h"
#include "stored_block.h"

namespace mlx_h2o::test {

using kernels::AttentionArguments;
using kernels::SimdTarget;

/// One random call with everything that it points to.
class AttentionCase {
 public:
  AttentionCase(Random& random, ElementType type)
      : a_(sizes(random, type)),
        queries_(random, type, a_.batch, a_.query_heads, a_.query_count, a_.width),
        keys_(random, type, a_.batch, a_.kv_heads, a_.key_count, a_.width, a_.key_packing),
        values_(random, type, a_.batch, a_.kv_heads, a_.key_count, a_.value_width,
                a_.value_packing),
        mask_(ElementType::float32, 0) {
    std::copy_n(queries_.strides, 3, a_.query_strides);
    std::copy_n(keys_.strides(), 3, a_.key_strides);
    std::copy_n(values_.strides(), 3, a_.value_strides);
    a_.queries = queries_.elements.data();
    a_.keys = keys_.data();
    a_.values = values_.data();
    a_.key_packing = keys_.packing();
    a_.value_packing = values_.packing();
    a_.scale = 1 / std::sqrt(static_cast<float>(a_.width));
    // The levels of packed keys reach 2^bits: logits as of dense ones.
    if (a_.key_packing.bits != 0) a_.scale /= static_cast<float>(1 << a_.key_packing.bits);
    if (a_.key_packing.codes != nullptr) a_.scale = 1;  // of rows of about length 1
    a_.causal = random.one_in(3);
    if (!a_.causal) make_mask(random);
    if (random.one_in(3)) {
      for (int h = 0; h < a_.query_heads; ++h) {
        sinks_.push_back(random.one_in(5) ? -std::numeric_limits<float>::infinity()
                                          : 2 * random.normal());
      }
      a_.sinks = sinks_.data();
    }
    // By numbers of its own: whether there is a bias changes no other draw.
    Random others(static_cast<unsigned>(1009 * a_.key_count + a_.width));
    if (others.one_in(3)) make_row_bias(others);
    // What no query sees may hold anything.
    if (a_.sparse_v_threshold > 0 || !random.one_in(4)) return;
    for (int head = 0; head < a_.batch * a_.kv_heads; ++head) {
      values_.spoil(head / a_.kv_heads, head % a_.kv_heads, random.between(0, a_.key_count - 1),
                    random.between(0, a_.value_width - 1));
    }
  }

  void check(SimdTarget target, Report& report);
  /// The step of a cache: scores that nobody keeps go into the average.
  void check_step(Random& random, SimdTarget target, Report& report);

 private:
  static AttentionArguments sizes(Random& random, ElementType type);
  static void pack(Random& random, AttentionArguments& a);
  static void code(Random& random, kernels::Packing& packing, int& width, uint32_t seed);
  void make_mask(Random& random);
  void make_row_bias(Random& random);
  /// Bias of a pair, -inf where it is masked: by the mask, and by the bias of its row too.
  double mask_bias(int b, int h, int query, int key) const;
  double bias(int b, int h, int query, int key) const;
  struct Dot {
    double sum, magnitude;  // of the terms, and of what they are without their signs
  };
  Dot dot(const double* query, const double* key) const {
    Dot result{0, 0};
    for (int d = 0; d < a_.width; ++d) {
      const double term = query[d] * key[d];
      result.sum += term;
      result.magnitude += std::abs(term);
    }
    return result;
  }
  double size_of(const double* query) const {
    double result = 0;
    for (int d = 0; d < a_.width; ++d) result += std::abs(query[d]);
    return result;
  }
  void check_threads(SimdTarget target, Report& report, const Elements& out,
                     std::vector<float>& workspace);
  void expect(SimdTarget target, Report& report, const char* what, int b, int h, int query,
              int index, double found, double expected, double tolerance) const;

  AttentionArguments a_;
  Block queries_;
  StoredBlock keys_, values_;
  Elements mask_;
  std::vector<unsigned char> allowed_;
  std::vector<float> sinks_, row_bias_;
};

inline AttentionArguments AttentionCase::sizes(Random& random, ElementType type) {
  static constexpr int kKeyCounts[] = {1, 2, 3, 7, 31, 32, 33, 63, 64, 65, 127, 128, 129, 300};
  static constexpr int kWidths[] = {1, 3, 4, 5, 8, 15, 16, 17, 32, 33, 64, 80, 96, 128, 192, 576};
  AttentionArguments a{};
  a.type = type;
  a.batch = random.between(1, 2);
  a.kv_heads = random.between(1, 3);
  a.query_heads = a.kv_heads * (random.one_in(4) ? random.between(1, 16) : random.between(1, 4));
  a.query_count = random.one_in(2) ? 1 : random.between(1, 16);
  a.key_count = random.one_in(20)   ? random.between(1023, 1025)
                : random.one_in(20) ? random.between(500, 2200)
                                    : random.choose(kKeyCounts);
  if (a.key_count > 400) {
    // Many rows take few queries, or they take all the time.
    a.query_heads = a.kv_heads * random.between(1, 4);
    a.query_count = random.one_in(2) ? 1 : random.between(1, 4);
  }
  a.width = random.choose(kWidths);
  a.value_width = random.choose(kWidths);
  // More than 256 (head, query) rows of a KV head; their logits come in blocks of 128 keys.
  if (random.one_in(40)) {
    a.batch = 1;
    a.query_heads = a.kv_heads * random.between(1, 2);
    a.query_count = random.between(250, 300);
    a.key_count = random.between(1, 400);
    a.width = a.value_width = 16;
  }
  if (random.one_in(3)) a.sparse_v_threshold = random.choose({1e-6f, 1e-3f, 0.02f, 0.5f});
  a.return_scores = !random.one_in(3);
  if (random.one_in(2)) pack(random, a);
  // Thresholds about the mean weight: long lists of wanted keys, with gaps.
  if (random.one_in(10)) {
    a.query_count = 1;
    a.key_count = random.between(65, 700);
    a.sparse_v_threshold =
        0.3f * static_cast<float>(random.between(1, 4)) / static_cast<float>(a.key_count);
  }
  return a;
}

inline void AttentionCase::pack(Random& random, AttentionArguments& a) {
  a.key_packing.type = a.value_packing.type = random.choose(kElementTypes);
  a.key_packing.group_size = a.value_packing.group_size = random.choose<int>({32, 64, 128});
  a.key_packing.bits = random.choose<int>({2, 3, 4, 5, 6, 8, 4, 8});
  a.value_packing.bits = random.choose<int>({2, 3, 4, 5, 6, 8, 4, 8});
  a.width = a.key_packing.group_size * random.between(1, 3);
  a.value_width = a.value_packing.group_size * random.between(1, 3);
  // By numbers of its own: codes change no other draw.
  Random others(static_cast<unsigned>(911 * a.width + 13 * a.value_width + a.key_packing.bits));
  if (others.one_in(3)) code(others, a.key_packing, a.width, kernels::kKeySeed);
  if (others.one_in(3)) code(others, a.value_packing, a.value_width, kernels::kValueSeed);
}

inline void AttentionCase::code(Random& random, kernels::Packing& packing, int& width,
                                uint32_t seed) {
  width = 32 << random.between(0, 3);
  packing.type = ElementType::float32;
  packing.group_size = width;
  packing.bits = random.between(2, 4);
  packing.codes = &kernels::codebook(width, packing.bits, seed);
}

inline void AttentionCase::make_mask(Random& random) {
  const int kind = random.between(0, 4);  // none, boolean, or one of the types of elements
  if (kind == 0) return;
  const int sizes[4] = {a_.batch, a_.query_heads, a_.query_count, a_.key_count};
  int64_t count = 1;
  for (int axis = 3; axis >= 0; --axis) {
    if (random.one_in(3)) continue;  // broadcast: stride 0
    a_.mask_strides[axis] = count;
    count *= sizes[axis];
  }
  const auto total = static_cast<size_t>(count);
  const int share = random.choose<int>({2, 5, 1});  // 1 in `share` pairs is masked
  a_.mask_is_boolean = kind == 1;
  if (a_.mask_is_boolean) {
    for (size_t i = 0; i < total; ++i) allowed_.push_back(random.one_in(share) ? 0 : 1);
    a_.mask = allowed_.data();
    return;
  }
  a_.mask_type = kElementTypes[kind - 2];
  const float lowest = a_.mask_type == ElementType::float16    ? -65504.0f
                       : a_.mask_type == ElementType::bfloat16 ? -0x1.fep127f
                                                               : -std::numeric_limits<float>::max();
  a_.mask_threshold = lowest / 2;
  mask_ = Elements(a_.mask_type, total);
  const bool with_nan = random.one_in(5);
  for (size_t i = 0; i < total; ++i) {
    const float masked = random.one_in(2) ? lowest : -std::numeric_limits<float>::infinity();
    mask_.set(i, random.one_in(share) ? masked : random.normal());
    if (with_nan && random.one_in(50)) mask_.set(i, std::numeric_limits<float>::quiet_NaN());
  }
  a_.mask = mask_.data();
}

inline void AttentionCase::make_row_bias(Random& random) {
  const int room = a_.key_count + random.between(0, 3);  // a slice of something wider
  a_.row_bias_strides[0] = int64_t{a_.kv_heads} * room;
  a_.row_bias_strides[1] = room;
  const int share = random.choose<int>({2, 5, 1});  // 1 in `share` rows is masked
  const bool with_nan = random.one_in(3);
  for (int i = 0; i < a_.batch * a_.kv_heads * room; ++i) {
    const float masked = random.one_in(2) ? std::numeric_limits<float>::lowest()
                                          : -std::numeric_limits<float>::infinity();
    row_bias_.push_back(random.one_in(share) ? masked : random.normal());
    if (with_nan && random.one_in(20)) row_bias_.back() = std::numeric_limits<float>::quiet_NaN();
  }
  // What is behind the last row may not be read.
  row_bias_.resize(row_bias_.size() - static_cast<size_t>(room - a_.key_count));
  row_bias_.shrink_to_fit();
  a_.row_bias = row_bias_.data();
}

inline double AttentionCase::bias(int b, int h, int query, int key) const {
  const double mask = mask_bias(b, h, query, key);
  if (mask == -kInf || row_bias_.empty()) return mask;
  const float own = a_.row_bias[b * a_.row_bias_strides[0] +
                                h / (a_.query_heads / a_.kv_heads) * a_.row_bias_strides[1] + key];
  return own <= std::numeric_limits<float>::lowest() ? -kInf : mask + static_cast<double>(own);
}

inline double AttentionCase::mask_bias(int b, int h, int query, int key) const {
  if (a_.causal) return key <= query + a_.key_count - a_.query_count ? 0 : -kInf;
  if (a_.mask == nullptr) return 0;
  const int64_t at = b * a_.mask_strides[0] + h * a_.mask_strides[1] + query * a_.mask_strides[2] +
                     key * a_.mask_strides[3];
  if (a_.mask_is_boolean) return allowed_[static_cast<size_t>(at)] != 0 ? 0 : -kInf;
  return mask_[at] <= static_cast<double>(a_.mask_threshold) ? -kInf : mask_[at];
}

inline void AttentionCase::expect(SimdTarget target, Report& report, const char* what, int b, int h,
                                  int query, int index, double found, double expected,
                                  double tolerance) const {
  if (std::isnan(expected)   ? std::isnan(found)
      : std::isinf(expected) ? found == expected
                             : std::abs(found - expected) <= tolerance) {
    return;
  }
  report.mismatch(
      "%s of target %s, type %d, bits %d and %d, tau %g, mask %d, causal %d, B=%d Hq=%d Hkv=%d "
      "Lq=%d N=%d D=%d Dv=%d at "
      "[%d, %d, %d, %d]: found %.9g, expected %.9g within %.3g",
      what, kernels::target_name(target), static_cast<int>(a_.type), a_.key_packing.bits,
      a_.value_packing.bits, static_cast<double>(a_.sparse_v_threshold),
      static_cast<int>(a_.mask_type), a_.causal ? 1 : 0, a_.batch, a_.query_heads, a_.kv_heads,
      a_.query_count, a_.key_count, a_.width, a_.value_width, b, h, query, index, found, expected,
      tolerance);
}

inline void AttentionCase::check(SimdTarget target, Report& report) {
  const auto rows = static_cast<size_t>(a_.batch) * static_cast<size_t>(a_.query_heads) *
                    static_cast<size_t>(a_.query_count);
  Elements out(a_.type, rows * static_cast<size_t>(a_.value_width));
  std::vector<float> scores(rows * static_cast<size_t>(a_.key_count));
  std::vector<float> lse(rows);
  std::vector<float> skipped(rows);
  std::vector<float> workspace(kernels::attention_workspace_size(a_));
  a_.out = out.data();
  a_.scores = scores.data();
  a_.lse = lse.data();
  a_.skipped = skipped.data();
  kernels::attention(a_, target, workspace.data());
  check_threads(target, report, out, workspace);

  const double ulp = a_.type == ElementType::float32   ? 0x1p-23
                     : a_.type == ElementType::float16 ? 0x1p-10
                                                       : 0x1p-7;
  const int group = a_.query_heads / a_.kv_heads;
  size_t row = 0;
  std::vector<double> logits(static_cast<size_t>(a_.key_count));
  for (int b = 0; b < a_.batch; ++b) {
    for (int h = 0; h < a_.query_heads; ++h) {
      for (int i = 0; i < a_.query_count; ++i, ++row) {
        const double sink =
            sinks_.empty() ? -kInf : static_cast<double>(sinks_[static_cast<size_t>(h)]);
        const double* query = queries_.elements.from(queries_.at(b, h, i));
        const double unpacking = size_of(query) * keys_.rounding();
        double error = 0;
        bool is_nan = false;
        for (int n = 0; n < a_.key_count; ++n) {
          const auto [sum, magnitude] = dot(query, keys_.row(b, h / group, n));
          const double scale = static_cast<double>(a_.scale);
          const double extra = bias(b, h, i, n);
          const double logit = extra == -kInf ? -kInf : scale * sum + extra;
          // With one bias added and not yet the other, which may be nearly its negative.
          const double partial = row_bias_.empty() ? 0 : std::abs(mask_bias(b, h, i, n));
          const double tolerance =
              0x1p-23 *
                  ((4 + std::sqrt(a_.width)) * (scale * magnitude + std::abs(logit)) + partial) +
              scale * unpacking;
          logits[static_cast<size_t>(n)] = logit;
          if (a_.return_scores) {
            expect(target, report, "score", b, h, i, n,
                   static_cast<double>(
                       scores[row * static_cast<size_t>(a_.key_count) + static_cast<size_t>(n)]),
                   logit, tolerance);
          }
          if (logit != -kInf) error = std::max(error, tolerance);
          is_nan |= std::isnan(logit);
        }
        const Softmax softmax(logits, sink);
        const double total = is_nan ? kNan : softmax.total;
        const double expected_lse = total == 0 ? -kInf : softmax.peak + std::log(total);
        expect(target, report, "lse", b, h, i, 0, static_cast<double>(lse[row]), expected_lse,
               error + 0x1p-20 * (1 + std::abs(expected_lse)));
        // Which side of the threshold a pair falls on is open where it is as near as the error.
        const auto threshold = static_cast<double>(a_.sparse_v_threshold);
        std::vector<double> weights(logits.size());
        std::vector<bool> open(logits.size());
        double fewest = 0, most = 0;
        for (size_t n = 0; n < logits.size(); ++n) {
          if (logits[n] == -kInf || total == 0) continue;
          weights[n] = softmax.weight(logits[n]);
          if (threshold == 0 || is_nan) continue;
          open[n] = std::abs(weights[n] - threshold) <= (2 * error + 1e-5) * threshold;
          if (weights[n] < threshold || open[n]) most += 1;
          if (open[n] || weights[n] >= threshold) continue;
          fewest += 1;
          weights[n] = 0;
        }
        const auto share = static_cast<double>(skipped[row]) * a_.key_count;
        if (!is_nan && (share < fewest - 1e-3 || share > most + 1e-3)) {
          expect(target, report, "skipped", b, h, i, 0, share, fewest, most - fewest);
        }
        const double* values = values_.row(b, h / group, 0);
        for (int d = 0; d < a_.value_width; ++d) {
          double sum = 0, largest = 0, undecided = 0;
          for (int n = 0; n < a_.key_count; ++n) {
            const auto at = static_cast<size_t>(n);
            if (logits[at] == -kInf) continue;
            const double value = values[n * a_.value_width + d];
            sum += weights[at] * value;
            largest = std::max(largest, std::abs(value));
            if (open[at]) undecided += weights[at] * std::abs(value);
          }
          const double expected = is_nan ? kNan : total == 0 ? 0 : sum;
          expect(target, report, "out", b, h, i, d,
                 static_cast<double>(
                     out.read(row * static_cast<size_t>(a_.value_width) + static_cast<size_t>(d))),
                 expected, (2 * error + 4 * ulp) * largest + undecided + values_.rounding());
        }
      }
    }
  }
}

inline void AttentionCase::check_step(Random& random, SimdTarget target, Report& report) {
  if (a_.query_count > 128) return;
  const auto heads = static_cast<size_t>(a_.batch) * static_cast<size_t>(a_.kv_heads);
  const auto keys = static_cast<size_t>(a_.key_count);
  const size_t rows = heads * static_cast<size_t>(a_.query_heads / a_.kv_heads) *
                      static_cast<size_t>(a_.query_count);
  Elements out(a_.type, rows * static_cast<size_t>(a_.value_width));
  std::vector<float> scores(rows * keys);
  AttentionArguments a = a_;
  a.skipped = nullptr;
  a.return_scores = true;
  std::vector<float> lses(rows);
  a.lse = lses.data();
  a.out = out.data();
  a.scores = scores.data();
  std::vector<float> workspace(kernels::attention_workspace_size(a));
  kernels::attention(a, target, workspace.data());

  std::vector<float> expected(heads * keys);
  for (float& before : expected) {
    before = random.one_in(3) ? std::numeric_limits<float>::quiet_NaN() : 1.0f;
  }
  a.return_scores = false;
  a.lse = nullptr;
  a.accumulate = true;
  a.decay = kernels::Decay::of(0.9);
  const std::vector<float> before = expected;
  std::vector<float> importance = expected;
  a.importance = importance.data();
  workspace.resize(kernels::attention_workspace_size(a));
  kernels::attention(a, target, workspace.data());

  kernels::AccumulationArguments whole{};
  whole.batch = a.batch;
  whole.heads = a.kv_heads;
  whole.group = a.query_heads / a.kv_heads;
  whole.query_count = a.query_count;
  whole.rows = a.key_count;
  whole.scores = scores.data();
  set_strides(whole.score_strides, a.key_count, a.query_count, a.query_heads);
  whole.importance = expected.data();
  whole.decay = a.decay;
  kernels::accumulate_scores(whole, target);
  for (size_t head = 0; head < heads; ++head) {
    const float* own = importance.data() + head * keys;
    if (std::memcmp(own, expected.data() + head * keys, keys * sizeof(float)) != 0) {
      report.mismatch("importance after a step of target %s", kernels::target_name(target));
    }
  }

  a.mass = true;
  importance = before;
  std::vector<float> exact(kernels::attention_workspace_size(a));  // no room that none asked for
  kernels::attention(a, target, exact.data());
  const size_t of_head = rows / heads;
  for (size_t head = 0; head < heads; ++head) {
    for (size_t key = 0; key < keys; ++key) {
      const float old = before[head * keys + key];
      double mass = std::isnan(old) ? 0 : double{old};
      for (size_t row = head * of_head; row < (head + 1) * of_head; ++row) {
        const double lse = lses[row];
        if (lse != -std::numeric_limits<double>::infinity()) {
          mass += std::exp(double{scores[row * keys + key]} - lse);
        }
      }
      if (!near(importance[head * keys + key], mass, 1e-4)) {
        report.mismatch("mass after a step of target %s: %g, expected %g",
                        kernels::target_name(target),
                        static_cast<double>(importance[head * keys + key]), mass);
      }
    }
  }
}

// The same bits on one thread.
inline void AttentionCase::check_threads(SimdTarget target, Report& report, const Elements& out,
                                         std::vector<float>& workspace) {
  set_threads(1);
  Elements alone = out;
  a_.out = alone.data();
  kernels::attention(a_, target, workspace.data());
  set_threads(3);
  if (alone.same_bits(out)) return;
  report.mismatch("out of target %s, B=%d Hkv=%d N=%d: one thread gives other bits",
                  kernels::target_name(target), a_.batch, a_.kv_heads, a_.key_count);
}

inline void test_attention(Random& random, int cases, Report& report) {
  set_threads(3);
  for (int i = 0; i < cases; ++i) {
    AttentionCase one(random, kElementTypes[i % 3]);
    for (SimdTarget target : kernels::kSimdTargets) {
      if (!kernels::is_supported(target)) continue;
      one.check(target, report);
      one.check_step(random, target, report);
    }
  }
  set_threads(0);
}

}  // namespace mlx_h2o::test
