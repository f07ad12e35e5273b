// The back ends behind the operations, and the choice between them.
#pragma once

#include <string>

#include "request.h"

namespace mlx_h2o_c {

struct Backend {
  const char* name;
  // Why it cannot run here; empty if it can.
  std::string (*unavailable_reason)();
  // Why it cannot serve this call; empty if it can.
  std::string (*refuses)(const AttentionRequest&);
  AttentionResult (*attention)(const AttentionRequest&);
  // Without a selection of its own the composed one serves.
  Array (*keep_indices)(const RetentionRequest&) = nullptr;
  Array (*evict_indices)(const RetentionRequest&) = nullptr;
};

extern const Backend metal_backend;
extern const Backend cuda_backend;
extern const Backend native_backend;
extern const Backend composed_backend;

// The back end of this name, and why it is not available; throws std::invalid_argument where
// there is none. `what` introduces the name in the message.
const Backend& backend_named(const std::string& name, const char* what = "unknown back end");

// For the calls of this thread; empty: automatic.
void set_backend(const std::string& name);

const Backend& backend_for_attention(const AttentionRequest& request);
const Backend& backend_for_retention(const char* op, bool on_gpu);

}  // namespace mlx_h2o_c
