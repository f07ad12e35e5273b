// The numeric arguments of one attention, passed from the public functions down to the kernels. No
// MLX in here.
#pragma once

namespace mlx_h2o {

struct AttentionNumbers {
  float scale = 1;
  bool causal = false;           // bottom-right aligned
  float sparse_v_threshold = 0;  // pairs of lower weight add nothing to out; below 1, 0 is off
  /// The numbers that are off at 0, in the order of metal/operations.toml.
  template <class Visit>
  void each(Visit visit) const {
    visit("sparse_v_threshold", sparse_v_threshold);
  }

  bool return_scores = false, return_lse = false, return_skipped = false;

#if __cplusplus >= 202002L  // the C interface is C++17, and does not compare them
  bool operator==(const AttentionNumbers&) const = default;
#endif
};

}  // namespace mlx_h2o
