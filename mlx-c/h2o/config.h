// The settings of an evicting cache, checked as Python's H2OConfig checks them.
#pragma once

#include <string>

#include "mlx_h2o/c/config.h"

namespace mlx_h2o_c {

mlx_h2o_config default_config();

// The settings with every size resolved. Throws std::invalid_argument.
mlx_h2o_config checked(const mlx_h2o_config& config);

// A published split of the budget. Throws std::invalid_argument.
mlx_h2o_config preset(const std::string& name, int max_kv_size);

}  // namespace mlx_h2o_c
