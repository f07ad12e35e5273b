// What the driver of attention calls of a SIMD target. Each target is a source of its own: they
// take longer to compile than all other kernels, and so they are compiled side by side.
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

// Those of this processor are there.
extern const Phases scalar_attention, avx2_attention, avx512_attention, neon_attention;

}  // namespace mlx_h2o::kernels
