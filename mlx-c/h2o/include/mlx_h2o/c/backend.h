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

/** Name the back end of the calls that this thread makes from now on. A named back end refuses
 *  what it cannot do. NULL or "" returns to the automatic choice: the back end that the
 *  environment variable MLX_H2O_BACKEND names, else the best that can serve the call.
 *  \return 1 for a name that is none of the four, or a back end that is not available here.
 */
int mlx_h2o_set_backend(const char* name);

/** Whether a back end can run here, and why not.
 *  \param[out] available may be NULL.
 *  \param[out] reason empty text where it is available; may be NULL.
 *  \return 1 for a name that is none of the four.
 */
int mlx_h2o_backend_status(const char* name, bool* available, mlx_string* reason);

/**@}*/

#ifdef __cplusplus
}
#endif

#endif
