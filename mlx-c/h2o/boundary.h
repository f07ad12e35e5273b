// The boundary that no exception crosses, and the places of results.
#pragma once

#include "checks.h"

namespace mlx_h2o_c {

// A call begins: no message has come from mlx-c on this thread yet.
void expect_no_error() noexcept;
// To the error handler of mlx-c, and to this thread's last error.
void report(const char* text) noexcept;
// mlx-c has told the handler; this thread's last error must not stay that of an earlier call.
void note_reported() noexcept;

// 0, or 1 after one report to mlx-c's error handler.
template <class Body>
int status(Body&& body) noexcept {
  expect_no_error();
  try {
    body();
    return 0;
  } catch (const Reported&) {
    note_reported();
  } catch (const std::exception& error) {
    report(error.what());
  } catch (...) {
    report("unknown exception");
  }
  return 1;
}

inline void check_place(const char* op, const char* name, const void* place) {
  expect(place != nullptr, op, name, " is NULL, expected a place for the result.");
}

// Nothing where the place is NULL.
inline void give(mlx_array* place, const Array& array) {
  if (place != nullptr) check(mlx_array_set(place, array));
}

inline void give(mlx_vector_array* place, const std::vector<Array>& arrays) {
  check(mlx_vector_array_set(place, vector_of(arrays)));
}

}  // namespace mlx_h2o_c
