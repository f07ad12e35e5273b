// Scores of a long chunk as Metal launches.
#include <cmath>

#include "composed.h"
#include "metal.h"

namespace mlx_h2o_c::metal {

namespace {

constexpr int simdgroups = 8;    // of a threadgroup
constexpr int keys_held = 4;     // by a simdgroup in registers, for every query
constexpr int queries_held = 4;  // by a simdgroup in registers, for every key

int tiles(int64_t count, int of) { return static_cast<int>((count + of - 1) / of); }

// One threadgroup per KV head and tile.
Outputs launched(const mlx_h2o_kernel_text& text, const AttentionRequest& r, const Names& names,
                 int count) {
  const int threads = simdgroups * lanes;
  return launch(text, flags_of(r), names, {r.batch * r.kv_heads * threads, count, 1},
                {threads, 1, 1}, r.stream);
}

}  // namespace

// One launch for the average; for the mass the denominators of all queries first.
Array prefill_scores(const PrefillRequest& request) {
  const AttentionRequest& r = request.attention;
  const int size = r.head_size;
  if (size % lanes != 0 || size > widest_head) return composed::prefill_scores(request);
  // Of no row so far: one NaN in memory.
  const Array importance =
      request.importance.ctx != nullptr
          ? copied(request.importance)
          : broadcast(mlx_h2o_c::number(NAN), {r.batch, r.kv_heads, r.rows}, r.stream);
  const Array params = floats({r.scale, r.mask_threshold, static_cast<float>(request.decay),
                               static_cast<float>(1 - request.decay)});
  Names names;
  names.buffers = {{"queries", r.queries}, {"keys", r.keys.parts[0]}, {"params", params},
                   {"mask", r.mask},       {"sinks", r.sinks},        {"importance", importance}};
  names.arguments = {{"T", type(r.queries)},
                     {"D", number(size)},
                     {"NS", number(simdgroups)},
                     {"KEYS", number(keys_held)},
                     {"QUERIES", number(queries_held)},
                     {"CAUSAL", boolean(r.causal)}};
  names.outputs = {{"accumulated", {{r.batch, r.kv_heads, r.rows}, MLX_FLOAT32}},
                   {"lses", {{r.batch, r.heads, r.length}, MLX_FLOAT32}}};
  const int key_tiles = tiles(r.rows, simdgroups * keys_held);
  if (!request.mass) {
    return std::move(launched(mlx_h2o_prefill_average_text, r, names, key_tiles)["accumulated"]);
  }
  const int query_tiles = tiles(int64_t{r.heads / r.kv_heads} * r.length, queries_held);
  const Outputs made = launched(mlx_h2o_prefill_lse_text, r, names, query_tiles);
  names.buffers["lses"] = made.at("lses");
  return std::move(launched(mlx_h2o_prefill_mass_text, r, names, key_tiles)["accumulated"]);
}

}  // namespace mlx_h2o_c::metal
