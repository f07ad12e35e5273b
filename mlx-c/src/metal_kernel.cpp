// Kernels compiled at run time. Without a Metal back end MLX throws when the kernel is applied.
#include <tuple>

#include "handles.h"

namespace mlx_c {

struct KernelConfig {
  std::vector<mx::Shape> output_shapes;
  std::vector<mx::Dtype> output_dtypes;
  std::tuple<int, int, int> grid{1, 1, 1};
  std::tuple<int, int, int> thread_group{1, 1, 1};
  std::vector<std::pair<std::string, mx::fast::TemplateArg>> template_args;
  std::optional<float> init_value;
  bool verbose = false;
};

template <>
struct Held<mlx_fast_metal_kernel_config> {
  using Type = KernelConfig;
  static constexpr auto name = "mlx_fast_metal_kernel_config";
};

template <>
struct Held<mlx_fast_metal_kernel> {
  using Type = mx::fast::CustomKernelFunction;
  static constexpr auto name = "mlx_fast_metal_kernel";
};

}  // namespace mlx_c

using namespace mlx_c;

namespace {

int add_template_arg(mlx_fast_metal_kernel_config cls, const char* name,
                     mx::fast::TemplateArg value) noexcept {
  return status([&] { get(cls).template_args.emplace_back(text(name), value); });
}

}  // namespace

extern "C" {

mlx_fast_metal_kernel_config mlx_fast_metal_kernel_config_new(void) {
  return value_or(mlx_fast_metal_kernel_config{nullptr},
                  [] { return make<mlx_fast_metal_kernel_config>({}); });
}

void mlx_fast_metal_kernel_config_free(mlx_fast_metal_kernel_config cls) { destroy(cls); }

int mlx_fast_metal_kernel_config_add_output_arg(mlx_fast_metal_kernel_config cls, const int* sizes,
                                                size_t size, mlx_dtype dtype) {
  return status([&] {
    const mx::Dtype type = to_dtype(dtype);
    get(cls).output_shapes.push_back(shape(sizes, size));
    get(cls).output_dtypes.push_back(type);
  });
}

int mlx_fast_metal_kernel_config_set_grid(mlx_fast_metal_kernel_config cls, int grid1, int grid2,
                                          int grid3) {
  return status([&] { get(cls).grid = {grid1, grid2, grid3}; });
}

int mlx_fast_metal_kernel_config_set_thread_group(mlx_fast_metal_kernel_config cls, int thread1,
                                                  int thread2, int thread3) {
  return status([&] { get(cls).thread_group = {thread1, thread2, thread3}; });
}

int mlx_fast_metal_kernel_config_set_init_value(mlx_fast_metal_kernel_config cls, float value) {
  return status([&] { get(cls).init_value = value; });
}

int mlx_fast_metal_kernel_config_set_verbose(mlx_fast_metal_kernel_config cls, bool verbose) {
  return status([&] { get(cls).verbose = verbose; });
}

int mlx_fast_metal_kernel_config_add_template_arg_dtype(mlx_fast_metal_kernel_config cls,
                                                        const char* name, mlx_dtype dtype) {
  return status([&] {
    get(cls).template_args.emplace_back(text(name), mx::fast::TemplateArg(to_dtype(dtype)));
  });
}

int mlx_fast_metal_kernel_config_add_template_arg_int(mlx_fast_metal_kernel_config cls,
                                                      const char* name, int value) {
  return add_template_arg(cls, name, value);
}

int mlx_fast_metal_kernel_config_add_template_arg_bool(mlx_fast_metal_kernel_config cls,
                                                       const char* name, bool value) {
  return add_template_arg(cls, name, value);
}

mlx_fast_metal_kernel mlx_fast_metal_kernel_new(const char* name,
                                                const mlx_vector_string input_names,
                                                const mlx_vector_string output_names,
                                                const char* source, const char* header,
                                                bool ensure_row_contiguous, bool atomic_outputs) {
  return value_or(mlx_fast_metal_kernel{nullptr}, [&] {
    return make<mlx_fast_metal_kernel>(
        mx::fast::metal_kernel(text(name), get(input_names), get(output_names), text(source),
                               text(header), ensure_row_contiguous, atomic_outputs));
  });
}

void mlx_fast_metal_kernel_free(mlx_fast_metal_kernel cls) { destroy(cls); }

int mlx_fast_metal_kernel_apply(mlx_vector_array* outputs, mlx_fast_metal_kernel cls,
                                const mlx_vector_array inputs,
                                const mlx_fast_metal_kernel_config config,
                                const mlx_stream stream) {
  return status([&] {
    const KernelConfig& settings = get(config);
    set(outputs, get(cls)(get(inputs), settings.output_shapes, settings.output_dtypes,
                          settings.grid, settings.thread_group, settings.template_args,
                          settings.init_value, settings.verbose, get(stream)));
  });
}

}  // extern "C"
