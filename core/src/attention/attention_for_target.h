// What the sweeps of attention need besides the vectors of their target. Included once, at the top
// of each target's source.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "attention/attention_phases.h"
#include "cpu/thread_pool.h"
#include "quantized/packed_bits.h"

#if defined(MLX_H2O_X86) && !defined(__clang__)
// GCC blames us for undefined lanes inside its own AVX-512 header (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
