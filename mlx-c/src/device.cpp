// Devices, streams, evaluation and memory.
#include <sstream>

#include "handles.h"

using namespace mlx_c;

namespace {

mx::Device::DeviceType device_type(mlx_device_type type) {
  switch (type) {
    case MLX_CPU:
      return mx::Device::cpu;
    case MLX_GPU:
      return mx::Device::gpu;
  }
  throw std::invalid_argument("unknown mlx_device_type");
}

template <class Handle>
int words(mlx_string* str, Handle handle) noexcept {
  return status([&] {
    std::ostringstream stream;
    stream << get(handle);
    set(str, stream.str());
  });
}

mlx_stream default_stream(mx::Device::DeviceType type) noexcept {
  return value_or(mlx_stream{nullptr}, [&] { return make<mlx_stream>(mx::default_stream(type)); });
}

// A number that MLX gives out.
template <class T, class Read>
int number(T* res, Read read) noexcept {
  return status([&] { place(res) = read(); });
}

}  // namespace

extern "C" {

mlx_device mlx_device_new(void) { return mlx_device{nullptr}; }

mlx_device mlx_device_new_type(mlx_device_type type, int index) {
  return value_or(mlx_device{nullptr},
                  [&] { return make<mlx_device>(mx::Device(device_type(type), index)); });
}

int mlx_device_free(mlx_device dev) {
  return status([&] { destroy(dev); });
}

int mlx_device_set(mlx_device* dev, const mlx_device src) {
  return status([&] { set(dev, get(src)); });
}

int mlx_device_tostring(mlx_string* str, mlx_device dev) { return words(str, dev); }

bool mlx_device_equal(mlx_device lhs, mlx_device rhs) {
  return value_or(false, [&] { return get(lhs) == get(rhs); });
}

int mlx_device_get_index(int* index, mlx_device dev) {
  return number(index, [&] { return get(dev).index; });
}

int mlx_device_get_type(mlx_device_type* type, mlx_device dev) {
  return number(type, [&] { return get(dev).type == mx::Device::gpu ? MLX_GPU : MLX_CPU; });
}

int mlx_get_default_device(mlx_device* dev) {
  return status([&] { set(dev, mx::default_device()); });
}

int mlx_set_default_device(mlx_device dev) {
  return status([&] { mx::set_default_device(get(dev)); });
}

int mlx_device_is_available(bool* avail, mlx_device dev) {
  return number(avail, [&] { return mx::is_available(get(dev)); });
}

int mlx_device_count(int* count, mlx_device_type type) {
  return number(count, [&] { return mx::device_count(device_type(type)); });
}

mlx_stream mlx_stream_new(void) { return mlx_stream{nullptr}; }

mlx_stream mlx_stream_new_device(mlx_device dev) {
  return value_or(mlx_stream{nullptr}, [&] { return make<mlx_stream>(mx::new_stream(get(dev))); });
}

int mlx_stream_set(mlx_stream* stream, const mlx_stream src) {
  return status([&] { set(stream, get(src)); });
}

int mlx_stream_free(mlx_stream stream) {
  return status([&] { destroy(stream); });
}

int mlx_stream_tostring(mlx_string* str, mlx_stream stream) { return words(str, stream); }

bool mlx_stream_equal(mlx_stream lhs, mlx_stream rhs) {
  return value_or(false, [&] { return get(lhs) == get(rhs); });
}

int mlx_stream_get_device(mlx_device* dev, mlx_stream stream) {
  return status([&] { set(dev, get(stream).device); });
}

int mlx_stream_get_index(int* index, mlx_stream stream) {
  return number(index, [&] { return get(stream).index; });
}

int mlx_synchronize(mlx_stream stream) {
  return status([&] { mx::synchronize(get(stream)); });
}

int mlx_get_default_stream(mlx_stream* stream, mlx_device dev) {
  return status([&] { set(stream, mx::default_stream(get(dev))); });
}

int mlx_set_default_stream(mlx_stream stream) {
  return status([&] { mx::set_default_stream(get(stream)); });
}

mlx_stream mlx_default_cpu_stream_new(void) { return default_stream(mx::Device::cpu); }

mlx_stream mlx_default_gpu_stream_new(void) { return default_stream(mx::Device::gpu); }

int mlx_eval(const mlx_vector_array outputs) {
  return status([&] { mx::eval(get(outputs)); });
}

int mlx_async_eval(const mlx_vector_array outputs) {
  return status([&] { mx::async_eval(get(outputs)); });
}

int mlx_clear_cache(void) {
  return status([] { mx::clear_cache(); });
}

int mlx_reset_peak_memory(void) {
  return status([] { mx::reset_peak_memory(); });
}

int mlx_get_active_memory(size_t* res) { return number(res, mx::get_active_memory); }
int mlx_get_cache_memory(size_t* res) { return number(res, mx::get_cache_memory); }
int mlx_get_memory_limit(size_t* res) { return number(res, mx::get_memory_limit); }
int mlx_get_peak_memory(size_t* res) { return number(res, mx::get_peak_memory); }

int mlx_set_cache_limit(size_t* res, size_t limit) {
  return number(res, [&] { return mx::set_cache_limit(limit); });
}

int mlx_set_memory_limit(size_t* res, size_t limit) {
  return number(res, [&] { return mx::set_memory_limit(limit); });
}

int mlx_set_wired_limit(size_t* res, size_t limit) {
  return number(res, [&] { return mx::set_wired_limit(limit); });
}

int mlx_metal_is_available(bool* res) { return number(res, mx::metal::is_available); }

int mlx_version(mlx_string* str_) {
  return status([&] { set(str_, mx::version()); });
}

}  // extern "C"
