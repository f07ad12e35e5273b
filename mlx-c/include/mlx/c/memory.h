#ifndef MLX_MEMORY_H
#define MLX_MEMORY_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/** \defgroup mlx_memory Memory
 *  Bytes of MLX's allocator, not of the process.
 */
/**@{*/

int mlx_clear_cache(void);
int mlx_get_active_memory(size_t* res);
int mlx_get_cache_memory(size_t* res);
int mlx_get_memory_limit(size_t* res);
int mlx_get_peak_memory(size_t* res);
int mlx_reset_peak_memory(void);
/** The setters give back the limit that held before. */
int mlx_set_cache_limit(size_t* res, size_t limit);
int mlx_set_memory_limit(size_t* res, size_t limit);
int mlx_set_wired_limit(size_t* res, size_t limit);

/**@}*/

#ifdef __cplusplus
}
#endif

#endif
