// The sweeps that prefill_kernel.cpp compiles for each SIMD target.
#include "attention/softmax_sweeps.h"
//
#include "attention/logit_masks.h"
//
#include "attention/prefill_sweeps.h"
