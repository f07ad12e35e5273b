// The checks of the operations' arguments; the texts are those of the Python package.
#include "request.h"

#include <cfloat>
#include <cmath>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace mlx_h2o_c {

namespace {

template <class... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  std::ostringstream message;
  message << '[' << op << "] ";
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

struct Named {
  const char* name;
  mlx_array array;
  const char* layout;
};

std::vector<int> shape_of(mlx_array array) {
  std::vector<int> shape(mlx_array_ndim(array));
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    shape[axis] = mlx_array_dim(array, static_cast<int>(axis));
  }
  return shape;
}

// As Python writes a tuple.
std::string shape_text(const std::vector<int>& shape) {
  std::string text = "(";
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    text += (axis > 0 ? ", " : "") + std::to_string(shape[axis]);
  }
  return text + (shape.size() == 1 ? ",)" : ")");
}

std::string shape_text(mlx_array array) { return shape_text(shape_of(array)); }

const char* dtype_name(mlx_array array) {
  static const char* const names[] = {"bool",    "uint8",   "uint16",   "uint32",   "uint64",
                                      "int8",    "int16",   "int32",    "int64",    "float16",
                                      "float32", "float64", "bfloat16", "complex64"};
  return names[mlx_array_dtype(array)];
}

bool is_float(mlx_array array) {
  const mlx_dtype dtype = mlx_array_dtype(array);
  return dtype == MLX_FLOAT32 || dtype == MLX_FLOAT16 || dtype == MLX_BFLOAT16;
}

void check_present(const char* op, const Named& named) {
  if (named.array.ctx == nullptr) {
    fail(op, named.name, " are an empty handle, expected an array ", named.layout, ".");
  }
}

bool has_empty_axis(mlx_array array) { return mlx_array_size(array) == 0; }

bool runs_on_gpu(const char* op, mlx_stream stream) {
  if (stream.ctx == nullptr) {
    fail(op, "the stream is an empty handle, expected a stream.");
  }
  Device device;
  check(mlx_stream_get_device(device.out(), stream));
  mlx_device_type type = MLX_CPU;
  check(mlx_device_get_type(&type, device));
  return type == MLX_GPU;
}

void check_shapes(const char* op, mlx_array queries, mlx_array keys, mlx_array values) {
  const Named layouts[] = {{"queries", queries, "[B, Hq, Lq, D]"},
                           {"keys", keys, "[B, Hkv, N, D]"},
                           {"values", values, "[B, Hkv, N, Dv]"}};
  for (const Named& named : layouts) {
    check_present(op, named);
  }
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
  const struct {
    const char* what;
    int one;
    int other;
  } same[] = {
      {"queries and keys have batch sizes", mlx_array_dim(queries, 0), mlx_array_dim(keys, 0)},
      {"keys and values have batch sizes", mlx_array_dim(keys, 0), mlx_array_dim(values, 0)},
      {"queries and keys have head sizes", mlx_array_dim(queries, 3), mlx_array_dim(keys, 3)},
      {"keys and values have head counts", mlx_array_dim(keys, 1), mlx_array_dim(values, 1)},
      {"keys and values have lengths", mlx_array_dim(keys, 2), mlx_array_dim(values, 2)},
  };
  for (const auto& [what, one, other] : same) {
    if (one != other) {
      fail(op, what, " ", one, " and ", other, ", expected the same.");
    }
  }
  if (mlx_array_dim(queries, 1) % mlx_array_dim(keys, 1) != 0) {
    fail(op, "queries have ", mlx_array_dim(queries, 1), " heads, expected a multiple of the ",
         mlx_array_dim(keys, 1), " heads of the keys.");
  }
}

void check_dtypes(const char* op, mlx_array queries, mlx_array keys, mlx_array values) {
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

void check_scale(const char* op, float scale) {
  if (!std::isfinite(scale)) {
    const char* found = std::isnan(scale) ? "nan" : scale > 0 ? "inf" : "-inf";
    fail(op, "scale is ", found, ", expected a finite number.");
  }
}

void check_mask(const char* op, mlx_array mask, const std::vector<int>& wanted) {
  if (mlx_array_dtype(mask) != MLX_BOOL && !is_float(mask)) {
    fail(op, "mask is ", dtype_name(mask),
         ", expected bool, or float32, float16 or bfloat16 to add.");
  }
  const std::vector<int> found = shape_of(mask);
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

RetentionRequest retention_request(const char* op, mlx_array scores, mlx_array positions,
                                   const char* name, int number, int sink_size,
                                   mlx_optional_int recent_start, mlx_stream stream) {
  const Named rows[] = {{"scores", scores, "[B, H, N]"}, {"positions", positions, "[B, H, N]"}};
  for (const Named& named : rows) {
    check_present(op, named);
  }
  for (const auto& [what, array, layout] : rows) {
    if (mlx_array_ndim(array) != 3) {
      fail(op, what, " have ", mlx_array_ndim(array), " dimensions, expected 3 ", layout, ".");
    }
  }
  const std::vector<int> shape = shape_of(scores);
  if (shape != shape_of(positions)) {
    fail(op, "scores and positions have shapes ", shape_text(shape), " and ", shape_text(positions),
         ", expected the same.");
  }
  if (has_empty_axis(scores)) {
    fail(op, "scores are empty: found shape ", shape_text(shape),
         ", expected every size of [B, H, N] to be at least 1.");
  }
  if (mlx_array_dtype(scores) != MLX_FLOAT32) {
    fail(op, "scores are ", dtype_name(scores), ", expected float32.");
  }
  if (mlx_array_dtype(positions) != MLX_INT32) {
    fail(op, "positions are ", dtype_name(positions), ", expected int32.");
  }
  if (number < 1 || number > shape[2]) {
    fail(op, name, " is ", number, ", expected 1 to N = ", shape[2], ".");
  }
  if (sink_size < 0) {
    fail(op, "sink_size is ", sink_size, ", expected 0 or more.");
  }
  const auto start = recent_start.has_value ? std::make_optional(recent_start.value) : std::nullopt;
  return RetentionRequest{scores, positions, shape[0], shape[1], shape[2],
                          number, sink_size, start,    stream,   runs_on_gpu(op, stream)};
}

}  // namespace

AttentionRequest attention_request(mlx_array queries, mlx_array keys, mlx_array values, float scale,
                                   const char* mask_mode, mlx_array mask, mlx_array sinks,
                                   bool return_lse, mlx_stream stream) {
  const char* op = attention_name;
  check_shapes(op, queries, keys, values);
  check_dtypes(op, queries, keys, values);
  check_scale(op, scale);
  AttentionRequest request{};
  request.queries = queries;
  request.keys = keys;
  request.values = values;
  request.scale = scale;
  request.sinks = sinks;
  request.return_lse = return_lse;
  request.stream = stream;
  request.batch = mlx_array_dim(queries, 0);
  request.heads = mlx_array_dim(queries, 1);
  request.kv_heads = mlx_array_dim(keys, 1);
  request.length = mlx_array_dim(queries, 2);
  request.rows = mlx_array_dim(keys, 2);
  request.head_size = mlx_array_dim(queries, 3);
  request.value_size = mlx_array_dim(values, 3);
  request.on_gpu = runs_on_gpu(op, stream);
  if (check_mask_mode(op, mask_mode, mask)) {
    const std::vector<int> pairs = {request.batch, request.heads, request.length, request.rows};
    check_mask(op, mask, pairs);
    request.mask_dtype = mlx_array_dtype(mask);
    request.mask_threshold = mask_threshold(request.mask_dtype);
    request.mask = call(mlx_broadcast_to, mask, pairs.data(), pairs.size(), stream);
  } else {
    request.causal = mask_mode != nullptr && mask_mode[0] != '\0';
  }
  if (sinks.ctx != nullptr) {
    check_sinks(op, sinks, request.heads);
  }
  return request;
}

RetentionRequest keep_request(mlx_array scores, mlx_array positions, int keep, int sink_size,
                              mlx_optional_int recent_start, mlx_stream stream) {
  RetentionRequest request = retention_request("keep_indices", scores, positions, "keep", keep,
                                               sink_size, recent_start, stream);
  request.count = request.rows - keep;
  return request;
}

RetentionRequest evict_request(mlx_array scores, mlx_array positions, int count, int sink_size,
                               mlx_optional_int recent_start, mlx_stream stream) {
  return retention_request("evict_indices", scores, positions, "count", count, sink_size,
                           recent_start, stream);
}

}  // namespace mlx_h2o_c
