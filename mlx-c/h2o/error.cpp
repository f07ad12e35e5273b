// The last error of each thread.
#include "mlx_h2o/c/error.h"

#include <string>

#include "boundary.h"

namespace mlx_h2o_c {

namespace {

// Replaces the source file, whose name would reveal where this library was built.
constexpr auto source = "mlx_h2o";

struct LastError {
  std::string text;
  bool kept_by_handler = false;
};
thread_local LastError last;

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// mlx-c appends " at FILE:LINE".
std::string without_position(const std::string& text) {
  const size_t at = text.rfind(" at "), digits = text.find_last_not_of("0123456789");
  if (at == std::string::npos || digits + 1 == text.size() || text[digits] != ':') return text;
  const std::string position = text.substr(0, digits);
  for (const char* end : {source, ".cpp", ".c", ".h"}) {
    if (ends_with(position, end)) return text.substr(0, at);
  }
  return text;
}

void keep(const char* text, bool by_handler = false) noexcept {
  try {
    last.text = without_position(text);
  } catch (...) {
    last.text.clear();  // no memory for the message
  }
  last.kept_by_handler = by_handler;
}

void report(const char* text) {
  keep(text);
  _mlx_error(source, 0, "%s", text);
}

}  // namespace

void expect_no_error() noexcept { last.kept_by_handler = false; }

void report_exception() noexcept {
  try {
    throw;
  } catch (const Reported&) {  // replace the last error of an earlier call
    if (!last.kept_by_handler) keep("a function of mlx-c failed, and told its error handler why");
  } catch (const std::exception& error) {
    report(error.what());
  } catch (...) {
    report("unknown exception");
  }
}

}  // namespace mlx_h2o_c

const char* mlx_h2o_last_error(void) { return mlx_h2o_c::last.text.c_str(); }

void mlx_h2o_keep_error(const char* msg, void* /* data */) { mlx_h2o_c::keep(msg, true); }
