#include <mutex>
#include <numeric>
#include <sstream>

#include "metal.h"

namespace mlx_h2o_c::metal {

namespace {

using Config = Owned<mlx_fast_metal_kernel_config, mlx_fast_metal_kernel_config_free>;

// The terms of a condition: true if the term must be on, false (with a "!") if it must be off.
std::map<std::string, bool> terms_of(const char* condition) {
  std::map<std::string, bool> terms;
  std::istringstream words(condition);
  for (std::string word; words >> word;) terms[word.substr(word[0] == '!')] = word[0] != '!';
  return terms;
}

bool holds(const char* condition, const Flags& flags) {
  for (const auto& [flag, on] : terms_of(condition)) {
    if ((flags.count(flag) != 0) != on) return false;
  }
  return true;
}

// One field of every table entry whose condition holds.
template <class Thing>
std::vector<const char*> chosen(const char* Thing::* part, const Thing* things, size_t count,
                                const Flags& flags) {
  std::vector<const char*> parts;
  for (const Thing* thing = things; thing != things + count; ++thing) {
    if (holds(thing->condition, flags)) parts.push_back(thing->*part);
  }
  return parts;
}

std::string joined(const mlx_h2o_kernel_segment* segments, size_t count, const Flags& flags) {
  const auto parts = chosen(&mlx_h2o_kernel_segment::text, segments, count, flags);
  return std::accumulate(parts.begin(), parts.end(), std::string());
}

StringVector strings(const std::vector<const char*>& values) {
  StringVector vector(mlx_vector_string_new());
  for (const char* value : values) check(mlx_vector_string_append_value(vector, value));
  return vector;
}

// A name made of the flags that are on and make a difference to the kernel.
std::string name_of(const mlx_h2o_kernel_text& text, const Flags& flags) {
  std::string name = std::string("h2o_") + text.name;
  std::istringstream own(text.own_flags);
  for (std::string flag; own >> flag;) name += flags.count(flag) != 0 ? "_" + flag : "";
  return name;
}

// The arguments of mlx_fast_metal_kernel_new, resolved for a set of flags.
struct Resolved {
  std::vector<const char*> inputs;
  std::vector<const char*> outputs;
  std::vector<const char*> template_arguments;
  mlx_fast_metal_kernel kernel;
};

const Resolved& resolve(const mlx_h2o_kernel_text& text, const Flags& flags) {
  // Kept for the life of the process, like the pipelines that MLX caches by name.
  static auto* const known = new std::map<std::pair<const char*, Flags>, const Resolved*>;
  static auto* const made = new std::map<std::string, Resolved>;
  static auto* const mutex = new std::mutex;

  const std::lock_guard<std::mutex> lock(*mutex);
  const auto key = std::make_pair(text.name, flags);
  const auto found = known->find(key);
  if (found != known->end()) return *found->second;
  Flags on = flags;
  for (const auto& [term, wanted] : terms_of(text.always_on)) on.insert(term);
  const std::string name = name_of(text, flags);
  const auto same = made->find(name);  // the flags differ, but not for this kernel
  if (same != made->end()) return *known->emplace(key, &same->second).first->second;
  const auto name_part = &mlx_h2o_kernel_buffer::name;
  Resolved resolved = {chosen(name_part, text.inputs, text.input_count, on),
                       chosen(name_part, text.outputs, text.output_count, on),
                       chosen(name_part, text.template_arguments, text.template_count, on),
                       {}};
  const std::string source = joined(text.segments, text.segment_count, on);
  const std::string header = joined(mlx_h2o_kernel_header, std::size(mlx_h2o_kernel_header), on);
  // Do not ask for row contiguity: that would copy a sliced cache on every step.
  resolved.kernel =
      mlx_fast_metal_kernel_new(name.c_str(), strings(resolved.inputs), strings(resolved.outputs),
                                source.c_str(), header.c_str(), false, false);
  if (resolved.kernel.ctx == nullptr) throw Reported();
  const Resolved& kept = made->emplace(name, std::move(resolved)).first->second;
  return *known->emplace(key, &kept).first->second;
}

void add(mlx_fast_metal_kernel_config config, const char* name, const TemplateArgument& argument) {
  if (const int* number = std::get_if<int>(&argument)) {
    check(mlx_fast_metal_kernel_config_add_template_arg_int(config, name, *number));
  } else if (const bool* flag = std::get_if<bool>(&argument)) {
    check(mlx_fast_metal_kernel_config_add_template_arg_bool(config, name, *flag));
  } else {
    const mlx_dtype dtype = std::get<mlx_dtype>(argument);
    check(mlx_fast_metal_kernel_config_add_template_arg_dtype(config, name, dtype));
  }
}

}  // namespace

Outputs launch(const mlx_h2o_kernel_text& text, const Flags& flags, const Names& names, Size grid,
               Size threadgroup, mlx_stream stream) {
  const Resolved& resolved = resolve(text, flags);
  const Config config(mlx_fast_metal_kernel_config_new());
  std::set<std::string> added;  // a name can appear under several conditions
  for (const char* name : resolved.template_arguments) {
    if (added.insert(name).second) add(config, name, names.arguments.at(name));
  }
  check(mlx_fast_metal_kernel_config_set_grid(config, grid[0], grid[1], grid[2]));
  check(mlx_fast_metal_kernel_config_set_thread_group(config, threadgroup[0], threadgroup[1],
                                                      threadgroup[2]));
  for (const char* name : resolved.outputs) {
    const Output& output = names.outputs.at(name);
    check(mlx_fast_metal_kernel_config_add_output_arg(config, output.shape.data(),
                                                      output.shape.size(), output.dtype));
  }
  std::vector<mlx_array> inputs;
  for (const char* name : resolved.inputs) inputs.push_back(names.buffers.at(name));
  std::vector<Array> arrays =
      results(mlx_fast_metal_kernel_apply, resolved.kernel, vector_of(inputs), config, stream);
  Outputs made;
  for (size_t i = 0; i < arrays.size(); ++i) made[resolved.outputs[i]] = std::move(arrays[i]);
  return made;
}

}  // namespace mlx_h2o_c::metal
