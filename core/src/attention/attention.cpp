// The attention operations: argument checks, and the inputs and outputs of their primitive.
#include <memory>
#include <utility>
#include <vector>

#include <mlx/ops.h>

#include "attention/attention_kernel.h"
#include "attention/attention_primitive.h"
#include "cpu/checks.h"
#include "mlx_h2o/ops.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

constexpr const char* kWithScores = "scaled_dot_product_attention_with_scores";
constexpr const char* kQuantized = "scaled_dot_product_attention_quantized_with_scores";
constexpr const char* kAndAccumulate = "attention_and_accumulate";
constexpr const char* kAttention = "scaled_dot_product_attention";

/// Keys or values: one array, words and norms, or words, scales and biases.
using Rows = std::vector<mx::array>;

void check_attention(const char* operation, const mx::array& queries, const Rows& keys,
                     const Rows& values, const AttentionOptions& options) {
  const auto known = [](const Rows& rows) { return rows.size() > 0 && rows.size() < 4; };
  const bool codes = keys.size() == 2 || values.size() == 2;
  if (!known(keys) || !known(values) || (keys.size() != values.size() && !codes) ||
      (keys.size() > 1 && values.size() == 1)) {
    fail(operation, "keys are ", keys.size(), " arrays and values ", values.size(),
         ", expected one each, words, scales and biases of both, or words and norms of either.");
  }
  const bool packed = keys.size() > 1 || values.size() > 1;
  Arguments given(operation);
  if (packed) given.packing(options.bits, options.v_bits, options.group_size);
  given.array(found(queries));
  give_rows(given, keys);
  give_rows(given, values);
  const int rows = given["N"];
  mx::Shape importance, bias;  // both may have room for more rows
  if (options.importance.has_value()) {
    given.array(found_rows(*options.importance, 0, rows, importance));
  }
  if (options.causal && options.mask.has_value()) {
    fail(operation, "found a mask array and \"causal\", expected one of them.");
  }
  given.array(found(options.mask));
  given.array(found(options.sinks));
  given.array(options.row_bias ? found_rows(*options.row_bias, 0, rows, bias) : Found{});
  given.number("scale", options.scale);
  options.each([&](const char* name, float value) {
    if (given.takes(name)) given.number(name, value);
  });
  if (options.importance && options.decay) given.number("decay", *options.decay);
}

std::vector<mx::array> attend(const char* operation, const mx::array& queries, const Rows& keys,
                              const Rows& values, const AttentionOptions& options,
                              mx::StreamOrDevice s) {
  check_attention(operation, queries, keys, values, options);
  const mx::Stream stream = cpu_stream(operation, s);

  AttentionSettings settings{};
  settings.key_arrays = static_cast<int>(keys.size());
  settings.value_arrays = static_cast<int>(values.size());
  static_cast<AttentionNumbers&>(settings) = options;
  settings.bits = keys.size() > 1 ? options.bits : 0;
  settings.v_bits = values.size() > 1 ? options.v_bits : 0;
  settings.group_size = keys.size() == 3 || values.size() == 3 ? options.group_size : 0;
  settings.has_mask = options.mask.has_value();
  settings.has_sinks = options.sinks.has_value();
  settings.has_row_bias = options.row_bias.has_value();
  settings.has_importance = options.importance.has_value();
  if (settings.has_importance) settings.decay = options.decay;

  std::vector<mx::array> inputs{queries};
  inputs.insert(inputs.end(), keys.begin(), keys.end());
  inputs.insert(inputs.end(), values.begin(), values.end());
  if (options.importance.has_value()) inputs.push_back(*options.importance);
  if (options.mask.has_value()) {
    const mx::Shape pairs{queries.shape(0), queries.shape(1), queries.shape(2), keys[0].shape(2)};
    inputs.push_back(mx::broadcast_to(*options.mask, pairs, stream));
  }
  if (options.sinks.has_value()) {
    inputs.push_back(mx::astype(*options.sinks, mx::float32, stream));
  }
  if (options.row_bias.has_value()) inputs.push_back(*options.row_bias);
  auto primitive = std::make_shared<Attention>(stream, operation, settings);
  std::vector<mx::Shape> shapes = primitive->output_shapes(inputs);
  std::vector<mx::Dtype> dtypes(shapes.size(), mx::float32);
  dtypes[0] = queries.dtype();
  return mx::array::make_arrays(std::move(shapes), dtypes, primitive, inputs);
}

}  // namespace

std::vector<mx::array> attention(const mx::array& queries, const std::vector<mx::array>& keys,
                                 const std::vector<mx::array>& values,
                                 const AttentionOptions& options, mx::StreamOrDevice s) {
  const char* operation = options.importance.has_value() ? kAndAccumulate
                          : values.size() > 1            ? kQuantized
                                                         : kWithScores;
  return attend(operation, queries, keys, values, options, s);
}

mx::array scaled_dot_product_attention(const mx::array& queries, const mx::array& keys,
                                       const mx::array& values, float scale, bool causal,
                                       const std::optional<mx::array>& mask,
                                       const std::optional<mx::array>& sinks,
                                       mx::StreamOrDevice s) {
  const AttentionOptions options{{scale, causal}, mask, sinks};
  return attend(kAttention, queries, {keys}, {values}, options, s)[0];
}

}  // namespace mlx_h2o
