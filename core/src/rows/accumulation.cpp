// The operation that updates the moving average with scores: checks, MLX primitive, kernel call.
#include "attention/attention_kernel.h"
#include "cpu/cpu_primitive.h"
#include "mlx_h2o/ops.h"
#include "rows/accumulation_kernel.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

constexpr const char* kAccumulateScores = "accumulate_scores";

/// Inputs: importance float32 [B, H, N], scores float32 [B, Hq, Lq, N]. Output: importance.
struct AccumulateScores : CpuOperation {
  double decay;

  bool operator==(const AccumulateScores&) const = default;

  Layout layout(size_t input) const { return input == 1 ? Layout::unit_last_stride : Layout::any; }
  int origin(size_t /*output*/) const { return 0; }

  void run(Arrays& inputs, Arrays& outputs) const {
    const mx::array& scores = inputs[1];
    kernels::AccumulationArguments a{};
    a.batch = outputs[0].shape(0);
    a.heads = outputs[0].shape(1);
    a.rows = outputs[0].shape(2);
    a.group = scores.shape(1) / a.heads;
    a.query_count = scores.shape(2);
    a.decay = kernels::Decay::of(decay);
    locate(scores, a.scores, a.score_strides);
    a.importance = outputs[0].data<float>();
    kernels::accumulate_scores(a, kernels::simd_target());
  }
};

}  // namespace

mx::array accumulate_scores(const mx::array& importance, const mx::array& scores, double decay,
                            mx::StreamOrDevice s) {
  Arguments given(kAccumulateScores);
  given.array(found(importance));
  given.array(found(scores));
  given.number("decay", decay);
  return outputs_of(kAccumulateScores, AccumulateScores{{}, decay}, {importance, scores},
                    {mx::float32}, s)[0];
}

}  // namespace mlx_h2o
