// Compiles the sweeps once per SIMD target and selects one at run time.
#include "rows/key_diversity_kernel.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/thread_pool.h"

namespace mlx_h2o::kernels {
namespace {

constexpr float kLeastNorm = 1e-12f;

#define MLX_H2O_SWEEPS "rows/key_diversity_sweeps.h"
#include "cpu/simd_each_target.h"
#undef MLX_H2O_SWEEPS

}  // namespace

void key_diversity(const KeyDiversityArguments& arguments, SimdTarget target) {
  const int64_t work = static_cast<int64_t>(arguments.rows) * arguments.width;
  parallel_for(
      int64_t{arguments.batch} * arguments.heads,
      [&](int64_t item) {
        const auto batch = static_cast<int>(item / arguments.heads);
        const auto head = static_cast<int>(item % arguments.heads);
        float* mean = thread_memory(padded(arguments.width));
        MLX_H2O_CALL_TARGET(target, diversity(arguments, batch, head, mean));
      },
      std::max<int64_t>(1, 65536 / work));
}

}  // namespace mlx_h2o::kernels
