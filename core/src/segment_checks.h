// What `merge_segments` and `rows_as_arrays` refuse.
#pragma once

#include <vector>

#include <mlx/array.h>

#include "checks.h"

namespace mlx_h2o {

inline constexpr const char* kMergeSegments = "merge_segments";
inline constexpr const char* kRowsAsArrays = "rows_as_arrays";

/// Throws std::invalid_argument for arrays that do not fit together.
void check_merge(const std::vector<mlx::core::array>& outs,
                 const std::vector<mlx::core::array>& lses,
                 const std::vector<mlx::core::array>& scores);

/// The same for rows of some tiers and the newest ones.
void check_segments(const std::vector<mlx::core::array>& tiers, const mlx::core::array& keys,
                    const mlx::core::array& values, const std::vector<int>& bits,
                    const std::vector<int>& value_bits, int group_size);

}  // namespace mlx_h2o
