// Primitives that allocate their outputs, and inputs read as if they were contiguous.
#pragma once

#include <utility>
#include <vector>

#include <mlx/stream.h>

#include "cpu/array_memory.h"
#include "cpu/cpu_primitive.h"
#include "cpu/encoder.h"
#include "cpu/strided_copy.h"

namespace mlx_h2o {

/// The elements of an array in row-major order: its own memory if contiguous, else a copy.
class Flat {
 public:
  explicit Flat(const mlx::core::array& array) {
    if (array.flags().row_contiguous) {
      first_ = array.data<char>();
      return;
    }
    copy_.resize(array.nbytes());
    copy_elements(array, copy_.data());
    first_ = copy_.data();
  }

  template <typename T>
  const T* data() const {
    return reinterpret_cast<const T*>(first_);
  }

 private:
  std::vector<char> copy_;
  const char* first_;
};

/// A primitive that allocates all its outputs, which a task fills; the task owns no array.
class NewArrays : public CpuPrimitive {
  static constexpr size_t kLarge = size_t{4} << 20;

 public:
  using CpuPrimitive::CpuPrimitive;

  void eval_cpu(const std::vector<mlx::core::array>& inputs,
                std::vector<mlx::core::array>& outputs) override {
    // MLX allocates memory for work that its stream has not reached yet. The rows of a long chunk
    // are so large that the stream first finishes earlier layers, and frees their memory.
    size_t bytes = 0;
    for (const mlx::core::array& output : outputs) bytes += output.nbytes();
    if (bytes >= kLarge) mlx::core::synchronize(stream());
    auto& encoder = mlx::core::cpu::get_command_encoder(stream());
    std::vector<mlx::core::array> given, made;
    given.reserve(inputs.size());
    made.reserve(outputs.size());
    for (const mlx::core::array& input : inputs)
      given.push_back(mlx::core::array::unsafe_weak_copy(input));
    for (mlx::core::array& output : outputs) {
      allocate(output);
      made.push_back(mlx::core::array::unsafe_weak_copy(output));
    }
    dispatch(encoder, std::move(given), std::move(made));
  }

 protected:
  virtual void dispatch(mlx::core::cpu::CommandEncoder& encoder,
                        std::vector<mlx::core::array> inputs,
                        std::vector<mlx::core::array> outputs) = 0;
};

}  // namespace mlx_h2o
