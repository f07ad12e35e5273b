#ifndef MLX_H2O_ROWS_H
#define MLX_H2O_ROWS_H

#include <stdbool.h>

#include "mlx/c/mlx.h"

#ifdef __cplusplus
extern "C" {
#endif

/** \defgroup mlx_h2o_rows Rows of a cache
 *  Rows are passed as vectors: of one array [B, H, N, D], or of words, scales and biases as
 *  mlx_quantize returns them; attention and mlx_h2o_quantize_append also take words and norms.
 *  Input arrays never change. If nothing else holds them, a back end may reuse their memory, so
 *  that adding a row does not copy the others: pass the input's own handle as the result, or free
 *  it before evaluating.
 */
/**@{*/

/** The moving average C = a*C + (1-a)*|s| of every row, over the queries in order.
 *
 *  s is the mean of a row's scores over the unmasked query heads of its KV head. A pair that is
 *  masked for every head of the group leaves C unchanged, and the first unmasked score of a row
 *  sets C = |s| (AtomGradient 2026, section 3.2, whose C starts at 0).
 *
 *  \param[out] res float32 [B, H, N]. With one query the same bits on all CPU back ends.
 *  \param importance C, float32 [B, H, N], NaN where a row has not been scored.
 *  \param scores float32 [B, Hq, Lq, N], -inf or NaN where masked; Hq a multiple of H, Lq at most
 *    128.
 *  \param decay a, at least 0 and below 1.
 *  \param masked false promises that every score is finite, which saves work on some back ends.
 */
int mlx_h2o_accumulate_scores(mlx_array* res, const mlx_array importance, const mlx_array scores,
                              double decay, bool masked, const mlx_stream s);

/** Minus the cosine of each key with the mean of the normalised keys of its head.
 *
 *  \param[out] res float32 [B, H, N]; a key of zeros gets 0.
 *  \param keys [B, H, N, D], float32, float16 or bfloat16.
 */
int mlx_h2o_key_diversity(mlx_array* res, const mlx_array keys, const mlx_stream s);

/** Fold evicted rows into the rows that stay.
 *
 *  Each evicted row goes into the nearest eligible row that stays, by the distance of logits, for
 *  queries of the size of the keys, and of values over their mean square. Rows folded into the same
 *  row enter its mean together. With r = N - K evicted rows, in order of their slots:
 *
 *  \param[out] into uint32 [B, H, r]: the slots of the changed rows. A slot appears once for every
 *    row folded into it, each time with the same new row; a row that is not folded has its own
 *    slot, and stays unchanged.
 *  \param[out] new_keys, new_values [B, H, r, D] and [B, H, r, Dv], the new rows at `into`:
 *    weighted means, computed in float32, in the dtype of the inputs. The caller must write them,
 *    and pack them if rows are packed.
 *  \param[out] new_bias, new_mass float32 [B, H, r]: ln of the summed counts, and summed masses.
 *  \param keys [B, H, N, D], float32, float16 or bfloat16.
 *  \param values [B, H, N, Dv] of the same dtype.
 *  \param bias ln n of the n rows that each row stands for, float32 [B, H, N]: 0 for an original
 *    row. Attention takes it as `row_bias`.
 *  \param mass a number per row that adds up in folding, float32 [B, H, N].
 *  \param weights of the rows in means, float32 [B, H, N]; at least 1e-9 counts. An evicted row
 *    with NaN is not folded.
 *  \param eligible bool [B, H, N], the rows that others may be folded into, if they stay.
 *  \param kept uint32 [B, H, K], 0 < K < N: the slots that stay, ascending.
 *  \param share the share of a head's evicted rows that is folded, rounded up: the nearest. Above
 *    0, at most 1.
 *  \return 1 for shapes or dtypes other than these.
 */
int mlx_h2o_fold(mlx_array* into, mlx_array* new_keys, mlx_array* new_values, mlx_array* new_bias,
                 mlx_array* new_mass, const mlx_array keys, const mlx_array values,
                 const mlx_array bias, const mlx_array mass, const mlx_array weights,
                 const mlx_array eligible, const mlx_array kept, double share, const mlx_stream s);

/** Quantise new rows straight into their slots.
 *
 *  Keys and values are stored independently, in a format given by the number of arrays. Three:
 *  words, scales and biases, which equal mlx_quantize on the same device bit for bit. Two: words
 *  and norms, codes of rotated rows (docs/design.md); a code may differ by one for an element
 *  within float32 rounding of the mean of two levels. One: unpacked rows. Evaluating the first
 *  array of the keys evaluates all.
 *
 *  \param[out] new_keys, new_values as many arrays as the inputs.
 *  \param keys words uint32 [B, H, N, D * bits / 32], scales and biases [B, H, N, D / group_size];
 *    or words and norms, float32 [B, H, N, 1]; or rows [B, H, N, D].
 *  \param values the same with Dv and v_bits.
 *  \param key_rows [B, H, L, D], float32, float16 or bfloat16: the dtype of the scales, or of
 *    unpacked rows.
 *  \param value_rows [B, H, L, Dv], the same for the values.
 *  \param slots uint32 [B, H, L], the rows to write, distinct within a head; a slot beyond the last
 *    row means the last row.
 *  \param bits, group_size, v_bits as in the quantised attention; codes have 2, 3 or 4 bits.
 */
int mlx_h2o_quantize_append(mlx_vector_array* new_keys, mlx_vector_array* new_values,
                            const mlx_vector_array keys, const mlx_vector_array values,
                            const mlx_array key_rows, const mlx_array value_rows,
                            const mlx_array slots, int bits, int group_size,
                            mlx_optional_int v_bits, const mlx_stream s);

/** Encode rows as codes of rotated directions, and norms (docs/design.md).
 *
 *  \param[out] words uint32 [B, H, N, D * bits / 32].
 *  \param[out] norms float32 [B, H, N, 1].
 *  \param rows [B, H, N, D], float32, float16 or bfloat16; D is a power of two from 32 to 1024.
 *  \param bits 2, 3 or 4.
 *  \param of_values whether the rows are values; keys have other signs.
 */
int mlx_h2o_encode_rows(mlx_array* words, mlx_array* norms, const mlx_array rows, int bits,
                        bool of_values, const mlx_stream s);

/** Decode words and norms to rows.
 *
 *  \param[out] res float32 [B, H, N, D].
 *  \param words, norms, bits, of_values as in mlx_h2o_encode_rows.
 */
int mlx_h2o_decode_rows(mlx_array* res, const mlx_array words, const mlx_array norms, int bits,
                        bool of_values, const mlx_stream s);

/**@}*/

#ifdef __cplusplus
}
#endif

#endif
