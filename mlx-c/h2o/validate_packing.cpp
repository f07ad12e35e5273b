// Rows as dense arrays or as mlx_quantize packs them.
#include "checks.h"
#include "validate.h"

namespace mlx_h2o_c {

namespace {

Array copied(mlx_array array) {
  Array copy;
  check(mlx_array_set(copy.out(), array));
  return copy;
}

}  // namespace

int value_bits(const Packing& packing) {
  return packing.value_bits.has_value ? packing.value_bits.value : packing.bits;
}

void check_packing(const char* op, const Packing& packing) {
  check_one_of(op, "bits", packing.bits, {2, 3, 4, 5, 6, 8});
  check_one_of(op, "v_bits", value_bits(packing), {2, 3, 4, 5, 6, 8});
  check_one_of(op, "group_size", packing.group_size, {32, 64, 128});
}

Rows dense_rows(mlx_array array) {
  Rows rows;
  rows.parts.push_back(copied(array));
  if (mlx_array_ndim(array) == 4) {
    rows.count = mlx_array_dim(array, 2);
    rows.size = mlx_array_dim(array, 3);
  }
  return rows;
}

Rows packed_rows(const char* op, const char* name, mlx_array words, mlx_array scales,
                 mlx_array biases, int bits, int group_size) {
  const Named parts[] = {{"words", words, ""}, {"scales", scales, ""}, {"biases", biases, ""}};
  for (const auto& [part, array, _] : parts) {
    const std::string what = std::string(name) + " " + part;
    check_present(op, {what.c_str(), array, "[B, Hkv, N, ...]"});
    if (mlx_array_ndim(array) != 4) {
      fail(op, what, " have ", mlx_array_ndim(array), " dimensions, expected 4 [B, Hkv, N, ...].");
    }
    if (has_empty_axis(array)) {
      fail(op, what, " are empty: found shape ", shape_text(array),
           ", expected every size to be at least 1.");
    }
  }
  if (mlx_array_dtype(words) != MLX_UINT32) {
    fail(op, name, " words are ", dtype_name(words), ", expected uint32.");
  }
  if (!is_float(scales) || mlx_array_dtype(scales) != mlx_array_dtype(biases)) {
    fail(op, name, " scales and biases are ", dtype_name(scales), " and ", dtype_name(biases),
         ", expected float32, float16 or bfloat16, both the same.");
  }
  const int64_t packed = int64_t{32} * mlx_array_dim(words, 3);
  const int64_t size = packed / bits;
  if (packed % bits != 0 || size % group_size != 0) {
    fail(op, name, " words have ", mlx_array_dim(words, 3), " words per row, which at ", bits,
         " bits is not a multiple of the group size ", group_size, ".");
  }
  Shape expected = shape_of(words);
  expected[3] = static_cast<int>(size / group_size);
  for (const auto& [part, array, _] : {parts[1], parts[2]}) {
    if (shape_of(array) != expected) {
      fail(op, name, " ", part, " have shape ", shape_text(array), ", expected ",
           shape_text(expected), " for rows of ", size, " elements in groups of ", group_size, ".");
    }
  }
  Rows rows;
  for (const mlx_array part : {words, scales, biases}) {
    rows.parts.push_back(copied(part));
  }
  rows.bits = bits;
  rows.group_size = group_size;
  rows.count = expected[2];
  rows.size = static_cast<int>(size);
  return rows;
}

std::vector<Array> parts_of(const char* op, const char* name, mlx_vector_array vector) {
  if (vector.ctx == nullptr) {
    fail(op, name, " are an empty handle, expected a vector of arrays.");
  }
  const size_t count = mlx_vector_array_size(vector);
  if (count != 1 && count != 3) {
    fail(op, name, " are ", count, " arrays, expected 1, or 3: words, scales and biases.");
  }
  std::vector<Array> parts(count);
  for (size_t i = 0; i < count; ++i) {
    check(mlx_vector_array_get(parts[i].out(), vector, i));
  }
  return parts;
}

Rows rows_of(const char* op, const char* name, mlx_vector_array vector, const Packing& packing) {
  const std::vector<Array> parts = parts_of(op, name, vector);
  if (parts.size() == 1) {
    return dense_rows(parts[0]);
  }
  check_packing(op, packing);
  const bool of_values = std::string(name) == "values";
  return packed_rows(op, of_values ? "value" : "key", parts[0], parts[1], parts[2],
                     of_values ? value_bits(packing) : packing.bits, packing.group_size);
}

}  // namespace mlx_h2o_c
