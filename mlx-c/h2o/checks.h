// Words and tests that the checks of all operations share; the texts are those of the Python
// package.
#pragma once

#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "arrays.h"

namespace mlx_h2o_c {

// What a message calls an array, and its layout in the documentation.
struct Named {
  std::string name;
  mlx_array array;
  const char* layout;
};

// In a message: a tuple and a number as Python writes them, and an array as "float32 (2, 3)".
std::string shown(const Shape& shape);
std::string shown(double number);
std::string shown(float number);
std::string shown(mlx_dtype dtype);
std::string shown(mlx_array array);
template <class Part>
const Part& shown(const Part& part) {
  return part;
}

template <class... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  std::ostringstream message;
  message << '[' << op << "] ";
  (message << ... << shown(parts));
  throw std::invalid_argument(message.str());
}

// Words that cost nothing where all is right.
template <class... Parts>
void expect(bool right, const char* op, const Parts&... parts) {
  if (!right) fail(op, parts...);
}

bool is_float(mlx_array array);
inline constexpr auto float_dtypes = "float32, float16 or bfloat16";

void check_present(const char* op, const Named& named);
void check_rank(const char* op, const Named& named, size_t rank);
void check_not_empty(const char* op, const Named& named);
void check_float(const char* op, const Named& named);
// Present, of this dtype and shape.
void check_array(const char* op, const Named& named, mlx_dtype dtype, const Shape& shape);
// Present, with four axes of at least 1, of this dtype or of any float dtype.
void check_rows(const char* op, const Named& named, std::optional<mlx_dtype> dtype = {});
// Present, int32 [] or [B]: one number for all sequences, or one each.
void check_per_sequence(const char* op, const char* name, mlx_array array, int batch);
// The protected zones; recent_start may be empty.
void check_zones(const char* op, int sink_size, mlx_array recent_start, int batch);

// `what` begins the message and says of which two things: "queries and keys have batch sizes".
template <class Value>
void check_same(const char* op, const char* what, const Value& one, const Value& other,
                const char* expected = "the same") {
  expect(one == other, op, what, " ", one, " and ", other, ", expected ", expected, ".");
}

// Whether the stream's device is a GPU; an empty handle is an error.
bool runs_on_gpu(const char* op, mlx_stream stream);
// Finite in float32, which every back end holds it in.
void check_number(const char* op, const char* name, double value);
void check_decay(const char* op, double decay);
// Whether rows accumulate the mass of weights, "mass", and not the moving average of scores, "ema".
bool is_mass(const char* op, const char* kind);

}  // namespace mlx_h2o_c
