#include "cpu/cpu_primitive.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include <mlx/backend/common/utils.h>

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

constexpr size_t kLarge = size_t{4} << 20;

void allocate(mx::array& array) {
  array.set_data(mx::allocator::malloc(array.nbytes()));
  check_memory(array);
}

template <typename Element>
void copy_strided(const mx::array& from, Element* to) {
  std::array<int64_t, 4> shape{1, 1, 1, 1}, strides{};
  std::copy_backward(from.shape().begin(), from.shape().end(), shape.end());
  std::copy_backward(from.strides().begin(), from.strides().end(), strides.end());
  for (int64_t i = 0; i < shape[0]; ++i) {
    for (int64_t j = 0; j < shape[1]; ++j) {
      for (int64_t k = 0; k < shape[2]; ++k) {
        const Element* row =
            from.data<Element>() + i * strides[0] + j * strides[1] + k * strides[2];
        for (int64_t l = 0; l < shape[3]; ++l) *to++ = row[l * strides[3]];
      }
    }
  }
}

void copy_elements(const mx::array& from, mx::array& to) {
  if (from.flags().row_contiguous) {
    std::memcpy(to.data<void>(), from.data<void>(), from.nbytes());
  } else if (from.itemsize() == 1) {
    copy_strided(from, to.data<uint8_t>());
  } else if (from.itemsize() == 2) {
    copy_strided(from, to.data<uint16_t>());
  } else if (from.itemsize() == 4) {
    copy_strided(from, to.data<uint32_t>());
  } else {
    copy_strided(from, to.data<uint64_t>());
  }
}

bool has_layout(const mx::array& array, Layout layout) {
  if (layout == Layout::contiguous) return array.flags().row_contiguous;
  return layout == Layout::any || array.strides(-1) == 1 || array.shape(-1) == 1;
}

}  // namespace

bool is_large(const Arrays& outputs) {
  size_t bytes = 0;
  for (const mx::array& output : outputs) bytes += output.nbytes();
  return bytes >= kLarge;
}

void check_memory(const mx::array& array) {
  if (array.buffer().ptr() == nullptr) {
    throw std::runtime_error("[mlx_h2o] there is no memory for an array of " +
                             std::to_string(array.nbytes()) + " bytes.");
  }
}

// In MLX every output of a primitive holds all inputs, which makes each input look shared. Releases
// those that the output under evaluation does not need; a traced graph keeps them.
void Evaluation::release_siblings() {
  const auto is_tracer = [](const mx::array& output) { return output.is_tracer(); };
  if (std::any_of(outputs_.begin(), outputs_.end(), is_tracer)) return;
  for (mx::array& output : outputs_) {
    if (&output.inputs() != &inputs_) output.inputs().clear();
  }
}

mx::array Evaluation::started(mx::array& output, const mx::array* origin) {
  if (origin != nullptr) release_siblings();
  if (origin != nullptr && origin->flags().row_contiguous && mx::is_donatable(*origin, output)) {
    output.copy_shared_buffer(*origin);
  } else {
    allocate(output);
    if (origin != nullptr) copy(*origin, output);
  }
  return mx::array::unsafe_weak_copy(output);
}

mx::array Evaluation::readable(const mx::array& input, Layout layout) {
  if (has_layout(input, layout)) return mx::array::unsafe_weak_copy(input);
  const mx::array result = temporary(input.shape(), input.dtype());
  copy(input, result);
  return mx::array::unsafe_weak_copy(result);
}

mx::array Evaluation::workspace(size_t floats) {
  // One extent of an array has 31 bits, so a large workspace has two.
  const size_t width = floats >> 31 == 0 ? 1 : 1 << 15;
  const auto lines = static_cast<int>(std::min<size_t>((floats + width - 1) / width, INT32_MAX));
  return mx::array::unsafe_weak_copy(temporary({lines, static_cast<int>(width)}, mx::float32));
}

// Lives until the stream has done the task that is dispatched next.
mx::array Evaluation::temporary(mx::Shape shape, mx::Dtype dtype) {
  mx::array result(std::move(shape), dtype, nullptr, {});
  allocate(result);
  encoder_.add_temporary(result);
  return result;
}

void Evaluation::copy(const mx::array& from, const mx::array& to) {
  encoder_.dispatch([from = mx::array::unsafe_weak_copy(from),
                     to = mx::array::unsafe_weak_copy(to)]() mutable { copy_elements(from, to); });
}

}  // namespace mlx_h2o
