// Merges the outputs of attention over segments of rows.
#include <cmath>
#include <limits>
#include <memory>
#include <utility>

#include "cpu/checks.h"
#include "cpu/element_type.h"
#include "cpu/half.h"
#include "cpu/new_arrays.h"
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

Shares shares_of(const std::vector<Flat>& lses, size_t query) {
  Shares shares{std::vector<float>(lses.size()), 0};
  float peak = -std::numeric_limits<float>::infinity();
  bool seen = false;
  for (const Flat& lse : lses) {
    const float value = lse.data<float>()[query];
    seen = seen || !(value == -std::numeric_limits<float>::infinity());
    peak = std::fmax(peak, value);
  }
  shares.lse = peak;
  if (!seen) return shares;  // all shares are 0
  float total = 0;
  for (size_t i = 0; i < lses.size(); ++i) {
    shares.of[i] = std::exp(lses[i].data<float>()[query] - peak);
    total += shares.of[i];
  }
  for (float& share : shares.of) share /= total;
  shares.lse = peak + std::log(total);
  return shares;
}

template <typename T>
void merge_query(const std::vector<Flat>& outs, const Shares& shares, size_t first, int width,
                 T* to) {
  for (int d = 0; d < width; ++d) {
    float sum = 0;
    for (size_t i = 0; i < outs.size(); ++i) {
      sum += shares.of[i] * kernels::to_float(outs[i].data<T>()[first + static_cast<size_t>(d)]);
    }
    to[d] = kernels::round_to<T>(sum);
  }
}

template <typename T>
void merge_outputs(const std::vector<Flat>& outs, const std::vector<Flat>& lses, mx::array& out,
                   mx::array& lse) {
  const int width = out.shape(-1);
  for (size_t query = 0; query < lse.size(); ++query) {
    const Shares shares = shares_of(lses, query);
    const size_t first = query * static_cast<size_t>(width);
    merge_query<T>(outs, shares, first, width, out.data<T>() + first);
    lse.data<float>()[query] = shares.lse;
  }
}

/// Inputs: the outputs of the segments, then their lse. Outputs: those of all rows together.
class MergeSegments : public NewArrays {
 public:
  MergeSegments(mx::Stream stream, size_t count)
      : NewArrays(stream, kMergeSegments), count_(count) {}

  const char* name() const override { return "MergeSegments"; }

  bool is_equivalent(const Primitive& other) const override {
    return count_ == static_cast<const MergeSegments&>(other).count_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    return {inputs[0].shape(), inputs[count_].shape()};
  }

 protected:
  void dispatch(mx::cpu::CommandEncoder& encoder, std::vector<mx::array> inputs,
                std::vector<mx::array> outputs) override {
    encoder.dispatch(
        [count = count_, inputs = std::move(inputs), outputs = std::move(outputs)]() mutable {
          const auto lses_from = inputs.begin() + static_cast<std::ptrdiff_t>(count);
          const std::vector<Flat> outs(inputs.begin(), lses_from);
          const std::vector<Flat> lses(lses_from, inputs.end());
          kernels::with_type(element_type(outputs[0].dtype()), [&](auto zero) {
            merge_outputs<decltype(zero)>(outs, lses, outputs[0], outputs[1]);
          });
        });
  }

 private:
  size_t count_;
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
  const mx::Stream stream = cpu_stream(kMergeSegments, s);
  std::vector<mx::array> inputs(outs);
  inputs.insert(inputs.end(), lses.begin(), lses.end());
  auto primitive = std::make_shared<MergeSegments>(stream, outs.size());
  return mx::array::make_arrays({outs[0].shape(), lses[0].shape()}, {outs[0].dtype(), mx::float32},
                                primitive, inputs);
}

}  // namespace mlx_h2o
