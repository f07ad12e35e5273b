// Operations as MLX primitives: a value that holds the settings, and a task on a CPU stream.
#pragma once

#include "cpu/encoder.h"
//
#include <memory>
#include <utility>
#include <vector>

#include <mlx/primitives.h>

#include "cpu/checks.h"

namespace mlx_h2o {

using Arrays = std::vector<mlx::core::array>;

/// How a kernel reads an input.
enum class Layout { any, unit_last_stride, contiguous };

/// What holds of an operation that says nothing else. Each operation is a struct of its settings,
/// with an operator== and
///
///   void run(Arrays& inputs, Arrays& outputs) const;
///
/// which is the task. Its arrays own no memory, since the stream keeps the buffers until it is
/// done.
struct CpuOperation {
  std::vector<mlx::core::Shape> output_shapes(const Arrays& inputs) const {
    return {inputs[0].shape()};
  }
  /// The layout that an input needs: `run` gets a copy of any other. Copies have at most four axes.
  Layout layout(size_t /*input*/) const { return Layout::any; }
  /// The input with whose contents an output begins, in its buffer if nothing else holds that; -1:
  /// none, in new memory.
  int origin(size_t /*output*/) const { return -1; }
  /// Whether to wait first until the stream has done what it was given.
  bool waits(const Arrays& /*inputs*/, const Arrays& /*outputs*/) const { return false; }
  /// Floats of memory for the task alone; if above 0, `run` gets it after the outputs.
  size_t workspace_floats(const Arrays& /*inputs*/, const Arrays& /*outputs*/) const { return 0; }

  bool operator==(const CpuOperation&) const = default;
};

/// Whether new outputs are so large that the stream should first finish earlier layers, and free
/// their memory: MLX allocates memory for work that its stream has not reached yet.
bool is_large(const Arrays& outputs);

/// Checks that MLX's allocator found memory for the array: on CPUs MLX does not check.
void check_memory(const mlx::core::array& array);

/// Sets the address of an evaluated array, and the strides of its first axes.
template <typename T, size_t Axes>
void locate(const mlx::core::array& array, const T*& first, int64_t (&strides)[Axes]) {
  first = array.data<T>();
  for (size_t axis = 0; axis < Axes; ++axis) strides[axis] = array.strides(static_cast<int>(axis));
}

/// The steps of CpuPrimitive::eval_cpu. Each returns arrays that own no memory.
class Evaluation {
 public:
  Evaluation(mlx::core::Stream stream, const Arrays& inputs, Arrays& outputs)
      : encoder_(mlx::core::cpu::get_command_encoder(stream)), inputs_(inputs), outputs_(outputs) {}

  mlx::core::array started(mlx::core::array& output, const mlx::core::array* origin);
  mlx::core::array readable(const mlx::core::array& input, Layout layout);
  mlx::core::array workspace(size_t floats);

 private:
  mlx::core::array temporary(mlx::core::Shape shape, mlx::core::Dtype dtype);
  void copy(const mlx::core::array& from, const mlx::core::array& to);

  void release_siblings();

  mlx::core::cpu::CommandEncoder& encoder_;
  const Arrays& inputs_;
  Arrays& outputs_;
};

/// Runs on CPU streams only, and takes batches by its own batch axis.
template <class Operation>
class CpuPrimitive : public mlx::core::Primitive {
 public:
  CpuPrimitive(mlx::core::Stream stream, const char* name, Operation operation)
      : Primitive(stream), name_(name), operation_(std::move(operation)) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    if (operation_.waits(inputs, outputs)) mlx::core::synchronize(stream());
    Evaluation evaluation(stream(), inputs, outputs);
    Arrays given, made;
    given.reserve(inputs.size());
    made.reserve(outputs.size() + 1);
    for (size_t i = 0; i < outputs.size(); ++i) {
      const int from = operation_.origin(i);
      made.push_back(evaluation.started(outputs[i], from < 0 ? nullptr : &inputs[size_t(from)]));
    }
    for (size_t i = 0; i < inputs.size(); ++i) {
      given.push_back(evaluation.readable(inputs[i], operation_.layout(i)));
    }
    const size_t floats = operation_.workspace_floats(given, made);
    if (floats > 0) made.push_back(evaluation.workspace(floats));
    mlx::core::cpu::get_command_encoder(stream()).dispatch(
        [operation = operation_, given = std::move(given), made = std::move(made)]() mutable {
          operation.run(given, made);
        });
  }

  void eval_gpu(const Arrays&, Arrays&) override {
    throw std::runtime_error(std::string("[") + name_ +
                             "] the native back end has no GPU implementation; expected a CPU "
                             "stream.");
  }

  std::pair<Arrays, std::vector<int>> vmap(const Arrays&, const std::vector<int>&) override {
    fail(name_,
         "the native back end cannot be vmapped; use the batch axis, or the composed back end.");
  }

  const char* name() const override { return name_; }

  bool is_equivalent(const Primitive& other) const override {
    return operation_ == static_cast<const CpuPrimitive&>(other).operation_;
  }

  std::vector<mlx::core::Shape> output_shapes(const Arrays& inputs) override {
    return operation_.output_shapes(inputs);
  }

 private:
  const char* name_;
  Operation operation_;
};

/// The outputs of an operation, not evaluated. `name` is a literal, at the start of error messages.
template <class Operation>
Arrays outputs_of(const char* name, Operation operation, Arrays inputs,
                  const std::vector<mlx::core::Dtype>& dtypes, mlx::core::StreamOrDevice s) {
  const auto primitive =
      std::make_shared<CpuPrimitive<Operation>>(cpu_stream(name, s), name, std::move(operation));
  std::vector<mlx::core::Shape> shapes = primitive->output_shapes(inputs);
  if (shapes.size() > 1) {
    return mlx::core::array::make_arrays(std::move(shapes), dtypes, primitive, inputs);
  }
  // One alone is made in less time.
  return {mlx::core::array(std::move(shapes[0]), dtypes[0], primitive, std::move(inputs))};
}

}  // namespace mlx_h2o
