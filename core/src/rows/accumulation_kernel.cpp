// Compiles the loops once per SIMD target and selects one at run time.
#include "rows/accumulation_kernel.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "attention/attention_kernel.h"
#include "cpu/half.h"
#include "cpu/thread_pool.h"

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF  // CMake sets it for GCC
#endif

namespace mlx_h2o::kernels {
namespace {

#define MLX_H2O_SWEEPS "rows/accumulation_sweeps.h"
#include "cpu/simd_each_target.h"
#undef MLX_H2O_SWEEPS

}  // namespace

void accumulate_block(const ScoredBlock& block, SimdTarget target) {
  MLX_H2O_CALL_TARGET(target, take_in(block));
}

void accumulate_scores(const AccumulationArguments& a, SimdTarget target) {
  constexpr int kBlock = 512;
  const int64_t blocks = (int64_t{a.rows} + kBlock - 1) / kBlock;
  const int64_t rows_read = int64_t{a.group} * a.query_count * kBlock;
  const int64_t grain = std::max<int64_t>(1, 65536 / rows_read);
  parallel_for(
      int64_t{a.batch} * a.heads * blocks,
      [&](int64_t item) {
        const int64_t head = item / blocks;
        const auto first = static_cast<int>(item % blocks * kBlock);
        // A block cannot describe the query stride of these scores: take one query at a time.
        for (int query = 0; query < a.query_count; ++query) {
          ScoredBlock block;
          block.count = std::min(kBlock, a.rows - first);
          block.group = a.group;
          block.scores = a.scores + head / a.heads * a.score_strides[0] +
                         head % a.heads * a.group * a.score_strides[1] +
                         query * a.score_strides[2] + first;
          block.stride = a.score_strides[1];
          block.decay = a.decay;
          block.importance = a.importance + head * a.rows + first;
          accumulate_block(block, target);
        }
      },
      grain);
}

}  // namespace mlx_h2o::kernels
