#include "codes.h"

#include <cmath>

#include "../../core/src/turbo_kernel.h"

#ifndef MLX_H2O_NATIVE  // else it comes with core/
#include "../../core/src/turbo_kernel.cpp"
#endif

namespace mlx_h2o_c {

namespace {

namespace kernels = mlx_h2o::kernels;

uint32_t seed_of(Side side) { return side == Side::keys ? kernels::kKeySeed : kernels::kValueSeed; }

// H diag(s) / sqrt(D), of which a direction is the product with a row.
Value basis(int size, Side side, mlx_stream s) {
  const auto width = static_cast<unsigned>(size);
  const std::vector<float>& signs = kernels::codebook(size, 2, seed_of(side)).signs;
  const float scale = 1 / std::sqrt(static_cast<float>(size));
  std::vector<float> elements;
  for (unsigned i = 0; i < width; ++i) {
    for (unsigned j = 0; j < width; ++j) {
      elements.push_back(__builtin_parity(i & j) != 0 ? -scale * signs[j] : scale * signs[j]);
    }
  }
  const int shape[] = {size, size};
  return {Array(mlx_array_new_data(elements.data(), shape, 2, MLX_FLOAT32)), s};
}

}  // namespace

bool codes_fit(int size) { return kernels::has_codebook(size); }

Array levels_of(const Rows& rows) {
  const int count = 1 << rows.bits;
  const float* levels = kernels::codebook(rows.size, rows.bits, kernels::kKeySeed).levels;
  return Array(mlx_array_new_data(levels, &count, 1, MLX_FLOAT32));
}

Value rotated(const Value& vectors, Side side) {
  const Value wide = vectors.as(MLX_FLOAT32);
  const int size = mlx_array_dim(wide, static_cast<int>(mlx_array_ndim(wide)) - 1);
  return wide.then(mlx_matmul, basis(size, side, vectors.stream()).then(mlx_swapaxes, 0, 1));
}

Value restored(const Value& vectors, Side side) {
  const int size = mlx_array_dim(vectors, static_cast<int>(mlx_array_ndim(vectors)) - 1);
  return vectors.then(mlx_matmul, basis(size, side, vectors.stream()));
}

}  // namespace mlx_h2o_c
