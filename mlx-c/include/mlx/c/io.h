#ifndef MLX_IO_H
#define MLX_IO_H

#include "mlx/c/map.h"
#include "mlx/c/stream.h"

#ifdef __cplusplus
extern "C" {
#endif

/** \defgroup mlx_io Files
 *  Loading is lazy: the file is read when the arrays are evaluated. Loads run on a CPU stream.
 */
/**@{*/

int mlx_load(mlx_array* res, const char* file, const mlx_stream s);
int mlx_load_safetensors(mlx_map_string_to_array* res_0, mlx_map_string_to_string* res_1,
                         const char* file, const mlx_stream s);
int mlx_save(const char* file, const mlx_array a);
int mlx_save_safetensors(const char* file, const mlx_map_string_to_array param,
                         const mlx_map_string_to_string metadata);

/**@}*/

#ifdef __cplusplus
}
#endif

#endif
