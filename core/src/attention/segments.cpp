// Merges the outputs of attention over segments of rows.
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/cpu_primitive.h"
#include "cpu/element_type.h"
#include "cpu/half.h"
#include "mlx_h2o/ops.h"
#include "quantized/quantization_kernel.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

constexpr const char* kMergeSegments = "merge_segments";

struct Shares {
  std::vector<float> of;  // the segments
  float lse;
};

Shares shares_of(const std::vector<const float*>& lses, size_t query) {
  Shares shares{std::vector<float>(lses.size()), 0};
  float peak = -std::numeric_limits<float>::infinity();
  bool seen = false;
  for (const float* lse : lses) {
    seen = seen || !(lse[query] == -std::numeric_limits<float>::infinity());
    peak = std::fmax(peak, lse[query]);
  }
  shares.lse = peak;
  if (!seen) return shares;  // all shares are 0
  float total = 0;
  for (size_t i = 0; i < lses.size(); ++i) {
    shares.of[i] = std::exp(lses[i][query] - peak);
    total += shares.of[i];
  }
  for (float& share : shares.of) share /= total;
  shares.lse = peak + std::log(total);
  return shares;
}

/// Inputs: the outputs of the segments, then their lse. Outputs: those of all rows together.
struct MergeSegments : CpuOperation {
  size_t count;

  bool operator==(const MergeSegments&) const = default;

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) const {
    return {inputs[0].shape(), inputs[count].shape()};
  }
  Layout layout(size_t /*input*/) const { return Layout::contiguous; }
  bool waits(const Arrays& /*inputs*/, const Arrays& outputs) const { return is_large(outputs); }

  void run(Arrays& inputs, Arrays& outputs) const {
    std::vector<const float*> lses;
    for (size_t i = count; i < inputs.size(); ++i) lses.push_back(inputs[i].data<float>());
    const auto width = static_cast<size_t>(outputs[0].shape(3));
    float* lse = outputs[1].data<float>();
    kernels::with_type(element_type(outputs[0].dtype()), [&]<typename T>(T) {
      std::vector<const T*> outs;
      for (size_t i = 0; i < count; ++i) outs.push_back(inputs[i].data<T>());
      T* out = outputs[0].data<T>();
      for (size_t query = 0; query < outputs[1].size(); ++query) {
        const Shares shares = shares_of(lses, query);
        lse[query] = shares.lse;
        for (size_t d = query * width; d < (query + 1) * width; ++d) {
          float sum = 0;
          for (size_t i = 0; i < count; ++i) sum += shares.of[i] * kernels::to_float(outs[i][d]);
          out[d] = kernels::round_to<T>(sum);
        }
      }
    });
  }
};

void check_merge(const std::vector<mx::array>& outs, const std::vector<mx::array>& lses) {
  if (outs.empty() || outs.size() != lses.size()) {
    fail(kMergeSegments, "found ", outs.size(), " outputs and ", lses.size(),
         " lse, expected as many of each, and at least one.");
  }
  check_dimensions(kMergeSegments, "outputs", outs[0], 4, "[B, Hq, L, D]");
  if (!is_float(outs[0].dtype())) {
    fail(kMergeSegments, "outputs are ", to_text(outs[0].dtype()),
         ", expected float32, float16 or bfloat16.");
  }
  const mx::Shape& shape = outs[0].shape();
  for (size_t i = 0; i < outs.size(); ++i) {
    check_array(kMergeSegments, "outputs", outs[i], shape, outs[0].dtype());
    check_array(kMergeSegments, "lse", lses[i], {shape[0], shape[1], shape[2]}, mx::float32);
  }
}

}  // namespace

std::vector<mx::array> merge_segments(const std::vector<mx::array>& outs,
                                      const std::vector<mx::array>& lses, mx::StreamOrDevice s) {
  check_merge(outs, lses);
  Arrays inputs(outs);
  inputs.insert(inputs.end(), lses.begin(), lses.end());
  return outputs_of(kMergeSegments, MergeSegments{{}, outs.size()}, inputs,
                    {outs[0].dtype(), mx::float32}, s);
}

}  // namespace mlx_h2o
