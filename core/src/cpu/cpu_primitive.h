// What every operation of core/ refuses, in one wording.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <mlx/primitives.h>

#include "cpu/checks.h"

namespace mlx_h2o {

/// An MLX primitive that runs on CPU streams only and takes batches by its own batch axis.
class CpuPrimitive : public mlx::core::Primitive {
 public:
  /// `operation` is a literal: the name at the start of error messages.
  CpuPrimitive(mlx::core::Stream stream, const char* operation)
      : Primitive(stream), operation_(operation) {}

  void eval_gpu(const std::vector<mlx::core::array>&, std::vector<mlx::core::array>&) override {
    throw std::runtime_error(std::string("[") + operation_ +
                             "] the native back end has no GPU implementation; expected a CPU "
                             "stream.");
  }

  std::pair<std::vector<mlx::core::array>, std::vector<int>> vmap(
      const std::vector<mlx::core::array>&, const std::vector<int>&) override {
    fail(operation_,
         "the native back end cannot be vmapped; use the batch axis, or the composed back end.");
  }

 private:
  const char* operation_;
};

}  // namespace mlx_h2o
