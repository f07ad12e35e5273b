#include "cpu/checks.h"

#include "cpu/thread_count.h"

namespace mx = mlx::core;

namespace mlx_h2o {

std::string to_text(const mx::Shape& shape) {
  std::ostringstream text;
  text << '(';
  for (size_t i = 0; i < shape.size(); ++i) text << (i == 0 ? "" : ", ") << shape[i];
  text << (shape.size() == 1 ? ",)" : ")");
  return text.str();
}

std::string to_text(mx::Dtype dtype) {
  if (dtype == mx::bool_) return "bool";
  std::ostringstream text;
  text << dtype;
  return text.str();
}

bool is_float(mx::Dtype dtype) {
  return dtype == mx::float32 || dtype == mx::float16 || dtype == mx::bfloat16;
}

void check_dimensions(const char* operation, const char* name, const mx::array& array, int expected,
                      const char* layout) {
  if (array.ndim() == static_cast<size_t>(expected)) return;
  fail(operation, name, " have ", array.ndim(), " dimensions, expected ", expected, ' ', layout,
       '.');
}

void check_not_empty(const char* operation, const char* name, const mx::array& array,
                     const char* layout) {
  if (array.size() != 0) return;
  fail(operation, name, " are empty: found shape ", to_text(array.shape()),
       ", expected every size of ", layout, " to be at least 1.");
}

void check_per_sequence(const char* operation, const char* name, const mx::array& array,
                        int batch) {
  const mx::Shape expected{batch};
  if (array.dtype() == mx::int32 && (array.ndim() == 0 || array.shape() == expected)) return;
  fail(operation, name, " is ", to_text(array.dtype()), ' ', to_text(array.shape()),
       ", expected int32 () or [B] = ", to_text(expected), '.');
}

mx::Stream cpu_stream(const char* operation, mx::StreamOrDevice s) {
  const mx::Stream stream = mx::to_stream(s);
  if (stream.device != mx::Device::cpu) {
    fail(operation, "the native back end runs on the CPU, found a stream of the GPU.");
  }
  kernels::thread_count();  // refuses a wrong MLX_H2O_THREADS here, not inside the stream
  return stream;
}

}  // namespace mlx_h2o
