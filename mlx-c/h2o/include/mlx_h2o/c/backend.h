#ifndef MLX_H2O_BACKEND_H
#define MLX_H2O_BACKEND_H

#include <stdbool.h>

#include "mlx/c/mlx.h"

#ifdef __cplusplus
extern "C" {
#endif

/** \defgroup mlx_h2o_backends Back ends
 *  "metal", "cuda", "native" (CPU) and "composed" (MLX operations: the definition, everywhere).
 */
/**@{*/

/** Name the back end for this thread's calls from now on. It refuses calls that it cannot serve.
 *  NULL or "" returns to the automatic choice: the back end that the environment variable
 *  MLX_H2O_BACKEND names, else the best one that can serve the call.
 *  \return 1 for an unknown name, or a back end that is not available here.
 */
int mlx_h2o_set_backend(const char* name);

/** Whether a back end can run here, and why not.
 *  \param[out] available may be NULL.
 *  \param[out] reason empty if it is available; may be NULL.
 *  \return 1 for an unknown name.
 */
int mlx_h2o_backend_status(const char* name, bool* available, mlx_string* reason);

/** Threads that one operation of the native back end may use: the number set, else the environment
 *  variable MLX_H2O_THREADS, else the processors that this process may use.
 *  \return 1 if this build has no native kernels, or the variable is not a number from 1 to 256.
 */
int mlx_h2o_threads(int* res);

/** Set them for the whole process, from the next operation that runs on; 0 returns to the default.
 *  \return 1 outside 0 to 256, or if this build has no native kernels.
 */
int mlx_h2o_set_threads(int count);

/**@}*/

#ifdef __cplusplus
}
#endif

#endif
