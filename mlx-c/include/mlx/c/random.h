#ifndef MLX_RANDOM_H
#define MLX_RANDOM_H

#include <stddef.h>
#include <stdint.h>

#include "mlx/c/array.h"
#include "mlx/c/stream.h"

#ifdef __cplusplus
extern "C" {
#endif

/** \defgroup mlx_random Random numbers
 */
/**@{*/

int mlx_random_seed(uint64_t seed);
int mlx_random_key(mlx_array* res, uint64_t seed);
int mlx_random_normal(mlx_array* res, const int* shape, size_t shape_num, mlx_dtype dtype,
                      float loc, float scale, const mlx_array key /* may be null */,
                      const mlx_stream s);
int mlx_random_uniform(mlx_array* res, const mlx_array low, const mlx_array high, const int* shape,
                       size_t shape_num, mlx_dtype dtype, const mlx_array key /* may be null */,
                       const mlx_stream s);

/**@}*/

#ifdef __cplusplus
}
#endif

#endif
