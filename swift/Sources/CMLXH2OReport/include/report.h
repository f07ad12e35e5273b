#ifndef MLX_H2O_SWIFT_REPORT_H
#define MLX_H2O_SWIFT_REPORT_H

/// Pass `message` to the error handler of mlx-c, whose own function takes variable arguments, which
/// Swift cannot call.
void mlx_h2o_swift_report(const char* message);

#endif
