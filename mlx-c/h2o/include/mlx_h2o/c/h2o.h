/*
 * Attention that returns its scores, and the operations on the rows of a cache, in the conventions
 * of mlx-c: results first, stream last, 0 for success. The functions are built on mlx-c's public
 * calls, and like them only build a graph: mlx_eval computes.
 *
 * Errors: a function returns 1 after one report to mlx-c's error handler. The text begins with the
 * name of the operation in brackets and says what was found and what was expected;
 * mlx_h2o_last_error() returns it for the thread. Results are then untouched. Nothing here ends the
 * process (mlx-c's own default handler does: set another, such as mlx_h2o_keep_error).
 */
#ifndef MLX_H2O_H
#define MLX_H2O_H

#include "mlx_h2o/c/attention.h"
#include "mlx_h2o/c/backend.h"
#include "mlx_h2o/c/config.h"
#include "mlx_h2o/c/error.h"
#include "mlx_h2o/c/rows.h"
#include "mlx_h2o/c/selection.h"

#endif
