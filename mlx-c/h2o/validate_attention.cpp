// Attention, over dense rows and over packed ones, and the scores of a long chunk.
#include <cfloat>

#include "validate.h"

namespace mlx_h2o_c {

namespace {

void check_together(const char* op, mlx_array queries, const Rows& keys, const Rows& values) {
  const Shape q = shape_of(queries), k = shape_of(keys.parts[0]), v = shape_of(values.parts[0]);
  check_same(op, "queries and keys have batch sizes", q[0], k[0]);
  check_same(op, "keys and values have batch sizes", k[0], v[0]);
  check_same(op, "queries and keys have head sizes", q[3], keys.size);
  check_same(op, "keys and values have head counts", k[1], v[1]);
  check_same(op, "keys and values have lengths", k[2], v[2]);
  expect(q[1] % k[1] == 0, op, "queries have ", q[1], " heads, expected a multiple of the ", k[1],
         " heads of the keys.");
}

void check_mask(const char* op, mlx_array mask, const Shape& wanted) {
  expect(dtype_of(mask) == MLX_BOOL || is_float(mask), op, "mask is ", dtype_of(mask),
         ", expected bool, or float32, float16 or bfloat16 to add.");
  const Shape found = shape_of(mask);
  bool broadcasts = found.size() <= wanted.size();
  for (size_t back = 1; broadcasts && back <= found.size(); ++back) {
    const int size = found[found.size() - back];
    broadcasts = size == 1 || size == wanted[wanted.size() - back];
  }
  expect(broadcasts, op, "mask has shape ", found,
         ", expected one that broadcasts to [B, Hq, Lq, N] = ", wanted, ".");
}

// Whether the mode asks for the array.
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

// Half of the lowest finite value: models mask with that value as well as with -inf.
float mask_threshold(mlx_dtype dtype) {
  return (dtype == MLX_FLOAT16 ? -65504.0F : dtype == MLX_BFLOAT16 ? -0x1.fep127F : -FLT_MAX) / 2;
}

void check_row_bias(const char* op, mlx_array bias, const Shape& rows) {
  expect(dtype_of(bias) == MLX_FLOAT32 && shape_of(bias) == rows, op, "row_bias is ",
         dtype_of(bias), " ", shape_of(bias), ", expected float32 [B, Hkv, N] = ", rows, ".");
}

// What follows once queries and rows are known to be right.
AttentionRequest finished(const char* op, mlx_array queries, Rows keys, Rows values,
                          const AttentionArguments& arguments) {
  AttentionRequest request{};
  static_cast<AttentionArguments&>(request) = arguments;
  const Shape q = shape_of(queries);
  static_cast<AttentionSizes&>(request) = {
      q[0], q[1], mlx_array_dim(keys.parts[0], 1), q[2], keys.count(), keys.size, values.size};
  request.op = op;
  request.queries = copied(queries);
  request.on_gpu = runs_on_gpu(op, request.stream);
  request.keys = std::move(keys);
  request.values = std::move(values);
  const std::string mode = request.mask_mode == nullptr ? "" : request.mask_mode;
  request.causal = mode == "causal";
  if (check_mask_mode(op, mode, request.mask_arr)) {
    const Shape pairs = {request.batch, request.heads, request.length, request.rows};
    check_mask(op, request.mask_arr, pairs);
    request.mask_threshold = mask_threshold(dtype_of(request.mask_arr));
    request.mask = broadcast(request.mask_arr, pairs, request.stream);
  }
  if (request.row_bias.ctx != nullptr) {
    check_row_bias(op, request.row_bias, {request.batch, request.kv_heads, request.rows});
  }
  if (request.sinks.ctx == nullptr) return request;
  check_float(op, {"sinks", request.sinks, ""});
  const Shape found = shape_of(request.sinks), expected = {request.heads};
  expect(found == expected, op, "sinks have shape ", found, ", expected [Hq] = ", expected, ".");
  return request;
}

Rows dense_rows(mlx_array array) {
  Rows rows{{}, 0, 0, mlx_array_dim(array, 3)};
  rows.parts.push_back(copied(array));
  return rows;
}

// Rows of any kind: without biases codes and norms, without scales one array of keys.
Rows any_rows(const char* op, const char* name, const Parts& parts, const Packing& packing) {
  const auto [rows, scales, biases] = parts;
  if (rows.ctx == nullptr || biases.ctx != nullptr) return packed_rows(op, name, parts, packing);
  if (scales.ctx != nullptr) return coded_rows(op, name, rows, scales, packing.bits);
  const Named named = {std::string(name) + " rows", rows, "[B, Hkv, N, D]"};
  check_rank(op, named, 4);
  check_not_empty(op, named);
  check_float(op, named);
  return dense_rows(rows);
}

}  // namespace

void check_queries(const char* op, mlx_array queries) {
  const Named named = {"queries", queries, query_layout};
  check_present(op, named);
  check_rank(op, named, 4);
  check_not_empty(op, named);
  check_float(op, named);
}

AttentionRequest dense_attention_request(const char* op, mlx_array queries, mlx_array keys,
                                         mlx_array values, const AttentionArguments& arguments) {
  const Named all[] = {{"queries", queries, query_layout},
                       {"keys", keys, "[B, Hkv, N, D]"},
                       {"values", values, "[B, Hkv, N, Dv]"}};
  for (const Named& each : all) check_present(op, each);
  for (const Named& each : all) check_rank(op, each, 4);
  for (const Named& each : all) check_not_empty(op, each);
  Rows k = dense_rows(keys), v = dense_rows(values);
  check_together(op, queries, k, v);
  for (const Named& each : all) check_float(op, each);
  const mlx_dtype dtype = dtype_of(queries);
  expect(dtype == dtype_of(keys) && dtype == dtype_of(values), op, "queries, keys and values are ",
         dtype_of(queries), ", ", dtype_of(keys), ", ", dtype_of(values),
         ", expected the same dtype of all three.");
  check_number(op, "scale", arguments.scale);
  return finished(op, queries, std::move(k), std::move(v), arguments);
}

AttentionRequest packed_attention_request(const char* op, mlx_array queries, const Parts& key_parts,
                                          const Parts& value_parts, const Packing& packing,
                                          const AttentionArguments& arguments) {
  check_packing(op, packing);
  Rows keys = any_rows(op, "key", key_parts, packing);
  Rows values = any_rows(op, "value", value_parts, packing.of_values());
  check_queries(op, queries);
  check_together(op, queries, keys, values);
  expect(values.packed() && (keys.packed() || values.codes()), op,
         "values are one array, expected words, scales and biases as of the keys, or codes.");
  expect(keys.packed() || dtype_of(keys.parts[0]) == dtype_of(queries), op, "queries and keys are ",
         dtype_of(queries), " and ", dtype_of(keys.parts[0]), ", expected the same dtype.");
  if (keys.parts.size() == 3 && values.parts.size() == 3) {
    const mlx_dtype of_keys = dtype_of(keys.parts[1]), of_values = dtype_of(values.parts[1]);
    expect(of_keys == of_values, op, "key scales and value scales are ", of_keys, " and ",
           of_values, ", expected the same dtype.");
  }
  check_number(op, "scale", arguments.scale);
  check_number(op, "sparse_v_threshold", arguments.sparse_v_threshold);
  const float threshold = arguments.sparse_v_threshold;
  expect(threshold >= 0 && threshold < 1, op, "sparse_v_threshold is ", threshold,
         ", expected 0 (off) or more, and below 1.");
  return finished(op, queries, std::move(keys), std::move(values), arguments);
}

AttentionRequest any_attention_request(const char* op, mlx_array queries, mlx_vector_array keys,
                                       mlx_vector_array values, const Packing& packing,
                                       const AttentionArguments& arguments) {
  check_present(op, {"queries", queries, query_layout});
  const std::vector<Array> k = parts_of(op, "keys", keys), v = parts_of(op, "values", values);
  expect(
      k.size() == 2 || v.size() == 2 || k.size() == v.size(), op,
      k.size() == 3 ? "keys are packed and values are not" : "values are packed and keys are not",
      ", expected both or none.");
  if (v.size() > 1 || k.size() > 1) {
    const auto three = [](const std::vector<Array>& parts) {
      Parts found = {};
      for (size_t i = 0; i < parts.size(); ++i) found[i] = parts[i];
      return found;
    };
    return packed_attention_request(op, queries, three(k), three(v), packing, arguments);
  }
  check_number(op, "sparse_v_threshold", arguments.sparse_v_threshold);
  expect(arguments.sparse_v_threshold == 0, op, "sparse_v_threshold is ",
         arguments.sparse_v_threshold, ", expected 0 with dense rows.");
  return dense_attention_request(op, queries, k[0], v[0], arguments);
}

}  // namespace mlx_h2o_c
