// The Metal kernels, through mlx-c's own kernel functions. Compiled everywhere, run where MLX has
// a Metal device.
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <vector>

#include "backend.h"
#include "kernel_text.h"

namespace mlx_h2o_c {

namespace {

constexpr int lanes = 32;
constexpr int longest_query = 8;
constexpr int widest_head = 576;

using Flags = std::set<std::string>;
using Kernel = Owned<mlx_fast_metal_kernel, mlx_fast_metal_kernel_free>;
using Config = Owned<mlx_fast_metal_kernel_config, mlx_fast_metal_kernel_config_free>;

std::string unavailable_reason() {
  bool available = false;
  check(mlx_metal_is_available(&available));
  return available ? "" : "MLX has no Metal device on this machine";
}

std::string head_size_refused(const char* name, int size) {
  if (size % lanes == 0 && size <= widest_head) {
    return "";
  }
  return "the kernels take head sizes that are multiples of " + std::to_string(lanes) + " up to " +
         std::to_string(widest_head) + ", found " + name + " = " + std::to_string(size);
}

std::string refuses(const AttentionRequest& request) {
  if (!request.on_gpu) {
    return "Metal kernels run on GPU streams, found a CPU stream";
  }
  if (request.length > longest_query) {
    return "decode kernels take up to " + std::to_string(longest_query) +
           " queries, found Lq = " + std::to_string(request.length);
  }
  const std::string reason = head_size_refused("D", request.head_size);
  return reason.empty() ? head_size_refused("Dv", request.value_size) : reason;
}

// Whether every flag of a condition is on, and every one written with a "!" off.
bool holds(const char* condition, const Flags& flags) {
  std::istringstream terms(condition);
  for (std::string term; terms >> term;) {
    const bool negated = term[0] == '!';
    if ((flags.count(term.substr(negated)) != 0) == negated) {
      return false;
    }
  }
  return true;
}

std::string join(const mlx_h2o_kernel_segment* segments, size_t count, const Flags& flags) {
  std::string text;
  for (size_t i = 0; i < count; ++i) {
    text += holds(segments[i].condition, flags) ? segments[i].text : "";
  }
  return text;
}

std::vector<std::string> names(const mlx_h2o_kernel_buffer* buffers, size_t count,
                               const Flags& flags) {
  std::vector<std::string> chosen;
  for (size_t i = 0; i < count; ++i) {
    if (holds(buffers[i].condition, flags)) {
      chosen.emplace_back(buffers[i].name);
    }
  }
  return chosen;
}

StringVector strings(const std::vector<std::string>& values) {
  StringVector vector(mlx_vector_string_new());
  for (const std::string& value : values) {
    check(mlx_vector_string_append_value(vector, value.c_str()));
  }
  return vector;
}

// What mlx_fast_metal_kernel_new takes, resolved for a set of flags.
struct Resolved {
  std::vector<std::string> inputs;
  std::vector<std::string> outputs;
  mlx_fast_metal_kernel kernel;
};

const Resolved& resolve(const mlx_h2o_kernel_text& text, const Flags& flags) {
  // Kept for the life of the process, like the pipelines that MLX caches by name.
  static auto* const known = new std::map<std::string, Resolved>;
  static auto* const mutex = new std::mutex;

  std::string name = std::string("h2o_") + text.name;
  for (const char* flag : mlx_h2o_kernel_flags) {
    name += flags.count(flag) != 0 ? std::string("_") + flag : "";
  }
  const std::lock_guard<std::mutex> lock(*mutex);
  const auto found = known->find(name);
  if (found != known->end()) {
    return found->second;
  }
  Resolved resolved;
  resolved.inputs = names(text.inputs, text.input_count, flags);
  resolved.outputs = names(text.outputs, text.output_count, flags);
  const std::string source = join(text.segments, text.segment_count, flags);
  const size_t header_count = sizeof(mlx_h2o_kernel_header) / sizeof(mlx_h2o_kernel_header[0]);
  const std::string header = join(mlx_h2o_kernel_header, header_count, flags);
  // Row contiguity is not asked for: that would copy a sliced cache on every step.
  resolved.kernel =
      mlx_fast_metal_kernel_new(name.c_str(), strings(resolved.inputs), strings(resolved.outputs),
                                source.c_str(), header.c_str(), false, false);
  if (resolved.kernel.ctx == nullptr) {
    throw Reported();
  }
  return known->emplace(name, std::move(resolved)).first->second;
}

// Simdgroups per threadgroup: wider rows need more registers per thread. MLX says when it
// evaluates whether a pipeline can run with so many; a C program cannot try without a report to
// its error handler, so there is no search for a smaller number as in Python.
int simdgroups(const AttentionRequest& request) {
  const int width = request.head_size + request.value_size;
  return width <= 256 ? 32 : width <= 512 ? 16 : 8;
}

Config config_of(const AttentionRequest& r, const Resolved& resolved) {
  Config config(mlx_fast_metal_kernel_config_new());
  const int groups = simdgroups(r);
  check(
      mlx_fast_metal_kernel_config_add_template_arg_dtype(config, "T", mlx_array_dtype(r.queries)));
  check(mlx_fast_metal_kernel_config_add_template_arg_int(config, "D", r.head_size));
  check(mlx_fast_metal_kernel_config_add_template_arg_int(config, "V", r.value_size));
  check(mlx_fast_metal_kernel_config_add_template_arg_int(config, "NS", groups));
  check(mlx_fast_metal_kernel_config_add_template_arg_bool(config, "CAUSAL", r.causal));
  check(mlx_fast_metal_kernel_config_set_grid(config, r.batch * r.heads * groups * lanes, r.length,
                                              1));
  check(mlx_fast_metal_kernel_config_set_thread_group(config, groups * lanes, 1, 1));
  for (const std::string& name : resolved.outputs) {
    const int last = name == "out" ? r.value_size : r.rows;
    const int shape[] = {r.batch, r.heads, r.length, last};
    check(mlx_fast_metal_kernel_config_add_output_arg(
        config, shape, name == "lse" ? 3 : 4,
        name == "out" ? mlx_array_dtype(r.queries) : MLX_FLOAT32));
  }
  return config;
}

AttentionResult attention(const AttentionRequest& r) {
  Flags flags = {"scores"};
  const std::pair<const char*, bool> optional_flags[] = {{"bool_mask", r.has_bool_mask()},
                                                         {"additive_mask", r.has_additive_mask()},
                                                         {"sinks", r.sinks.ctx != nullptr},
                                                         {"lse", r.return_lse}};
  for (const auto& [flag, on] : optional_flags) {
    if (on) {
      flags.insert(flag);
    }
  }
  const Resolved& resolved = resolve(mlx_h2o_sdpa_vector_text, flags);

  const float scalars[] = {r.scale, r.mask_threshold};
  const int scalar_count = 2;
  const Array params(mlx_array_new_data(scalars, &scalar_count, 1, MLX_FLOAT32));
  const std::map<std::string, mlx_array> buffers = {{"queries", r.queries}, {"keys", r.keys},
                                                    {"values", r.values},   {"mask", r.mask},
                                                    {"sinks", r.sinks},     {"params", params}};
  const ArrayVector inputs(mlx_vector_array_new());
  for (const std::string& name : resolved.inputs) {
    check(mlx_vector_array_append_value(inputs, buffers.at(name)));
  }

  ArrayVector outputs(mlx_vector_array_new());
  check(mlx_fast_metal_kernel_apply(outputs.out(), resolved.kernel, inputs, config_of(r, resolved),
                                    r.stream));
  AttentionResult result;
  const std::map<std::string, Array*> places = {
      {"out", &result.out}, {"scores", &result.scores}, {"lse", &result.lse}};
  for (size_t i = 0; i < resolved.outputs.size(); ++i) {
    check(mlx_vector_array_get(places.at(resolved.outputs[i])->out(), outputs, i));
  }
  return result;
}

}  // namespace

const Backend metal_backend = {"metal", unavailable_reason, refuses, attention, nullptr, nullptr};

}  // namespace mlx_h2o_c
