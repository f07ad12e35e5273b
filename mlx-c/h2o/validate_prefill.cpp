// Scores of a long chunk.
#include "arrays.h"
#include "checks.h"
#include "validate.h"

namespace mlx_h2o_c {

namespace {

// The last `count` queries; a bottom-right causal mask fits as it is.
void keep_last(PrefillRequest& request, int count) {
  AttentionRequest& r = request.attention;
  request.queries = slice(r.queries, 2, r.length - count, r.length, r.stream);
  r.queries = request.queries;
  if (!r.mask.empty()) {
    r.mask = slice(r.mask, 2, r.length - count, r.length, r.stream);
  }
  r.length = count;
}

}  // namespace

PrefillRequest prefill_request(mlx_array queries, mlx_array keys, const char* kind,
                               mlx_array importance, double decay, int counted,
                               const AttentionArguments& arguments) {
  const char* op = prefill_name;
  check_present(op, {"queries", queries, "[B, Hq, Lq, D]"});
  check_present(op, {"keys", keys, "[B, Hkv, N, D]"});
  if (is_float(queries) && is_float(keys) && mlx_array_dtype(queries) != mlx_array_dtype(keys)) {
    fail(op, "queries and keys are ", dtype_name(queries), " and ", dtype_name(keys),
         ", expected the same dtype.");
  }
  // The rules of attention hold, whose values are of no account here.
  PrefillRequest request{};
  request.attention =
      dense_attention_request(op, queries, dense_rows(keys), dense_rows(keys), arguments);
  const std::string name = kind == nullptr ? "" : kind;
  if (name != "ema" && name != "mass") {
    fail(op, "kind is '", name, "', expected 'ema' or 'mass'.");
  }
  request.mass = name == "mass";
  check_decay(op, decay);
  request.decay = decay;
  if (counted < 1) {
    fail(op, "queries is ", counted, ", expected at least 1.");
  }
  request.importance = importance;
  if (!request.mass && counted < request.attention.length) {
    keep_last(request, counted);
  }
  if (importance.ctx == nullptr) {
    return request;
  }
  if (request.mass) {
    fail(op, "importance is given with kind '", name, "', expected it with 'ema'.");
  }
  if (mlx_array_dtype(importance) != MLX_FLOAT32) {
    fail(op, "importance is ", dtype_name(importance), ", expected float32.");
  }
  Shape rows = shape_of(keys);
  rows.pop_back();
  if (shape_of(importance) != rows) {
    fail(op, "importance has shape ", shape_text(importance),
         ", expected [B, Hkv, N] = ", shape_text(rows), ".");
  }
  return request;
}

}  // namespace mlx_h2o_c
