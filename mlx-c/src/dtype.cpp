#include <array>

#include "handles.h"

namespace mlx_c {

namespace {

// In the order of mlx_dtype.
const std::array<mx::Dtype, 14>& dtypes() {
  static const std::array<mx::Dtype, 14> table = {
      mx::bool_, mx::uint8, mx::uint16,  mx::uint32,  mx::uint64,  mx::int8,     mx::int16,
      mx::int32, mx::int64, mx::float16, mx::float32, mx::float64, mx::bfloat16, mx::complex64,
  };
  return table;
}

}  // namespace

mx::Dtype to_dtype(mlx_dtype dtype) {
  const auto index = static_cast<size_t>(dtype);
  if (index >= dtypes().size()) {
    throw std::invalid_argument("unknown mlx_dtype " + std::to_string(static_cast<int>(dtype)));
  }
  return dtypes()[index];
}

mlx_dtype from_dtype(mx::Dtype dtype) {
  for (size_t index = 0; index < dtypes().size(); ++index) {
    if (dtypes()[index] == dtype) {
      return static_cast<mlx_dtype>(index);
    }
  }
  throw std::invalid_argument("this dtype has no mlx_dtype");
}

}  // namespace mlx_c

extern "C" size_t mlx_dtype_size(mlx_dtype dtype) {
  return mlx_c::value_or(size_t{0},
                         [&] { return size_t{mlx::core::size_of(mlx_c::to_dtype(dtype))}; });
}
