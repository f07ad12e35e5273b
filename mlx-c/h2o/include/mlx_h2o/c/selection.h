#ifndef MLX_H2O_SELECTION_H
#define MLX_H2O_SELECTION_H

#include "mlx/c/mlx.h"

#ifdef __cplusplus
extern "C" {
#endif

/** \defgroup mlx_h2o_selection Selection of rows
 *  Rows rank, the best first: protected rows (0 <= position < sink_size, or position >=
 *  recent_start); then by score, descending; then rows whose score is NaN; then padding (a negative
 *  position). In a tie, and among protected rows, the lower position is better, for padding the
 *  lower slot. So there are no ties left, and every back end keeps the same rows.
 */
/**@{*/

/** Slots of the rows that stay when a cache is reduced to `keep` rows per head.
 *
 *  \param[out] res uint32 [B, H, keep], ascending.
 *  \param scores float32 [B, H, N].
 *  \param positions int32 [B, H, N], distinct within a head and below 2^30; negative: padding.
 *  \param keep 1 to N.
 *  \param sink_size the number of first positions to protect, 0 or more.
 *  \param recent_start the first position of the protected recent window, int32 [] for all
 * sequences, or [B] with one each; empty: no window.
 *  \return 1 for shapes, dtypes or numbers other than these.
 */
int mlx_h2o_keep_indices(mlx_array* res, const mlx_array scores, const mlx_array positions,
                         int keep, int sink_size, const mlx_array recent_start /* may be null */,
                         const mlx_stream s);

/**@}*/

#ifdef __cplusplus
}
#endif

#endif
