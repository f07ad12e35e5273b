// Words and tests that the checks of all operations share; the texts are those of the Python
// package.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "owned.h"

namespace mlx_h2o_c {

template <class... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  std::ostringstream message;
  message << '[' << op << "] ";
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

using Shape = std::vector<int>;

// What a message calls an array, and its layout in the documentation.
struct Named {
  const char* name;
  mlx_array array;
  const char* layout;
};

Shape shape_of(mlx_array array);

// As Python writes a tuple, and a number.
std::string shape_text(const Shape& shape);
std::string shape_text(mlx_array array);
std::string number_text(double number);
std::string number_text(float number);

const char* dtype_name(mlx_dtype dtype);
const char* dtype_name(mlx_array array);

// "float32 (2, 3)".
std::string found_text(mlx_array array);

bool is_float(mlx_array array);
bool has_empty_axis(mlx_array array);

void check_present(const char* op, const Named& named);
// Whether the stream's device is a GPU; an empty handle is an error.
bool runs_on_gpu(const char* op, mlx_stream stream);
void check_one_of(const char* op, const char* name, int value, std::initializer_list<int> known);
// Finite in float32, which every back end holds it in.
void check_number(const char* op, const char* name, double value);
void check_decay(const char* op, double decay);
// int32 [] or [B]: one number for all sequences, or one each.
void check_per_sequence(const char* op, const char* name, mlx_array array, int batch);
// The protected zones; recent_start may be empty.
void check_zones(const char* op, int sink_size, mlx_array recent_start, int batch);

}  // namespace mlx_h2o_c
