/*
 * Attention that returns its scores, and the selection of cache rows to keep or to evict, in the
 * conventions of mlx-c: result first, stream last, 0 for success. The functions are built on
 * mlx-c's public calls, and like them only build a graph: mlx_eval computes.
 *
 * Errors: 1 is returned after one report to mlx-c's error handler, whose text begins with the
 * name of the operation in brackets and says what was found and what was expected. Results are
 * then untouched. Nothing ends the process (mlx-c's own default handler does: set one).
 */
#ifndef MLX_H2O_H
#define MLX_H2O_H

#include <stdbool.h>

#include "mlx/c/mlx.h"

#ifdef __cplusplus
extern "C" {
#endif

/** \defgroup mlx_h2o_attention Attention with scores
 */
/**@{*/

/** Scaled dot product attention and the logits that went into its softmax (AtomGradient 2026,
 *  section 3.1).
 *
 *  With B sequences, Hq query heads in Hkv groups, Lq queries and N keys:
 *
 *  \param[out] out [B, Hq, Lq, Dv], the dtype of the queries. A fully masked query gives zeros.
 *  \param[out] scores float32 [B, Hq, Lq, N]: scale * q.k + mask, -inf where masked.
 *  \param[out] lse float32 [B, Hq, Lq], or NULL where it is not wanted: the log of the denominator,
 *    sink included; the weights are exp(scores - lse). -inf where nothing is unmasked and there is
 *    no sink; the weights are then 0.
 *  \param queries [B, Hq, Lq, D], float32, float16 or bfloat16.
 *  \param keys [B, Hkv, N, D], the dtype of the queries; Hq is a multiple of Hkv.
 *  \param values [B, Hkv, N, Dv], the dtype of the queries; Dv may differ from D.
 *  \param scale finite factor of the products, usually 1 / sqrt(D).
 *  \param mask_mode "" for none; "causal", bottom-right aligned: query i sees the keys
 *    n <= N - Lq + i; "array" for `mask_arr`.
 *  \param mask_arr bool, true where a query sees a key; or float32, float16 or bfloat16, added to
 *    the products, where a value at or below half of the lowest finite one masks the pair, and NaN
 *    makes the output of its query NaN, and of no other. Broadcasts to [B, Hq, Lq, N]. Empty
 *    unless the mode is "array".
 *  \param sinks float [Hq], or empty: logits that join the denominator and have no row.
 *  \param s the stream; its device decides between the back ends.
 *  \return 1 for wrong dimensions, sizes, head counts or dtypes, a mask that does not broadcast, a
 *    scale that is not finite, or a named back end that cannot serve the call.
 */
int mlx_h2o_scaled_dot_product_attention_with_scores(
    mlx_array* out, mlx_array* scores, mlx_array* lse /* may be null */, const mlx_array queries,
    const mlx_array keys, const mlx_array values, float scale, const char* mask_mode,
    const mlx_array mask_arr /* may be null */, const mlx_array sinks /* may be null */,
    const mlx_stream s);

/**@}*/

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
 *  \param recent_start the first position of the protected recent window; without a value, none.
 *  \return 1 for shapes, dtypes or numbers other than these.
 */
int mlx_h2o_keep_indices(mlx_array* res, const mlx_array scores, const mlx_array positions,
                         int keep, int sink_size, mlx_optional_int recent_start,
                         const mlx_stream s);

/** Slots of the `count` rows (1 to N) that mlx_h2o_keep_indices with N - count drops.
 *
 *  \param[out] res uint32 [B, H, count], the worst first. One row is an arg-min, without a sort.
 *  Everything else is as in mlx_h2o_keep_indices.
 */
int mlx_h2o_evict_indices(mlx_array* res, const mlx_array scores, const mlx_array positions,
                          int count, int sink_size, mlx_optional_int recent_start,
                          const mlx_stream s);

/**@}*/

/** \defgroup mlx_h2o_config Settings of an evicting cache
 */
/**@{*/

/** What Python calls H2OConfig and Swift H2OConfiguration. */
typedef struct mlx_h2o_config_ {
  int max_kv_size; /**< rows that each KV head keeps, at least 1 */
  int sink_size;   /**< first positions, never evicted; fewer than max_kv_size */
  mlx_optional_int
      heavy_size; /**< rows kept by score; no value: half of the budget, or what is left */
  mlx_optional_int recent_size; /**< the newest rows, never evicted; no value: what is left */
  const char* policy; /**< a name of docs/policies.md, such as "h2o"; borrowed, not copied */
  float decay;        /**< a of the moving average C = a*C + (1-a)*|s|, 0 <= a < 1 */
  int evict_every;    /**< single-token steps per eviction, at least 1 */
} mlx_h2o_config;

/** The defaults: 256 rows, 4 sinks, sizes without a value, "h2o", 0.95, 1. Nothing to free. */
mlx_h2o_config mlx_h2o_config_new(void);

/** Check the settings and give heavy_size and recent_size their values, in place: afterwards
 *  sink_size + heavy_size + recent_size is max_kv_size. Where the three do not fill the budget the
 *  recent window grows.
 *  \return 1 for a value out of range, an unknown policy, or sizes beyond the budget; the settings
 *    are then untouched.
 */
int mlx_h2o_config_resolve(mlx_h2o_config* config);

/** The published splits, scaled to max_kv_size (AtomGradient 2026, section 4.1): at 256 rows
 *  "heavy" 4 sinks, 128 heavy, 124 recent; "balanced" 4, 64, 188; "recent" 4, 32, 220.
 *  \return 1 for another name, or as mlx_h2o_config_resolve.
 */
int mlx_h2o_config_preset(mlx_h2o_config* res, const char* name, int max_kv_size);

/**@}*/

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
