// What `replace_worst` refuses.
#pragma once

#include <vector>

#include <mlx/array.h>

#include "mlx_h2o/ops.h"

namespace mlx_h2o {

inline constexpr const char* kReplaceWorst = "replace_worst";

/// Throws std::invalid_argument, in the words of every language, for arguments that do not fit.
void check_replacement(const std::vector<mlx::core::array>& keys,
                       const std::vector<mlx::core::array>& values,
                       const mlx::core::array& importance, const mlx::core::array& positions,
                       const mlx::core::array& new_keys, const mlx::core::array& new_values,
                       const mlx::core::array& position, const ReplacementOptions& options);

}  // namespace mlx_h2o
