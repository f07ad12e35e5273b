#ifndef MLX_ERROR_H
#define MLX_ERROR_H

#ifdef __cplusplus
extern "C" {
#endif

/** \defgroup mlx_error Errors
 *  One handler for the whole process; functions return their status after it.
 */
/**@{*/

/** Receives the message of an error, on the thread that met it. `msg` lives until it returns. */
typedef void (*mlx_error_handler_func)(const char* msg, void* data);

/** Replace the error handler. May be called at any time, from any thread, also from a handler.
 *  A NULL handler restores the default, which prints "MLX error: MESSAGE" to stderr and returns
 *  (mlx-c's own default ends the process). `dtor`, if any, is called with `data` once the handler
 *  has been replaced and no thread is inside it any more.
 */
void mlx_set_error_handler(mlx_error_handler_func handler, void* data, void (*dtor)(void*));

/** Report an error. The text is `fmt` with its arguments; text that was not written by the
 *  programmer goes through "%s". `file` and `line` say where the report was made; they are not
 *  part of the message (mlx-c appends them).
 */
void _mlx_error(const char* file, const int line, const char* fmt, ...);
#define mlx_error(...) _mlx_error(__FILE__, __LINE__, __VA_ARGS__)

/**@}*/

#ifdef __cplusplus
}
#endif

#endif
