// Scores of a long chunk against plain double arithmetic.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "attention/prefill_kernel.h"
#include "check.h"
#include "elements.h"

namespace mlx_h2o::test {

inline void test_prefill(Random& random, int cases, Report& report) {
  for (int i = 0; i < cases; ++i) {
    kernels::AttentionArguments a{};
    a.type = random.choose(kElementTypes);
    a.batch = random.between(1, 2);
    a.kv_heads = random.between(1, 2);
    const int group = random.between(1, 5);
    a.query_heads = a.kv_heads * group;
    a.query_count = random.between(1, 9);
    a.key_count = random.between(1, 150);
    a.width = random.between(1, 40);
    a.scale = 0.3f;
    a.causal = random.one_in(2);
    const double decay = random.between(0, 9) / 10.0;
    a.decay = kernels::Decay::of(decay);
    a.mass = random.one_in(2);
    const Block queries(random, a.type, a.batch, a.query_heads, a.query_count, a.width);
    const Block keys(random, a.type, a.batch, a.kv_heads, a.key_count, a.width);
    std::copy_n(queries.strides, 3, a.query_strides);
    std::copy_n(keys.strides, 3, a.key_strides);
    a.queries = const_cast<Elements&>(queries.elements).data();
    a.keys = const_cast<Elements&>(keys.elements).data();
    std::vector<float> result(static_cast<size_t>(a.batch * a.kv_heads * a.key_count));
    for (float& value : result) {
      value = random.one_in(2) ? std::numeric_limits<float>::quiet_NaN() : 1.0f;
    }
    const std::vector<float> before = result;
    a.importance = result.data();
    std::vector<float> sinks(static_cast<size_t>(a.query_heads));
    for (float& sink : sinks) sink = static_cast<float>(random.between(-30, 30)) / 10.0f;
    if (random.one_in(2)) {
      a.sinks = sinks.data();
      a.sink_stride = 1;
    }
    const kernels::SimdTarget target = random_target(random);
    kernels::prefill_scores(a, target);

    const auto logit = [&](int b, int h, int query, int key) {
      if (a.causal && key > query + a.key_count - a.query_count) return -kInf;
      double sum = 0;
      for (int d = 0; d < a.width; ++d) {
        sum += queries.elements[queries.at(b, h, query) + d] *
               keys.elements[keys.at(b, h / group, key) + d];
      }
      return static_cast<double>(a.scale) * sum;
    };
    std::vector<double> expected(before.begin(), before.end());
    if (a.mass) std::fill(expected.begin(), expected.end(), 0.0);
    for (int b = 0; b < a.batch; ++b) {
      for (int h = 0; h < a.kv_heads; ++h) {
        double* own = expected.data() + (b * a.kv_heads + h) * a.key_count;
        for (int query = 0; query < a.query_count; ++query) {
          std::vector<double> sums(static_cast<size_t>(a.key_count), 0.0);
          for (int member = 0; member < group; ++member) {
            std::vector<double> logits;
            for (int key = 0; key < a.key_count; ++key) {
              logits.push_back(logit(b, h * group + member, query, key));
            }
            const bool none = a.sinks == nullptr;
            const Softmax softmax(logits,
                                  none ? -kInf : sinks[static_cast<size_t>(h * group + member)]);
            for (size_t key = 0; key < logits.size(); ++key) {
              sums[key] += a.mass ? softmax.weight(logits[key]) : logits[key];
            }
          }
          for (size_t key = 0; key < sums.size(); ++key) {
            if (a.mass) {
              own[key] += sums[key];
            } else if (sums[key] != -kInf) {
              const double score = std::fabs(sums[key] / group);
              own[key] = std::isnan(own[key]) ? score : decay * own[key] + (1 - decay) * score;
            }
          }
        }
      }
    }
    for (size_t cell = 0; cell < result.size(); ++cell) {
      if (near(static_cast<double>(result[cell]), expected[cell], 2e-5)) continue;
      report.mismatch("prefill %s of target %s, case %d, cell %zu: found %g, expected %g",
                      a.mass ? "mass" : "average", kernels::target_name(target), i, cell,
                      static_cast<double>(result[cell]), expected[cell]);
    }
  }
}

}  // namespace mlx_h2o::test
