// mlx-c functions that fail in the middle of an operation, on demand, and report as MLX does.
#include "mlx/c/mlx.h"

namespace {

int calls_until_failure = -1;

}  // namespace

extern "C" {

// The n-th of the next calls fails; -1: none does.
void fail_at(int n) { calls_until_failure = n; }

#define FAILS(name, parameters, real)        \
  int name parameters {                      \
    if (calls_until_failure-- == 0) {        \
      mlx_error("%s", "[" #name "] seeded"); \
      return 1;                              \
    }                                        \
    return real;                             \
  }

// Each is done by another mlx-c function, as the real one is hidden by this one.
FAILS(mlx_subtract, (mlx_array * res, const mlx_array a, const mlx_array b, const mlx_stream s),
      ([&] {
        mlx_array negative = mlx_array_new();
        const int failed = mlx_negative(&negative, b, s) || mlx_add(res, a, negative, s);
        mlx_array_free(negative);
        return failed;
      })())

FAILS(mlx_reshape,
      (mlx_array * res, const mlx_array a, const int* shape, size_t shape_num, const mlx_stream s),
      ([&] {
        mlx_array flat = mlx_array_new();
        const int failed =
            mlx_flatten(&flat, a, 0, -1, s) || mlx_unflatten(res, flat, 0, shape, shape_num, s);
        mlx_array_free(flat);
        return failed;
      })())

FAILS(mlx_sort_axis, (mlx_array * res, const mlx_array a, int axis, const mlx_stream s), ([&] {
        mlx_array order = mlx_array_new();
        const int failed =
            mlx_argsort_axis(&order, a, axis, s) || mlx_take_along_axis(res, a, order, axis, s);
        mlx_array_free(order);
        return failed;
      })())

}  // extern "C"
