#include "codes.h"

#include "../../core/src/quantized/turbo_kernel.h"
#include "composed.h"

#ifndef MLX_H2O_NATIVE  // else core/ provides it
#include "../../core/src/quantized/turbo_kernel.cpp"
#endif

namespace mlx_h2o_c {

namespace {

namespace kernels = mlx_h2o::kernels;

constexpr float least_coded_norm = 1e-8F;
constexpr mlx_optional_float scaled = {};  // makes the transform its own inverse

// The signs for vectors of this size.
Array signs_for(const Value& vectors, Side side) {
  return signs_of(mlx_array_dim(vectors, static_cast<int>(mlx_array_ndim(vectors)) - 1), side);
}

Value lengths_of(const Value& rows) {
  return rows.then(mlx_square).then(mlx_sum_axis, -1, true).then(mlx_sqrt);
}

}  // namespace

uint32_t seed_of(Side side) { return side == Side::keys ? kernels::kKeySeed : kernels::kValueSeed; }

bool codes_fit(int size) { return kernels::has_codebook(size); }

Array levels_of(int size, int bits) {
  const int count = 1 << bits;
  const float* levels = kernels::codebook(size, bits, kernels::kKeySeed).levels;
  return Array(mlx_array_new_data(levels, &count, 1, MLX_FLOAT32));
}

Array signs_of(int size, Side side) {
  // The signs do not depend on the bits.
  const std::vector<float>& signs = kernels::codebook(size, 2, seed_of(side)).signs;
  return Array(mlx_array_new_data(signs.data(), &size, 1, MLX_FLOAT32));
}

Value rotated(const Value& vectors, Side side) {
  return (vectors.as(MLX_FLOAT32) * signs_for(vectors, side)).then(mlx_hadamard_transform, scaled);
}

Value restored(const Value& vectors, Side side) {
  return vectors.then(mlx_hadamard_transform, scaled) * signs_for(vectors, side);
}

std::vector<Array> composed::encode_rows(const EncodeRequest& r) {
  const mlx_stream s = r.stream;
  const int bits = r.bits, means = (1 << bits) - 1;
  Shape shape = shape_of(r.rows);
  const Value rows = Value(r.rows, s).as(MLX_FLOAT32);
  const Value lengths = lengths_of(rows);
  const Value directions = rotated(rows / lengths.at_least(number(least_coded_norm)), r.side);
  const float* const between = kernels::codebook(shape[3], bits, seed_of(r.side)).between;
  const Value codes =
      directions.then(mlx_expand_dims, -1)
          .then(mlx_greater, Array(mlx_array_new_data(between, &means, 1, MLX_FLOAT32)))
          .then(mlx_sum_axis, -1, false)
          .as(MLX_UINT32);
  // The norm gives the decoded row the length of the original.
  const Value coded = Value(levels_of(shape[3], bits), s).then(mlx_take, codes);
  Value norms = lengths / lengths_of(coded);
  // The bits of all codes in order; each 32 make a word.
  shape[3] = shape[3] * bits / 32;
  shape.push_back(32);
  Value words = codes.then(mlx_expand_dims, -1)
                    .then(mlx_right_shift, range(0, bits, MLX_UINT32, s))
                    .then(mlx_bitwise_and, scalar(uint32_t{1}, MLX_UINT32))
                    .then(mlx_reshape, shape.data(), shape.size())
                    .then(mlx_left_shift, range(0, 32, MLX_UINT32, s))
                    .then(mlx_sum_axis, -1, false)
                    .as(MLX_UINT32);
  std::vector<Array> parts;
  parts.push_back(std::move(words));
  parts.push_back(std::move(norms));
  return parts;
}

Array composed::decode_rows(const DecodeRequest& r) {
  return restored(dense(r.rows, r.stream), r.side);
}

}  // namespace mlx_h2o_c
