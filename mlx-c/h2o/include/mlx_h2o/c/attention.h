#ifndef MLX_H2O_ATTENTION_H
#define MLX_H2O_ATTENTION_H

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
 *  \param[out] scores float32 [B, Hq, Lq, N]: scale * q.k + mask + row_bias, -inf where masked.
 *    NULL if not wanted: without lse too, on a GPU, MLX's own attention then serves more than 8
 *    queries, and gives a fully masked query a mean of the values.
 *  \param[out] lse float32 [B, Hq, Lq], or NULL if not wanted: the log of the denominator, sink
 *    included; the weights are exp(scores - lse). -inf if everything is masked and there is no
 *    sink; the weights are then 0.
 *  \param queries [B, Hq, Lq, D], float32, float16 or bfloat16.
 *  \param keys [B, Hkv, N, D], the dtype of the queries; Hq is a multiple of Hkv.
 *  \param values [B, Hkv, N, Dv], the dtype of the queries; Dv may differ from D.
 *  \param scale finite factor of the products, usually 1 / sqrt(D).
 *  \param mask_mode "" for none; "causal", bottom-right aligned: query i sees the keys
 *    n <= N - Lq + i; "array" for `mask_arr`.
 *  \param mask_arr bool, true where a query sees a key; or float32, float16 or bfloat16, added to
 *    the products: a value at or below half of the lowest finite one masks the pair, and NaN makes
 *    only the output of its query NaN. Broadcasts to [B, Hq, Lq, N]. Empty unless the mode is
 *    "array".
 *  \param sinks float [Hq], or empty: logits that join the denominator and have no row.
 *  \param row_bias float32 [B, Hkv, N], or empty: added to the products of every query of the KV
 *    head, so that a row of bias log(n) counts as n rows. -inf masks the row; NaN as in a mask.
 *  \param s the stream; its device decides between the back ends.
 *  \return 1 for wrong dimensions, sizes, head counts or dtypes, a mask that does not broadcast, a
 *    scale that is not finite, or a named back end that cannot serve the call.
 */
int mlx_h2o_scaled_dot_product_attention_with_scores(
    mlx_array* out, mlx_array* scores /* may be null */, mlx_array* lse /* may be null */,
    const mlx_array queries, const mlx_array keys, const mlx_array values, float scale,
    const char* mask_mode, const mlx_array mask_arr /* may be null */,
    const mlx_array sinks /* may be null */, const mlx_array row_bias /* may be null */,
    const mlx_stream s);

/** The same over rows packed as mlx_quantize packs them, dequantised in registers.
 *
 *  Keys or values may also be codes of rotated rows (docs/design.md): words, norms in place of the
 *  scales, float32 [B, Hkv, N, 1], and an empty handle for the biases, with 2, 3 or 4 bits and
 *  sizes that are powers of two from 32 to 1024. With coded values, keys may also be one array in
 *  place of the words, with empty handles for scales and biases. Operations that take vectors of
 *  arrays get two arrays or one instead.
 *
 *  \param[out] out, scores, lse as above, for the rows as they dequantise.
 *  \param[out] skipped float32 [B, Hq, Lq], or NULL if not wanted: the share of the N rows that
 *    added nothing because their weight was below the threshold, without masked pairs.
 *  \param queries [B, Hq, Lq, D], float32, float16 or bfloat16.
 *  \param k_w uint32 [B, Hkv, N, D * bits / 32].
 *  \param k_s, k_b [B, Hkv, N, D / group_size], both float32, float16 or bfloat16.
 *  \param v_w uint32 [B, Hkv, N, Dv * v_bits / 32].
 *  \param v_s, v_b [B, Hkv, N, Dv / group_size], the dtype of the keys' scales.
 *  \param bits 2, 3, 4, 5, 6 or 8.
 *  \param group_size 32, 64 or 128.
 *  \param v_bits bits of the values; without a value, the bits of the keys.
 *  \param sparse_v_threshold a pair whose weight is below it adds nothing to `out`, and its value
 *    need not be read (Turney 2026); scores and lse do not change. 0 turns it off; 1e-6 is a good
 *    value; below 1. Weights are compared once all keys are known.
 *  \return 1 as above, and for words, scales and biases that do not fit each other.
 */
int mlx_h2o_scaled_dot_product_attention_quantized_with_scores(
    mlx_array* out, mlx_array* scores /* may be null */, mlx_array* lse /* may be null */,
    mlx_array* skipped /* may be null */, const mlx_array queries, const mlx_array k_w,
    const mlx_array k_s, const mlx_array k_b, const mlx_array v_w, const mlx_array v_s,
    const mlx_array v_b, float scale, int bits, int group_size, mlx_optional_int v_bits,
    const char* mask_mode, const mlx_array mask_arr /* may be null */,
    const mlx_array sinks /* may be null */, const mlx_array row_bias /* may be null */,
    float sparse_v_threshold, const mlx_stream s);

/** Attention that also accumulates its scores per row; a back end need not store them.
 *
 *  Takes the arguments and errors of mlx_h2o_scaled_dot_product_attention_with_scores, or of its
 *  packed variant, and of mlx_h2o_accumulate_scores; at most 128 queries.
 *
 *  \param[out] out [B, Hq, Lq, Dv]. Evaluating it evaluates the importance too.
 *  \param[out] new_importance float32 [B, Hkv, N].
 *  \param kind "ema": mlx_h2o_accumulate_scores with this `decay`. "mass": the attention mass of
 *    Zhang et al. 2023 (H2O): adds the weights exp(score - lse) of all queries and of the query
 *    heads of the KV head; NaN, an unscored row, counts as 0.
 */
int mlx_h2o_attention_and_accumulate(
    mlx_array* out, mlx_array* new_importance, const mlx_array queries, const mlx_vector_array keys,
    const mlx_vector_array values, const mlx_array importance, float scale, const char* kind,
    double decay, const char* mask_mode, const mlx_array mask_arr /* may be null */,
    const mlx_array sinks /* may be null */, const mlx_array row_bias /* may be null */, int bits,
    int group_size, mlx_optional_int v_bits, float sparse_v_threshold, const mlx_stream s);

/** The scores of a chunk of queries, summed up per key and KV head, computed in blocks without a
 *  matrix of all queries by all keys.
 *
 *  \param[out] res float32 [B, Hkv, N].
 *  \param kind "ema": the moving average of mlx_h2o_accumulate_scores over the last
 *    `counted_queries` queries in order; NaN for rows that are still unscored. "mass": the
 *    attention mass of Zhang et al. 2023 (H2O), the sum of the weights over all queries and over
 *    the query heads of the KV head.
 *  \param sinks used by "mass"; scores, and so "ema", do not depend on them.
 *  \param row_bias float32 [B, Hkv, N], as above.
 *  \param importance for "ema", the average so far, float32 [B, Hkv, N]; empty: no row has been
 *    scored. Empty for "mass".
 *  \param decay for "ema", at least 0 and below 1.
 *  \param counted_queries at least 1; "ema" ignores older queries of the chunk.
 */
int mlx_h2o_prefill_scores(mlx_array* res, const mlx_array queries, const mlx_array keys,
                           float scale, const char* mask_mode,
                           const mlx_array mask_arr /* may be null */,
                           const mlx_array sinks /* may be null */,
                           const mlx_array row_bias /* may be null */, const char* kind,
                           const mlx_array importance /* may be null */, double decay,
                           int counted_queries, const mlx_stream s);

/**@}*/

#ifdef __cplusplus
}
#endif

#endif
