// The boundary that no exception crosses, and the places of results.
#pragma once

#include "checks.h"

namespace mlx_h2o_c {

// A call begins: no message has come from mlx-c on this thread yet.
void expect_no_error() noexcept;
// The exception that is being handled, to the error handler of mlx-c (which knows what it reported
// itself) and to this thread's last error.
void report_exception() noexcept;

// Where a result goes, and the name of the parameter.
struct Place {
  const char* name;
  const void* address;
};
using Places = std::initializer_list<Place>;

// The body of a public function, once every result has its place: 0, or 1 after one report to
// mlx-c's error handler. `op` begins the messages.
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

// Nothing where the place is NULL.
inline void give(mlx_array* place, const Array& array) {
  if (place != nullptr) check(mlx_array_set(place, array));
}

inline void give(mlx_vector_array* place, const std::vector<Array>& arrays) {
  check(mlx_vector_array_set(place, vector_of(arrays)));
}

}  // namespace mlx_h2o_c
