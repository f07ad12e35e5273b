// The functions of each SIMD target that the driver of attention calls. Each target is its own
// source, so that these slow compilations run in parallel.
#pragma once

#include "attention/attention_plan.h"
#include "cpu/simd_regions.h"

namespace mlx_h2o::kernels {

struct Phases {
  void (*attend_span)(const AttentionArguments&, const Plan&, const Piece&, const Partial&);
  void (*add_span)(const AttentionArguments&, const Plan&, const Piece&, const Partial&);
  void (*add_mass)(const AttentionArguments&, const Plan&, const Piece&);
  void (*finish_unit)(const AttentionArguments&, const Plan&, const Piece&);
};

// The targets of this processor architecture.
extern const Phases scalar_attention, avx2_attention, avx512_attention, neon_attention;

}  // namespace mlx_h2o::kernels
