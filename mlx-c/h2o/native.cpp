// The CPU kernels of core/. This is the only file that looks inside a handle, so it is built only
// with this repository's mlx-c (MLX_H2O_NATIVE).
#include "backend.h"
#include "checks.h"

#ifdef MLX_H2O_NATIVE
#include <mlx_h2o/ops.h>
#include <mlx_h2o/simd.h>
#include <mlx_h2o/threads.h>

#include <mlx/mlx.h>

#include "codes.h"
#include "composed.h"
#endif

namespace mlx_h2o_c::native {

#ifdef MLX_H2O_NATIVE

namespace {

namespace mx = mlx::core;

const mx::array& get(mlx_array handle) { return *static_cast<const mx::array*>(handle.ctx); }

mx::Stream get(mlx_stream handle) { return *static_cast<const mx::Stream*>(handle.ctx); }

std::optional<mx::array> optional(mlx_array handle) {
  return handle.ctx == nullptr ? std::nullopt : std::make_optional(get(handle));
}

std::vector<mx::array> arrays(const Rows& rows) {
  std::vector<mx::array> parts;
  for (const Array& part : rows.parts) parts.push_back(get(part));
  return parts;
}

Array wrap(mx::array array) { return Array(mlx_array{new mx::array(std::move(array))}); }

// Wraps the next `count` outputs.
std::vector<Array> wrap(std::vector<mx::array>::const_iterator& next, size_t count) {
  std::vector<Array> parts;
  for (size_t i = 0; i < count; ++i) parts.push_back(wrap(*next++));
  return parts;
}

std::vector<Array> wrap(const std::vector<mx::array>& outputs) {
  auto next = outputs.begin();
  return wrap(next, outputs.size());
}

std::string unavailable_reason() {
  try {
    mlx_h2o::simd_target();
    mlx_h2o::threads();
    return "";
  } catch (const std::invalid_argument& error) {  // from MLX_H2O_SIMD or MLX_H2O_THREADS
    return error.what();
  }
}

std::string refuses(const AttentionRequest& request) {
  return request.on_gpu ? "it runs on CPU streams, found a GPU stream" : "";
}

// Sets the packing in any options struct of core/.
template <class Options>
void set_packing(Options& options, const Rows& keys, const Rows& values) {
  if (keys.packed()) options.bits = keys.bits;
  if (values.packed()) options.v_bits = values.bits;
  for (const Rows* rows : {&keys, &values}) {
    if (rows->group_size != 0) options.group_size = rows->group_size;
  }
}

std::vector<Array> attend(const AttentionRequest& r, mlx_h2o::AttentionOptions options) {
  options.mask = optional(r.mask);
  options.sinks = optional(r.sinks);
  options.row_bias = optional(r.row_bias);
  set_packing(options, r.keys, r.values);
  return wrap(
      mlx_h2o::attention(get(r.queries), arrays(r.keys), arrays(r.values), options, get(r.stream)));
}

AttentionResult attention(const AttentionRequest& r) {
  mlx_h2o::AttentionOptions options;
  static_cast<AttentionNumbers&>(options) = r;
  std::vector<Array> made = attend(r, std::move(options));
  size_t next = 0;
  const auto take = [&](bool asked) { return asked ? std::move(made.at(next++)) : Array(); };
  return {take(true), take(r.return_scores), take(r.return_lse), take(r.return_skipped)};
}

AttentionAccumulated attention_and_accumulate(const AccumulatingRequest& r) {
  mlx_h2o::AttentionOptions options;
  static_cast<AttentionNumbers&>(options) = r;
  options.return_scores = options.return_lse = false;
  options.importance = get(r.importance);
  options.decay = r.mass ? std::nullopt : std::make_optional(r.decay);
  std::vector<Array> made = attend(r, std::move(options));
  return {std::move(made.at(0)), std::move(made.at(1))};
}

Array prefill_scores(const AccumulatingRequest& r) {
  const std::optional<double> decay = r.mass ? std::nullopt : std::make_optional(r.decay);
  return wrap(mlx_h2o::prefill_scores(get(r.queries), get(r.keys.parts[0]), r.scale, r.causal,
                                      optional(r.mask), optional(r.sinks), decay,
                                      optional(r.importance), optional(r.row_bias), get(r.stream)));
}

Array accumulate_scores(const AccumulateRequest& r) {
  return wrap(mlx_h2o::accumulate_scores(get(r.importance), get(r.scores), r.decay, get(r.stream)));
}

Array keep_indices(const RetentionRequest& r) {
  return wrap(mlx_h2o::keep_indices(get(r.scores), get(r.positions), r.rows - r.count, r.sink_size,
                                    optional(r.recent_start), get(r.stream)));
}

Array key_diversity(const KeyDiversityRequest& r) {
  return wrap(mlx_h2o::key_diversity(get(r.keys), get(r.stream)));
}

Folded fold(const FoldRequest& r) {
  std::vector<Array> made =
      wrap(mlx_h2o::fold(get(r.keys), get(r.values), get(r.bias), get(r.mass), get(r.weights),
                         get(r.eligible), get(r.kept), r.share, get(r.stream)));
  return {std::move(made[0]), std::move(made[1]), std::move(made[2]), std::move(made[3]),
          std::move(made[4])};
}

Written quantize_append(const AppendRequest& r) {
  mlx_h2o::AttentionOptions packing;
  set_packing(packing, r.keys, r.values);
  const std::vector<mx::array> outputs = mlx_h2o::quantize_append(
      arrays(r.keys), arrays(r.values), get(r.new_keys), get(r.new_values), get(r.slots),
      packing.bits, packing.group_size, packing.v_bits, get(r.stream));
  auto next = outputs.begin();
  return {wrap(next, r.keys.parts.size()), wrap(next, r.values.parts.size())};
}

std::vector<Array> encode_rows(const EncodeRequest& r) {
  return wrap(
      mlx_h2o::encode_rows(get(r.rows), r.bits, static_cast<int>(seed_of(r.side)), get(r.stream)));
}

Array decode_rows(const DecodeRequest& r) {
  return wrap(mlx_h2o::decode_rows(get(r.rows.parts[0]), get(r.rows.parts[1]), r.rows.bits,
                                   static_cast<int>(seed_of(r.side)), mx::float32, get(r.stream)));
}

}  // namespace

const Backend backend = {
    "native", unavailable_reason, refuses,           attention,    attention_and_accumulate,
    nullptr,  prefill_scores,     accumulate_scores, keep_indices, key_diversity,
    fold,     quantize_append,    encode_rows,       decode_rows};

int threads() { return mlx_h2o::threads(); }
void set_threads(int count) { mlx_h2o::set_threads(count); }

#else

static std::string unavailable_reason() { return "this build has no native kernels"; }

const Backend backend = {"native", unavailable_reason};

int threads() { fail("threads", unavailable_reason(), "."); }
void set_threads(int /* count */) { fail("set_threads", unavailable_reason(), "."); }

#endif

}  // namespace mlx_h2o_c::native
