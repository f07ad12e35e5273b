#include "attention/attention_checks.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "cpu/checks.h"
#include "quantized/turbo_kernel.h"
#include "rows/accumulation_checks.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

void check_together(const char* operation, const mx::Shape& queries, const mx::Shape& keys,
                    const mx::Shape& values) {
  const struct {
    const char* what;
    int one, other;
  } same[] = {
      {"queries and keys have batch sizes ", queries[0], keys[0]},
      {"keys and values have batch sizes ", keys[0], values[0]},
      {"queries and keys have head sizes ", queries[3], keys[3]},
      {"keys and values have head counts ", keys[1], values[1]},
      {"keys and values have lengths ", keys[2], values[2]},
  };
  for (const auto& [what, one, other] : same) {
    if (one != other) fail(operation, what, one, " and ", other, ", expected the same.");
  }
  if (queries[1] % keys[1] != 0) {
    fail(operation, "queries have ", queries[1], " heads, expected a multiple of the ", keys[1],
         " heads of the keys.");
  }
}

void check_dtypes(const char* operation, const mx::array& queries, const mx::array& keys,
                  const mx::array& values) {
  const std::pair<const char*, mx::Dtype> all[] = {
      {"queries", queries.dtype()}, {"keys", keys.dtype()}, {"values", values.dtype()}};
  for (const auto& [name, dtype] : all) {
    if (is_float(dtype)) continue;
    fail(operation, name, " are ", to_text(dtype), ", expected float32, float16 or bfloat16.");
  }
  if (queries.dtype() != keys.dtype() || queries.dtype() != values.dtype()) {
    fail(operation, "queries, keys and values are ", to_text(queries.dtype()), ", ",
         to_text(keys.dtype()), ", ", to_text(values.dtype()),
         ", expected the same dtype of all three.");
  }
}

void check_dense(const char* operation, const char* name, const mx::array& rows,
                 const char* layout) {
  check_dimensions(operation, name, rows, 4, layout);
  check_not_empty(operation, name, rows, layout);
}

void check_codes(const char* operation, const char* name, const Rows& rows, int bits) {
  if (bits != 2 && bits != 3 && bits != 4) {
    fail(operation, "bits of the ", name, " are ", bits, ", expected 2, 3 or 4 of codes.");
  }
  for (const mx::array& part : rows) {
    check_dimensions(operation, name, part, 4, "[B, Hkv, N, ...]");
    check_not_empty(operation, name, part, "[B, Hkv, N, ...]");
  }
  const mx::array &words = rows[0], &norms = rows[1];
  if (words.dtype() != mx::uint32) {
    fail(operation, "words of the ", name, " are ", to_text(words.dtype()), ", expected uint32.");
  }
  const mx::Shape shape = shape_of_rows(rows, bits);
  if (words.shape(3) * 32 % bits != 0 || !kernels::has_codebook(shape[3])) {
    fail(operation, name, " have ", words.shape(3), " words per row of ", bits,
         " bits, expected those of a power of two of elements from 32 to 1024.");
  }
  const mx::Shape expected{shape[0], shape[1], shape[2], 1};
  if (norms.shape() != expected || norms.dtype() != mx::float32) {
    fail(operation, "norms of the ", name, " are ", to_text(norms.dtype()), ' ',
         to_text(norms.shape()), ", expected float32 ", to_text(expected), '.');
  }
}

void check_packed(const char* operation, const char* name, const Rows& rows, int bits,
                  int group_size) {
  if (bits != 2 && bits != 3 && bits != 4 && bits != 5 && bits != 6 && bits != 8) {
    fail(operation, "bits of the ", name, " are ", bits, ", expected 2, 3, 4, 5, 6 or 8.");
  }
  if (group_size != 32 && group_size != 64 && group_size != 128) {
    fail(operation, "group_size is ", group_size, ", expected 32, 64 or 128.");
  }
  for (const mx::array& part : rows) {
    check_dimensions(operation, name, part, 4, "[B, Hkv, N, ...]");
    check_not_empty(operation, name, part, "[B, Hkv, N, ...]");
  }
  const mx::array &words = rows[0], &scales = rows[1], &biases = rows[2];
  if (words.dtype() != mx::uint32) {
    fail(operation, "words of the ", name, " are ", to_text(words.dtype()), ", expected uint32.");
  }
  if (!is_float(scales.dtype()) || scales.dtype() != biases.dtype()) {
    fail(operation, "scales and biases of the ", name, " are ", to_text(scales.dtype()), " and ",
         to_text(biases.dtype()), ", expected float32, float16 or bfloat16, both the same.");
  }
  const mx::Shape shape = shape_of_rows(rows, bits);
  if (words.shape(3) * 32 % bits != 0 || shape[3] % group_size != 0) {
    fail(operation, name, " have ", words.shape(3), " words per row, which at ", bits,
         " bits is not a multiple of the group size ", group_size, '.');
  }
  const mx::Shape expected{shape[0], shape[1], shape[2], shape[3] / group_size};
  for (const mx::array* part : {&scales, &biases}) {
    if (part->shape() == expected) continue;
    fail(operation, part == &scales ? "scales" : "biases", " of the ", name, " have shape ",
         to_text(part->shape()), ", expected ", to_text(expected), '.');
  }
}

void check_sinks(const char* operation, const mx::array& sinks, int heads) {
  if (!is_float(sinks.dtype())) {
    fail(operation, "sinks are ", to_text(sinks.dtype()),
         ", expected float32, float16 or bfloat16.");
  }
  if (sinks.shape() != mx::Shape{heads}) {
    fail(operation, "sinks have shape ", to_text(sinks.shape()), ", expected [Hq] = (", heads,
         ",).");
  }
}

}  // namespace

void check_row_bias(const char* operation, const mx::array& bias, const mx::Shape& keys) {
  const bool fits = bias.ndim() == 3 && bias.shape(0) == keys[0] && bias.shape(1) == keys[1] &&
                    bias.shape(2) >= keys[2];  // it may have room for more rows
  if (!fits || bias.dtype() != mx::float32) {
    fail(operation, "row_bias is ", to_text(bias.dtype()), ' ', to_text(bias.shape()),
         ", expected float32 [B, Hkv, N] = ", to_text(mx::Shape{keys[0], keys[1], keys[2]}), '.');
  }
}

mx::Shape shape_of_rows(const Rows& rows, int bits) {
  mx::Shape shape = rows[0].shape();
  if (rows.size() > 1) shape[3] = shape[3] * 32 / bits;
  return shape;
}

void check_mask(const char* operation, const mx::array& mask, const mx::Shape& pairs) {
  if (mask.dtype() != mx::bool_ && !is_float(mask.dtype())) {
    fail(operation, "mask is ", to_text(mask.dtype()),
         ", expected bool, or float32, float16 or bfloat16 to add.");
  }
  bool broadcasts = mask.ndim() <= pairs.size();
  for (int axis = 1; broadcasts && axis <= static_cast<int>(mask.ndim()); ++axis) {
    const int found = mask.shape(-axis);
    broadcasts = found == 1 || found == pairs[pairs.size() - static_cast<size_t>(axis)];
  }
  if (!broadcasts) {
    fail(operation, "mask has shape ", to_text(mask.shape()),
         ", expected one that broadcasts to [B, Hq, Lq, N] = ", to_text(pairs), '.');
  }
}

void check_attention(const char* operation, const mx::array& queries, const Rows& keys,
                     const Rows& values, const AttentionOptions& options) {
  const auto known = [](const Rows& rows) { return rows.size() > 0 && rows.size() < 4; };
  const bool codes = keys.size() == 2 || values.size() == 2;
  if (!known(keys) || !known(values) || (keys.size() != values.size() && !codes)) {
    fail(operation, "keys are ", keys.size(), " arrays and values ", values.size(),
         ", expected one each, words, scales and biases of both, or words and norms of either.");
  }
  check_dense(operation, "queries", queries, "[B, Hq, Lq, D]");
  const auto check_rows = [&](const char* name, const Rows& rows, int bits, const char* layout) {
    if (rows.size() == 1) return check_dense(operation, name, rows[0], layout);
    if (rows.size() == 2) return check_codes(operation, name, rows, bits);
    check_packed(operation, name, rows, bits, options.group_size);
  };
  check_rows("keys", keys, options.bits, "[B, Hkv, N, D]");
  check_rows("values", values, options.v_bits, "[B, Hkv, N, Dv]");
  const mx::Shape shape = shape_of_rows(keys, options.bits);
  check_together(operation, queries.shape(), shape, shape_of_rows(values, options.v_bits));
  const auto dense = [&](const Rows& rows) { return rows.size() == 1 ? rows[0] : queries; };
  check_dtypes(operation, queries, dense(keys), dense(values));
  if (!std::isfinite(options.scale)) {
    fail(operation, "scale is ", options.scale, ", expected a finite number.");
  }
  if (!(options.sparse_v_threshold >= 0 && options.sparse_v_threshold < 1)) {
    fail(operation, "sparse_v_threshold is ", options.sparse_v_threshold,
         ", expected 0 (off) or more, and below 1.");
  }
  if (options.causal && options.mask.has_value()) {
    fail(operation, "found a mask array and \"causal\", expected one of them.");
  }
  const mx::Shape pairs{queries.shape(0), queries.shape(1), queries.shape(2), shape[2]};
  if (options.mask.has_value()) check_mask(operation, *options.mask, pairs);
  if (options.sinks.has_value()) check_sinks(operation, *options.sinks, queries.shape(1));
  if (options.row_bias.has_value()) check_row_bias(operation, *options.row_bias, shape);
  if (!options.importance.has_value()) return;
  const mx::array& importance = *options.importance;  // it may have room for more rows
  const int rows = importance.ndim() == 3 ? std::max(importance.shape(2), pairs[3]) : pairs[3];
  check_importance(operation, importance, pairs[0], rows, shape[1]);
  if (options.importance->shape(1) != shape[1]) {
    fail(operation, "importance has ", options.importance->shape(1), " heads, expected ", shape[1],
         " as the keys.");
  }
  check_query_count(operation, pairs[2]);
  if (options.decay.has_value()) check_decay(operation, *options.decay);
}

}  // namespace mlx_h2o
