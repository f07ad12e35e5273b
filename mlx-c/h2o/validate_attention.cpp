// Attention, over dense rows and over packed ones.
#include <cfloat>
#include <cmath>

#include "checks.h"
#include "validate.h"

namespace mlx_h2o_c {

namespace {

void check_dense_shapes(const char* op, mlx_array queries, mlx_array keys, mlx_array values) {
  const Named layouts[] = {{"queries", queries, "[B, Hq, Lq, D]"},
                           {"keys", keys, "[B, Hkv, N, D]"},
                           {"values", values, "[B, Hkv, N, Dv]"}};
  for (const auto& [name, array, layout] : layouts) {
    if (mlx_array_ndim(array) != 4) {
      fail(op, name, " have ", mlx_array_ndim(array), " dimensions, expected 4 ", layout, ".");
    }
  }
  for (const auto& [name, array, layout] : layouts) {
    if (has_empty_axis(array)) {
      fail(op, name, " are empty: found shape ", shape_text(array), ", expected every size of ",
           layout, " to be at least 1.");
    }
  }
}

void check_together(const char* op, mlx_array queries, const Rows& keys, const Rows& values) {
  const mlx_array k = keys.parts[0], v = values.parts[0];
  const struct {
    const char* what;
    int one;
    int other;
  } same[] = {
      {"queries and keys have batch sizes", mlx_array_dim(queries, 0), mlx_array_dim(k, 0)},
      {"keys and values have batch sizes", mlx_array_dim(k, 0), mlx_array_dim(v, 0)},
      {"queries and keys have head sizes", mlx_array_dim(queries, 3), keys.size},
      {"keys and values have head counts", mlx_array_dim(k, 1), mlx_array_dim(v, 1)},
      {"keys and values have lengths", keys.count, values.count},
  };
  for (const auto& [what, one, other] : same) {
    if (one != other) {
      fail(op, what, " ", one, " and ", other, ", expected the same.");
    }
  }
  if (mlx_array_dim(queries, 1) % mlx_array_dim(k, 1) != 0) {
    fail(op, "queries have ", mlx_array_dim(queries, 1), " heads, expected a multiple of the ",
         mlx_array_dim(k, 1), " heads of the keys.");
  }
}

void check_dense_dtypes(const char* op, mlx_array queries, mlx_array keys, mlx_array values) {
  const Named named[] = {{"queries", queries, ""}, {"keys", keys, ""}, {"values", values, ""}};
  for (const auto& [name, array, _] : named) {
    if (!is_float(array)) {
      fail(op, name, " are ", dtype_name(array), ", expected float32, float16 or bfloat16.");
    }
  }
  if (mlx_array_dtype(queries) != mlx_array_dtype(keys) ||
      mlx_array_dtype(keys) != mlx_array_dtype(values)) {
    fail(op, "queries, keys and values are ", dtype_name(queries), ", ", dtype_name(keys), ", ",
         dtype_name(values), ", expected the same dtype of all three.");
  }
}

void check_mask(const char* op, mlx_array mask, const Shape& wanted) {
  if (mlx_array_dtype(mask) != MLX_BOOL && !is_float(mask)) {
    fail(op, "mask is ", dtype_name(mask),
         ", expected bool, or float32, float16 or bfloat16 to add.");
  }
  const Shape found = shape_of(mask);
  bool broadcasts = found.size() <= wanted.size();
  for (size_t back = 1; broadcasts && back <= found.size(); ++back) {
    const int size = found[found.size() - back];
    broadcasts = size == 1 || size == wanted[wanted.size() - back];
  }
  if (!broadcasts) {
    fail(op, "mask has shape ", shape_text(found),
         ", expected one that broadcasts to [B, Hq, Lq, N] = ", shape_text(wanted), ".");
  }
}

void check_sinks(const char* op, mlx_array sinks, int heads) {
  if (!is_float(sinks)) {
    fail(op, "sinks are ", dtype_name(sinks), ", expected float32, float16 or bfloat16.");
  }
  if (mlx_array_ndim(sinks) != 1 || mlx_array_dim(sinks, 0) != heads) {
    fail(op, "sinks have shape ", shape_text(sinks), ", expected [Hq] = (", heads, ",).");
  }
}

// Whether the mode asks for the array.
bool check_mask_mode(const char* op, const char* mode, mlx_array mask) {
  const std::string name = mode == nullptr ? "" : mode;
  if (name != "" && name != "causal" && name != "array") {
    fail(op, "mask_mode is '", name, "', expected '', 'causal' or 'array'.");
  }
  const bool wants = name == "array";
  if (wants && mask.ctx == nullptr) {
    fail(op, "mask_mode is 'array' and mask_arr an empty handle, expected a mask.");
  }
  if (!wants && mask.ctx != nullptr) {
    fail(op, "mask_mode is '", name, "' and mask_arr an array, expected mask_mode 'array'.");
  }
  return wants;
}

// Half of the lowest finite value: models mask with that value as well as with -inf.
float mask_threshold(mlx_dtype dtype) {
  switch (dtype) {
    case MLX_FLOAT16:
      return -65504.0f / 2;
    case MLX_BFLOAT16:
      return -0x1.fep127f / 2;
    default:
      return -FLT_MAX / 2;
  }
}

// What follows once queries and rows are known to be right.
AttentionRequest finished(const char* op, mlx_array queries, Rows keys, Rows values,
                          const AttentionArguments& arguments) {
  AttentionRequest request{};
  request.op = op;
  request.queries = queries;
  request.scale = arguments.scale;
  request.sinks = arguments.sinks;
  request.stream = arguments.stream;
  request.batch = mlx_array_dim(queries, 0);
  request.heads = mlx_array_dim(queries, 1);
  request.kv_heads = mlx_array_dim(keys.parts[0], 1);
  request.length = mlx_array_dim(queries, 2);
  request.rows = keys.count;
  request.head_size = keys.size;
  request.value_size = values.size;
  request.keys = std::move(keys);
  request.values = std::move(values);
  request.on_gpu = runs_on_gpu(op, arguments.stream);
  if (check_mask_mode(op, arguments.mask_mode, arguments.mask)) {
    const mlx_array mask = arguments.mask;
    const Shape pairs = {request.batch, request.heads, request.length, request.rows};
    check_mask(op, mask, pairs);
    request.mask_dtype = mlx_array_dtype(mask);
    request.mask_threshold = mask_threshold(request.mask_dtype);
    request.mask = call(mlx_broadcast_to, mask, pairs.data(), pairs.size(), arguments.stream);
  } else {
    request.causal = arguments.mask_mode != nullptr && arguments.mask_mode[0] != '\0';
  }
  if (arguments.sinks.ctx != nullptr) {
    check_sinks(op, arguments.sinks, request.heads);
  }
  return request;
}

}  // namespace

void check_queries(const char* op, mlx_array queries) {
  check_present(op, {"queries", queries, "[B, Hq, Lq, D]"});
  if (mlx_array_ndim(queries) != 4) {
    fail(op, "queries have ", mlx_array_ndim(queries), " dimensions, expected 4 [B, Hq, Lq, D].");
  }
  if (has_empty_axis(queries)) {
    fail(op, "queries are empty: found shape ", shape_text(queries),
         ", expected every size of [B, Hq, Lq, D] to be at least 1.");
  }
  if (!is_float(queries)) {
    fail(op, "queries are ", dtype_name(queries), ", expected float32, float16 or bfloat16.");
  }
}

AttentionRequest dense_attention_request(const char* op, mlx_array queries, Rows keys, Rows values,
                                         const AttentionArguments& arguments) {
  check_dense_shapes(op, queries, keys.parts[0], values.parts[0]);
  check_together(op, queries, keys, values);
  check_dense_dtypes(op, queries, keys.parts[0], values.parts[0]);
  check_number(op, "scale", arguments.scale);
  return finished(op, queries, std::move(keys), std::move(values), arguments);
}

AttentionRequest packed_attention_request(const char* op, mlx_array queries, Rows keys, Rows values,
                                          float sparse_v_threshold,
                                          const AttentionArguments& arguments) {
  check_together(op, queries, keys, values);
  if (mlx_array_dtype(keys.parts[1]) != mlx_array_dtype(values.parts[1])) {
    fail(op, "key scales and value scales are ", dtype_name(keys.parts[1]), " and ",
         dtype_name(values.parts[1]), ", expected the same dtype.");
  }
  check_number(op, "scale", arguments.scale);
  check_number(op, "sparse_v_threshold", sparse_v_threshold);
  if (!(sparse_v_threshold >= 0 && sparse_v_threshold < 1)) {
    fail(op, "sparse_v_threshold is ", number_text(sparse_v_threshold),
         ", expected 0 (off) or more, and below 1.");
  }
  AttentionRequest request = finished(op, queries, std::move(keys), std::move(values), arguments);
  request.sparse_v_threshold = sparse_v_threshold;
  return request;
}

AttentionRequest any_attention_request(const char* op, mlx_array queries, mlx_vector_array keys,
                                       mlx_vector_array values, const Packing& packing,
                                       float sparse_v_threshold,
                                       const AttentionArguments& arguments) {
  check_present(op, {"queries", queries, "[B, Hq, Lq, D]"});
  Rows k = rows_of(op, "keys", keys, packing), v = rows_of(op, "values", values, packing);
  if (k.packed() != v.packed()) {
    fail(op,
         k.packed() ? "keys are packed and values are not" : "values are packed and keys are not",
         ", expected both or none.");
  }
  if (k.packed()) {
    check_queries(op, queries);
    return packed_attention_request(op, queries, std::move(k), std::move(v), sparse_v_threshold,
                                    arguments);
  }
  check_number(op, "sparse_v_threshold", sparse_v_threshold);
  if (sparse_v_threshold != 0) {
    fail(op, "sparse_v_threshold is ", number_text(sparse_v_threshold), ", expected 0 ",
         op == std::string(probes_name) ? "for keys and values that are not packed."
                                        : "with dense rows.");
  }
  return dense_attention_request(op, queries, std::move(k), std::move(v), arguments);
}

void check_probes(const AttentionRequest& request, mlx_array probes) {
  const char* op = request.op;
  check_present(op, {"probes", probes, "[B, Hkv, E, D]"});
  if (mlx_array_ndim(probes) != 4) {
    fail(op, "probes have ", mlx_array_ndim(probes), " dimensions, expected 4 [B, Hkv, E, D].");
  }
  const Shape found = shape_of(probes);
  if (found[0] != request.batch || found[1] != request.kv_heads || found[3] != request.head_size ||
      found[2] == 0) {
    fail(op, "probes have shape ", shape_text(found), ", expected [B, Hkv, E, D] = (",
         request.batch, ", ", request.kv_heads, ", E, ", request.head_size,
         ") with E of at least 1.");
  }
  if (mlx_array_dtype(probes) != mlx_array_dtype(request.queries)) {
    fail(op, "probes are ", dtype_name(probes), ", expected the dtype of the queries, ",
         dtype_name(request.queries), ".");
  }
}

}  // namespace mlx_h2o_c
