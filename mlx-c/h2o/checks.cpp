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
  if (!std::isfinite(number)) return std::isnan(number) ? "nan" : number > 0 ? "inf" : "-inf";
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

std::string shown(const Shape& shape) {
  std::string text = "(";
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    text += (axis > 0 ? ", " : "") + std::to_string(shape[axis]);
  }
  return text + (shape.size() == 1 ? ",)" : ")");
}

std::string number_text(double number) { return shortest(number); }
std::string number_text(float number) { return shortest(number); }

const char* dtype_name(mlx_dtype dtype) {
  static const char* const names[] = {"bool",    "uint8",   "uint16",   "uint32",   "uint64",
                                      "int8",    "int16",   "int32",    "int64",    "float16",
                                      "float32", "float64", "bfloat16", "complex64"};
  return names[dtype];
}

const char* dtype_name(mlx_array array) { return dtype_name(mlx_array_dtype(array)); }

std::string shown(ShapeOf shape) { return shown(shape_of(shape.array)); }

std::string shown(Found found) {
  return std::string(dtype_name(found.array)) + " " + shown(shape_of(found.array));
}

bool is_float(mlx_array array) {
  const mlx_dtype dtype = mlx_array_dtype(array);
  return dtype == MLX_FLOAT32 || dtype == MLX_FLOAT16 || dtype == MLX_BFLOAT16;
}

bool has_empty_axis(mlx_array array) { return mlx_array_size(array) == 0; }

void check_present(const char* op, const Named& named) {
  expect(named.array.ctx != nullptr, op, named.name, " are an empty handle, expected an array ",
         named.layout, ".");
}

void check_rank(const char* op, const Named& named, size_t rank) {
  const size_t found = mlx_array_ndim(named.array);
  expect(found == rank, op, named.name, " have ", found, " dimensions, expected ", rank, " ",
         named.layout, ".");
}

void check_not_empty(const char* op, const Named& named) {
  expect(!has_empty_axis(named.array), op, named.name, " are empty: found shape ",
         ShapeOf{named.array}, ", expected every size of ", named.layout, " to be at least 1.");
}

void check_float(const char* op, const Named& named) {
  expect(is_float(named.array), op, named.name, " are ", dtype_name(named.array),
         ", expected float32, float16 or bfloat16.");
}

void check_array(const char* op, const Named& named, mlx_dtype dtype, const Shape& shape) {
  check_present(op, named);
  expect(shape_of(named.array) == shape && mlx_array_dtype(named.array) == dtype, op, named.name,
         " are ", Found{named.array}, ", expected ", dtype_name(dtype), " ", named.layout, " = ",
         shape, ".");
}

void check_float_rows(const char* op, const Named& named) {
  check_present(op, named);
  expect(mlx_array_ndim(named.array) == 4 && !has_empty_axis(named.array) && is_float(named.array),
         op, named.name, " are ", Found{named.array}, ", expected float32, float16 or bfloat16 ",
         named.layout, ", every size at least 1.");
}

void check_per_sequence(const char* op, const char* name, mlx_array array, int batch) {
  const Shape shape = shape_of(array), expected = {batch};
  expect(mlx_array_dtype(array) == MLX_INT32 && (shape.empty() || shape == expected), op, name,
         " is ", Found{array}, ", expected int32 () or [B] = ", expected, ".");
}

void check_zones(const char* op, int sink_size, mlx_array recent_start, int batch) {
  expect(sink_size >= 0, op, "sink_size is ", sink_size, ", expected 0 or more.");
  if (recent_start.ctx != nullptr) check_per_sequence(op, "recent_start", recent_start, batch);
}

bool runs_on_gpu(const char* op, mlx_stream stream) {
  expect(stream.ctx != nullptr, op, "the stream is an empty handle, expected a stream.");
  Device device;
  check(mlx_stream_get_device(device.out(), stream));
  mlx_device_type type = MLX_CPU;
  check(mlx_device_get_type(&type, device));
  return type == MLX_GPU;
}

void check_one_of(const char* op, const char* name, int value, const Shape& known) {
  expect(std::find(known.begin(), known.end(), value) != known.end(), op, name, " is ", value,
         ", expected one of ", known, ".");
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

}  // namespace mlx_h2o_c
