// The operation that updates the moving average with scores: checks, MLX primitive, kernel call.
#include <memory>
#include <utility>

#include "attention/attention_kernel.h"
#include "cpu/checks.h"
#include "cpu/cpu_primitive.h"
#include "cpu/donation.h"
#include "cpu/strided_copy.h"
#include "mlx_h2o/ops.h"
#include "rows/accumulation_kernel.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

constexpr const char* kAccumulateScores = "accumulate_scores";

/// Inputs: importance float32 [B, H, N], scores float32 [B, Hq, Lq, N]. Output: importance.
class AccumulateScores : public CpuPrimitive {
 public:
  AccumulateScores(mx::Stream stream, double decay)
      : CpuPrimitive(stream, kAccumulateScores), decay_(decay) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;

  const char* name() const override { return "AccumulateScores"; }

  bool is_equivalent(const Primitive& other) const override {
    return decay_ == static_cast<const AccumulateScores&>(other).decay_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    return {inputs[0].shape()};
  }

 private:
  double decay_;
};

void AccumulateScores::eval_cpu(const std::vector<mx::array>& inputs,
                                std::vector<mx::array>& outputs) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  const bool in_place = take_over(inputs[0], outputs[0]);
  const mx::array scores = with_unit_last_stride(inputs[1], encoder);

  kernels::AccumulationArguments a{};
  a.batch = outputs[0].shape(0);
  a.heads = outputs[0].shape(1);
  a.rows = outputs[0].shape(2);
  a.group = scores.shape(1) / a.heads;
  a.query_count = scores.shape(2);
  a.decay = kernels::Decay::of(decay_);
  copy_strides(scores, 3, a.score_strides);

  // The stream keeps the buffers of inputs, outputs and temporaries until its tasks are done.
  encoder.dispatch([a, in_place, importance = mx::array::unsafe_weak_copy(inputs[0]),
                    scores = mx::array::unsafe_weak_copy(scores),
                    result = mx::array::unsafe_weak_copy(outputs[0]),
                    target = kernels::simd_target()]() mutable {
    if (!in_place) copy_elements(importance, result.data<float>());
    a.scores = scores.data<float>();
    a.importance = result.data<float>();
    kernels::accumulate_scores(a, target);
  });
}

}  // namespace

mx::array accumulate_scores(const mx::array& importance, const mx::array& scores, double decay,
                            mx::StreamOrDevice s) {
  Arguments given(kAccumulateScores);
  given.array(found(importance));
  given.array(found(scores));
  given.number("decay", decay);
  const mx::Stream stream = cpu_stream(kAccumulateScores, s);
  return mx::array(importance.shape(), mx::float32,
                   std::make_shared<AccumulateScores>(stream, decay), {importance, scores});
}

}  // namespace mlx_h2o
