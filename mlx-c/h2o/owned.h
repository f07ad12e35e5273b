// mlx-c handles that release themselves, so that no error path leaks.
#pragma once

#include <initializer_list>
#include <utility>

#include "mlx/c/mlx.h"

namespace mlx_h2o_c {

// Thrown where an mlx-c call failed: it has reported the error itself.
struct Reported {};

inline void check(int status) {
  if (status != 0) {
    throw Reported();
  }
}

template <class Handle, auto Free>
class Owned {
 public:
  Owned() = default;
  // Takes over a new handle; mlx-c reports the error and returns an empty one where it cannot.
  explicit Owned(Handle created) : handle_(created) {
    if (handle_.ctx == nullptr) {
      throw Reported();
    }
  }
  Owned(Owned&& other) noexcept : handle_(std::exchange(other.handle_, Handle{})) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Owned() {
    if (handle_.ctx != nullptr) {
      Free(handle_);
    }
  }

  operator Handle() const { return handle_; }
  bool empty() const { return handle_.ctx == nullptr; }
  // The place for a result.
  Handle* out() { return &handle_; }

 private:
  Handle handle_{};
};

using Array = Owned<mlx_array, mlx_array_free>;
using ArrayVector = Owned<mlx_vector_array, mlx_vector_array_free>;
using Device = Owned<mlx_device, mlx_device_free>;
using String = Owned<mlx_string, mlx_string_free>;
using StringVector = Owned<mlx_vector_string, mlx_vector_string_free>;

// One mlx-c operation: its result, or an exception.
template <class... Parameters, class... Arguments>
Array call(int (*operation)(mlx_array*, Parameters...), const Arguments&... arguments) {
  Array result;
  check(operation(result.out(), arguments...));
  return result;
}

inline Array reshape(mlx_array array, std::initializer_list<int> shape, mlx_stream s) {
  return call(mlx_reshape, array, shape.begin(), shape.size(), s);
}

// A scalar of exactly this dtype; T has its representation.
template <class T>
Array scalar(T value, mlx_dtype dtype) {
  const int no_sizes = 0;
  return Array(mlx_array_new_data(&value, &no_sizes, 0, dtype));
}

}  // namespace mlx_h2o_c
