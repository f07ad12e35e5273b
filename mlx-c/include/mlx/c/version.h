#ifndef MLX_VERSION_H
#define MLX_VERSION_H

#include "mlx/c/string.h"

#ifdef __cplusplus
extern "C" {
#endif

/** \defgroup mlx_version Version
 */
/**@{*/

/** Version of the libmlx that was loaded, as "major.minor.patch". */
int mlx_version(mlx_string* str_);

/**@}*/

#ifdef __cplusplus
}
#endif

#endif
