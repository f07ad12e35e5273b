// The definition of every operation in plain MLX operations. Inputs are upcast, logits and
// softmax are float32, and the output is rounded once.
#include <cmath>
#include <cstdint>

#include "backend.h"

namespace mlx_h2o_c {

namespace {

// Classes of rows, the worst first, in the two upper bits of the retention key.
enum Class : int32_t { padding, unscored, scored, protected_row };

constexpr int position_bits = 30;

std::string always() { return ""; }
std::string nothing_refused(const AttentionRequest& /* request */) { return ""; }

Array number(float value) { return scalar(value, MLX_FLOAT32); }

Array upcast(mlx_array array, mlx_stream s) { return call(mlx_astype, array, MLX_FLOAT32, s); }

Array range(int start, int stop, mlx_dtype dtype, mlx_stream s) {
  return call(mlx_arange, double(start), double(stop), 1.0, dtype, s);
}

// scale * q.k + mask as float32 [B, Hq, Lq, N], -inf where the pair is masked.
Array logits_of(const AttentionRequest& r) {
  const mlx_stream s = r.stream;
  // The query heads of one KV head become rows of one product: K is not repeated.
  const int group_rows = r.heads / r.kv_heads * r.length;
  const Array scaled = call(mlx_multiply, upcast(r.queries, s), number(r.scale), s);
  const Array queries = reshape(scaled, {r.batch, r.kv_heads, group_rows, r.head_size}, s);
  const Array keys = call(mlx_swapaxes, upcast(r.keys, s), -1, -2, s);
  Array logits =
      reshape(call(mlx_matmul, queries, keys, s), {r.batch, r.heads, r.length, r.rows}, s);
  const Array masked = number(-INFINITY);
  if (r.causal) {
    const Array last = range(r.rows - r.length, r.rows, MLX_INT32, s);
    const Array seen =
        call(mlx_less_equal, range(0, r.rows, MLX_INT32, s), reshape(last, {r.length, 1}, s), s);
    return call(mlx_where, seen, logits, masked, s);
  }
  if (r.has_bool_mask()) {
    return call(mlx_where, r.mask, logits, masked, s);
  }
  if (r.has_additive_mask()) {
    const Array bias = upcast(r.mask, s);
    // NaN compares false: it is not masked, and reaches the output of its query.
    const Array hidden = call(mlx_less_equal, bias, number(r.mask_threshold), s);
    return call(mlx_where, hidden, masked, call(mlx_add, logits, bias, s), s);
  }
  return logits;
}

AttentionResult attention(const AttentionRequest& r) {
  const mlx_stream s = r.stream;
  AttentionResult result;
  result.scores = logits_of(r);
  Array peak = call(mlx_max_axis, result.scores, -1, true, s);
  Array sinks;
  if (r.sinks.ctx != nullptr) {
    sinks = reshape(upcast(r.sinks, s), {1, r.heads, 1, 1}, s);
    peak = call(mlx_maximum, peak, sinks, s);
  }
  // With nothing to attend to the peak is -inf, and -inf - -inf would be NaN.
  const Array nothing = call(mlx_equal, peak, number(-INFINITY), s);
  peak = call(mlx_where, nothing, number(0), peak, s);
  const Array weights = call(mlx_exp, call(mlx_subtract, result.scores, peak, s), s);
  Array total = call(mlx_sum_axis, weights, -1, true, s);
  if (!sinks.empty()) {
    total = call(mlx_add, total, call(mlx_exp, call(mlx_subtract, sinks, peak, s), s), s);
  }
  const int group_rows = r.heads / r.kv_heads * r.length;
  const Array grouped = reshape(weights, {r.batch, r.kv_heads, group_rows, r.rows}, s);
  const Array mixed = reshape(call(mlx_matmul, grouped, upcast(r.values, s), s),
                              {r.batch, r.heads, r.length, r.value_size}, s);
  const Array out = call(mlx_where, call(mlx_equal, total, number(0), s), number(0),
                         call(mlx_divide, mixed, total, s), s);
  result.out = call(mlx_astype, out, mlx_array_dtype(r.queries), s);
  if (r.return_lse) {
    const Array lse = call(mlx_add, peak, call(mlx_log, total, s), s);
    result.lse = call(mlx_squeeze_axis, lse, -1, s);
  }
  return result;
}

// uint32 in the order of the float32 scores; -0 and +0 are the same.
Array ordered_bits(mlx_array scores, mlx_stream s) {
  const Array bits = call(mlx_view, call(mlx_add, scores, number(0), s), MLX_UINT32, s);
  const Array sign = scalar(uint32_t{1} << 31, MLX_UINT32);
  return call(mlx_where, call(mlx_greater_equal, bits, sign, s), call(mlx_bitwise_invert, bits, s),
              call(mlx_bitwise_or, bits, sign, s), s);
}

Array row_class(Class value) { return scalar<int32_t>(value, MLX_INT32); }

// uint64 [B, H, N], higher is kept longer, distinct within a head:
// class << 62 | ordered score << 30 | (2^30 - 1 - position). Only the class of scored rows carries
// a score, and padding has its slot in the place of a position.
Array retention_key(const RetentionRequest& r) {
  const mlx_stream s = r.stream;
  const Array is_padding = call(mlx_less, r.positions, scalar<int32_t>(0, MLX_INT32), s);
  Array is_protected = call(mlx_less, r.positions, scalar<int32_t>(r.sink_size, MLX_INT32), s);
  if (r.recent_start) {
    const Array start = scalar<int32_t>(*r.recent_start, MLX_INT32);
    is_protected =
        call(mlx_logical_or, is_protected, call(mlx_greater_equal, r.positions, start, s), s);
  }
  Array classes =
      call(mlx_where, call(mlx_isnan, r.scores, s), row_class(unscored), row_class(scored), s);
  classes = call(mlx_where, is_protected, row_class(protected_row), classes, s);
  classes = call(mlx_where, is_padding, row_class(padding), classes, s);

  const Array is_scored = call(mlx_equal, classes, row_class(scored), s);
  const Array ranked =
      call(mlx_where, is_scored, ordered_bits(r.scores, s), scalar<uint32_t>(0, MLX_UINT32), s);
  const Array slots = range(0, r.rows, MLX_INT32, s);
  const Array place = call(mlx_subtract, scalar<int32_t>((1 << position_bits) - 1, MLX_INT32),
                           call(mlx_where, is_padding, slots, r.positions, s), s);

  const auto shifted = [s](mlx_array part, uint64_t bits) {
    return call(mlx_left_shift, call(mlx_astype, part, MLX_UINT64, s), scalar(bits, MLX_UINT64), s);
  };
  const Array upper = call(mlx_bitwise_or, shifted(classes, 62), shifted(ranked, position_bits), s);
  return call(mlx_bitwise_or, upper, call(mlx_astype, place, MLX_UINT64, s), s);
}

// [B, H, first:last] of [B, H, N].
Array columns(const RetentionRequest& r, mlx_array array, int first, int last) {
  const int start[] = {0, 0, first};
  const int stop[] = {r.batch, r.heads, last};
  const int strides[] = {1, 1, 1};
  return call(mlx_slice, array, start, size_t{3}, stop, size_t{3}, strides, size_t{3}, r.stream);
}

Array keep_indices(const RetentionRequest& r) {
  const mlx_stream s = r.stream;
  if (r.count == 0) {
    const int shape[] = {r.batch, r.heads, r.rows};
    return call(mlx_broadcast_to, range(0, r.rows, MLX_UINT32, s), shape, size_t{3}, s);
  }
  const Array order = call(mlx_argpartition_axis, retention_key(r), r.count, -1, s);
  const Array kept = columns(r, order, r.count, r.rows);
  return call(mlx_astype, call(mlx_sort_axis, kept, -1, s), MLX_UINT32, s);
}

Array evict_indices(const RetentionRequest& r) {
  const mlx_stream s = r.stream;
  if (r.count == 1) {
    return call(mlx_astype, call(mlx_argmin_axis, retention_key(r), -1, true, s), MLX_UINT32, s);
  }
  const Array order = call(mlx_argsort_axis, retention_key(r), -1, s);
  return call(mlx_astype, columns(r, order, 0, r.count), MLX_UINT32, s);
}

}  // namespace

const Backend composed_backend = {"composed", always,       nothing_refused,
                                  attention,  keep_indices, evict_indices};

}  // namespace mlx_h2o_c
