// Operations on rows of a cache as Metal launches.
#include <climits>

#include "codes.h"
#include "composed.h"
#include "metal.h"

namespace mlx_h2o_c::metal {

namespace {

constexpr int simdgroups = 8;  // per threadgroup: few registers, so any GPU can run it
constexpr int threads = simdgroups * lanes;
constexpr int never = INT_MAX;  // a position that no row has

Outputs launched(const mlx_h2o_kernel_text& text, Names& names, int width, int height,
                 mlx_stream stream) {
  names.arguments["NS"] = simdgroups;
  return launch(text, {}, names, {width, height, 1}, {threads, 1, 1}, stream);
}

}  // namespace

// One thread per row.
Array add_mass(const AccumulatingRequest& r, mlx_array scores, mlx_array lse) {
  Names names;
  names.buffers = {{"importance", r.importance}, {"scores", scores}, {"lse", lse}};
  names.outputs = {{"accumulated", {{r.batch, r.kv_heads, r.rows}, MLX_FLOAT32}}};
  const int width = (r.rows + threads - 1) / threads * threads;
  return std::move(
      launched(mlx_h2o_add_mass_text, names, width, r.batch * r.kv_heads, r.stream)["accumulated"]);
}

// One threadgroup per head.
Array keep_indices(const RetentionRequest& r) {
  if (r.count == 0) return composed::keep_indices(r);
  // Empty: no window.
  const Array start = r.recent_start.ctx == nullptr ? integer(never) : copied(r.recent_start);
  const Array starts = broadcast(start, {r.batch}, r.stream);
  const Array zones = integers({r.sink_size, r.count});
  Names names;
  names.buffers = {{"scores", r.scores},
                   {"positions", r.positions},
                   {"recent_starts", starts},
                   {"zones", zones}};
  names.outputs = {{"kept", {{r.batch, r.heads, r.rows - r.count}, MLX_UINT32}}};
  return std::move(
      launched(mlx_h2o_keep_rows_text, names, r.batch * r.heads * threads, 1, r.stream)["kept"]);
}

Written quantize_append(const AppendRequest& r) {
  return composed::appended(r, composed::as_stored(r, encode_rows));
}

// One simdgroup per row.
std::vector<Array> encode_rows(const EncodeRequest& r) {
  Shape words = shape_of(r.rows), norms = words;
  const int size = words[3], rows = static_cast<int>(mlx_array_size(r.rows) / size);
  words[3] = size * r.bits / 32;
  norms[3] = 1;
  const Array signs = signs_of(size, r.side), levels = levels_of(size, r.bits);
  Names names;
  names.buffers = {{"rows", r.rows}, {"signs", signs}, {"levels", levels}};
  names.arguments = {{"T", dtype_of(r.rows)}, {"D", size}, {"BITS", r.bits}};
  names.outputs = {{"words", {words, MLX_UINT32}}, {"norms", {norms, MLX_FLOAT32}}};
  Outputs made =
      launch(mlx_h2o_encode_rows_text, {}, names, {rows * lanes, 1, 1}, {lanes, 1, 1}, r.stream);
  std::vector<Array> parts;
  for (const char* part : {"words", "norms"}) parts.push_back(std::move(made[part]));
  return parts;
}

}  // namespace mlx_h2o_c::metal
