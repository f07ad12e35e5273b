/*
 * A subset of mlx-c's interface, with the same names, signatures and conventions, over the
 * libmlx that the `mlx` Python wheel brings to Linux. On Apple platforms the real mlx-c takes
 * its place, so code that keeps to these functions compiles against either.
 *
 * Conventions (mlx-c's):
 * - A handle is a struct that holds one pointer, passed by value. `mlx_X_new*` creates one,
 *   `mlx_X_free` releases it. The pointer is NULL in an empty handle; an optional argument, marked
 *   "may be null", is left out by passing an empty handle.
 * - An operation writes its result to its first argument, a handle that was initialised by
 *   `mlx_X_new()` or that holds an earlier result (which is then released), and takes the stream
 *   last.
 * - It returns 0, or 1 after reporting an error to the handler of error.h; a function that returns
 *   a value returns 0, NULL or an empty handle instead. No exception and no signal leaves it.
 * - Handles are not synchronised: two threads may use two handles, not write to the same one.
 *
 * Two things differ from mlx-c: the default error handler prints and returns where mlx-c's ends
 * the process, and data and item accessors check their element size.
 */
#ifndef MLX_H
#define MLX_H

#include "mlx/c/array.h"
#include "mlx/c/device.h"
#include "mlx/c/error.h"
#include "mlx/c/fast.h"
#include "mlx/c/io.h"
#include "mlx/c/map.h"
#include "mlx/c/memory.h"
#include "mlx/c/metal.h"
#include "mlx/c/ops.h"
#include "mlx/c/optional.h"
#include "mlx/c/random.h"
#include "mlx/c/stream.h"
#include "mlx/c/string.h"
#include "mlx/c/transforms.h"
#include "mlx/c/vector.h"
#include "mlx/c/version.h"

#endif
