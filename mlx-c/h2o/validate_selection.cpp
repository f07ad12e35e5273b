// The selection of rows.
#include "checks.h"
#include "validate.h"

namespace mlx_h2o_c {

namespace {

RetentionRequest retention_request(const char* op, mlx_array scores, mlx_array positions,
                                   const char* name, int number, int sink_size,
                                   mlx_array recent_start, mlx_stream stream) {
  const Named rows[] = {{"scores", scores, "[B, H, N]"}, {"positions", positions, "[B, H, N]"}};
  for (const Named& named : rows) {
    check_present(op, named);
  }
  for (const auto& [what, array, layout] : rows) {
    if (mlx_array_ndim(array) != 3) {
      fail(op, what, " have ", mlx_array_ndim(array), " dimensions, expected 3 ", layout, ".");
    }
  }
  const Shape shape = shape_of(scores);
  if (shape != shape_of(positions)) {
    fail(op, "scores and positions have shapes ", shape_text(shape), " and ", shape_text(positions),
         ", expected the same.");
  }
  if (has_empty_axis(scores)) {
    fail(op, "scores are empty: found shape ", shape_text(shape),
         ", expected every size of [B, H, N] to be at least 1.");
  }
  if (mlx_array_dtype(scores) != MLX_FLOAT32) {
    fail(op, "scores are ", dtype_name(scores), ", expected float32.");
  }
  if (mlx_array_dtype(positions) != MLX_INT32) {
    fail(op, "positions are ", dtype_name(positions), ", expected int32.");
  }
  if (number < 1 || number > shape[2]) {
    fail(op, name, " is ", number, ", expected 1 to N = ", shape[2], ".");
  }
  check_zones(op, sink_size, recent_start, shape[0]);
  return RetentionRequest{scores, positions, shape[0],     shape[1], shape[2],
                          number, sink_size, recent_start, stream,   runs_on_gpu(op, stream)};
}

}  // namespace

RetentionRequest keep_request(mlx_array scores, mlx_array positions, int keep, int sink_size,
                              mlx_array recent_start, mlx_stream stream) {
  RetentionRequest request = retention_request("keep_indices", scores, positions, "keep", keep,
                                               sink_size, recent_start, stream);
  request.count = request.rows - keep;
  return request;
}

RetentionRequest evict_request(mlx_array scores, mlx_array positions, int count, int sink_size,
                               mlx_array recent_start, mlx_stream stream) {
  return retention_request("evict_indices", scores, positions, "count", count, sink_size,
                           recent_start, stream);
}

}  // namespace mlx_h2o_c
