// The back ends behind the operations, and the choice between them.
#pragma once

#include <string>

#include "request.h"

namespace mlx_h2o_c {

// Functions that are NULL are those that a back end does not bring: the composed one serves them.
struct Backend {
  const char* name;
  // Why it cannot run here; empty if it can.
  std::string (*unavailable_reason)();
  // Why it cannot serve this call; empty if it can.
  std::string (*refuses)(const AttentionRequest&) = nullptr;
  // With probes and skipped rows where the request asks for them.
  AttentionResult (*attention)(const AttentionRequest&) = nullptr;
  Array (*keep_indices)(const RetentionRequest&) = nullptr;
  Array (*evict_indices)(const RetentionRequest&) = nullptr;
  Array (*accumulate_scores)(const AccumulateRequest&) = nullptr;
  // Whether the next function takes the request; else it is composed of others.
  bool (*fuses)(const AttentionAccumulateRequest&) = nullptr;
  AttentionAccumulated (*attention_and_accumulate)(const AttentionAccumulateRequest&) = nullptr;
  Array (*key_diversity)(const KeyDiversityRequest&) = nullptr;
  Replaced (*replace_worst)(const ReplaceRequest&) = nullptr;
  Appended (*quantize_append)(const AppendRequest&) = nullptr;
  Array (*prefill_scores)(const PrefillRequest&) = nullptr;
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

// Of the native back end; both throw where this build has none.
int threads();
void set_threads(int count);

// Throws where a back end was named and cannot serve the request.
const Backend& backend_for_attention(const AttentionRequest& request);

// The back ends that may serve an operation other than attention, the preferred first: the one that
// was named, or all that are available for the device; then composed.
std::vector<const Backend*> candidates(const char* op, bool on_gpu);

// The best of those functions that there are. `operation` is a member of Backend.
template <class Function>
Function best(const char* op, bool on_gpu, Function Backend::* operation) {
  for (const Backend* backend : candidates(op, on_gpu)) {
    if (backend->*operation != nullptr) {
      return backend->*operation;
    }
  }
  return nullptr;
}

}  // namespace mlx_h2o_c
