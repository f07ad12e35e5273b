#include "report.h"

#include "mlx/c/mlx.h"

// Not with the macro, which would tell the handler where this file was compiled.
void mlx_h2o_swift_report(const char* message) { _mlx_error("mlx_h2o", 0, "%s", message); }
