#include "operations.h"

#include "arrays.h"
#include "backend.h"

namespace mlx_h2o_c {

AttentionResult serve(const AttentionRequest& request) {
  return backend_for_attention(request).attention(request);
}

Array keep_indices(const RetentionRequest& request) {
  return best("keep_indices", request.on_gpu, &Backend::keep_indices)(request);
}

Array evict_indices(const RetentionRequest& request) {
  return best("evict_indices", request.on_gpu, &Backend::evict_indices)(request);
}

Array accumulate_scores(const AccumulateRequest& request) {
  return best("accumulate_scores", request.on_gpu, &Backend::accumulate_scores)(request);
}

AttentionAccumulated attention_and_accumulate(const AttentionAccumulateRequest& request) {
  const AttentionRequest& attention = request.attention;
  const Backend& backend = backend_for_attention(attention);
  if (backend.fuses != nullptr && backend.fuses(request)) {
    return backend.attention_and_accumulate(request);
  }
  const AttentionResult found = backend.attention(attention);
  const bool masked = !attention.mask.empty() || (attention.causal && attention.length > 1);
  AttentionAccumulated result;
  result.importance = accumulate_scores({request.importance, found.scores, request.decay, masked,
                                         attention.stream, attention.on_gpu});
  // Untied, the scores of every step would wait for someone to ask, graph and all.
  result.out = tied(found.out, {result.importance});
  return result;
}

Array key_diversity(const KeyDiversityRequest& request) {
  return best("key_diversity", request.on_gpu, &Backend::key_diversity)(request);
}

Replaced replace_worst(const ReplaceRequest& request) {
  return best("replace_worst", request.on_gpu, &Backend::replace_worst)(request);
}

Appended quantize_append(const AppendRequest& request) {
  return best("quantize_append", request.on_gpu, &Backend::quantize_append)(request);
}

Array prefill_scores(const PrefillRequest& request) {
  return best(request.attention.op, request.attention.on_gpu, &Backend::prefill_scores)(request);
}

}  // namespace mlx_h2o_c
