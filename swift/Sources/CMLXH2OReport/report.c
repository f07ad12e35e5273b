#include "report.h"

#include "mlx/c/mlx.h"

// Not by the macro: the handler would be told where this file stood when it was compiled.
void mlx_h2o_swift_report(const char* message) { _mlx_error("mlx_h2o", 0, "%s", message); }
