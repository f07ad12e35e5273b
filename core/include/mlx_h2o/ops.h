// The operations of mlx-h2o on the CPU, as MLX graph operations.
//
// Arguments are checked when the graph is built; an error is a std::invalid_argument whose text
// begins with the operation's name in brackets and says what was found and what was expected.
// Every operation needs a CPU stream.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <mlx/array.h>
#include <mlx/utils.h>

#include "mlx_h2o/attention_numbers.h"

namespace mlx_h2o {

/// Dense attention. queries [B, Hq, Lq, D], keys [B, Hkv, N, D] and values [B, Hkv, N, Dv] have one
/// dtype of float32, float16 and bfloat16; they are read in place where their last axis has unit
/// stride. The arithmetic is float32. Returns out [B, Hq, Lq, Dv] in their dtype: zeros where a
/// query sees nothing, NaN where its additive mask holds NaN.
///
/// A pair (query, key) is masked where `causal` (aligned bottom-right) hides it, where a bool mask
/// is false, or where an additive float mask is at or below half of its dtype's lowest finite
/// value. `mask` broadcasts to [B, Hq, Lq, N]; it and `causal` exclude each other. `sinks` [Hq],
/// of any of the three dtypes, are logits that join the denominator and have no value.
mlx::core::array scaled_dot_product_attention(
    const mlx::core::array& queries, const mlx::core::array& keys, const mlx::core::array& values,
    float scale, bool causal = false, const std::optional<mlx::core::array>& mask = std::nullopt,
    const std::optional<mlx::core::array>& sinks = std::nullopt, mlx::core::StreamOrDevice s = {});

/// What `attention` may be told beside its arrays.
struct AttentionOptions : AttentionNumbers {
  std::optional<mlx::core::array> mask = std::nullopt;
  std::optional<mlx::core::array> sinks = std::nullopt;
  // Scores are not stored: with `decay` they go straight into the moving average of
  // accumulate_scores, without it the weights exp(score - lse) of all queries and query heads of a
  // KV head are added to the importance, where NaN counts as 0 (the attention mass of Zhang et al.
  // 2023, H2O). At most 128 queries.
  std::optional<mlx::core::array> importance = std::nullopt;
  std::optional<double> decay = 0;
  int bits = 8;  // of packed keys
  int v_bits = 8;
  int group_size = 64;
  // float32 [B, Hkv, at least N]: added to the products of all queries of a KV head, and so part of
  // the scores; at or below the lowest finite float it masks its row.
  std::optional<mlx::core::array> row_bias = std::nullopt;
};

/// Attention over rows of any kind: `keys` and `values` are one array each, or packed as words,
/// scales and biases (affine, as mx.quantize packs them; 2, 3, 4, 5, 6 or 8 bits, groups of 32, 64
/// or 128), or as words and norms (encode_rows); dense keys go with such values, too. Packed rows
/// are unpacked in registers at 2, 3, 4 and 8 bits, a few rows at a time at others.
///
/// A pair whose weight is below `sparse_v_threshold` adds nothing to out, and its value is not read
/// unless another query of its KV head needs it; scores and lse do not change.
///
/// Returns out, then, where asked for, scores float32 [B, Hq, Lq, N], the logits scale * q.k +
/// mask, -inf where masked; lse float32 [B, Hq, Lq] with the sink in it: weights are exp(scores -
/// lse), and 0 where lse is -inf; the share of a query's rows that the threshold skipped [B, Hq,
/// Lq]; and the new importance. That may have room for more rows than there are keys, which stay as
/// they are.
std::vector<mlx::core::array> attention(const mlx::core::array& queries,
                                        const std::vector<mlx::core::array>& keys,
                                        const std::vector<mlx::core::array>& values,
                                        const AttentionOptions& options,
                                        mlx::core::StreamOrDevice s = {});

/// Reads all of the arrays' memory, on all threads, and returns the sum of its bytes as words: what
/// a benchmark compares with. The arrays must have been evaluated.
uint64_t plain_read(const std::vector<mlx::core::array>& arrays);

/// The moving average C = a*C + (1-a)*|s| over the queries in order (AtomGradient 2026, sec. 3.2).
///
/// importance is C, float32 [B, H, N], NaN where a row has not been scored: the first score sets
/// C = |s|. scores are float32 [B, Hq, Lq, N], Hq a multiple of H, at most 128 queries; s is their
/// mean over the query heads of the group that are not masked (-inf or NaN), and a row that all of
/// them mask stays as it is. 0 <= decay < 1. float32 arithmetic, additions not fused. The buffer
/// of `importance` is reused where nothing else holds it.
mlx::core::array accumulate_scores(const mlx::core::array& importance,
                                   const mlx::core::array& scores, double decay,
                                   mlx::core::StreamOrDevice s = {});

/// Scores of a long chunk of queries, one number per key: float32 [B, Hkv, N].
///
/// queries [B, Hq, Lq, D], keys [B, Hkv, N, D], mask and sinks as attention takes them. With
/// `decay` the moving average of accumulate_scores over all Lq queries in order, from `importance`
/// float32 [B, Hkv, N] on, or from rows that are not scored; its buffer is reused where nothing
/// else holds it. Without `decay` the attention mass (Zhang et al. 2023, H2O): the sum of the
/// weights over queries and query heads. `row_bias`, float32 [B, Hkv, at least N], as attention
/// takes it. No matrix of all logits is made.
mlx::core::array prefill_scores(const mlx::core::array& queries, const mlx::core::array& keys,
                                float scale, bool causal,
                                const std::optional<mlx::core::array>& mask,
                                const std::optional<mlx::core::array>& sinks,
                                std::optional<double> decay,
                                const std::optional<mlx::core::array>& importance = std::nullopt,
                                const std::optional<mlx::core::array>& row_bias = std::nullopt,
                                mlx::core::StreamOrDevice s = {});

/// Minus the cosine of each key with the mean of the normalised keys of its head, float32
/// [B, H, N], of keys [B, H, N, D] in float32, float16 or bfloat16. A key of zeros gets 0.
mlx::core::array key_diversity(const mlx::core::array& keys, mlx::core::StreamOrDevice s = {});

/// Folds each row that goes into the nearest row that stays: slots uint32 [B, H, r], keys, values,
/// bias and mass of the rows that change, one for each of the r rows that go. keys [B, H, N, D] and
/// values [B, H, N, Dv] of one float dtype; `bias`, ln n of the n rows that each stands for,
/// `mass`, which adds up, and `weights` in means, NaN: it is not folded, float32 [B, H, N];
/// `eligible`, the rows that others may be folded into, bool [B, H, N]; `kept`, the slots that
/// stay, ascending, uint32 [B, H, N - r]; `share` of the rows that go, rounded up, are folded, the
/// nearest: above 0, at most 1. python/mlx_h2o/operations/composed/folding.py is the definition.
std::vector<mlx::core::array> fold(const mlx::core::array& keys, const mlx::core::array& values,
                                   const mlx::core::array& bias, const mlx::core::array& mass,
                                   const mlx::core::array& weights,
                                   const mlx::core::array& eligible, const mlx::core::array& kept,
                                   double share = 1, mlx::core::StreamOrDevice s = {});

/// New rows [B, H, L, width] in the slots from `start` on of buffers [B, H, C, width] of the same
/// dtypes: the buffers, in the memory of the inputs where nothing else holds that, and then of each
/// the first `start` + L slots.
std::vector<mlx::core::array> append_rows(const std::vector<mlx::core::array>& buffers,
                                          const std::vector<mlx::core::array>& rows, int start,
                                          mlx::core::StreamOrDevice s = {});

/// Rows [B, H, n, ...] in the slots uint32 [B, H, n] of a buffer [B, H, C, ...] of the same dtype:
/// the buffer, written in the memory of the input where nothing else holds that, also where it was
/// read to make the rows. A slot beyond the buffer is left out.
mlx::core::array put_rows(const mlx::core::array& buffer, const mlx::core::array& slots,
                          const mlx::core::array& rows, mlx::core::StreamOrDevice s = {});

/// Zeros of a shape whose memory is taken page by page, as it is written, where commits_pages()
/// says so: a buffer with room for all rows that may come. MLX counts all of it at once.
mlx::core::array reserved_rows(const mlx::core::Shape& shape, mlx::core::Dtype dtype);

/// Gives back the memory of rows from slot `from` on of a buffer [B, H, C, width]: whole pages,
/// whose rows are zeros from then on. Nothing happens where the buffer is not evaluated, or where
/// something else holds it too. Returns the bytes of these pages, in memory or not.
size_t discard_rows(mlx::core::array& buffer, int from);

/// Bytes of an array that are in memory; all of them where it is not evaluated or nobody can say.
size_t committed_bytes(const mlx::core::array& buffer);

/// Whether this system takes and gives back memory by pages, as the three above want it.
bool commits_pages();

/// Rows that stay close the gaps of those that go, in place.
///
/// `buffer` is [B, H, C] or [B, H, C, width] of a dtype of two or four bytes. Of the sequences in
/// `lines` the rows in the slots `kept`, uint32 [b, H, K], ascending, stay: the last of them,
/// beyond slot K, fill the slots below it that fall free, the last one the first. Then `tail` rows
/// from slot `start` on follow them. Returns the buffer, written in the memory of the input where
/// nothing else holds that; what is behind the rows that stay means nothing.
mlx::core::array compact_rows(const mlx::core::array& buffer, const mlx::core::array& kept,
                              const std::vector<int>& lines, int start = 0, int tail = 0,
                              mlx::core::StreamOrDevice s = {});

/// Attention over rows in segments put together, of outs [B, Hq, L, D] and lses float32 [B, Hq, L]
/// of each: the outputs are averaged by their shares exp(lse_i - lse) of the common denominator; a
/// query that no segment shows anything gives zeros. Returns out and lse.
std::vector<mlx::core::array> merge_segments(const std::vector<mlx::core::array>& outs,
                                             const std::vector<mlx::core::array>& lses,
                                             mlx::core::StreamOrDevice s = {});

/// Packed rows in tiers, and behind them the dense `newest` [B, H, n, D], in one form.
///
/// tiers are {words, scales, biases} of each tier, `bits` those of each. `slots`, uint32 [B, H, K],
/// name the rows, counted from the first of the first tier; none given: all. With `to` 0 the result
/// is one array [B, H, K, D] in the dtype of the newest, where packed rows are dequantised in
/// float32 and rounded once. Else it is {words, scales, biases} of `to` bits: new rows are
/// quantised as mx.quantize does, and packed ones never again, they keep the upper bits of their
/// codes. All bits are 2, 4 or 8 then.
std::vector<mlx::core::array> segment_rows(
    const std::vector<mlx::core::array>& tiers, const mlx::core::array& newest,
    const std::vector<int>& bits, int group_size,
    const std::optional<mlx::core::array>& slots = std::nullopt, int to = 0,
    mlx::core::StreamOrDevice s = {});

/// Rows [B, H, N, D] as codes of rotated directions (docs/design.md): words, uint32
/// [B, H, N, D * bits / 32], and norms, float32 [B, H, N, 1]. D is a power of two from 32 to 1024,
/// bits are 2, 3 or 4; the seed of the rotation is 42 of keys and 43 of values.
std::vector<mlx::core::array> encode_rows(const mlx::core::array& rows, int bits, int seed,
                                          mlx::core::StreamOrDevice s = {});

/// The rows that they stand for, [B, H, N, D] in `dtype`.
mlx::core::array decode_rows(const mlx::core::array& words, const mlx::core::array& norms, int bits,
                             int seed, mlx::core::Dtype dtype, mlx::core::StreamOrDevice s = {});

/// Quantises new rows straight into their slots, bit for bit as mx.quantize (affine, CPU) does.
///
/// keys and values are {words uint32 [B, H, N, D * bits / 32], scales and biases
/// [B, H, N, D / group_size]}, or {words, norms} as encode_rows makes them, or one array of rows,
/// each of its own; new_keys [B, H, L, D] and new_values [B, H, L, Dv] have the dtype of
/// their scales; slots are uint32 [B, H, L], distinct within a head (beyond N they mean N - 1).
/// bits are 2, 3, 4, 5, 6 or 8, group_size 32, 64 or 128.
///
/// Returns the stored arrays, keys first, as siblings; each is written in the buffer of its
/// input where nothing else holds that, else in a copy.
std::vector<mlx::core::array> quantize_append(const std::vector<mlx::core::array>& keys,
                                              const std::vector<mlx::core::array>& values,
                                              const mlx::core::array& new_keys,
                                              const mlx::core::array& new_values,
                                              const mlx::core::array& slots, int bits,
                                              int group_size, int v_bits,
                                              mlx::core::StreamOrDevice s = {});

/// The slots of the `keep` rows of each head that are worth most, uint32 [B, H, keep], ascending.
///
/// scores float32 [B, H, N]; positions int32 [B, H, N], distinct within a head, below 0 for
/// padding; 1 <= keep <= N. Best first: rows at 0 <= position < sink_size or position >=
/// recent_start, whatever their score; the higher score; NaN; padding. Of equals the lower position
/// is kept, of padding the lower slot. Sinks are StreamingLLM's (Xiao et al. 2024), recent rows and
/// heavy hitters H2O's (Zhang et al. 2023). recent_start is int32 [] or [B]: one for all sequences,
/// or one each.
mlx::core::array keep_indices(const mlx::core::array& scores, const mlx::core::array& positions,
                              int keep, int sink_size = 0,
                              const std::optional<mlx::core::array>& recent_start = std::nullopt,
                              mlx::core::StreamOrDevice s = {});

}  // namespace mlx_h2o
