// MLX's CPU command encoder. Included before every other header: newer clang warns about the
// deprecated std::result_of inside libstdc++'s std::bind, which that encoder uses.
#pragma once

#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wdeprecated-declarations"
#endif

#include <functional>

#include <mlx/backend/cpu/encoder.h>

#if defined(__clang__)
#pragma clang diagnostic pop
#endif
