// The checks of the settings, for those that make settings.
#pragma once

#include "checks.h"
#include "mlx_h2o/c/config.h"

namespace mlx_h2o_c {

// With values for all sizes; throws where they do not fit.
mlx_h2o_config checked_settings(mlx_h2o_config config);
// The name as a static text; throws for an unknown one.
const char* known_policy(const char* op, const char* name);

}  // namespace mlx_h2o_c
