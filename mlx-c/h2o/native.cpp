// The CPU kernels of core/. The one file that looks into a handle, so it is built only where the
// mlx-c of this repository is (MLX_H2O_NATIVE).
#include "backend.h"

#ifdef MLX_H2O_NATIVE
#include <mlx_h2o/ops.h>
#include <mlx_h2o/simd.h>
#include <stdexcept>

#include <mlx/mlx.h>
#endif

namespace mlx_h2o_c {

namespace {

#ifdef MLX_H2O_NATIVE

namespace mx = mlx::core;

const mx::array& get(mlx_array handle) { return *static_cast<const mx::array*>(handle.ctx); }

mx::Stream get(mlx_stream handle) { return *static_cast<const mx::Stream*>(handle.ctx); }

std::optional<mx::array> optional(mlx_array handle) {
  return handle.ctx == nullptr ? std::nullopt : std::make_optional(get(handle));
}

Array wrap(mx::array array) { return Array(mlx_array{new mx::array(std::move(array))}); }

std::string unavailable_reason() {
  try {
    mlx_h2o::simd_target();
    return "";
  } catch (const std::invalid_argument& error) {  // MLX_H2O_SIMD
    return error.what();
  }
}

std::string refuses(const AttentionRequest& request) {
  return request.on_gpu ? "it runs on CPU streams, found a GPU stream" : "";
}

AttentionResult attention(const AttentionRequest& request) {
  std::vector<mx::array> outputs = mlx_h2o::scaled_dot_product_attention_with_scores(
      get(request.queries), get(request.keys), get(request.values), request.scale, request.causal,
      optional(request.mask), optional(request.sinks), request.return_lse, get(request.stream));
  AttentionResult result;
  result.out = wrap(outputs.at(0));
  result.scores = wrap(outputs.at(1));
  if (request.return_lse) {
    result.lse = wrap(outputs.at(2));
  }
  return result;
}

Array keep_indices(const RetentionRequest& request) {
  return wrap(mlx_h2o::keep_indices(get(request.scores), get(request.positions),
                                    request.rows - request.count, request.sink_size,
                                    request.recent_start, get(request.stream)));
}

Array evict_indices(const RetentionRequest& request) {
  return wrap(mlx_h2o::evict_indices(get(request.scores), get(request.positions), request.count,
                                     request.sink_size, request.recent_start, get(request.stream)));
}

#else

std::string unavailable_reason() { return "this build has no native kernels"; }

constexpr std::nullptr_t refuses = nullptr;
constexpr std::nullptr_t attention = nullptr;
constexpr std::nullptr_t keep_indices = nullptr;
constexpr std::nullptr_t evict_indices = nullptr;

#endif

}  // namespace

const Backend native_backend = {"native",  unavailable_reason, refuses,
                                attention, keep_indices,       evict_indices};

}  // namespace mlx_h2o_c
