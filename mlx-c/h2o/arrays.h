// Short forms of the mlx-c calls that compositions are written in.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "owned.h"

namespace mlx_h2o_c {

inline Array number(float value) { return scalar(value, MLX_FLOAT32); }
inline Array integer(int32_t value) { return scalar(value, MLX_INT32); }

inline Array upcast(mlx_array array, mlx_stream s) {
  return call(mlx_astype, array, MLX_FLOAT32, s);
}

inline Array range(int start, int stop, mlx_dtype dtype, mlx_stream s) {
  return call(mlx_arange, double(start), double(stop), 1.0, dtype, s);
}

inline Array broadcast(mlx_array array, const std::vector<int>& shape, mlx_stream s) {
  return call(mlx_broadcast_to, array, shape.data(), shape.size(), s);
}

// array[..., first:last, ...] along one axis.
inline Array slice(mlx_array array, size_t axis, int first, int last, mlx_stream s) {
  const size_t count = mlx_array_ndim(array);
  std::vector<int> start(count, 0), stop(count), strides(count, 1);
  for (size_t i = 0; i < count; ++i) {
    stop[i] = mlx_array_dim(array, static_cast<int>(i));
  }
  start[axis] = first;
  stop[axis] = last;
  return call(mlx_slice, array, start.data(), count, stop.data(), count, strides.data(), count, s);
}

inline ArrayVector vector_of(std::initializer_list<mlx_array> arrays) {
  return ArrayVector(mlx_vector_array_new_data(arrays.begin(), arrays.size()));
}

inline ArrayVector vector_of(const std::vector<Array>& arrays) {
  ArrayVector vector(mlx_vector_array_new());
  for (const Array& array : arrays) {
    check(mlx_vector_array_append_value(vector, array));
  }
  return vector;
}

inline Array item(mlx_vector_array vector, size_t index) {
  Array array;
  check(mlx_vector_array_get(array.out(), vector, index));
  return array;
}

// `array`, such that evaluating it evaluates the others too.
inline Array tied(mlx_array array, const std::vector<mlx_array>& others) {
  const ArrayVector dependencies(mlx_vector_array_new_data(others.data(), others.size()));
  ArrayVector result(mlx_vector_array_new());
  check(mlx_depends(result.out(), vector_of({array}), dependencies));
  return item(result, 0);
}

}  // namespace mlx_h2o_c
