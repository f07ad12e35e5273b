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

/// Options of `attention` beside its arrays.
struct AttentionOptions : AttentionNumbers {
  std::optional<mlx::core::array> mask = std::nullopt;
  std::optional<mlx::core::array> sinks = std::nullopt;
  // Scores are not stored. With `decay` they go straight into the moving average of
  // accumulate_scores. Without it, the weights exp(score - lse) of all queries and query heads of a
  // KV head are added to the importance, where NaN counts as 0 (the attention mass of Zhang et al.
  // 2023, H2O). At most 128 queries.
  std::optional<mlx::core::array> importance = std::nullopt;
  std::optional<double> decay = 0;
  int bits = 8;  // of packed keys
  int v_bits = 8;
  int group_size = 64;
  // float32 [B, Hkv, at least N]: added to the logits of all queries of a KV head, and so part of
  // the scores; a value at or below the lowest finite float masks its row.
  std::optional<mlx::core::array> row_bias = std::nullopt;
};

/// Attention over rows in any format: `keys` and `values` are one array each, or packed as words,
/// scales and biases (affine, as mx.quantize packs them; 2, 3, 4, 5, 6 or 8 bits, groups of 32, 64
/// or 128), or as words and norms (encode_rows); dense keys also go with coded values. Rows of 2,
/// 3, 4 and 8 bits are unpacked in registers, rows of 5 and 6 bits to memory, a few at a time.
///
/// A pair whose weight is below `sparse_v_threshold` adds nothing to out, and its value is read
/// only if another query of its KV head needs it; scores and lse do not change.
///
/// Returns out, then, as requested: scores float32 [B, Hq, Lq, N], the logits scale * q.k + mask,
/// -inf where masked; lse float32 [B, Hq, Lq] with the sink in it (weights are exp(scores - lse),
/// and 0 where lse is -inf); the share of a query's rows that the threshold skipped [B, Hq, Lq];
/// and the new importance. The importance may have room for more rows than there are keys; the
/// surplus stays unchanged.
std::vector<mlx::core::array> attention(const mlx::core::array& queries,
                                        const std::vector<mlx::core::array>& keys,
                                        const std::vector<mlx::core::array>& values,
                                        const AttentionOptions& options,
                                        mlx::core::StreamOrDevice s = {});

/// Reads all of the arrays' memory, on all threads, and returns the sum of its bytes as words: the
/// baseline of benchmarks. The arrays must have been evaluated.
uint64_t plain_read(const std::vector<mlx::core::array>& arrays);

/// The moving average C = a*C + (1-a)*|s| over the queries in order (AtomGradient 2026, sec. 3.2).
///
/// importance is C, float32 [B, H, N], NaN where a row has not been scored: the first score sets C
/// = |s|. scores are float32 [B, Hq, Lq, N], Hq a multiple of H, at most 128 queries; s is their
/// mean over the unmasked query heads of the group (neither -inf nor NaN). A row masked by all of
/// them keeps its C. 0 <= decay < 1. float32 arithmetic, additions not fused. Reuses the buffer of
/// `importance` if nothing else holds it.
mlx::core::array accumulate_scores(const mlx::core::array& importance,
                                   const mlx::core::array& scores, double decay,
                                   mlx::core::StreamOrDevice s = {});

/// Scores of a long chunk of queries, one number per key: float32 [B, Hkv, N].
///
/// queries [B, Hq, Lq, D], keys [B, Hkv, N, D], mask and sinks as attention takes them. With
/// `decay`: the moving average of accumulate_scores over all Lq queries in order, starting from
/// `importance` float32 [B, Hkv, N] or, without it, from unscored rows; reuses the buffer of
/// `importance` if nothing else holds it. Without `decay`: the attention mass (Zhang et al. 2023,
/// H2O), the sum of the weights over queries and query heads. `row_bias`, float32 [B, Hkv, at least
/// N], as attention takes it. Never builds a matrix of all logits.
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

/// Folds each evicted row into the nearest row that stays. Returns slots uint32 [B, H, r], keys,
/// values, bias and mass of the changed rows, one for each of the r evicted rows. keys [B, H, N, D]
/// and values [B, H, N, Dv] have one float dtype. `bias` is ln n of the n rows that each row stands
/// for, `mass` adds up, `weights` are for means (NaN: not folded), all float32 [B, H, N].
/// `eligible`, bool [B, H, N], marks rows that others may be folded into; `kept`, uint32 [B, H, N -
/// r], are the slots that stay, ascending. The nearest `share` of the evicted rows, rounded up, is
/// folded: above 0, at most 1. python/mlx_h2o/operations/composed/folding.py is the definition.
std::vector<mlx::core::array> fold(const mlx::core::array& keys, const mlx::core::array& values,
                                   const mlx::core::array& bias, const mlx::core::array& mass,
                                   const mlx::core::array& weights,
                                   const mlx::core::array& eligible, const mlx::core::array& kept,
                                   double share = 1, mlx::core::StreamOrDevice s = {});

/// Puts new rows [B, H, L, width] into the slots from `start` on of buffers [B, H, C, width] of the
/// same dtypes. Returns the buffers, in the memory of the inputs if nothing else holds them, and
/// then the first `start` + L slots of each.
std::vector<mlx::core::array> append_rows(const std::vector<mlx::core::array>& buffers,
                                          const std::vector<mlx::core::array>& rows, int start,
                                          mlx::core::StreamOrDevice s = {});

/// Puts rows [B, H, n, ...] into the slots uint32 [B, H, n] of a buffer [B, H, C, ...] of the same
/// dtype. Returns the buffer, written in the memory of the input if nothing else holds it, even if
/// the rows were computed from it. Slots beyond the buffer are skipped.
mlx::core::array put_rows(const mlx::core::array& buffer, const mlx::core::array& slots,
                          const mlx::core::array& rows, mlx::core::StreamOrDevice s = {});

/// Zeros of a shape, in memory that is committed page by page as it is written if commits_pages():
/// a buffer with room for all future rows. MLX counts all of it at once.
mlx::core::array reserved_rows(const mlx::core::Shape& shape, mlx::core::Dtype dtype);

/// Gives back the memory of rows from slot `from` on of a buffer [B, H, C, width]: whole pages,
/// whose rows then read as zeros. Does nothing if the buffer is not evaluated, or something else
/// holds it too. Returns the bytes of these pages, whether in memory or not.
size_t discard_rows(mlx::core::array& buffer, int from);

/// Bytes of an array in memory; all of them if it is not evaluated or the system cannot say.
size_t committed_bytes(const mlx::core::array& buffer);

/// Whether this system takes and gives back memory by pages, as the three functions above need.
bool commits_pages();

/// Fills the gaps of evicted rows with rows that stay, in place.
///
/// `buffer` is [B, H, C] or [B, H, C, width]. In the sequences `sequences`, the rows in the slots
/// `kept`, uint32 [b, H, K], ascending, stay: kept rows beyond slot K fill the free slots below it,
/// the last row first. Then `tail` rows from slot `start` on follow them. Returns the buffer,
/// written in the memory of the input if nothing else holds it; the contents after the rows that
/// stay are undefined.
mlx::core::array compact_rows(const mlx::core::array& buffer, const mlx::core::array& kept,
                              const std::vector<int>& sequences, int start = 0, int tail = 0,
                              mlx::core::StreamOrDevice s = {});

/// Merges attention over segments of rows, from outs [B, Hq, L, D] and lses float32 [B, Hq, L] of
/// each: the outputs are averaged by their shares exp(lse_i - lse) of the common denominator; a
/// query that sees nothing in any segment gives zeros. Returns out and lse.
std::vector<mlx::core::array> merge_segments(const std::vector<mlx::core::array>& outs,
                                             const std::vector<mlx::core::array>& lses,
                                             mlx::core::StreamOrDevice s = {});

/// Packed rows in tiers, followed by the dense `newest` [B, H, n, D], in one format.
///
/// tiers are {words, scales, biases} of each tier, `bits` their bits. `slots`, uint32 [B, H, K],
/// choose the rows, counted from the first row of the first tier; without slots, all rows. With
/// `to` 0 the result is one array [B, H, K, D] in the dtype of the newest rows; packed rows are
/// dequantised in float32 and rounded once. Otherwise it is {words, scales, biases} of `to` bits:
/// dense rows are quantised as mx.quantize does; packed rows are not quantised again, but keep the
/// upper bits of their codes. All bits are 2, 4 or 8 then.
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

/// Decodes words and norms to rows [B, H, N, D] in `dtype`.
mlx::core::array decode_rows(const mlx::core::array& words, const mlx::core::array& norms, int bits,
                             int seed, mlx::core::Dtype dtype, mlx::core::StreamOrDevice s = {});

/// Quantises new rows straight into their slots, bit for bit as mx.quantize (affine, CPU) does.
///
/// keys and values are stored independently, each as {words uint32 [B, H, N, D * bits / 32], scales
/// and biases [B, H, N, D / group_size]}, as {words, norms} from encode_rows, or as one array of
/// rows; new_keys [B, H, L, D] and new_values [B, H, L, Dv] have the dtype of their scales; slots
/// are uint32 [B, H, L], distinct within a head (beyond N they mean N - 1). bits are 2, 3, 4, 5, 6
/// or 8, group_size 32, 64 or 128.
///
/// Returns the stored arrays, keys first, as siblings; each is written in the buffer of its input
/// if nothing else holds it, else in a copy.
std::vector<mlx::core::array> quantize_append(const std::vector<mlx::core::array>& keys,
                                              const std::vector<mlx::core::array>& values,
                                              const mlx::core::array& new_keys,
                                              const mlx::core::array& new_values,
                                              const mlx::core::array& slots, int bits,
                                              int group_size, int v_bits,
                                              mlx::core::StreamOrDevice s = {});

/// The slots of the best `keep` rows of each head, uint32 [B, H, keep], ascending.
///
/// scores float32 [B, H, N]; positions int32 [B, H, N], distinct within a head, below 0 for
/// padding; 1 <= keep <= N. Best first: rows at 0 <= position < sink_size or position >=
/// recent_start, whatever their score; then by score, descending; NaN; padding. In a tie the lower
/// position is kept, for padding the lower slot. Sinks are StreamingLLM's (Xiao et al. 2024),
/// recent rows and heavy hitters H2O's (Zhang et al. 2023). recent_start is int32 [] or [B]: one
/// for all sequences, or one each.
mlx::core::array keep_indices(const mlx::core::array& scores, const mlx::core::array& positions,
                              int keep, int sink_size = 0,
                              const std::optional<mlx::core::array>& recent_start = std::nullopt,
                              mlx::core::StreamOrDevice s = {});

}  // namespace mlx_h2o
