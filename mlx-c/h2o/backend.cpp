#include "backend.h"

#include <cstdlib>

#include "checks.h"

namespace mlx_h2o_c {

namespace {

// In the order of preference. Composed is the last of both devices.
const Backend* const all[] = {&metal_backend, &cuda_backend, &native_backend, &composed_backend};
const Backend* const for_gpu[] = {&metal_backend, &cuda_backend, &composed_backend};
const Backend* const for_cpu[] = {&native_backend, &composed_backend};

thread_local std::string chosen;

void check_available(const char* op, const Backend& backend) {
  const std::string reason = backend.unavailable_reason();
  if (!reason.empty()) {
    fail(op, "back end '", backend.name, "' is not available: ", reason);
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

std::vector<const Backend*> available(bool on_gpu) {
  std::vector<const Backend*> found;
  const auto add = [&](const auto& preferred) {
    for (const Backend* backend : preferred) {
      if (backend->unavailable_reason().empty()) {
        found.push_back(backend);
      }
    }
  };
  on_gpu ? add(for_gpu) : add(for_cpu);
  return found;
}

std::string no_cuda() { return "the C interface launches no CUDA kernels"; }

}  // namespace

const Backend cuda_backend = {"cuda", no_cuda};

const Backend& backend_named(const std::string& name, const char* what) {
  std::string names;
  for (const Backend* backend : all) {
    if (name == backend->name) {
      return *backend;
    }
    names += (names.empty() ? "" : ", ") + std::string(backend->name);
  }
  fail("use_backend", what, " '", name, "', expected one of ", names, ".");
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
    for (const Backend* each : available(request.on_gpu)) {
      if (each->refuses(request).empty()) {
        return *each;
      }
    }
    return composed_backend;
  }
  check_available(request.op, *backend);
  const std::string reason = backend->refuses(request);
  if (!reason.empty()) {
    fail(request.op, "back end '", backend->name, "' cannot serve this call: ", reason);
  }
  return *backend;
}

std::vector<const Backend*> candidates(const char* op, bool on_gpu) {
  const Backend* backend = named();
  if (backend == nullptr) {
    return available(on_gpu);
  }
  check_available(op, *backend);
  return {backend, &composed_backend};
}

}  // namespace mlx_h2o_c
