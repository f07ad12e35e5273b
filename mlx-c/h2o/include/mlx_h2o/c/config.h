#ifndef MLX_H2O_CONFIG_H
#define MLX_H2O_CONFIG_H

#include "mlx/c/mlx.h"

#ifdef __cplusplus
extern "C" {
#endif

/** \defgroup mlx_h2o_config Settings of an evicting cache
 */
/**@{*/

/** The rows that each KV head keeps, and which of them always stay. */
typedef struct mlx_h2o_budget_ {
  int max_kv_size;              /**< rows that each KV head keeps, at least 1 */
  int sink_size;                /**< first positions, never evicted; fewer than max_kv_size */
  mlx_optional_int heavy_size;  /**< rows kept by score; no value: half; "h2o": the rest */
  mlx_optional_int recent_size; /**< the newest rows, never evicted; no value: the rest */
  mlx_optional_int evict_every; /**< rows evicted together; no value: one row of 32 */
  int speculative;              /**< draft tokens that can be taken back */
  int context_size;             /**< rows older than this many tokens go first; 0: no limit */
} mlx_h2o_budget;

/** How rows are stored: affine with kv_bits bits, as in mlx_quantize; without kv_bits unpacked. */
typedef struct mlx_h2o_format_ {
  mlx_optional_int kv_bits; /**< 2, 3, 4, 5, 6 or 8 */
  mlx_optional_int v_bits;  /**< for values; no value: kv_bits */
  int kv_group_size;        /**< elements that share a scale and a bias: 32, 64 or 128 */
} mlx_h2o_format;

/** The policy that ranks the rows, and its settings, if it has any. */
typedef struct mlx_h2o_policy_ {
  const char* name; /**< a name of docs/design.md, such as "keydiff"; borrowed, not copied */
  float diversity;  /**< for "h2o": share of rows kept for the diversity of their keys, 0 to 1 */
  float decay;      /**< for "h2o-ema": a of the moving average C = a*C + (1-a)*|s|, 0 <= a < 1 */
} mlx_h2o_policy;

/** Python's H2OConfig, Swift's H2OConfiguration. */
typedef struct mlx_h2o_config_ {
  mlx_h2o_budget budget;
  mlx_h2o_format format;
  mlx_h2o_policy policy;
} mlx_h2o_config;

/** The defaults: 256 rows, 4 sinks, no other sizes, dense, "keydiff". Nothing to free. */
mlx_h2o_config mlx_h2o_config_new(void);

/** Check the settings and fill in missing values, in place: afterwards sink_size + heavy_size +
 *  recent_size is max_kv_size. If the three do not fill the budget, the recent window grows.
 *  \return 1 for a value out of range, an unknown policy, or sizes beyond the budget; the settings
 *    are then unchanged.
 */
int mlx_h2o_config_resolve(mlx_h2o_config* config);

/** The published splits, for "h2o-ema", scaled to max_kv_size (AtomGradient 2026, sec. 4.1): at 256
 *  rows "heavy" 4 sinks, 128 heavy, 124 recent; "balanced" 4, 64, 188; "recent" 4, 32, 220.
 *  \return 1 for another name, or as mlx_h2o_config_resolve.
 */
int mlx_h2o_config_preset(mlx_h2o_config* res, const char* name, int max_kv_size);

/**@}*/

#ifdef __cplusplus
}
#endif

#endif
