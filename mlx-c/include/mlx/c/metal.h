#ifndef MLX_METAL_H
#define MLX_METAL_H

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/** \defgroup mlx_metal Metal
 */
/**@{*/

int mlx_metal_is_available(bool* res);

/**@}*/

#ifdef __cplusplus
}
#endif

#endif
