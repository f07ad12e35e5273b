// What `merge_segments` and `segment_rows` refuse.
#pragma once

#include <optional>
#include <vector>

#include <mlx/array.h>

#include "cpu/checks.h"

namespace mlx_h2o {

inline constexpr const char* kMergeSegments = "merge_segments";
inline constexpr const char* kSegmentRows = "segment_rows";

/// Throws std::invalid_argument for arrays that do not fit together.
void check_merge(const std::vector<mlx::core::array>& outs,
                 const std::vector<mlx::core::array>& lses);

/// The same for rows of some tiers and the newest ones.
void check_segments(const std::vector<mlx::core::array>& tiers, const mlx::core::array& newest,
                    const std::vector<int>& bits, int group_size,
                    const std::optional<mlx::core::array>& slots, int to);

}  // namespace mlx_h2o
