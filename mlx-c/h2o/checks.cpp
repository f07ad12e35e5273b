#include "checks.h"

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
  const std::string text(digits, std::to_chars(digits, digits + sizeof digits, number).ptr);
  return text.find_first_of(".e") == std::string::npos ? text + ".0" : text;
}

}  // namespace

std::string shown(const Shape& shape) {
  std::string text = "(";
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    text += (axis > 0 ? ", " : "") + std::to_string(shape[axis]);
  }
  return text + (shape.size() == 1 ? ",)" : ")");
}

std::string shown(double number) { return shortest(number); }
std::string shown(float number) { return shortest(number); }

std::string shown(mlx_dtype dtype) {
  static const char* const names[] = {"bool",    "uint8",   "uint16",   "uint32",   "uint64",
                                      "int8",    "int16",   "int32",    "int64",    "float16",
                                      "float32", "float64", "bfloat16", "complex64"};
  return names[dtype];
}

std::string shown(mlx_array array) { return shown(dtype_of(array)) + " " + shown(shape_of(array)); }

bool is_float(mlx_array array) {
  const mlx_dtype dtype = dtype_of(array);
  return dtype == MLX_FLOAT32 || dtype == MLX_FLOAT16 || dtype == MLX_BFLOAT16;
}

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
  expect(mlx_array_size(named.array) > 0, op, named.name, " are empty: found shape ",
         shape_of(named.array), ", expected every size of ", named.layout, " to be at least 1.");
}

void check_float(const char* op, const Named& named) {
  expect(is_float(named.array), op, named.name, " are ", dtype_of(named.array), ", expected ",
         float_dtypes, ".");
}

void check_array(const char* op, const Named& named, mlx_dtype dtype, const Shape& shape) {
  check_present(op, named);
  expect(shape_of(named.array) == shape && dtype_of(named.array) == dtype, op, named.name, " are ",
         named.array, ", expected ", dtype, " ", named.layout, " = ", shape, ".");
}

void check_rows(const char* op, const Named& named, std::optional<mlx_dtype> dtype) {
  check_present(op, named);
  const bool known = dtype ? dtype_of(named.array) == *dtype : is_float(named.array);
  expect(known && mlx_array_ndim(named.array) == 4 && mlx_array_size(named.array) > 0, op,
         named.name, " are ", named.array, ", expected ", dtype ? shown(*dtype) : float_dtypes, " ",
         named.layout, ", every size at least 1.");
}

void check_per_sequence(const char* op, const char* name, mlx_array array, int batch) {
  check_present(op, {name, array, "[] or [B]"});
  const Shape shape = shape_of(array), expected = {batch};
  expect(dtype_of(array) == MLX_INT32 && (shape.empty() || shape == expected), op, name, " is ",
         array, ", expected int32 () or [B] = ", expected, ".");
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

void check_number(const char* op, const char* name, double value) {
  expect(std::abs(value) <= FLT_MAX, op, name, " is ", value, ", expected a finite number.");
}

void check_decay(const char* op, double decay) {
  check_number(op, "decay", decay);
  expect(decay >= 0 && decay < 1, op, "decay is ", decay, ", expected at least 0 and below 1.");
}

bool is_mass(const char* op, const char* kind) {
  const std::string name = kind == nullptr ? "" : kind;
  expect(name == "ema" || name == "mass", op, "kind is '", name, "', expected 'ema' or 'mass'.");
  return name == "mass";
}

}  // namespace mlx_h2o_c
