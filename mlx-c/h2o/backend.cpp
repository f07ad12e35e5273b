#include "backend.h"

#include <cstdlib>

#include "boundary.h"
#include "mlx_h2o/c/backend.h"

namespace mlx_h2o_c {

namespace {

std::string no_cuda() { return "the C interface launches no CUDA kernels"; }
constexpr Backend cuda_backend = {"cuda", no_cuda};

// In order of preference. Composed is the last on both devices.
const Backend* const all[] = {&metal::backend, &cuda_backend, &native::backend, &composed::backend};

constexpr auto choice = "use_backend";
thread_local std::string chosen;

void check_available(const char* op, const Backend& backend) {
  const std::string reason = backend.unavailable_reason();
  if (!reason.empty()) fail(op, "back end '", backend.name, "' is not available: ", reason);
}

// Finds a back end by name; `what` introduces the name in the message.
const Backend& backend_named(const std::string& name, const char* what = "unknown back end") {
  std::string names;
  for (const Backend* backend : all) {
    if (name == backend->name) return *backend;
    names += (names.empty() ? "" : ", ") + std::string(backend->name);
  }
  fail(choice, what, " '", name, "', expected one of ", names, ".");
}

// The back end named by the program or by the environment; NULL if none.
const Backend* named() {
  if (!chosen.empty()) return &backend_named(chosen);
  const char* environment = std::getenv("MLX_H2O_BACKEND");
  if (environment == nullptr || environment[0] == '\0') return nullptr;
  return &backend_named(environment, "MLX_H2O_BACKEND names the back end");
}

}  // namespace

std::vector<const Backend*> candidates(const char* op, mlx_stream stream) {
  const Backend* other_device = runs_on_gpu(op, stream) ? &native::backend : &metal::backend;
  if (const Backend* backend = named()) {
    check_available(op, *backend);
    return {backend == other_device ? &composed::backend : backend, &composed::backend};
  }
  std::vector<const Backend*> found;
  for (const Backend* backend : all) {
    if (backend != other_device && backend->unavailable_reason().empty()) found.push_back(backend);
  }
  return found;
}

const Backend& backend_for_attention(const AttentionRequest& request) {
  if (const Backend* backend = named()) {
    check_available(request.op, *backend);
    const std::string reason = backend->refuses(request);
    if (!reason.empty()) {
      fail(request.op, "back end '", backend->name, "' cannot serve this call: ", reason);
    }
    return *backend;
  }
  for (const Backend* backend : candidates(request.op, request.stream)) {
    if (backend->refuses(request).empty()) return *backend;
  }
  return composed::backend;
}

AttentionAccumulated attend_and_accumulate(const AccumulatingRequest& request) {
  const Backend& backend = backend_for_attention(request);
  if (backend.attention_and_accumulate != nullptr) return backend.attention_and_accumulate(request);
  const AttentionResult found = backend.attention(request);
  if (request.mass) {
    const Backend& adds = backend.add_mass != nullptr ? backend : composed::backend;
    Array mass = adds.add_mass(request, found.scores, found.lse);
    return {tied(found.out, {mass}), std::move(mass)};
  }
  const bool masked =
      !request.mask.empty() || !request.row_bias.empty() || (request.causal && request.length > 1);
  Array importance = serve(
      "accumulate_scores", &Backend::accumulate_scores,
      AccumulateRequest{request.importance, found.scores, request.decay, masked, request.stream});
  // If untied, the scores of every step would stay unevaluated, and keep their graph alive.
  return {tied(found.out, {importance}), std::move(importance)};
}

}  // namespace mlx_h2o_c

using namespace mlx_h2o_c;

int mlx_h2o_set_backend(const char* name) {
  return operation(choice, {}, [&](const char* op) {
    const std::string wanted = name == nullptr ? "" : name;
    if (!wanted.empty()) check_available(op, backend_named(wanted));
    chosen = wanted;
  });
}

int mlx_h2o_backend_status(const char* name, bool* available, mlx_string* reason) {
  return operation(choice, {}, [&](auto) {
    const std::string why = backend_named(name == nullptr ? "" : name).unavailable_reason();
    if (reason != nullptr) check(mlx_string_set(reason, String(mlx_string_new_data(why.c_str()))));
    if (available != nullptr) *available = why.empty();
  });
}

int mlx_h2o_threads(int* res) {
  return operation("threads", {{"res", res}}, [&](auto) { *res = native::threads(); });
}

int mlx_h2o_set_threads(int count) {
  return operation("set_threads", {}, [&](auto) { native::set_threads(count); });
}
