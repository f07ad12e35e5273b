// The sweeps that prefill_kernel.cpp compiles for each SIMD target.
#include "cpu/simd_exp.h"
//
#include "attention/logit_masks.h"
//
#include "attention/prefill_sweeps.h"
