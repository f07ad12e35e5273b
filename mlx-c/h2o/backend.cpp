#include "backend.h"

#include <cstdlib>
#include <stdexcept>

namespace mlx_h2o_c {

namespace {

// In the order of preference. Composed is the last of both devices.
const Backend* const all[] = {&metal_backend, &cuda_backend, &native_backend, &composed_backend};
const Backend* const for_gpu[] = {&metal_backend, &cuda_backend, &composed_backend};
const Backend* const for_cpu[] = {&native_backend, &composed_backend};

thread_local std::string chosen;

[[noreturn]] void fail(const std::string& op, const std::string& text) {
  throw std::invalid_argument("[" + op + "] " + text);
}

void check_available(const std::string& op, const Backend& backend) {
  const std::string reason = backend.unavailable_reason();
  if (!reason.empty()) {
    fail(op, "back end '" + std::string(backend.name) + "' is not available: " + reason);
  }
}

// The back end that was named, by the program or by the environment; NULL: none was.
const Backend* named() {
  if (!chosen.empty()) {
    return &backend_named(chosen);
  }
  const char* environment = std::getenv("MLX_H2O_BACKEND");
  if (environment == nullptr || environment[0] == '\0') {
    return nullptr;
  }
  return &backend_named(environment, "MLX_H2O_BACKEND names the back end");
}

template <class Serves>
const Backend& best(bool on_gpu, Serves serves) {
  const auto choose = [&](const auto& preferred) -> const Backend& {
    for (const Backend* backend : preferred) {
      if (backend->unavailable_reason().empty() && serves(*backend)) {
        return *backend;
      }
    }
    return composed_backend;
  };
  return on_gpu ? choose(for_gpu) : choose(for_cpu);
}

std::string no_cuda() { return "the C interface launches no CUDA kernels"; }

}  // namespace

const Backend cuda_backend = {"cuda", no_cuda, nullptr, nullptr, nullptr, nullptr};

const Backend& backend_named(const std::string& name, const char* what) {
  std::string names;
  for (const Backend* backend : all) {
    if (name == backend->name) {
      return *backend;
    }
    names += (names.empty() ? "" : ", ") + std::string(backend->name);
  }
  fail("use_backend", std::string(what) + " '" + name + "', expected one of " + names + ".");
}

void set_backend(const std::string& name) {
  if (!name.empty()) {
    check_available("use_backend", backend_named(name));
  }
  chosen = name;
}

const Backend& backend_for_attention(const AttentionRequest& request) {
  const Backend* backend = named();
  if (backend == nullptr) {
    return best(request.on_gpu, [&](const Backend& b) { return b.refuses(request).empty(); });
  }
  check_available(attention_name, *backend);
  const std::string reason = backend->refuses(request);
  if (!reason.empty()) {
    fail(attention_name,
         "back end '" + std::string(backend->name) + "' cannot serve this call: " + reason);
  }
  return *backend;
}

const Backend& backend_for_retention(const char* op, bool on_gpu) {
  const auto selects = [](const Backend& backend) { return backend.keep_indices != nullptr; };
  const Backend* backend = named();
  if (backend == nullptr) {
    return best(on_gpu, selects);
  }
  check_available(op, *backend);
  return selects(*backend) ? *backend : composed_backend;
}

}  // namespace mlx_h2o_c
