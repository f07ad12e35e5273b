// What prefill_kernel.cpp compiles for each SIMD target.
#include "simd_exp.h"
//
#include "logit_masks.h"
//
#include "prefill_sweeps.h"
