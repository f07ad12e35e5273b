#include "cpu/checks.h"

#include <algorithm>

#include "attention/attention_kernel.h"
#include "mlx_h2o/threads.h"

namespace mx = mlx::core;

namespace mlx_h2o {

std::string to_text(const mx::Shape& shape) { return shown(shape.data(), shape.size()); }

const char* to_text(mx::Dtype dtype) { return dtype_name(static_cast<int>(dtype.val())); }

bool is_float(mx::Dtype dtype) {
  return dtype == mx::float32 || dtype == mx::float16 || dtype == mx::bfloat16;
}

void check_dimensions(const char* operation, const char* name, const mx::array& array, int expected,
                      const char* layout) {
  if (array.ndim() == static_cast<size_t>(expected)) return;
  fail(operation, name, " have ", array.ndim(), " dimensions, expected ", expected, ' ', layout,
       '.');
}

void check_array(const char* operation, const char* name, const mx::array& found,
                 const mx::Shape& shape, mx::Dtype dtype) {
  if (found.shape() == shape && found.dtype() == dtype) return;
  fail(operation, name, " are ", to_text(found.dtype()), ' ', to_text(found.shape()), ", expected ",
       to_text(dtype), ' ', to_text(shape), '.');
}

Found found(const mx::array& array) {
  return {to_text(array.dtype()), array.shape().data(), array.ndim()};
}

Found found(const std::optional<mx::array>& array) {
  return array.has_value() ? found(*array) : Found{};
}

void give_rows(Arguments& given, const std::vector<mx::array>& parts) {
  Found all[3];
  for (size_t i = 0; i < parts.size(); ++i) all[i] = found(parts[i]);
  given.rows(all, parts.size());
}

Found found_rows(const mx::array& array, int least, int most, mx::Shape& shape) {
  Found result = found(array);
  shape = array.shape();
  if (shape.size() > 2) shape[2] = std::clamp<int>(shape[2], least, most);
  result.shape = shape.data();
  return result;
}

mx::Stream cpu_stream(const char* operation, mx::StreamOrDevice s) {
  const mx::Stream stream = mx::to_stream(s);
  if (stream.device != mx::Device::cpu) {
    fail(operation, "the native back end runs on the CPU, found a stream of the GPU.");
  }
  // Refuse a wrong MLX_H2O_THREADS or MLX_H2O_SIMD here, not inside the stream.
  threads();
  kernels::simd_target();
  return stream;
}

}  // namespace mlx_h2o
