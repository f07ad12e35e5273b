// Reading and writing parts of an array.
#include "handles.h"

using namespace mlx_c;

#define SCATTER(name)                                                                             \
  int mlx_##name(mlx_array* res, const mlx_array a, const mlx_vector_array indices,               \
                 const mlx_array updates, const int* list, size_t axes_num, const mlx_stream s) { \
    return status([&] {                                                                           \
      set(res, mx::name(get(a), get(indices), get(updates), axes(list, axes_num), get(s)));       \
    });                                                                                           \
  }

extern "C" {

SCATTER(scatter)
SCATTER(scatter_add)
SCATTER(scatter_max)
SCATTER(scatter_min)

int mlx_scatter_add_axis(mlx_array* res, const mlx_array a, const mlx_array indices,
                         const mlx_array values, int axis, const mlx_stream s) {
  return status(
      [&] { set(res, mx::scatter_add_axis(get(a), get(indices), get(values), axis, get(s))); });
}

int mlx_put_along_axis(mlx_array* res, const mlx_array a, const mlx_array indices,
                       const mlx_array values, int axis, const mlx_stream s) {
  return status(
      [&] { set(res, mx::put_along_axis(get(a), get(indices), get(values), axis, get(s))); });
}

int mlx_take(mlx_array* res, const mlx_array a, const mlx_array indices, const mlx_stream s) {
  return status([&] { set(res, mx::take(get(a), get(indices), get(s))); });
}

int mlx_take_axis(mlx_array* res, const mlx_array a, const mlx_array indices, int axis,
                  const mlx_stream s) {
  return status([&] { set(res, mx::take(get(a), get(indices), axis, get(s))); });
}

int mlx_take_along_axis(mlx_array* res, const mlx_array a, const mlx_array indices, int axis,
                        const mlx_stream s) {
  return status([&] { set(res, mx::take_along_axis(get(a), get(indices), axis, get(s))); });
}

int mlx_slice(mlx_array* res, const mlx_array a, const int* start, size_t start_num,
              const int* stop, size_t stop_num, const int* strides, size_t strides_num,
              const mlx_stream s) {
  return status([&] {
    set(res, mx::slice(get(a), shape(start, start_num), shape(stop, stop_num),
                       shape(strides, strides_num), get(s)));
  });
}

int mlx_slice_dynamic(mlx_array* res, const mlx_array a, const mlx_array start, const int* list,
                      size_t axes_num, const int* slice_size, size_t slice_size_num,
                      const mlx_stream s) {
  return status([&] {
    set(res, mx::slice(get(a), get(start), axes(list, axes_num), shape(slice_size, slice_size_num),
                       get(s)));
  });
}

int mlx_slice_update(mlx_array* res, const mlx_array src, const mlx_array update, const int* start,
                     size_t start_num, const int* stop, size_t stop_num, const int* strides,
                     size_t strides_num, const mlx_stream s) {
  return status([&] {
    set(res, mx::slice_update(get(src), get(update), shape(start, start_num), shape(stop, stop_num),
                              shape(strides, strides_num), get(s)));
  });
}

int mlx_slice_update_dynamic(mlx_array* res, const mlx_array src, const mlx_array update,
                             const mlx_array start, const int* list, size_t axes_num,
                             const mlx_stream s) {
  return status([&] {
    set(res, mx::slice_update(get(src), get(update), get(start), axes(list, axes_num), get(s)));
  });
}

}  // extern "C"
