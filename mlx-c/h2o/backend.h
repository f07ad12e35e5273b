// The back ends of the operations, and the choice between them.
#pragma once

#include <string>

#include "request.h"

namespace mlx_h2o_c {

// A NULL function means that the back end lacks the operation: the composed back end serves it.
struct Backend {
  const char* name;
  // Why it cannot run here; empty if it can.
  std::string (*unavailable_reason)();
  // Why it cannot serve this call; empty if it can.
  std::string (*refuses)(const AttentionRequest&) = nullptr;
  // With skipped rows if the request asks for them.
  AttentionResult (*attention)(const AttentionRequest&) = nullptr;
  AttentionAccumulated (*attention_and_accumulate)(const AccumulatingRequest&) = nullptr;
  Array (*add_mass)(const AccumulatingRequest&, mlx_array scores, mlx_array lse) = nullptr;
  Array (*prefill_scores)(const AccumulatingRequest&) = nullptr;
  Array (*accumulate_scores)(const AccumulateRequest&) = nullptr;
  Array (*keep_indices)(const RetentionRequest&) = nullptr;
  Array (*key_diversity)(const KeyDiversityRequest&) = nullptr;
  Folded (*fold)(const FoldRequest&) = nullptr;
  Written (*quantize_append)(const AppendRequest&) = nullptr;
  std::vector<Array> (*encode_rows)(const EncodeRequest&) = nullptr;
  Array (*decode_rows)(const DecodeRequest&) = nullptr;
};

namespace metal {
extern const Backend backend;
}
namespace composed {
extern const Backend backend;
}
namespace native {
extern const Backend backend;
// Both throw if this build has no native back end.
int threads();
void set_threads(int count);
}  // namespace native

// Throws if a back end was named and cannot serve the request.
const Backend& backend_for_attention(const AttentionRequest& request);

// The back ends that may serve another operation on the stream, in order of preference: the named
// one, or all available ones; then composed.
std::vector<const Backend*> candidates(const char* op, mlx_stream stream);

// The result of the first of these back ends that has the operation.
template <class Result, class Request>
Result serve(const char* op, Result (*Backend::*operation)(const Request&),
             const Request& request) {
  for (const Backend* backend : candidates(op, request.stream)) {
    if (backend->*operation != nullptr) return (backend->*operation)(request);
  }
  return (composed::backend.*operation)(request);
}

// Uses one kernel if the back end of the attention has it, else attention followed by the average
// or the mass.
AttentionAccumulated attend_and_accumulate(const AccumulatingRequest& request);

}  // namespace mlx_h2o_c
