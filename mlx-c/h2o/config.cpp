#include "config.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <stdexcept>

namespace mlx_h2o_c {

namespace {

const char* const policies[] = {"h2o",    "h2o-sum", "window",      "random", "keydiff",
                                "snapkv", "tova",    "value-aware", "mix"};

// Heavy hitters take budget / divisor (AtomGradient 2026, sec. 4.1 and table 4: 128, 64 and 32 of
// 256 rows); the recent window takes what the sinks leave.
struct Preset {
  const char* name;
  int divisor;
};
const Preset presets[] = {{"heavy", 2}, {"balanced", 4}, {"recent", 8}};

[[noreturn]] void fail(const std::string& text) { throw std::invalid_argument(text); }

void check_int(const char* name, int value, int least) {
  if (value < least) {
    fail(std::string("[H2OConfig] ") + name + " is " + std::to_string(value) +
         ", expected an int of at least " + std::to_string(least) + ".");
  }
}

template <class Names, class NameOf>
std::string joined(const Names& names, NameOf name_of) {
  std::string text;
  for (const auto& name : names) {
    text += (text.empty() ? "" : ", ") + std::string(name_of(name));
  }
  return text;
}

void check_policy(const char* policy) {
  const std::string found = policy == nullptr ? "" : policy;
  if (std::find(std::begin(policies), std::end(policies), found) == std::end(policies)) {
    fail("[H2OConfig] policy is '" + found +
         "', expected one of: " + joined(policies, [](const char* name) { return name; }) + ".");
  }
}

void check_decay(float decay) {
  if (!(decay >= 0 && decay < 1)) {
    char number[32];
    std::snprintf(number, sizeof number, "%g", static_cast<double>(decay));
    fail(std::string("[H2OConfig] decay is ") + number +
         ", expected a number of at least 0, below 1.");
  }
}

mlx_optional_int some(int64_t value) { return {static_cast<int>(value), true}; }

// In 64 bits: the sizes are at most INT_MAX each.
void resolve_sizes(mlx_h2o_config& config) {
  const int64_t recent = config.recent_size.has_value ? config.recent_size.value : 0;
  const int64_t left = static_cast<int64_t>(config.max_kv_size) - config.sink_size - recent;
  int64_t heavy = config.heavy_size.value;
  if (!config.heavy_size.has_value) {
    // At least one recent row, which gives the newest row time to be scored.
    const int64_t spare = config.recent_size.has_value ? left : left - 1;
    heavy = std::max<int64_t>(0, std::min<int64_t>(config.max_kv_size / 2, spare));
  }
  if (left < heavy) {
    fail("[H2OConfig] sink_size + heavy_size + recent_size is " + std::to_string(config.sink_size) +
         " + " + std::to_string(heavy) + " + " + std::to_string(recent) + " = " +
         std::to_string(config.sink_size + heavy + recent) +
         ", expected at most max_kv_size = " + std::to_string(config.max_kv_size) + ".");
  }
  config.heavy_size = some(heavy);
  config.recent_size = some(config.max_kv_size - config.sink_size - heavy);
}

}  // namespace

mlx_h2o_config default_config() {
  const mlx_optional_int none = {0, false};
  return {256, 4, none, none, "keydiff", 0.95F, 1};
}

mlx_h2o_config checked(const mlx_h2o_config& config) {
  check_int("max_kv_size", config.max_kv_size, 1);
  check_int("sink_size", config.sink_size, 0);
  check_int("evict_every", config.evict_every, 1);
  if (config.heavy_size.has_value) {
    check_int("heavy_size", config.heavy_size.value, 0);
  }
  if (config.recent_size.has_value) {
    check_int("recent_size", config.recent_size.value, 0);
  }
  check_decay(config.decay);
  check_policy(config.policy);
  if (config.sink_size >= config.max_kv_size) {
    fail("[H2OConfig] sink_size is " + std::to_string(config.sink_size) +
         ", expected fewer than max_kv_size = " + std::to_string(config.max_kv_size) +
         ": no row could ever be evicted.");
  }
  mlx_h2o_config resolved = config;
  resolve_sizes(resolved);
  return resolved;
}

mlx_h2o_config preset(const std::string& name, int max_kv_size) {
  const auto found = std::find_if(std::begin(presets), std::end(presets),
                                  [&](const Preset& preset) { return name == preset.name; });
  if (found == std::end(presets)) {
    fail("[H2OConfig.preset] name is '" + name + "', expected one of: " +
         joined(presets, [](const Preset& preset) { return preset.name; }) + ".");
  }
  check_int("max_kv_size", max_kv_size, 1);
  mlx_h2o_config config = default_config();
  config.max_kv_size = max_kv_size;
  const int spare = max_kv_size - config.sink_size - 1;
  config.heavy_size = some(std::max(0, std::min(max_kv_size / found->divisor, spare)));
  return checked(config);
}

}  // namespace mlx_h2o_c
