// Rows as dense arrays or as mlx_quantize packs them.
#include "validate.h"

namespace mlx_h2o_c {

int value_bits(const Packing& packing) {
  return packing.value_bits.has_value ? packing.value_bits.value : packing.bits;
}

void check_packing(const char* op, const Packing& packing) {
  check_one_of(op, "bits", packing.bits, {2, 3, 4, 5, 6, 8});
  check_one_of(op, "v_bits", value_bits(packing), {2, 3, 4, 5, 6, 8});
  check_one_of(op, "group_size", packing.group_size, {32, 64, 128});
}

int packed_width(const char* op, const std::string& what, mlx_array words, int bits,
                 int group_size) {
  const int64_t packed = int64_t{32} * mlx_array_dim(words, 3);
  expect(packed % bits == 0 && packed / bits % group_size == 0, op, what, " have ",
         mlx_array_dim(words, 3), " words per row, which at ", bits,
         " bits is not a multiple of the group size ", group_size, ".");
  return static_cast<int>(packed / bits);
}

std::vector<Array> parts_of(const char* op, const char* name, mlx_vector_array vector) {
  expect(vector.ctx != nullptr, op, name, " are an empty handle, expected a vector of arrays.");
  const size_t count = mlx_vector_array_size(vector);
  expect(count == 1 || count == 3, op, name, " are ", count,
         " arrays, expected 1, or 3: words, scales and biases.");
  return items(vector);
}

void check_both_packed(const char* op, bool keys, bool values) {
  if (keys != values) {
    fail(op, keys ? "keys are packed and values are not" : "values are packed and keys are not",
         ", expected both or none.");
  }
}

Rows packed_rows(const char* op, const std::string& name, mlx_array words, mlx_array scales,
                 mlx_array biases, int bits, int group_size) {
  const char* const layout = "[B, Hkv, N, ...]";
  const Named parts[] = {{name + " words", words, layout},
                         {name + " scales", scales, layout},
                         {name + " biases", biases, layout}};
  for (const Named& part : parts) {
    check_present(op, part);
    check_rank(op, part, 4);
    expect(!has_empty_axis(part.array), op, part.name, " are empty: found shape ",
           ShapeOf{part.array}, ", expected every size to be at least 1.");
  }
  expect(mlx_array_dtype(words) == MLX_UINT32, op, name, " words are ", dtype_name(words),
         ", expected uint32.");
  expect(is_float(scales) && mlx_array_dtype(scales) == mlx_array_dtype(biases), op, name,
         " scales and biases are ", dtype_name(scales), " and ", dtype_name(biases),
         ", expected float32, float16 or bfloat16, both the same.");
  Rows rows{{}, bits, group_size, mlx_array_dim(words, 2), 0};
  rows.size = packed_width(op, parts[0].name, words, bits, group_size);
  Shape expected = shape_of(words);
  expected[3] = rows.size / group_size;
  for (const Named& part : {parts[1], parts[2]}) {
    expect(shape_of(part.array) == expected, op, part.name, " have shape ", ShapeOf{part.array},
           ", expected ", expected, " for rows of ", rows.size, " elements in groups of ",
           group_size, ".");
  }
  for (const Named& part : parts) rows.parts.push_back(copied(part.array));
  return rows;
}

}  // namespace mlx_h2o_c
