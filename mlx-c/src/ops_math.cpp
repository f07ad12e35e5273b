// Elementwise operations, reductions and order, one line per function.
#include "handles.h"

using namespace mlx_c;

#define UNARY(name)                                                       \
  int mlx_##name(mlx_array* res, const mlx_array a, const mlx_stream s) { \
    return status([&] { set(res, mx::name(get(a), get(s))); });           \
  }

#define BINARY(name)                                                                         \
  int mlx_##name(mlx_array* res, const mlx_array a, const mlx_array b, const mlx_stream s) { \
    return status([&] { set(res, mx::name(get(a), get(b), get(s))); });                      \
  }

// `flag` is keepdims, or precise for softmax.
#define REDUCTION_AXIS(name)                                                         \
  int mlx_##name(mlx_array* res, const mlx_array a, bool flag, const mlx_stream s) { \
    return status([&] { set(res, mx::name(get(a), flag, get(s))); });                \
  }                                                                                  \
  int mlx_##name##_axis(mlx_array* res, const mlx_array a, int axis, bool flag,      \
                        const mlx_stream s) {                                        \
    return status([&] { set(res, mx::name(get(a), axis, flag, get(s))); });          \
  }

#define REDUCTION(name)                                                                      \
  REDUCTION_AXIS(name)                                                                       \
  int mlx_##name##_axes(mlx_array* res, const mlx_array a, const int* list, size_t axes_num, \
                        bool flag, const mlx_stream s) {                                     \
    return status([&] { set(res, mx::name(get(a), axes(list, axes_num), flag, get(s))); });  \
  }

#define SORT(name)                                                                         \
  UNARY(name)                                                                              \
  int mlx_##name##_axis(mlx_array* res, const mlx_array a, int axis, const mlx_stream s) { \
    return status([&] { set(res, mx::name(get(a), axis, get(s))); });                      \
  }

#define SELECT(name)                                                                              \
  int mlx_##name(mlx_array* res, const mlx_array a, int k, const mlx_stream s) {                  \
    return status([&] { set(res, mx::name(get(a), k, get(s))); });                                \
  }                                                                                               \
  int mlx_##name##_axis(mlx_array* res, const mlx_array a, int k, int axis, const mlx_stream s) { \
    return status([&] { set(res, mx::name(get(a), k, axis, get(s))); });                          \
  }

extern "C" {

UNARY(abs)
UNARY(bitwise_invert)
UNARY(copy)
UNARY(cos)
UNARY(exp)
UNARY(floor)
UNARY(isfinite)
UNARY(isinf)
UNARY(isnan)
UNARY(isneginf)
UNARY(isposinf)
UNARY(log)
UNARY(log10)
UNARY(log1p)
UNARY(log2)
UNARY(logical_not)
UNARY(negative)
UNARY(ones_like)
UNARY(reciprocal)
UNARY(rsqrt)
UNARY(sigmoid)
UNARY(sign)
UNARY(sin)
UNARY(sqrt)
UNARY(square)
UNARY(tanh)
UNARY(zeros_like)

BINARY(add)
BINARY(bitwise_and)
BINARY(bitwise_or)
BINARY(bitwise_xor)
BINARY(divide)
BINARY(equal)
BINARY(floor_divide)
BINARY(greater)
BINARY(greater_equal)
BINARY(left_shift)
BINARY(less)
BINARY(less_equal)
BINARY(logaddexp)
BINARY(logical_and)
BINARY(logical_or)
BINARY(matmul)
BINARY(maximum)
BINARY(minimum)
BINARY(multiply)
BINARY(not_equal)
BINARY(power)
BINARY(remainder)
BINARY(right_shift)
BINARY(subtract)

REDUCTION(all)
REDUCTION(any)
REDUCTION(logsumexp)
REDUCTION(max)
REDUCTION(mean)
REDUCTION(min)
REDUCTION(prod)
REDUCTION(softmax)
REDUCTION(sum)
REDUCTION_AXIS(argmax)
REDUCTION_AXIS(argmin)

SORT(argsort)
SORT(sort)
SELECT(argpartition)
SELECT(partition)
SELECT(topk)

int mlx_cumsum(mlx_array* res, const mlx_array a, int axis, bool reverse, bool inclusive,
               const mlx_stream s) {
  return status([&] { set(res, mx::cumsum(get(a), axis, reverse, inclusive, get(s))); });
}

int mlx_allclose(mlx_array* res, const mlx_array a, const mlx_array b, double rtol, double atol,
                 bool equal_nan, const mlx_stream s) {
  return status([&] { set(res, mx::allclose(get(a), get(b), rtol, atol, equal_nan, get(s))); });
}

int mlx_array_equal(mlx_array* res, const mlx_array a, const mlx_array b, bool equal_nan,
                    const mlx_stream s) {
  return status([&] { set(res, mx::array_equal(get(a), get(b), equal_nan, get(s))); });
}

int mlx_astype(mlx_array* res, const mlx_array a, mlx_dtype dtype, const mlx_stream s) {
  return status([&] { set(res, mx::astype(get(a), to_dtype(dtype), get(s))); });
}

int mlx_view(mlx_array* res, const mlx_array a, mlx_dtype dtype, const mlx_stream s) {
  return status([&] { set(res, mx::view(get(a), to_dtype(dtype), get(s))); });
}

int mlx_clip(mlx_array* res, const mlx_array a, const mlx_array a_min, const mlx_array a_max,
             const mlx_stream s) {
  return status([&] { set(res, mx::clip(get(a), optional(a_min), optional(a_max), get(s))); });
}

int mlx_where(mlx_array* res, const mlx_array condition, const mlx_array x, const mlx_array y,
              const mlx_stream s) {
  return status([&] { set(res, mx::where(get(condition), get(x), get(y), get(s))); });
}

int mlx_hadamard_transform(mlx_array* res, const mlx_array a, mlx_optional_float scale,
                           const mlx_stream s) {
  return status([&] { set(res, mx::hadamard_transform(get(a), optional(scale), get(s))); });
}

int mlx_quantize(mlx_vector_array* res, const mlx_array w, mlx_optional_int group_size,
                 mlx_optional_int bits, const char* mode, const mlx_array global_scale,
                 const mlx_stream s) {
  return status([&] {
    set(res, mx::quantize(get(w), optional(group_size), optional(bits), text(mode),
                          optional(global_scale), get(s)));
  });
}

int mlx_dequantize(mlx_array* res, const mlx_array w, const mlx_array scales,
                   const mlx_array biases, mlx_optional_int group_size, mlx_optional_int bits,
                   const char* mode, const mlx_array global_scale, mlx_optional_dtype dtype,
                   const mlx_stream s) {
  return status([&] {
    const auto type = dtype.has_value ? std::make_optional(to_dtype(dtype.value)) : std::nullopt;
    set(res, mx::dequantize(get(w), get(scales), optional(biases), optional(group_size),
                            optional(bits), text(mode), optional(global_scale), type, get(s)));
  });
}

int mlx_quantized_matmul(mlx_array* res, const mlx_array x, const mlx_array w,
                         const mlx_array scales, const mlx_array biases, bool transpose,
                         mlx_optional_int group_size, mlx_optional_int bits, const char* mode,
                         const mlx_stream s) {
  return status([&] {
    set(res, mx::quantized_matmul(get(x), get(w), get(scales), optional(biases), transpose,
                                  optional(group_size), optional(bits), text(mode), get(s)));
  });
}

int mlx_depends(mlx_vector_array* res, const mlx_vector_array inputs,
                const mlx_vector_array dependencies) {
  return status([&] { set(res, mx::depends(get(inputs), get(dependencies))); });
}

}  // extern "C"
