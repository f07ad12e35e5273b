// Reading values: scalars by conversion, buffers by pointer.
#include "handles.h"

using namespace mlx_c;

namespace {

template <class T>
int item(T* res, mlx_array arr, mx::Dtype dtype) noexcept {
  return status([&] {
    mx::array value = get(arr);
    if (value.dtype() != dtype) {
      value = mx::astype(value, dtype, mx::Device::cpu);
    }
    place(res) = value.item<T>();
  });
}

// MLX would hand out the pointer of a buffer that is not there, or not as long as T asks.
template <class T>
const T* data(mlx_array arr) noexcept {
  return value_or<const T*>(nullptr, [&] {
    mx::array& array = get(arr);
    if (array.status() == mx::array::Status::unscheduled || array.data_shared_ptr() == nullptr) {
      throw std::invalid_argument("[array data] the array is not evaluated");
    }
    if (array.itemsize() != sizeof(T)) {
      throw std::invalid_argument("[array data] elements of " + std::to_string(array.itemsize()) +
                                  " bytes cannot be read as elements of " +
                                  std::to_string(sizeof(T)));
    }
    array.wait();
    return array.data<T>();
  });
}

int flag(bool* res, mlx_array arr, bool (*read)(const mx::array&)) noexcept {
  return status([&] { place(res) = read(get(arr)); });
}

}  // namespace

extern "C" {

// NOLINTBEGIN(bugprone-macro-parentheses): the argument is a type.
#define ITEM_AND_DATA(name, type, dtype)                                                      \
  int mlx_array_item_##name(type* res, const mlx_array arr) { return item(res, arr, dtype); } \
  const type* mlx_array_data_##name(const mlx_array arr) { return data<type>(arr); }
// NOLINTEND(bugprone-macro-parentheses)

ITEM_AND_DATA(bool, bool, mx::bool_)
ITEM_AND_DATA(uint8, uint8_t, mx::uint8)
ITEM_AND_DATA(uint16, uint16_t, mx::uint16)
ITEM_AND_DATA(uint32, uint32_t, mx::uint32)
ITEM_AND_DATA(uint64, uint64_t, mx::uint64)
ITEM_AND_DATA(int8, int8_t, mx::int8)
ITEM_AND_DATA(int16, int16_t, mx::int16)
ITEM_AND_DATA(int32, int32_t, mx::int32)
ITEM_AND_DATA(int64, int64_t, mx::int64)
ITEM_AND_DATA(float32, float, mx::float32)
ITEM_AND_DATA(float64, double, mx::float64)

#undef ITEM_AND_DATA

int _mlx_array_is_available(bool* res, const mlx_array arr) {
  return flag(res, arr, [](const mx::array& a) { return a.is_available(); });
}

int _mlx_array_wait(const mlx_array arr) {
  return status([&] { get(arr).wait(); });
}

int _mlx_array_is_contiguous(bool* res, const mlx_array arr) {
  return flag(res, arr, [](const mx::array& a) { return a.flags().contiguous; });
}

int _mlx_array_is_row_contiguous(bool* res, const mlx_array arr) {
  return flag(res, arr, [](const mx::array& a) { return a.flags().row_contiguous; });
}

int _mlx_array_is_col_contiguous(bool* res, const mlx_array arr) {
  return flag(res, arr, [](const mx::array& a) { return a.flags().col_contiguous; });
}

}  // extern "C"
