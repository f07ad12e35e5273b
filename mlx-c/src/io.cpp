// Files and random numbers.
#include "handles.h"

using namespace mlx_c;

extern "C" {

int mlx_load(mlx_array* res, const char* file, const mlx_stream s) {
  return status([&] { set(res, mx::load(text(file), get(s))); });
}

int mlx_load_safetensors(mlx_map_string_to_array* res_0, mlx_map_string_to_string* res_1,
                         const char* file, const mlx_stream s) {
  return status([&] {
    auto [tensors, metadata] = mx::load_safetensors(text(file), get(s));
    set(res_0, std::move(tensors));
    set(res_1, std::move(metadata));
  });
}

int mlx_save(const char* file, const mlx_array a) {
  return status([&] { mx::save(text(file), get(a)); });
}

int mlx_save_safetensors(const char* file, const mlx_map_string_to_array param,
                         const mlx_map_string_to_string metadata) {
  return status([&] { mx::save_safetensors(text(file), get(param), get(metadata)); });
}

int mlx_random_seed(uint64_t seed) {
  return status([&] { mx::random::seed(seed); });
}

int mlx_random_key(mlx_array* res, uint64_t seed) {
  return status([&] { set(res, mx::random::key(seed)); });
}

int mlx_random_normal(mlx_array* res, const int* sizes, size_t shape_num, mlx_dtype dtype,
                      float loc, float scale, const mlx_array key, const mlx_stream s) {
  return status([&] {
    set(res, mx::random::normal(shape(sizes, shape_num), to_dtype(dtype), loc, scale, optional(key),
                                get(s)));
  });
}

int mlx_random_uniform(mlx_array* res, const mlx_array low, const mlx_array high, const int* sizes,
                       size_t shape_num, mlx_dtype dtype, const mlx_array key, const mlx_stream s) {
  return status([&] {
    set(res, mx::random::uniform(get(low), get(high), shape(sizes, shape_num), to_dtype(dtype),
                                 optional(key), get(s)));
  });
}

}  // extern "C"
