// Rows as dense arrays or as mlx_quantize packs them.
#include <algorithm>

#include "codes.h"
#include "validate.h"

namespace mlx_h2o_c {

void check_packing(const char* op, const Packing& packing) {
  const auto check = [&](const char* name, int value, const Shape& known) {
    const bool found = std::find(known.begin(), known.end(), value) != known.end();
    expect(found, op, name, " is ", value, ", expected one of ", known, ".");
  };
  check("bits", packing.bits, {2, 3, 4, 5, 6, 8});
  check("v_bits", packing.of_values().bits, {2, 3, 4, 5, 6, 8});
  check("group_size", packing.group_size, {32, 64, 128});
}

int packed_width(const char* op, const std::string& what, mlx_array words, const Packing& packing) {
  const auto [bits, group_size, v_bits] = packing;
  const int64_t packed = int64_t{32} * mlx_array_dim(words, 3);
  expect(packed % bits == 0 && packed / bits % group_size == 0, op, what, " have ",
         mlx_array_dim(words, 3), " words per row, which at ", bits,
         " bits is not a multiple of the group size ", group_size, ".");
  return static_cast<int>(packed / bits);
}

std::vector<Array> parts_of(const char* op, const char* name, mlx_vector_array vector) {
  expect(vector.ctx != nullptr, op, name, " are an empty handle, expected a vector of arrays.");
  const size_t count = mlx_vector_array_size(vector);
  expect(count >= 1 && count <= 3, op, name, " are ", count,
         " arrays, expected 1, or 3: words, scales and biases, or 2: words and norms.");
  return items(vector);
}

Rows coded_rows(const char* op, const std::string& name, mlx_array words, mlx_array norms,
                int bits) {
  const char* const layout = "[B, Hkv, N, ...]";
  const Named named = {name + " words", words, layout};
  check_present(op, named);
  check_rank(op, named, 4);
  check_not_empty(op, named);
  expect(bits >= 2 && bits <= 4, op, name, " codes have ", bits, " bits, expected 2, 3 or 4.");
  expect(dtype_of(words) == MLX_UINT32, op, name, " words are ", dtype_of(words),
         ", expected uint32.");
  const int64_t packed = int64_t{32} * mlx_array_dim(words, 3);
  const int size = static_cast<int>(packed / bits);
  expect(packed % bits == 0 && codes_fit(size), op, name, " words have ", mlx_array_dim(words, 3),
         " words per row of ", bits,
         " bits, expected those of a power of two of elements from 32 to 1024.");
  Shape expected = shape_of(words);
  expected[3] = 1;
  expect(dtype_of(norms) == MLX_FLOAT32 && shape_of(norms) == expected, op, name, " norms are ",
         norms, ", expected float32 ", expected, ".");
  Rows rows{{}, bits, 0, size};
  rows.parts.push_back(copied(words));
  rows.parts.push_back(copied(norms));
  return rows;
}

Rows packed_rows(const char* op, const std::string& name, const Parts& parts,
                 const Packing& packing) {
  const auto [words, scales, biases] = parts;
  const char* const layout = "[B, Hkv, N, ...]";
  const Named named[] = {{name + " words", words, layout},
                         {name + " scales", scales, layout},
                         {name + " biases", biases, layout}};
  for (const Named& part : named) {
    check_present(op, part);
    check_rank(op, part, 4);
    expect(mlx_array_size(part.array) > 0, op, part.name, " are empty: found shape ",
           shape_of(part.array), ", expected every size to be at least 1.");
  }
  expect(dtype_of(words) == MLX_UINT32, op, name, " words are ", dtype_of(words),
         ", expected uint32.");
  expect(is_float(scales) && dtype_of(scales) == dtype_of(biases), op, name,
         " scales and biases are ", dtype_of(scales), " and ", dtype_of(biases), ", expected ",
         float_dtypes, ", both the same.");
  Rows rows{{}, packing.bits, packing.group_size, 0};
  rows.size = packed_width(op, named[0].name, words, packing);
  Shape expected = shape_of(words);
  expected[3] = rows.size / rows.group_size;
  for (const Named& part : {named[1], named[2]}) {
    const Shape found = shape_of(part.array);
    expect(found == expected, op, part.name, " have shape ", found, ", expected ", expected,
           " for rows of ", rows.size, " elements in groups of ", rows.group_size, ".");
  }
  for (const mlx_array part : parts) rows.parts.push_back(copied(part));
  return rows;
}

}  // namespace mlx_h2o_c
