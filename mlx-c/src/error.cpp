#include "mlx/c/error.h"

#include <cstdarg>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>

namespace {

void print_and_return(const char* message, void* /* data */) {
  std::fprintf(stderr, "MLX error: %s\n", message);
}

struct Handler {
  mlx_error_handler_func function = print_and_return;
  void* data = nullptr;
  void (*dtor)(void*) = nullptr;

  Handler() = default;
  Handler(const Handler&) = delete;
  Handler& operator=(const Handler&) = delete;
  ~Handler() {
    if (dtor != nullptr) {
      dtor(data);
    }
  }
};

// Never destroyed: threads may still report errors while the process ends.
struct Registry {
  std::mutex mutex;
  std::shared_ptr<Handler> handler = std::make_shared<Handler>();
};

Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

std::string format(const char* fmt, va_list arguments) {
  va_list copy;
  va_copy(copy, arguments);
  const int length = std::vsnprintf(nullptr, 0, fmt, copy);
  va_end(copy);
  if (length < 0) {
    return "an error message that cannot be formatted";
  }
  std::string message(static_cast<size_t>(length), '\0');
  std::vsnprintf(message.data(), message.size() + 1, fmt, arguments);
  return message;
}

}  // namespace

extern "C" void mlx_set_error_handler(mlx_error_handler_func handler, void* data,
                                      void (*dtor)(void*)) {
  auto next = std::make_shared<Handler>();
  if (handler != nullptr) {
    next->function = handler;
  }
  next->data = data;
  next->dtor = dtor;
  Registry& shared = registry();
  // The old handler goes outside the lock, so its dtor may report errors itself.
  const std::lock_guard<std::mutex> lock(shared.mutex);
  shared.handler.swap(next);
}

extern "C" void _mlx_error(const char* /* file */, const int /* line */, const char* fmt, ...) {
  va_list arguments;
  va_start(arguments, fmt);
  const std::string message = format(fmt, arguments);
  va_end(arguments);
  std::shared_ptr<Handler> handler;
  {
    Registry& shared = registry();
    const std::lock_guard<std::mutex> lock(shared.mutex);
    handler = shared.handler;
  }
  handler->function(message.c_str(), handler->data);
}
