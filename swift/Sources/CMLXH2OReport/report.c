#include "report.h"

#include "mlx/c/mlx.h"

void mlx_h2o_swift_report(const char* message) { mlx_error("%s", message); }
