// The operations of attention: argument checks, and the inputs and outputs of their primitive.
#include <vector>

#include <mlx/ops.h>

#include "attention/attention_primitive.h"
#include "mlx_h2o/ops.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

constexpr const char* kWithScores = "scaled_dot_product_attention_with_scores";
constexpr const char* kQuantized = "scaled_dot_product_attention_quantized_with_scores";
constexpr const char* kAndAccumulate = "attention_and_accumulate";
constexpr const char* kAttention = "scaled_dot_product_attention";
constexpr const char* kPrefillScores = "prefill_scores";

void check_parts(const char* operation, const Arrays& keys, const Arrays& values) {
  const auto known = [](const Arrays& rows) { return rows.size() > 0 && rows.size() < 4; };
  const bool codes = keys.size() == 2 || values.size() == 2;
  if (known(keys) && known(values) && (keys.size() == values.size() || codes) &&
      (keys.size() == 1 || values.size() > 1)) {
    return;
  }
  fail(operation, "keys are ", keys.size(), " arrays and values ", values.size(),
       ", expected one each, words, scales and biases of both, or words and norms of either.");
}

// Without values: the scores of a chunk.
void check_attention(const char* operation, const mx::array& queries, const Arrays& keys,
                     const Arrays& values, const AttentionOptions& options) {
  const bool chunk = values.empty();
  Arguments given(operation);
  if (keys.size() > 1 || values.size() > 1) {
    given.packing(options.bits, options.v_bits, options.group_size);
  }
  given.array(found(queries));
  give_rows(given, keys);
  if (!chunk) give_rows(given, values);
  const int rows = given["N"];
  mx::Shape importance, bias;  // both may have room for more rows, but not for a chunk
  if (!chunk && options.importance.has_value()) {
    given.array(found_rows(*options.importance, 0, rows, importance));
  }
  if (options.causal && options.mask.has_value()) {
    fail(operation, "found a mask array and \"causal\", expected one of them.");
  }
  given.array(found(options.mask));
  given.array(found(options.sinks));
  given.array(options.row_bias ? found_rows(*options.row_bias, 0, rows, bias) : Found{});
  if (chunk) given.array(found(options.importance));
  given.number("scale", options.scale);
  options.each([&](const char* name, float value) {
    if (given.takes(name)) given.number(name, value);
  });
  if ((options.importance || chunk) && options.decay) given.number("decay", *options.decay);
  if (chunk && options.importance && !options.decay) {
    fail(operation, "importance is given for the mass, expected it for the average.");
  }
}

Arrays attend(const char* name, const mx::array& queries, const Arrays& keys, const Arrays& values,
              const AttentionOptions& options, mx::StreamOrDevice s) {
  check_attention(name, queries, keys, values, options);
  Attention operation{};
  static_cast<AttentionNumbers&>(operation) = options;
  operation.key_arrays = keys.size();
  operation.value_arrays = values.size();
  operation.bits = keys.size() > 1 ? options.bits : 0;
  operation.v_bits = values.size() > 1 ? options.v_bits : 0;
  operation.group_size = keys.size() == 3 || values.size() == 3 ? options.group_size : 0;
  operation.has_row_bias = options.row_bias.has_value();
  operation.has_importance = options.importance.has_value();
  operation.has_mask = options.mask.has_value();
  operation.has_sinks = options.sinks.has_value();
  if (operation.has_importance || values.empty()) operation.decay = options.decay;

  Arrays inputs{queries};
  inputs.insert(inputs.end(), keys.begin(), keys.end());
  inputs.insert(inputs.end(), values.begin(), values.end());
  if (options.row_bias.has_value()) inputs.push_back(*options.row_bias);
  if (options.importance.has_value()) inputs.push_back(*options.importance);
  if (options.mask.has_value()) {
    const mx::Shape pairs{queries.shape(0), queries.shape(1), queries.shape(2), keys[0].shape(2)};
    inputs.push_back(mx::broadcast_to(*options.mask, pairs, s));
  }
  if (options.sinks.has_value()) inputs.push_back(mx::astype(*options.sinks, mx::float32, s));
  // All outputs but the first are float32; of a chunk, this one too.
  std::vector<mx::Dtype> dtypes(operation.output_shapes(inputs).size(), mx::float32);
  if (!values.empty()) dtypes[0] = queries.dtype();
  return outputs_of(name, operation, inputs, dtypes, s);
}

}  // namespace

std::vector<mx::array> attention(const mx::array& queries, const std::vector<mx::array>& keys,
                                 const std::vector<mx::array>& values,
                                 const AttentionOptions& options, mx::StreamOrDevice s) {
  const char* name = options.importance.has_value() ? kAndAccumulate
                     : values.size() > 1            ? kQuantized
                                                    : kWithScores;
  check_parts(name, keys, values);
  return attend(name, queries, keys, values, options, s);
}

mx::array scaled_dot_product_attention(const mx::array& queries, const mx::array& keys,
                                       const mx::array& values, float scale, bool causal,
                                       const std::optional<mx::array>& mask,
                                       const std::optional<mx::array>& sinks,
                                       mx::StreamOrDevice s) {
  const AttentionOptions options{{scale, causal}, mask, sinks};
  return attend(kAttention, queries, {keys}, {values}, options, s)[0];
}

mx::array prefill_scores(const mx::array& queries, const mx::array& keys, float scale, bool causal,
                         const std::optional<mx::array>& mask,
                         const std::optional<mx::array>& sinks, std::optional<double> decay,
                         const std::optional<mx::array>& importance,
                         const std::optional<mx::array>& row_bias, mx::StreamOrDevice s) {
  AttentionOptions options{{scale, causal}, mask, sinks, importance, decay};
  options.row_bias = row_bias;
  return attend(kPrefillScores, queries, {keys}, {}, options, s)[0];
}

}  // namespace mlx_h2o
