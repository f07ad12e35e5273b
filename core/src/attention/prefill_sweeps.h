// Logits of many queries for a block of keys, as a matrix product with the keys side by side in the
// lanes of a vector. Included once per SIMD target: hence no include guard.
#include "attention/logit_masks.h"
#include "attention/softmax_sweeps.h"

// These need 16 or 32 registers: the sums of kRows x kVectors, the keys, a query.
constexpr int kRows = 4;
constexpr int kVectors = kLanes == 16 ? 4 : 2;

// Transposes `count` keys from `first` on to turned[d, key]; the block's other columns are zeros.
inline void turn_keys(const AttentionArguments& a, int64_t batch, int64_t kv_head, int first,
                      int count, float* row, float* turned) {
  for (int key = 0; key < kKeyBlock; ++key) {
    if (key < count) {
      const int64_t offset = batch * a.key_strides[0] + kv_head * a.key_strides[1] +
                             (int64_t{first} + key) * a.key_strides[2];
      widen(a.type, a.keys, offset, a.width, row);
    } else if (key == count) {
      std::fill(row, row + a.width, 0.0f);
    }
    for (int d = 0; d < a.width; ++d) turned[d * kKeyBlock + key] = row[d];
  }
}

// logits[row, key] for kRows query rows, [kRows, width], and a block of transposed keys.
inline void multiply(const float* queries, int width, const float* turned, float scale,
                     float* const (&logits)[kRows]) {
  for (int key = 0; key < kKeyBlock; key += kVectors * kLanes) {
    Vector sums[kRows][kVectors];
    MLX_H2O_UNROLL
    for (int i = 0; i < kRows; ++i) {
      MLX_H2O_UNROLL
      for (int j = 0; j < kVectors; ++j) sums[i][j] = broadcast(0);
    }
    for (int d = 0; d < width; ++d) {
      Vector keys[kVectors];
      MLX_H2O_UNROLL
      for (int j = 0; j < kVectors; ++j) keys[j] = load(turned + d * kKeyBlock + key + j * kLanes);
      MLX_H2O_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const Vector query = broadcast(queries[i * width + d]);
        MLX_H2O_UNROLL
        for (int j = 0; j < kVectors; ++j) sums[i][j] = multiply_add(query, keys[j], sums[i][j]);
      }
    }
    const Vector factor = broadcast(scale);
    MLX_H2O_UNROLL
    for (int i = 0; i < kRows; ++i) {
      MLX_H2O_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        store(logits[i] + key + j * kLanes, sums[i][j] * factor);
      }
    }
  }
}

// Masked logits of a block of keys for the (group member, query) pairs `rows`; logits [count of
// rows, stride], from the first key of the block on.
inline void score_rows(const AttentionArguments& a, int64_t batch, int64_t kv_head,
                       const QueryRows& rows, int first, int count, const PrefillScratch& scratch,
                       float* logits, int64_t stride) {
  turn_keys(a, batch, kv_head, first, count, scratch.row, scratch.turned);
  const int64_t group = a.query_heads / a.kv_heads;
  float block[kRows][kKeyBlock];
  float* const to[kRows] = {block[0], block[1], block[2], block[3]};
  for (int64_t row = 0; row < rows.count; row += kRows) {
    const int together = static_cast<int>(std::min<int64_t>(kRows, rows.count - row));
    int seen[kRows];
    int most = 0;
    for (int i = 0; i < together; ++i) {
      const int64_t head = kv_head * group + rows.member(row + i);
      const int64_t query = rows.query(row + i);
      seen[i] = visible_keys(a, query, first, count);
      most = std::max(most, seen[i]);
      const int64_t offset =
          batch * a.query_strides[0] + head * a.query_strides[1] + query * a.query_strides[2];
      widen(a.type, a.queries, offset, a.width, scratch.queries + int64_t{i} * a.width);
    }
    if (most > 0) multiply(scratch.queries, a.width, scratch.turned, a.scale, to);
    for (int i = 0; i < together; ++i) {
      float* result = logits + (row + i) * stride;
      std::copy(block[i], block[i] + seen[i], result);
      mask_row(a, batch, kv_head * group + rows.member(row + i), rows.query(row + i), first, count,
               result);
    }
  }
}

// weights[i] = exp(logits[i] - shift) in place; returns their sum.
inline double weigh_row(float* logits, int count, float shift) {
  constexpr int kPart = 16 * kLanes;  // summing in parts keeps long rows accurate
  double total = 0;
  for (int i = 0; i < count; i += kPart) {
    const float part = weigh(logits + i, std::min(kPart, count - i), shift, logits + i);
    total += static_cast<double>(part);
  }
  return total;
}

// mass[key] += the weights of each row over their total; the logits become weights.
inline void add_mass(const AttentionArguments& a, int64_t kv_head, const QueryRows& rows,
                     float* logits, float* mass) {
  const int64_t group = a.query_heads / a.kv_heads;
  for (int64_t row = 0; row < rows.count; ++row) {
    float* own = logits + row * a.key_count;
    const int64_t head = kv_head * group + rows.member(row);
    const float sink = a.sinks == nullptr ? -kInfinity : a.sinks[head * a.sink_stride];
    const float least = sink > -kInfinity ? sink : -kInfinity;
    const float shift = shift_of(row_maximum(own, a.key_count, least));
    const double total =
        weigh_row(own, a.key_count, shift) + std::exp(static_cast<double>(sink - shift));
    const float share = total == 0 ? 0.0f : static_cast<float>(1 / total);
    for (int key = 0; key < a.key_count; ++key) mass[key] += own[key] * share;
  }
}
