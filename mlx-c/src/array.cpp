#include <sstream>

#include "handles.h"

using namespace mlx_c;

namespace {

template <class T>
mx::array copy_elements(const void* data, mx::Shape shape, mx::Dtype dtype) {
  return mx::array(static_cast<const T*>(data), std::move(shape), dtype);
}

mx::array new_array(const void* data, const int* sizes, int dim, mlx_dtype dtype) {
  if (dim < 0) {
    throw std::invalid_argument("[array] expected a number of dimensions, found " +
                                std::to_string(dim));
  }
  mx::Shape shape = mlx_c::shape(sizes, static_cast<size_t>(dim));
  bool has_elements = true;
  for (const int size : shape) {
    if (size < 0) {
      throw std::invalid_argument("[array] negative size " + std::to_string(size));
    }
    has_elements = has_elements && size > 0;
  }
  if (data == nullptr && has_elements) {
    throw std::invalid_argument("[array] expected data, found NULL");
  }
  const mx::Dtype type = to_dtype(dtype);
  switch (dtype) {
    case MLX_BOOL:
      return copy_elements<bool>(data, std::move(shape), type);
    case MLX_UINT8:
      return copy_elements<uint8_t>(data, std::move(shape), type);
    case MLX_UINT16:
      return copy_elements<uint16_t>(data, std::move(shape), type);
    case MLX_UINT32:
      return copy_elements<uint32_t>(data, std::move(shape), type);
    case MLX_UINT64:
      return copy_elements<uint64_t>(data, std::move(shape), type);
    case MLX_INT8:
      return copy_elements<int8_t>(data, std::move(shape), type);
    case MLX_INT16:
      return copy_elements<int16_t>(data, std::move(shape), type);
    case MLX_INT32:
      return copy_elements<int32_t>(data, std::move(shape), type);
    case MLX_INT64:
      return copy_elements<int64_t>(data, std::move(shape), type);
    case MLX_FLOAT16:
      return copy_elements<mx::float16_t>(data, std::move(shape), type);
    case MLX_FLOAT32:
      return copy_elements<float>(data, std::move(shape), type);
    case MLX_FLOAT64:
      return copy_elements<double>(data, std::move(shape), type);
    case MLX_BFLOAT16:
      return copy_elements<mx::bfloat16_t>(data, std::move(shape), type);
    case MLX_COMPLEX64:
      return copy_elements<mx::complex64_t>(data, std::move(shape), type);
  }
  throw std::invalid_argument("[array] unknown dtype");
}

template <class T>
mlx_array scalar(T value) noexcept {
  return value_or(mlx_array{nullptr}, [&] { return make<mlx_array>(mx::array(value)); });
}

template <class T>
int set_scalar(mlx_array* arr, T value) noexcept {
  return status([&] { set(arr, mx::array(value)); });
}

}  // namespace

extern "C" {

mlx_array mlx_array_new(void) { return mlx_array{nullptr}; }

int mlx_array_free(mlx_array arr) {
  return status([&] { destroy(arr); });
}

mlx_array mlx_array_new_bool(bool val) { return scalar(val); }
mlx_array mlx_array_new_int(int val) { return scalar(val); }
mlx_array mlx_array_new_float32(float val) { return scalar(val); }
mlx_array mlx_array_new_float(float val) { return scalar(val); }
mlx_array mlx_array_new_float64(double val) {
  return value_or(mlx_array{nullptr}, [&] { return make<mlx_array>(mx::array(val, mx::float64)); });
}
mlx_array mlx_array_new_double(double val) { return mlx_array_new_float64(val); }

mlx_array mlx_array_new_data(const void* data, const int* shape, int dim, mlx_dtype dtype) {
  return value_or(mlx_array{nullptr},
                  [&] { return make<mlx_array>(new_array(data, shape, dim, dtype)); });
}

int mlx_array_set(mlx_array* arr, const mlx_array src) {
  return status([&] { set(arr, get(src)); });
}

int mlx_array_set_bool(mlx_array* arr, bool val) { return set_scalar(arr, val); }
int mlx_array_set_int(mlx_array* arr, int val) { return set_scalar(arr, val); }
int mlx_array_set_float32(mlx_array* arr, float val) { return set_scalar(arr, val); }
int mlx_array_set_float(mlx_array* arr, float val) { return set_scalar(arr, val); }
int mlx_array_set_float64(mlx_array* arr, double val) {
  return status([&] { set(arr, mx::array(val, mx::float64)); });
}
int mlx_array_set_double(mlx_array* arr, double val) { return mlx_array_set_float64(arr, val); }

int mlx_array_set_data(mlx_array* arr, const void* data, const int* shape, int dim,
                       mlx_dtype dtype) {
  return status([&] { set(arr, new_array(data, shape, dim, dtype)); });
}

int mlx_array_tostring(mlx_string* str, const mlx_array arr) {
  return status([&] {
    std::ostringstream words;
    words << get(arr);
    set(str, words.str());
  });
}

size_t mlx_array_itemsize(const mlx_array arr) {
  return value_or(size_t{0}, [&] { return get(arr).itemsize(); });
}

size_t mlx_array_size(const mlx_array arr) {
  return value_or(size_t{0}, [&] { return get(arr).size(); });
}

size_t mlx_array_nbytes(const mlx_array arr) {
  return value_or(size_t{0}, [&] { return get(arr).nbytes(); });
}

size_t mlx_array_ndim(const mlx_array arr) {
  return value_or(size_t{0}, [&] { return get(arr).ndim(); });
}

const int* mlx_array_shape(const mlx_array arr) {
  return value_or<const int*>(nullptr, [&] { return get(arr).shape().data(); });
}

const size_t* mlx_array_strides(const mlx_array arr) {
  // mlx-c's type; MLX's own is signed, of the same width.
  return value_or<const size_t*>(
      nullptr, [&] { return reinterpret_cast<const size_t*>(get(arr).strides().data()); });
}

int mlx_array_dim(const mlx_array arr, int dim) {
  return value_or(0, [&] { return get(arr).shape(dim); });
}

mlx_dtype mlx_array_dtype(const mlx_array arr) {
  return value_or(MLX_FLOAT32, [&] { return from_dtype(get(arr).dtype()); });
}

int mlx_array_eval(mlx_array arr) {
  return status([&] { get(arr).eval(); });
}

}  // extern "C"
