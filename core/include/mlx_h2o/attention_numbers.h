// What one attention is asked for in numbers: from the public functions down to the kernels. No MLX
// in here.
#pragma once

namespace mlx_h2o {

struct AttentionNumbers {
  float scale = 1;
  bool causal = false;           // bottom-right aligned
  float sparse_v_threshold = 0;  // pairs of less weight add nothing to out; below 1, 0 is off
  bool return_scores = false, return_lse = false, return_skipped = false;

  bool operator==(const AttentionNumbers&) const = default;
};

}  // namespace mlx_h2o
