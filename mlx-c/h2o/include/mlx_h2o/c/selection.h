#ifndef MLX_H2O_SELECTION_H
#define MLX_H2O_SELECTION_H

#include "mlx/c/mlx.h"

#ifdef __cplusplus
extern "C" {
#endif

/** \defgroup mlx_h2o_selection Selection of rows
 *  Rows rank, the best first: protected ones (0 <= position < sink_size, or position >=
 *  recent_start); then by score, descending; then those whose score is NaN; then padding (a
 *  negative position). Among equals, and among protected rows, the lower position is the better;
 *  of padding the lower slot. So there are no ties, and one set of rows on every back end.
 */
/**@{*/

/** Slots of the rows that stay when a cache is cut down to `keep` rows per head.
 *
 *  \param[out] res uint32 [B, H, keep], ascending.
 *  \param scores float32 [B, H, N].
 *  \param positions int32 [B, H, N], distinct within a head and below 2^30; negative: padding.
 *  \param keep 1 to N.
 *  \param sink_size the number of first positions that are protected, 0 or more.
 *  \param recent_start the first position of the protected recent window, int32 [] for all
 * sequences or [B], one each; empty: there is none.
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
