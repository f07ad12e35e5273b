#include "checks.h"

#ifndef MLX_H2O_NATIVE  // else core/ provides it
#include "../../core/src/cpu/arguments.cpp"
#endif

namespace mlx_h2o_c {

Found found(mlx_array array) {
  if (array.ctx == nullptr) return {};
  return {mlx_h2o::dtype_name(dtype_of(array)), mlx_array_shape(array), mlx_array_ndim(array)};
}

bool runs_on_gpu(const char* op, mlx_stream stream) {
  expect(stream.ctx != nullptr, op, "the stream is an empty handle, expected a stream.");
  Device device;
  check(mlx_stream_get_device(device.out(), stream));
  mlx_device_type type = MLX_CPU;
  check(mlx_device_get_type(&type, device));
  return type == MLX_GPU;
}

}  // namespace mlx_h2o_c
