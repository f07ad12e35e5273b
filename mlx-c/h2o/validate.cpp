#include "validate.h"

#include <cfloat>
#include <cstring>

namespace mlx_h2o_c {

namespace {

// Whether the mode needs the mask array.
bool check_mask_mode(const char* op, const std::string& mode, mlx_array mask) {
  expect(mode == "" || mode == "causal" || mode == "array", op, "mask_mode is '", mode,
         "', expected '', 'causal' or 'array'.");
  const bool wants = mode == "array";
  expect(!wants || mask.ctx != nullptr, op,
         "mask_mode is 'array' and mask_arr an empty handle, expected a mask.");
  expect(wants || mask.ctx == nullptr, op, "mask_mode is '", mode,
         "' and mask_arr an array, expected mask_mode 'array'.");
  return wants;
}

}  // namespace

float mask_threshold(mlx_dtype dtype) {
  return (dtype == MLX_FLOAT16 ? -65504.0F : dtype == MLX_BFLOAT16 ? -0x1.fep127F : -FLT_MAX) / 2;
}

std::vector<Array> parts_of(const char* op, const char* name, mlx_vector_array vector) {
  expect(vector.ctx != nullptr, op, name, " are an empty handle, expected a vector of arrays.");
  const size_t count = mlx_vector_array_size(vector);
  expect(count >= 1 && count <= 3, op, name, " are ", count,
         " arrays, expected 1, or 3: words, scales and biases, or 2: words and norms.");
  return items(vector);
}

std::vector<Array> parts_of(mlx_array rows, mlx_array scales, mlx_array biases) {
  const size_t count = biases.ctx != nullptr ? 3 : scales.ctx != nullptr ? 2 : 1;
  const mlx_array all[] = {rows, scales, biases};
  std::vector<Array> parts;
  for (size_t i = 0; i < count; ++i) {
    parts.push_back(all[i].ctx == nullptr ? Array() : copied(all[i]));
  }
  return parts;
}

Rows checked_rows(Arguments& given, std::vector<Array> parts, int bits, int group_size,
                  const char* size) {
  Found all[3];
  for (size_t i = 0; i < parts.size(); ++i) all[i] = found(parts[i]);
  given.rows(all, parts.size());
  const size_t count = parts.size();
  return {std::move(parts), count == 1 ? 0 : bits, count == 3 ? group_size : 0, given[size]};
}

AttentionRequest attention_request(const char* op, mlx_array queries, std::vector<Array> keys,
                                   std::vector<Array> values, const Packing* packing,
                                   const AttentionNumbers& numbers,
                                   const AttentionArguments& arguments, mlx_array importance) {
  const bool prefill = std::strcmp(op, "prefill_scores") == 0;
  Arguments given(op);
  Packing how = {8, 64, {}};
  if (packing != nullptr) {
    how = *packing;
    given.packing(how.bits, how.of_values(), how.group_size);
  }
  const std::string mode = arguments.mask_mode == nullptr ? "" : arguments.mask_mode;
  const size_t key_parts = keys.size(), value_parts = values.size();
  given.array(found(queries));
  AttentionRequest request{};
  request.keys = checked_rows(given, std::move(keys), how.bits, how.group_size, "D");
  if (!prefill) {
    request.values = checked_rows(given, std::move(values), how.of_values(), how.group_size, "Dv");
  }
  if (std::strcmp(op, "attention_and_accumulate") == 0) given.array(found(importance));
  const bool masked = check_mask_mode(op, mode, arguments.mask_arr);
  given.array(masked ? found(arguments.mask_arr) : Found{});
  given.array(found(arguments.sinks));
  given.array(found(arguments.row_bias));
  if (prefill) given.array(found(importance));
  if (request.packed()) {
    expect(value_parts != 1 && !(key_parts == 1 && value_parts == 3), op, "keys and values are ",
           key_parts, " and ", value_parts,
           " arrays, expected both packed, or one array of keys beside codes.");
  }
  given.number("scale", numbers.scale);
  numbers.each([&](const char* name, float value) {
    if (given.takes(name)) given.number(name, value);
  });
  static_cast<AttentionNumbers&>(request) = numbers;
  request.op = op;
  request.sinks = arguments.sinks;
  request.stream = arguments.stream;
  request.on_gpu = runs_on_gpu(op, request.stream);
  request.queries = copied(queries);
  request.causal = mode == "causal";
  request.batch = given["B"];
  request.heads = given["Hq"];
  request.kv_heads = given["Hkv"];
  request.length = given["Lq"];
  request.rows = given["N"];
  request.head_size = given["D"];
  request.value_size = given[prefill ? "D" : "Dv"];
  if (masked) {
    request.mask_threshold = mask_threshold(dtype_of(arguments.mask_arr));
    request.mask = broadcast(arguments.mask_arr, request.pairs(), request.stream);
  }
  if (arguments.row_bias.ctx != nullptr) request.row_bias = copied(arguments.row_bias);
  return request;
}

}  // namespace mlx_h2o_c
