#include "checks.h"

#include <algorithm>
#include <cfloat>
#include <charconv>
#include <cmath>

namespace mlx_h2o_c {

namespace {

// The shortest digits that read back as the same number.
template <class Number>
std::string shortest(Number number) {
  if (!std::isfinite(number)) {
    return std::isnan(number) ? "nan" : number > 0 ? "inf" : "-inf";
  }
  char digits[64];
  const std::to_chars_result result = std::to_chars(digits, digits + sizeof digits, number);
  std::string text(digits, result.ptr);
  return text.find_first_of(".e") == std::string::npos ? text + ".0" : text;
}

}  // namespace

Shape shape_of(mlx_array array) {
  Shape shape(mlx_array_ndim(array));
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    shape[axis] = mlx_array_dim(array, static_cast<int>(axis));
  }
  return shape;
}

std::string shape_text(const Shape& shape) {
  std::string text = "(";
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    text += (axis > 0 ? ", " : "") + std::to_string(shape[axis]);
  }
  return text + (shape.size() == 1 ? ",)" : ")");
}

std::string shape_text(mlx_array array) { return shape_text(shape_of(array)); }

std::string number_text(double number) { return shortest(number); }
std::string number_text(float number) { return shortest(number); }

const char* dtype_name(mlx_dtype dtype) {
  static const char* const names[] = {"bool",    "uint8",   "uint16",   "uint32",   "uint64",
                                      "int8",    "int16",   "int32",    "int64",    "float16",
                                      "float32", "float64", "bfloat16", "complex64"};
  return names[dtype];
}

const char* dtype_name(mlx_array array) { return dtype_name(mlx_array_dtype(array)); }

std::string found_text(mlx_array array) {
  return std::string(dtype_name(array)) + " " + shape_text(array);
}

bool is_float(mlx_array array) {
  const mlx_dtype dtype = mlx_array_dtype(array);
  return dtype == MLX_FLOAT32 || dtype == MLX_FLOAT16 || dtype == MLX_BFLOAT16;
}

bool has_empty_axis(mlx_array array) { return mlx_array_size(array) == 0; }

void check_present(const char* op, const Named& named) {
  if (named.array.ctx == nullptr) {
    fail(op, named.name, " are an empty handle, expected an array ", named.layout, ".");
  }
}

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

void check_one_of(const char* op, const char* name, int value, std::initializer_list<int> known) {
  if (std::find(known.begin(), known.end(), value) == known.end()) {
    fail(op, name, " is ", value, ", expected one of ", shape_text(Shape(known)), ".");
  }
}

void check_number(const char* op, const char* name, double value) {
  if (!(std::abs(value) <= FLT_MAX)) {
    fail(op, name, " is ", number_text(value), ", expected a finite number.");
  }
}

void check_decay(const char* op, double decay) {
  check_number(op, "decay", decay);
  if (!(decay >= 0 && decay < 1)) {
    fail(op, "decay is ", number_text(decay), ", expected at least 0 and below 1.");
  }
}

void check_per_sequence(const char* op, const char* name, mlx_array array, int batch) {
  const Shape shape = shape_of(array), expected = {batch};
  if (mlx_array_dtype(array) != MLX_INT32 || (!shape.empty() && shape != expected)) {
    fail(op, name, " is ", found_text(array), ", expected int32 () or [B] = ", shape_text(expected),
         ".");
  }
}

void check_zones(const char* op, int sink_size, mlx_array recent_start, int batch) {
  if (sink_size < 0) {
    fail(op, "sink_size is ", sink_size, ", expected 0 or more.");
  }
  if (recent_start.ctx != nullptr) {
    check_per_sequence(op, "recent_start", recent_start, batch);
  }
}

}  // namespace mlx_h2o_c
