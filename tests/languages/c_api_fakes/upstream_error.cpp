// The error report of mlx-c itself, which appends the source position.
#include <cstdarg>
#include <cstdio>
#include <string>

#include "mlx/c/mlx.h"

namespace {

mlx_error_handler_func handler_function = nullptr;

}  // namespace

extern "C" {

void mlx_set_error_handler(mlx_error_handler_func handler, void* /* data */,
                           void (* /* dtor */)(void*)) {
  handler_function = handler;
}

void _mlx_error(const char* file, const int line, const char* fmt, ...) {
  char text[4096];
  va_list arguments;
  va_start(arguments, fmt);
  const int length = std::vsnprintf(text, sizeof text, fmt, arguments);
  va_end(arguments);
  std::snprintf(text + length, sizeof text - static_cast<size_t>(length), " at %s:%d", file, line);
  handler_function(text, nullptr);
}

}  // extern "C"
