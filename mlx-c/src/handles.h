// What the handles of the public headers hold, and the one boundary that no exception crosses.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "mlx/c/mlx.h"
#include "mlx/mlx.h"

namespace mlx_c {

namespace mx = mlx::core;

template <class Handle>
struct Held;

#define MLX_C_HANDLE(handle, type)        \
  template <>                             \
  struct Held<handle> {                   \
    using Type = type;                    \
    static constexpr auto name = #handle; \
  }

using ArrayMap = std::unordered_map<std::string, mx::array>;
using StringMap = std::unordered_map<std::string, std::string>;

MLX_C_HANDLE(mlx_array, mx::array);
MLX_C_HANDLE(mlx_device, mx::Device);
MLX_C_HANDLE(mlx_stream, mx::Stream);
MLX_C_HANDLE(mlx_string, std::string);
MLX_C_HANDLE(mlx_vector_array, std::vector<mx::array>);
MLX_C_HANDLE(mlx_vector_string, std::vector<std::string>);
MLX_C_HANDLE(mlx_map_string_to_array, ArrayMap);
MLX_C_HANDLE(mlx_map_string_to_string, StringMap);

#undef MLX_C_HANDLE

template <class Handle>
using HeldType = typename Held<Handle>::Type;

// The object behind a handle; an empty handle is the caller's mistake.
template <class Handle>
HeldType<Handle>& get(Handle handle) {
  if (handle.ctx == nullptr) {
    throw std::invalid_argument(std::string("expected a non-empty ") + Held<Handle>::name);
  }
  return *static_cast<HeldType<Handle>*>(handle.ctx);
}

template <class Handle>
Handle make(HeldType<Handle> value) {
  return Handle{new HeldType<Handle>(std::move(value))};
}

template <class T>
T& place(T* result) {
  if (result == nullptr) {
    throw std::invalid_argument("expected a place for the result, found NULL");
  }
  return *result;
}

// Stores a result, releasing what the handle held before.
template <class Handle>
void set(Handle* result, HeldType<Handle> value) {
  Handle& handle = place(result);
  if (handle.ctx == nullptr) {
    handle = make<Handle>(std::move(value));
  } else {
    get(handle) = std::move(value);
  }
}

template <class Handle>
void destroy(Handle handle) {
  delete static_cast<HeldType<Handle>*>(handle.ctx);
}

inline std::optional<mx::array> optional(mlx_array handle) {
  return handle.ctx == nullptr ? std::nullopt : std::make_optional(get(handle));
}

inline std::optional<int> optional(mlx_optional_int value) {
  return value.has_value ? std::make_optional(value.value) : std::nullopt;
}

inline std::optional<float> optional(mlx_optional_float value) {
  return value.has_value ? std::make_optional(value.value) : std::nullopt;
}

inline const char* text(const char* characters) {
  if (characters == nullptr) {
    throw std::invalid_argument("expected a string, found NULL");
  }
  return characters;
}

// Copies `count` elements into a container of MLX's (Shape, Strides, std::vector).
template <class Container, class T>
Container list(const T* data, size_t count) {
  if (data == nullptr && count > 0) {
    throw std::invalid_argument("expected " + std::to_string(count) + " values, found NULL");
  }
  return Container(data, data + count);
}

inline mx::Shape shape(const int* data, size_t count) { return list<mx::Shape>(data, count); }

inline std::vector<int> axes(const int* data, size_t count) {
  return list<std::vector<int>>(data, count);
}

mx::Dtype to_dtype(mlx_dtype dtype);
mlx_dtype from_dtype(mx::Dtype dtype);

// Runs `body`; an exception becomes a report and the fallback.
template <class R, class Body>
R value_or(R fallback, Body&& body) noexcept {
  try {
    return body();
  } catch (const std::exception& error) {
    mlx_error("%s", error.what());
  } catch (...) {
    mlx_error("%s", "unknown exception");
  }
  return fallback;
}

// The same for functions that return a status.
template <class Body>
int status(Body&& body) noexcept {
  return value_or(1, [&] {
    body();
    return 0;
  });
}

}  // namespace mlx_c
