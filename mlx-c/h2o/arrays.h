// mlx-c handles that release themselves, so that no error path leaks, and shorthands for the calls
// that the compositions use.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include "mlx/c/mlx.h"

namespace mlx_h2o_c {

// Thrown when an mlx-c call failed; mlx-c has already reported the error.
struct Reported {};

inline void check(int status) {
  if (status != 0) throw Reported();
}

template <class Handle, auto Free>
class Owned {
 public:
  Owned() = default;
  // Takes ownership of a new handle; if mlx-c fails, it reports the error and returns an empty one.
  explicit Owned(Handle created) : handle_(created) {
    if (handle_.ctx == nullptr) throw Reported();
  }
  Owned(Owned&& other) noexcept : handle_(std::exchange(other.handle_, Handle{})) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Owned() {
    if (handle_.ctx != nullptr) Free(handle_);
  }

  operator Handle() const { return handle_; }
  bool empty() const { return handle_.ctx == nullptr; }
  // Where mlx-c writes a result.
  Handle* out() { return &handle_; }

 private:
  Handle handle_{};
};

using Array = Owned<mlx_array, mlx_array_free>;
using ArrayVector = Owned<mlx_vector_array, mlx_vector_array_free>;
using Device = Owned<mlx_device, mlx_device_free>;
using String = Owned<mlx_string, mlx_string_free>;
using StringVector = Owned<mlx_vector_string, mlx_vector_string_free>;

inline mlx_optional_int some(int64_t value) { return {static_cast<int>(value), true}; }
inline mlx_dtype dtype_of(mlx_array array) { return mlx_array_dtype(array); }

using Shape = std::vector<int>;

inline Shape shape_of(mlx_array array) {
  const int* sizes = mlx_array_shape(array);
  return Shape(sizes, sizes + mlx_array_ndim(array));
}

// Calls one mlx-c operation; returns its result or throws.
template <class... Parameters, class... Arguments>
Array call(int (*operation)(mlx_array*, Parameters...), const Arguments&... arguments) {
  Array result;
  check(operation(result.out(), arguments...));
  return result;
}

// A scalar of exactly this dtype; T has the same representation.
template <class T>
Array scalar(T value, mlx_dtype dtype) {
  const int no_sizes = 0;
  return Array(mlx_array_new_data(&value, &no_sizes, 0, dtype));
}

// Rounded once, to float32.
template <class Number>
Array number(Number value) {
  return scalar(static_cast<float>(value), MLX_FLOAT32);
}
inline Array integer(int32_t value) { return scalar(value, MLX_INT32); }

inline Array range(int start, int stop, mlx_dtype dtype, mlx_stream s) {
  return call(mlx_arange, double(start), double(stop), 1.0, dtype, s);
}

inline Array broadcast(mlx_array array, const Shape& shape, mlx_stream s) {
  return call(mlx_broadcast_to, array, shape.data(), shape.size(), s);
}

inline Array zeros(const Shape& shape, mlx_stream s) {
  return call(mlx_zeros, shape.data(), shape.size(), MLX_FLOAT32, s);
}

inline Array copied(mlx_array array) { return call(mlx_array_set, array); }

// array[..., first:last, ...] along one axis.
inline Array slice(mlx_array array, size_t axis, int first, int last, mlx_stream s) {
  const size_t count = mlx_array_ndim(array);
  const int* shape = mlx_array_shape(array);
  Shape start(count, 0), stop(shape, shape + count), strides(count, 1);
  start[axis] = first;
  stop[axis] = last;
  return call(mlx_slice, array, start.data(), count, stop.data(), count, strides.data(), count, s);
}

// An array of a composition: operations on it run on its stream.
class Value : public Array {
 public:
  Value(Array array, mlx_stream s) : Array(std::move(array)), s_(s) {}
  Value(mlx_array array, mlx_stream s) : Value(copied(array), s) {}

  template <class... Parameters, class... Arguments>
  Value then(int (*operation)(mlx_array*, Parameters...), const Arguments&... arguments) const {
    return {call(operation, mlx_array(*this), arguments..., s_), s_};
  }
  Value operator+(mlx_array other) const { return then(mlx_add, other); }
  Value operator-(mlx_array other) const { return then(mlx_subtract, other); }
  Value operator*(mlx_array other) const { return then(mlx_multiply, other); }
  Value operator/(mlx_array other) const { return then(mlx_divide, other); }
  Value at_least(mlx_array other) const { return then(mlx_maximum, other); }
  Value where(mlx_array yes, mlx_array no) const { return then(mlx_where, yes, no); }
  Value as(mlx_dtype dtype) const { return then(mlx_astype, dtype); }
  Value reshaped(std::initializer_list<int> shape) const {
    return then(mlx_reshape, shape.begin(), shape.size());
  }
  mlx_stream stream() const { return s_; }
  Value sliced(size_t axis, int first, int last) const {
    return {slice(*this, axis, first, last, s_), s_};
  }

 private:
  mlx_stream s_;
};

template <class Arrays = std::initializer_list<mlx_array>>
ArrayVector vector_of(const Arrays& arrays) {
  ArrayVector vector(mlx_vector_array_new());
  for (const mlx_array array : arrays) check(mlx_vector_array_append_value(vector, array));
  return vector;
}

inline std::vector<Array> items(mlx_vector_array vector) {
  std::vector<Array> arrays(mlx_vector_array_size(vector));
  for (size_t i = 0; i < arrays.size(); ++i) arrays[i] = call(mlx_vector_array_get, vector, i);
  return arrays;
}

// One mlx-c operation with several results.
template <class... Parameters, class... Arguments>
std::vector<Array> results(int (*operation)(mlx_vector_array*, Parameters...),
                           const Arguments&... arguments) {
  ArrayVector vector(mlx_vector_array_new());
  check(operation(vector.out(), arguments...));
  return items(vector);
}

// `array`, such that evaluating it evaluates the others too.
inline Array tied(mlx_array array, const std::vector<mlx_array>& others) {
  const ArrayVector one(mlx_vector_array_new_value(array));
  return std::move(results(mlx_depends, one, vector_of(others))[0]);
}

}  // namespace mlx_h2o_c
