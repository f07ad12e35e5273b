// The boundary of the C interface: exceptions become error codes, and results get their places.
#pragma once

#include "checks.h"

namespace mlx_h2o_c {

// A call begins: mlx-c has not reported anything on this thread yet.
void expect_no_error() noexcept;
// Passes the current exception to mlx-c's error handler (unless mlx-c reported it itself) and keeps
// it as this thread's last error.
void report_exception() noexcept;

// The address for a result, and the name of its parameter.
struct Place {
  const char* name;
  const void* address;
};
using Places = std::initializer_list<Place>;

// Runs the body of a public function, once every result has a place. Returns 0, or 1 after one
// report to mlx-c's error handler. Messages begin with `op`.
template <class Body>
int operation(const char* op, Places places, Body&& body) noexcept {
  expect_no_error();
  try {
    for (const auto& [name, address] : places) {
      expect(address != nullptr, op, name, " is NULL, expected a place for the result.");
    }
    body(op);
    return 0;
  } catch (...) {
    report_exception();
    return 1;
  }
}

// Does nothing if the place is NULL.
inline void give(mlx_array* place, const Array& array) {
  if (place != nullptr) check(mlx_array_set(place, array));
}

inline void give(mlx_vector_array* place, const std::vector<Array>& arrays) {
  check(mlx_vector_array_set(place, vector_of(arrays)));
}

}  // namespace mlx_h2o_c
