// A Metal device that records instead of running: linked before the real mlx-c functions, it shows
// what the Metal back end would hand to MLX. The outputs are zeros.
#include <string>
#include <utility>
#include <vector>

#include "mlx/c/mlx.h"

namespace {

struct Config {
  std::vector<std::pair<std::vector<int>, mlx_dtype>> outputs;
  std::string text;
};

std::string record;
int kernels_made = 0;

void line(std::string& text, const std::string& key, const std::string& value) {
  text += key + "\x1f" + value + "\x1e";
}

std::string join(const std::vector<int>& numbers) {
  std::string text;
  for (const int number : numbers) {
    text += (text.empty() ? "" : " ") + std::to_string(number);
  }
  return text;
}

std::string join(mlx_vector_string vector) {
  std::string text;
  for (size_t i = 0; i < mlx_vector_string_size(vector); ++i) {
    char* item = nullptr;
    mlx_vector_string_get(&item, vector, i);
    text += (text.empty() ? "" : " ") + std::string(item);
  }
  return text;
}

Config& get(mlx_fast_metal_kernel_config config) { return *static_cast<Config*>(config.ctx); }

int template_argument(mlx_fast_metal_kernel_config config, const char* name, int value) {
  line(get(config).text, std::string("template ") + name, std::to_string(value));
  return 0;
}

}  // namespace

extern "C" {

// "key\x1fvalue\x1e" for everything since the last call.
const char* fake_metal_record(void) {
  static std::string taken;
  taken = std::exchange(record, "");
  return taken.c_str();
}

int fake_metal_kernels_made(void) { return kernels_made; }

int mlx_metal_is_available(bool* res) {
  *res = true;
  return 0;
}

int mlx_device_get_type(mlx_device_type* type, mlx_device /* dev */) {
  *type = MLX_GPU;
  return 0;
}

mlx_fast_metal_kernel_config mlx_fast_metal_kernel_config_new(void) { return {new Config}; }

void mlx_fast_metal_kernel_config_free(mlx_fast_metal_kernel_config cls) {
  delete static_cast<Config*>(cls.ctx);
}

int mlx_fast_metal_kernel_config_add_output_arg(mlx_fast_metal_kernel_config cls, const int* shape,
                                                size_t size, mlx_dtype dtype) {
  get(cls).outputs.emplace_back(std::vector<int>(shape, shape + size), dtype);
  line(get(cls).text, "output", join(get(cls).outputs.back().first) + ":" + std::to_string(dtype));
  return 0;
}

int mlx_fast_metal_kernel_config_set_grid(mlx_fast_metal_kernel_config cls, int grid1, int grid2,
                                          int grid3) {
  line(get(cls).text, "grid", join({grid1, grid2, grid3}));
  return 0;
}

int mlx_fast_metal_kernel_config_set_thread_group(mlx_fast_metal_kernel_config cls, int thread1,
                                                  int thread2, int thread3) {
  line(get(cls).text, "threadgroup", join({thread1, thread2, thread3}));
  return 0;
}

int mlx_fast_metal_kernel_config_add_template_arg_dtype(mlx_fast_metal_kernel_config cls,
                                                        const char* name, mlx_dtype dtype) {
  return template_argument(cls, name, dtype);
}

int mlx_fast_metal_kernel_config_add_template_arg_int(mlx_fast_metal_kernel_config cls,
                                                      const char* name, int value) {
  return template_argument(cls, name, value);
}

int mlx_fast_metal_kernel_config_add_template_arg_bool(mlx_fast_metal_kernel_config cls,
                                                       const char* name, bool value) {
  return template_argument(cls, name, value);
}

mlx_fast_metal_kernel mlx_fast_metal_kernel_new(const char* name,
                                                const mlx_vector_string input_names,
                                                const mlx_vector_string output_names,
                                                const char* source, const char* header,
                                                bool ensure_row_contiguous, bool atomic_outputs) {
  ++kernels_made;
  auto* text = new std::string;
  line(*text, "name", name);
  line(*text, "inputs", join(input_names));
  line(*text, "outputs", join(output_names));
  line(*text, "source", source);
  line(*text, "header", header);
  line(*text, "switches", join({ensure_row_contiguous, atomic_outputs}));
  return {text};
}

int mlx_fast_metal_kernel_apply(mlx_vector_array* outputs, mlx_fast_metal_kernel cls,
                                const mlx_vector_array inputs,
                                const mlx_fast_metal_kernel_config config,
                                const mlx_stream stream) {
  record += *static_cast<std::string*>(cls.ctx) + get(config).text;
  for (size_t i = 0; i < mlx_vector_array_size(inputs); ++i) {
    mlx_array input = mlx_array_new();
    mlx_vector_array_get(&input, inputs, i);
    const int* shape = mlx_array_shape(input);
    line(record, "input", join(std::vector<int>(shape, shape + mlx_array_ndim(input))));
    mlx_array_free(input);
  }
  for (const auto& [shape, dtype] : get(config).outputs) {
    mlx_array zeros = mlx_array_new();
    mlx_zeros(&zeros, shape.data(), shape.size(), dtype, stream);
    mlx_vector_array_append_value(*outputs, zeros);
    mlx_array_free(zeros);
  }
  return 0;
}

}  // extern "C"
