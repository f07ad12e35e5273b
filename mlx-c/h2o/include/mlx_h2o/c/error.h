#ifndef MLX_H2O_ERROR_H
#define MLX_H2O_ERROR_H

#ifdef __cplusplus
extern "C" {
#endif

/** \defgroup mlx_h2o_error The last error of a thread
 */
/**@{*/

/** The message of the last call that failed on this thread. Successful calls do not change it.
 *
 *  If a function of mlx-c failed inside the call, mlx-c reported only to its error handler: the
 *  message is here if that handler is mlx_h2o_keep_error.
 *
 *  \return never NULL; "" before the first failure. Valid until this thread's next failure.
 */
const char* mlx_h2o_last_error(void);

/** An error handler that prints nothing and keeps every message, including those of mlx-c's own
 *  functions, for mlx_h2o_last_error on the thread that failed. It strips the source position that
 *  mlx-c appends: `mlx_set_error_handler(mlx_h2o_keep_error, NULL, NULL)`. `data` is not used.
 */
void mlx_h2o_keep_error(const char* msg, void* data);

/**@}*/

#ifdef __cplusplus
}
#endif

#endif
