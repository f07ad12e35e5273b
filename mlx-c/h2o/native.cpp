// The CPU kernels of core/. The one file that looks into a handle, so it is built only where the
// mlx-c of this repository is (MLX_H2O_NATIVE).
#include "backend.h"
#include "checks.h"

#ifdef MLX_H2O_NATIVE
#include <mlx_h2o/ops.h>
#include <mlx_h2o/simd.h>
#include <mlx_h2o/threads.h>
#include <stdexcept>

#include <mlx/mlx.h>

#include "composed.h"
#endif

namespace mlx_h2o_c {

namespace {

#ifdef MLX_H2O_NATIVE

namespace mx = mlx::core;

const mx::array& get(mlx_array handle) { return *static_cast<const mx::array*>(handle.ctx); }

mx::Stream get(mlx_stream handle) { return *static_cast<const mx::Stream*>(handle.ctx); }

std::optional<mx::array> optional(mlx_array handle) {
  return handle.ctx == nullptr ? std::nullopt : std::make_optional(get(handle));
}

Array wrap(mx::array array) { return Array(mlx_array{new mx::array(std::move(array))}); }

std::vector<mx::array> arrays(const Rows& rows) {
  std::vector<mx::array> parts;
  for (const Array& part : rows.parts) {
    parts.push_back(get(part));
  }
  return parts;
}

std::vector<Array> wrap(const std::vector<mx::array>& arrays, size_t first, size_t count) {
  std::vector<Array> parts;
  for (size_t i = first; i < first + count; ++i) {
    parts.push_back(wrap(arrays.at(i)));
  }
  return parts;
}

std::string unavailable_reason() {
  try {
    mlx_h2o::simd_target();
    mlx_h2o::threads();
    return "";
  } catch (const std::invalid_argument& error) {  // MLX_H2O_SIMD, MLX_H2O_THREADS
    return error.what();
  }
}

std::string refuses(const AttentionRequest& request) {
  return request.on_gpu ? "it runs on CPU streams, found a GPU stream" : "";
}

mlx_h2o::AttentionOptions options_of(const AttentionRequest& r) {
  mlx_h2o::AttentionOptions options;
  options.scale = r.scale;
  options.causal = r.causal;
  options.mask = optional(r.mask);
  options.sinks = optional(r.sinks);
  options.probes = optional(r.probes);
  options.sparse_threshold = r.sparse_v_threshold;
  if (r.keys.packed()) {
    options.bits = r.keys.bits;
    options.value_bits = r.values.bits;
    options.group_size = r.keys.group_size;
  }
  return options;
}

AttentionResult attention(const AttentionRequest& r) {
  mlx_h2o::AttentionOptions options = options_of(r);
  options.return_scores = true;
  options.return_lse = r.return_lse;
  options.return_skipped = r.return_skipped;
  const std::vector<mx::array> outputs =
      mlx_h2o::attention(get(r.queries), arrays(r.keys), arrays(r.values), options, get(r.stream));
  AttentionResult result;
  size_t next = 0;
  const std::pair<Array*, bool> places[] = {{&result.out, true},
                                            {&result.scores, true},
                                            {&result.lse, r.return_lse},
                                            {&result.skipped, r.return_skipped},
                                            {&result.probe_scores, r.probes.ctx != nullptr}};
  for (const auto& [place, wanted] : places) {
    if (wanted) {
      *place = wrap(outputs.at(next++));
    }
  }
  return result;
}

bool fuses(const AttentionAccumulateRequest& /* request */) { return true; }

AttentionAccumulated attention_and_accumulate(const AttentionAccumulateRequest& request) {
  const AttentionRequest& r = request.attention;
  mlx_h2o::AttentionOptions options = options_of(r);
  options.importance = get(request.importance);
  options.decay = request.decay;
  const std::vector<mx::array> outputs =
      mlx_h2o::attention(get(r.queries), arrays(r.keys), arrays(r.values), options, get(r.stream));
  AttentionAccumulated result;
  result.out = wrap(outputs.at(0));
  result.importance = wrap(outputs.at(1));
  return result;
}

Array keep_indices(const RetentionRequest& request) {
  return wrap(mlx_h2o::keep_indices(get(request.scores), get(request.positions),
                                    request.rows - request.count, request.sink_size,
                                    optional(request.recent_start), get(request.stream)));
}

Array evict_indices(const RetentionRequest& request) {
  return wrap(mlx_h2o::evict_indices(get(request.scores), get(request.positions), request.count,
                                     request.sink_size, optional(request.recent_start),
                                     get(request.stream)));
}

Array accumulate_scores(const AccumulateRequest& request) {
  return wrap(mlx_h2o::accumulate_scores(get(request.importance), get(request.scores),
                                         request.decay, get(request.stream)));
}

Array key_diversity(const KeyDiversityRequest& request) {
  return wrap(mlx_h2o::key_diversity(get(request.keys), get(request.stream)));
}

mlx_h2o::RankedBy ranked_by(RankedBy by) {
  switch (by) {
    case RankedBy::array:
      return mlx_h2o::RankedBy::array;
    case RankedBy::age:
      return mlx_h2o::RankedBy::age;
    case RankedBy::key_diversity:
      return mlx_h2o::RankedBy::key_diversity;
    default:
      return mlx_h2o::RankedBy::importance;
  }
}

Replaced replace_worst(const ReplaceRequest& r) {
  mlx_h2o::ReplacementOptions options;
  options.sink_size = r.sink_size;
  options.recent_start = optional(r.recent_start);
  options.ranked_by = ranked_by(r.ranked_by);
  Array ranks;
  if (r.ranked_by == RankedBy::array ||
      (r.ranked_by == RankedBy::key_diversity && r.keys.packed())) {
    ranks = composed::ranks(r);
    options.ranked_by = mlx_h2o::RankedBy::array;
    options.ranks = get(ranks);
  }
  if (r.keys.packed()) {
    options.bits = r.keys.bits;
    options.value_bits = r.values.bits;
    options.group_size = r.keys.group_size;
  }
  const std::vector<mx::array> outputs = mlx_h2o::replace_worst(
      arrays(r.keys), arrays(r.values), get(r.importance), get(r.positions), get(r.new_keys),
      get(r.new_values), get(r.position), options, get(r.stream));
  const size_t parts = r.keys.parts.size();
  return {wrap(outputs, 0, parts), wrap(outputs, parts, parts), wrap(outputs.at(2 * parts)),
          wrap(outputs.at(2 * parts + 1))};
}

Array prefill_scores(const PrefillRequest& request) {
  const AttentionRequest& r = request.attention;
  const std::optional<double> decay =
      request.mass ? std::nullopt : std::make_optional(request.decay);
  return wrap(mlx_h2o::prefill_scores(get(r.queries), get(r.keys.parts[0]), r.scale, r.causal,
                                      optional(r.mask), optional(r.sinks), decay,
                                      optional(request.importance), get(r.stream)));
}

Appended quantize_append(const AppendRequest& r) {
  const std::vector<mx::array> outputs = mlx_h2o::quantize_append(
      arrays(r.keys), arrays(r.values), get(r.new_keys), get(r.new_values), get(r.slots),
      r.keys.bits, r.keys.group_size, r.values.bits, get(r.stream));
  return {wrap(outputs, 0, 3), wrap(outputs, 3, 3)};
}

#else

std::string unavailable_reason() { return "this build has no native kernels"; }

constexpr std::nullptr_t refuses = nullptr;
constexpr std::nullptr_t attention = nullptr;
constexpr std::nullptr_t keep_indices = nullptr;
constexpr std::nullptr_t evict_indices = nullptr;
constexpr std::nullptr_t accumulate_scores = nullptr;
constexpr std::nullptr_t fuses = nullptr;
constexpr std::nullptr_t attention_and_accumulate = nullptr;
constexpr std::nullptr_t key_diversity = nullptr;
constexpr std::nullptr_t replace_worst = nullptr;
constexpr std::nullptr_t quantize_append = nullptr;
constexpr std::nullptr_t prefill_scores = nullptr;

#endif

}  // namespace

#ifdef MLX_H2O_NATIVE
int threads() { return mlx_h2o::threads(); }
void set_threads(int count) { mlx_h2o::set_threads(count); }
#else
int threads() { fail("threads", unavailable_reason(), "."); }
void set_threads(int /* count */) { fail("set_threads", unavailable_reason(), "."); }
#endif

const Backend native_backend = {
    "native",
    unavailable_reason,
    refuses,
    attention,
    keep_indices,
    evict_indices,
    accumulate_scores,
    fuses,
    attention_and_accumulate,
    key_diversity,
    replace_worst,
    quantize_append,
    prefill_scores,
};

}  // namespace mlx_h2o_c
