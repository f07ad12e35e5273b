// What `replace_in_tiers` refuses.
#pragma once

#include <vector>

#include <mlx/array.h>

#include "mlx_h2o/ops.h"

namespace mlx_h2o {

inline constexpr const char* kReplaceInTiers = "replace_in_tiers";

/// Throws std::invalid_argument for arguments that do not fit together.
void check_tiers(const std::vector<mlx::core::array>& tiers, const mlx::core::array& keys,
                 const mlx::core::array& values, const mlx::core::array& importance,
                 const mlx::core::array& positions, const mlx::core::array& new_keys,
                 const mlx::core::array& new_values, int position, const TierOptions& options);

}  // namespace mlx_h2o
