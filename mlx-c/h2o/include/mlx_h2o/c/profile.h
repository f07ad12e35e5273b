#ifndef MLX_H2O_PROFILE_H
#define MLX_H2O_PROFILE_H

#include <stddef.h>

#include "mlx/c/mlx.h"
#include "mlx_h2o/c/config.h"

#ifdef __cplusplus
extern "C" {
#endif

/** \defgroup mlx_h2o_profile Rows for each layer
 *  What `mlx_h2o calibrate` of the Python package has measured, and rows shared out by it.
 */
/**@{*/

/** The losses of a model's evicting layers, in order. Borrowed, not copied.
 *
 *  The arrays of the file have the names of these; its metadata "mlx_h2o_profile" is a JSON object
 *  with the numbers and the policy.
 */
typedef struct mlx_h2o_profile_ {
  const float* loss;   /**< [layers, row_count, share_count], nats per token above the full cache */
  const int* rows;     /**< [row_count], how many rows the layer had, ascending */
  const float* shares; /**< [share_count], what part of them but the sinks was the recent window,
                            ascending, at most 1 */
  size_t layers, row_count, share_count;
  int tokens;         /**< of each document, more than any of the rows */
  int recent_size;    /**< the least recent window that was measured */
  const char* policy; /**< a name of docs/policies.md, that of the caches that were measured */
} mlx_h2o_profile;

/** \return 1 for sizes of 0, losses that are not finite (an unfinished calibration), numbers that
 *    do not ascend, and an unknown policy.
 */
int mlx_h2o_profile_check(const mlx_h2o_profile profile);

/** Settings of each layer, whose rows are `total_rows` together, per head; those that Python's
 *  Profile.share gives.
 *
 *  Every layer first gets the fewest rows that were measured, or an equal share where that is less.
 *  Each next row goes where it lowers the sum of the losses most, along the lower convex hull of
 *  what was measured; a layer that holds a whole document loses nothing. Rows beyond that go
 * evenly. A layer whose best recent share is all becomes a "window".
 *
 *  \param[out] res room for `profile.layers` settings, resolved; policies are static texts.
 *  \param total_rows at least config.sink_size + 1 for each layer.
 *  \param config the other settings; its heavy_size, recent_size and policy are not used, and an
 *    evict_every of one row of 32 follows the budget of the layer.
 *  \return 1 as mlx_h2o_profile_check and mlx_h2o_config_resolve, and for too few rows; `res` is
 *    then untouched.
 */
int mlx_h2o_profile_share(mlx_h2o_config* res, const mlx_h2o_profile profile, int total_rows,
                          const mlx_h2o_config config);

/** Of a model's weights, as the profile's "fingerprint" says it: 32 hexadecimal digits of the
 *  SHA-256 of the name, the shape, the kind and at most 16 elements of each, evenly spread, in
 * order of the names. Floats count as float32, whatever they are stored in. Evaluates these
 * elements.
 *
 *  \param parameters by the names that mlx_lm gives them, "model.layers.0.self_attn.q_proj.weight";
 *    printable ASCII without quotes and backslashes.
 *  \return 1 for an empty handle and other names.
 */
int mlx_h2o_fingerprint(mlx_string* res, const mlx_map_string_to_array parameters,
                        const mlx_stream s);

/**@}*/

#ifdef __cplusplus
}
#endif

#endif
