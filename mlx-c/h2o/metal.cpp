// The Metal kernels of attention. Compiled everywhere, run if MLX has a Metal device.
#include "metal.h"

#include "backend.h"
#include "codes.h"

namespace mlx_h2o_c::metal {

namespace {

constexpr int widest_head = 576;

// From this many keys on, they are split into blocks.
constexpr int two_pass_keys = 1024;
constexpr int keys_of_a_simdgroup = 16;
constexpr int most_blocks = lanes;  // each lane of the second pass takes a block

std::string unavailable_reason() {
  bool available = false;
  check(mlx_metal_is_available(&available));
  return available ? "" : "MLX has no Metal device on this machine";
}

std::string refuses(const AttentionRequest& r) {
  if (!r.on_gpu) return "Metal kernels run on GPU streams, found a CPU stream";
  if (mlx_serves(r)) return "";
  if (r.length > longest_query) {
    return "decode kernels take up to " + std::to_string(longest_query) +
           " queries, found Lq = " + std::to_string(r.length);
  }
  for (const auto& [name, size] : {std::pair("D", r.head_size), std::pair("Dv", r.value_size)}) {
    if (size % lanes != 0 || size > widest_head) {
      return "the kernels take head sizes that are multiples of " + std::to_string(lanes) +
             " up to " + std::to_string(widest_head) + ", found " + name + " = " +
             std::to_string(size);
    }
  }
  return "";
}

// Simdgroups per threadgroup: wider rows need more registers per thread. MLX reports only at
// evaluation whether a pipeline can run this many. A failed attempt in C would reach the error
// handler, so unlike Python, C does not search for a smaller number.
int preferred_simdgroups(const AttentionRequest& request) {
  const int width = request.head_size + request.value_size;
  return width <= 256 ? 32 : width <= 512 ? 16 : 8;
}

// Blocks of keys, each with its own threadgroup; 1 means one pass. The largest power of two that
// leaves every simdgroup enough keys.
int preferred_blocks(int key_count, int simdgroups) {
  if (key_count < two_pass_keys) return 1;
  const int most = key_count / (keys_of_a_simdgroup * simdgroups);
  int blocks = 2;
  while (blocks < most_blocks && 2 * blocks <= most) blocks *= 2;
  return blocks;
}

// The flags that a request turns on.
Flags flags_of(const AttentionRequest& r) {
  Flags flags;
  const std::pair<const char*, bool> known[] = {
      {"bool_mask", !r.mask.empty() && dtype_of(r.mask) == MLX_BOOL},
      {"additive_mask", !r.mask.empty() && dtype_of(r.mask) != MLX_BOOL},
      {"sinks", r.sinks.ctx != nullptr},
      {"scores", r.return_scores},
      {"lse", r.return_lse},
      {"skipped", r.sparse_v_threshold > 0 && r.return_skipped},
      {"row_bias", !r.row_bias.empty()},
      {"dense_keys", r.packed() && !r.keys.packed()},
      {"key_codes", r.keys.codes()},
      {"value_codes", r.values.codes()}};
  for (const auto& [flag, on] : known) {
    if (on) flags.insert(flag);
  }
  r.each([&](const char* name, float value) {
    if (value != 0) flags.insert(name);
  });
  return flags;
}

Names names_of(const AttentionRequest& r, mlx_array params, int simdgroups, int blocks) {
  Names names;
  names.buffers = {{"queries", r.queries},
                   {"mask", r.mask},
                   {"sinks", r.sinks},
                   {"row_bias", r.row_bias},
                   {"params", params}};
  const mlx_dtype dtype = r.has_codes() ? MLX_FLOAT32 : dtype_of(r.queries);
  names.arguments = {{"T", dtype},
                     {"D", r.head_size},
                     {"V", r.value_size},
                     {"NS", simdgroups},
                     {"CAUSAL", r.causal}};
  names.arguments["S"] = MLX_FLOAT32;
  for (const auto& [name, rows] : {std::pair("key", &r.keys), std::pair("value", &r.values)}) {
    const std::string side = name;
    const char* const parts[] = {"_words", "_scales", "_biases"};
    if (!rows->packed()) names.buffers[side + "s"] = rows->parts[0];
    for (size_t i = 0; rows->packed() && i < rows->parts.size(); ++i) {
      names.buffers[side + parts[i]] = rows->parts[i];
    }
    names.arguments[side == "key" ? "KB" : "VB"] = rows->bits;
    if (rows->parts.size() < 3) continue;
    names.arguments["S"] = dtype_of(rows->parts[1]);
    names.arguments["G"] = rows->group_size;
  }
  const int b = r.batch, h = r.heads, q = r.length;
  names.outputs = {{"out", {{b, h, q, r.value_size}, dtype}},
                   {"scores", {{b, h, q, r.rows}, MLX_FLOAT32}},
                   {"lse", {{b, h, q}, MLX_FLOAT32}},
                   {"skipped", {{b, h, q}, MLX_FLOAT32}},
                   {"partial_skipped", {{b, h, q, blocks}, MLX_FLOAT32}},
                   {"partial_sums", {{b, h, q, blocks, r.value_size}, MLX_FLOAT32}},
                   {"partial_maxima", {{b, h, q, blocks}, MLX_FLOAT32}},
                   {"partial_totals", {{b, h, q, blocks}, MLX_FLOAT32}}};
  return names;
}

bool is_sparse(const AttentionRequest& r) { return r.sparse_v_threshold > 0; }

// The kernels that read keys and values, in order. Sparse V with several blocks takes two launches
// for the first pass, because weights are final only between them.
std::vector<const mlx_h2o_kernel_text*> decode_kernels(const AttentionRequest& r, bool one_pass) {
  if (is_sparse(r) && !one_pass) {
    return {&mlx_h2o_sdpa_vector_sparse_keys_quantized_text,
            &mlx_h2o_sdpa_vector_sparse_values_quantized_text};
  }
  if (is_sparse(r)) return {&mlx_h2o_sdpa_vector_sparse_quantized_text};
  if (r.packed()) {
    return {one_pass ? &mlx_h2o_sdpa_vector_quantized_text
                     : &mlx_h2o_sdpa_vector_2pass_1_quantized_text};
  }
  return {one_pass ? &mlx_h2o_sdpa_vector_text : &mlx_h2o_sdpa_vector_2pass_1_text};
}

// One threadgroup serves one query row, or one block of its keys.
AttentionResult attention(const AttentionRequest& r) {
  if (mlx_serves(r)) return mlx_attention(r);
  const Flags flags = flags_of(r);
  std::vector<double> scalars = {r.scale, r.mask_threshold};
  r.each([&](const char*, float value) { scalars.push_back(value); });
  while (scalars.back() == 0 && scalars.size() > 2) scalars.pop_back();
  const Array params = floats(scalars);
  const int simdgroups = preferred_simdgroups(r);
  const int blocks = preferred_blocks(r.rows, simdgroups);
  Names names = names_of(r, params, simdgroups, blocks);
  // Replace queries by queries in the basis of the keys, and add the levels of codes.
  std::vector<Array> made_here;
  const auto put = [&](const char* name, Array array) {
    names.buffers[name] = array;
    made_here.push_back(std::move(array));
  };
  if (r.has_codes()) {
    Value wide = Value(mlx_array(r.queries), r.stream).as(MLX_FLOAT32);
    put("queries", r.keys.codes() ? rotated(wide, Side::keys) : std::move(wide));
  }
  if (r.keys.codes()) put("key_levels", levels_of(r.head_size, r.keys.bits));
  if (r.values.codes()) put("value_levels", levels_of(r.value_size, r.values.bits));
  const Size grid = {r.batch * r.heads * simdgroups * lanes, r.length, blocks};
  Outputs made;
  // The outputs of earlier launches are inputs of later ones.
  const auto run = [&](const mlx_h2o_kernel_text& text, Size size, Size threadgroup) {
    made.merge(launch(text, flags, names, size, threadgroup, r.stream));
    for (const auto& [name, array] : made) names.buffers[name] = array;
  };
  for (const mlx_h2o_kernel_text* text : decode_kernels(r, blocks == 1)) {
    run(*text, grid, {simdgroups * lanes, 1, 1});
  }
  if (blocks > 1) {
    run(mlx_h2o_sdpa_vector_2pass_2_text, {r.batch * r.heads * r.length * r.value_size, 1, 1},
        {lanes, 1, 1});
  }
  if (r.has_codes()) {
    Value out(std::move(made["out"]), r.stream);
    if (r.values.codes()) out = restored(out, Side::values);
    made["out"] = out.as(dtype_of(r.queries));
  }
  AttentionResult result{std::move(made["out"]), std::move(made["scores"]), std::move(made["lse"]),
                         std::move(made["skipped"])};
  if (r.return_skipped && result.skipped.empty()) {
    result.skipped = zeros({r.batch, r.heads, r.length}, r.stream);
  }
  return result;
}

}  // namespace

// The composition serves the rest: scores of a chunk, averages, key diversity, folding, decoding.
const Backend backend = {
    "metal", unavailable_reason, refuses, attention, nullptr,         add_mass,   nullptr,
    nullptr, keep_indices,       nullptr, nullptr,   quantize_append, encode_rows};

}  // namespace mlx_h2o_c::metal
