// Shapes and new arrays.
#include "handles.h"

using namespace mlx_c;

extern "C" {

int mlx_as_strided(mlx_array* res, const mlx_array a, const int* sizes, size_t shape_num,
                   const int64_t* strides, size_t strides_num, size_t offset, const mlx_stream s) {
  return status([&] {
    set(res, mx::as_strided(get(a), shape(sizes, shape_num),
                            list<mx::Strides>(strides, strides_num), offset, get(s)));
  });
}

int mlx_broadcast_arrays(mlx_vector_array* res, const mlx_vector_array inputs, const mlx_stream s) {
  return status([&] { set(res, mx::broadcast_arrays(get(inputs), get(s))); });
}

int mlx_broadcast_to(mlx_array* res, const mlx_array a, const int* sizes, size_t shape_num,
                     const mlx_stream s) {
  return status([&] { set(res, mx::broadcast_to(get(a), shape(sizes, shape_num), get(s))); });
}

int mlx_concatenate(mlx_array* res, const mlx_vector_array arrays, const mlx_stream s) {
  return status([&] { set(res, mx::concatenate(get(arrays), get(s))); });
}

int mlx_concatenate_axis(mlx_array* res, const mlx_vector_array arrays, int axis,
                         const mlx_stream s) {
  return status([&] { set(res, mx::concatenate(get(arrays), axis, get(s))); });
}

int mlx_contiguous(mlx_array* res, const mlx_array a, bool allow_col_major, const mlx_stream s) {
  return status([&] { set(res, mx::contiguous(get(a), allow_col_major, get(s))); });
}

int mlx_expand_dims(mlx_array* res, const mlx_array a, int axis, const mlx_stream s) {
  return status([&] { set(res, mx::expand_dims(get(a), axis, get(s))); });
}

int mlx_expand_dims_axes(mlx_array* res, const mlx_array a, const int* list, size_t axes_num,
                         const mlx_stream s) {
  return status([&] { set(res, mx::expand_dims(get(a), axes(list, axes_num), get(s))); });
}

int mlx_flatten(mlx_array* res, const mlx_array a, int start_axis, int end_axis,
                const mlx_stream s) {
  return status([&] { set(res, mx::flatten(get(a), start_axis, end_axis, get(s))); });
}

int mlx_moveaxis(mlx_array* res, const mlx_array a, int source, int destination,
                 const mlx_stream s) {
  return status([&] { set(res, mx::moveaxis(get(a), source, destination, get(s))); });
}

int mlx_repeat(mlx_array* res, const mlx_array arr, int repeats, const mlx_stream s) {
  return status([&] { set(res, mx::repeat(get(arr), repeats, get(s))); });
}

int mlx_repeat_axis(mlx_array* res, const mlx_array arr, int repeats, int axis,
                    const mlx_stream s) {
  return status([&] { set(res, mx::repeat(get(arr), repeats, axis, get(s))); });
}

int mlx_reshape(mlx_array* res, const mlx_array a, const int* sizes, size_t shape_num,
                const mlx_stream s) {
  return status([&] { set(res, mx::reshape(get(a), shape(sizes, shape_num), get(s))); });
}

int mlx_split(mlx_vector_array* res, const mlx_array a, int num_splits, int axis,
              const mlx_stream s) {
  return status([&] { set(res, mx::split(get(a), num_splits, axis, get(s))); });
}

int mlx_split_sections(mlx_vector_array* res, const mlx_array a, const int* indices,
                       size_t indices_num, int axis, const mlx_stream s) {
  return status([&] { set(res, mx::split(get(a), shape(indices, indices_num), axis, get(s))); });
}

int mlx_squeeze(mlx_array* res, const mlx_array a, const mlx_stream s) {
  return status([&] { set(res, mx::squeeze(get(a), get(s))); });
}

int mlx_squeeze_axis(mlx_array* res, const mlx_array a, int axis, const mlx_stream s) {
  return status([&] { set(res, mx::squeeze(get(a), axis, get(s))); });
}

int mlx_squeeze_axes(mlx_array* res, const mlx_array a, const int* list, size_t axes_num,
                     const mlx_stream s) {
  return status([&] { set(res, mx::squeeze(get(a), axes(list, axes_num), get(s))); });
}

int mlx_stack(mlx_array* res, const mlx_vector_array arrays, const mlx_stream s) {
  return status([&] { set(res, mx::stack(get(arrays), get(s))); });
}

int mlx_stack_axis(mlx_array* res, const mlx_vector_array arrays, int axis, const mlx_stream s) {
  return status([&] { set(res, mx::stack(get(arrays), axis, get(s))); });
}

int mlx_stop_gradient(mlx_array* res, const mlx_array a, const mlx_stream s) {
  return status([&] { set(res, mx::stop_gradient(get(a), get(s))); });
}

int mlx_swapaxes(mlx_array* res, const mlx_array a, int axis1, int axis2, const mlx_stream s) {
  return status([&] { set(res, mx::swapaxes(get(a), axis1, axis2, get(s))); });
}

int mlx_transpose(mlx_array* res, const mlx_array a, const mlx_stream s) {
  return status([&] { set(res, mx::transpose(get(a), get(s))); });
}

int mlx_transpose_axes(mlx_array* res, const mlx_array a, const int* list, size_t axes_num,
                       const mlx_stream s) {
  return status([&] { set(res, mx::transpose(get(a), axes(list, axes_num), get(s))); });
}

int mlx_unflatten(mlx_array* res, const mlx_array a, int axis, const int* sizes, size_t shape_num,
                  const mlx_stream s) {
  return status([&] { set(res, mx::unflatten(get(a), axis, shape(sizes, shape_num), get(s))); });
}

int mlx_arange(mlx_array* res, double start, double stop, double step, mlx_dtype dtype,
               const mlx_stream s) {
  return status([&] { set(res, mx::arange(start, stop, step, to_dtype(dtype), get(s))); });
}

int mlx_full(mlx_array* res, const int* sizes, size_t shape_num, const mlx_array vals,
             mlx_dtype dtype, const mlx_stream s) {
  return status(
      [&] { set(res, mx::full(shape(sizes, shape_num), get(vals), to_dtype(dtype), get(s))); });
}

int mlx_full_like(mlx_array* res, const mlx_array a, const mlx_array vals, mlx_dtype dtype,
                  const mlx_stream s) {
  return status([&] { set(res, mx::full_like(get(a), get(vals), to_dtype(dtype), get(s))); });
}

int mlx_identity(mlx_array* res, int n, mlx_dtype dtype, const mlx_stream s) {
  return status([&] { set(res, mx::identity(n, to_dtype(dtype), get(s))); });
}

int mlx_ones(mlx_array* res, const int* sizes, size_t shape_num, mlx_dtype dtype,
             const mlx_stream s) {
  return status([&] { set(res, mx::ones(shape(sizes, shape_num), to_dtype(dtype), get(s))); });
}

int mlx_zeros(mlx_array* res, const int* sizes, size_t shape_num, mlx_dtype dtype,
              const mlx_stream s) {
  return status([&] { set(res, mx::zeros(shape(sizes, shape_num), to_dtype(dtype), get(s))); });
}

int mlx_tril(mlx_array* res, const mlx_array x, int k, const mlx_stream s) {
  return status([&] { set(res, mx::tril(get(x), k, get(s))); });
}

int mlx_triu(mlx_array* res, const mlx_array x, int k, const mlx_stream s) {
  return status([&] { set(res, mx::triu(get(x), k, get(s))); });
}

}  // extern "C"
