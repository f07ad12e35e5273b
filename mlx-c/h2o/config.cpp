// The settings of an evicting cache, checked as Python's H2OConfig checks them.
#include "mlx_h2o/c/config.h"

#include <algorithm>

#include "boundary.h"
#include "settings.h"

using namespace mlx_h2o_c;

namespace {

constexpr auto op = "H2OConfig";

struct Policy {
  const char* name;
};
constexpr Policy policies[] = {{"h2o"}, {"h2o-ema"}, {"window"}, {"keydiff"}};

// Heavy hitters take budget / divisor (AtomGradient 2026, sec. 4.1 and table 4: 128, 64 and 32 of
// 256 rows); the recent window takes what the sinks leave.
struct Preset {
  const char* name;
  int divisor;
};
constexpr Preset presets[] = {{"heavy", 2}, {"balanced", 4}, {"recent", 8}};

// Rows, with room for a chunk more: sizes of MLX's arrays have 31 bits.
constexpr int largest = 1 << 30;
constexpr int fewest_recent = 32;  // of h2o; below it much is lost

void check_int(const char* name, int value, int least) {
  expect(value >= least, op, name, " is ", value, ", expected an int of at least ", least, ".");
  expect(value <= largest, op, name, " is ", value, ", expected at most ", largest, ".");
}

// The one of this name; `what` is what a message calls it.
template <class Known, size_t count>
const Known& named(const char* op, const char* what, const char* name,
                   const Known (&known)[count]) {
  const std::string found = name == nullptr ? "" : name;
  std::string names;
  for (const Known& each : known) {
    if (found == each.name) return each;
    names += (names.empty() ? "" : ", ") + std::string(each.name);
  }
  fail(op, what, " is '", found, "', expected one of: ", names, ".");
}

// In 64 bits, since three sizes are added.
void resolve_sizes(mlx_h2o_config& config) {
  const int64_t recent = config.recent_size.has_value ? config.recent_size.value : 0;
  const int64_t left = static_cast<int64_t>(config.max_kv_size) - config.sink_size - recent;
  int64_t heavy = config.heavy_size.value;
  if (!config.heavy_size.has_value) {
    // At least one recent row, which gives the newest row time to be scored.
    const int64_t spare = config.recent_size.has_value ? left : left - 1;
    int64_t usual = config.max_kv_size / 2;
    if (std::string(config.policy) == "h2o") {  // all but the recent rows
      const int rows = config.max_kv_size;
      const int recent_rows = std::max(rows / 4, std::min(fewest_recent, rows / 2));
      usual = config.recent_size.has_value ? left : left - recent_rows;
    }
    heavy = std::max<int64_t>(0, std::min(usual, spare));
  }
  expect(left >= heavy, op, "sink_size + heavy_size + recent_size is ", config.sink_size, " + ",
         heavy, " + ", recent, " = ", config.sink_size + heavy + recent,
         ", expected at most max_kv_size = ", config.max_kv_size, ".");
  config.heavy_size = some(heavy);
  config.recent_size = some(config.max_kv_size - config.sink_size - heavy);
}

mlx_h2o_config preset(const char* of_preset, const char* name, int max_kv_size) {
  const int divisor = named(of_preset, "name", name, presets).divisor;
  check_int("max_kv_size", max_kv_size, 1);
  mlx_h2o_config config = mlx_h2o_config_new();
  config.max_kv_size = max_kv_size;
  config.policy = "h2o-ema";  // the paper's
  const int spare = max_kv_size - config.sink_size - 1;
  config.heavy_size = some(std::max(0, std::min(max_kv_size / divisor, spare)));
  return checked_settings(config);
}

}  // namespace

const char* mlx_h2o_c::known_policy(const char* of, const char* name) {
  return named(of, "policy", name, policies).name;
}

mlx_h2o_config mlx_h2o_c::checked_settings(mlx_h2o_config config) {
  const auto given = [](mlx_optional_int size) { return size.has_value ? size.value : 0; };
  check_int("sink_size", config.sink_size, 0);
  check_int("max_kv_size", config.max_kv_size, 1);
  if (config.evict_every.has_value) check_int("evict_every", config.evict_every.value, 1);
  check_int("heavy_size", given(config.heavy_size), 0);
  check_int("recent_size", given(config.recent_size), 0);
  expect(config.decay >= 0 && config.decay < 1, op, "decay is ", config.decay,
         ", expected a number of at least 0, below 1.");
  known_policy(op, config.policy);
  expect(config.sink_size < config.max_kv_size, op, "sink_size is ", config.sink_size,
         ", expected fewer than max_kv_size = ", config.max_kv_size,
         ": no row could ever be evicted.");
  const int batch = std::max(1, config.max_kv_size / 32);
  if (!config.evict_every.has_value) config.evict_every = some(batch);
  resolve_sizes(config);
  return config;
}

mlx_h2o_config mlx_h2o_config_new(void) {
  const mlx_optional_int none = {0, false};
  return {256, 4, none, none, "keydiff", 0.95F, none};
}

int mlx_h2o_config_resolve(mlx_h2o_config* config) {
  return operation(op, {{"config", config}}, [&](auto) { *config = checked_settings(*config); });
}

int mlx_h2o_config_preset(mlx_h2o_config* res, const char* name, int max_kv_size) {
  return operation("H2OConfig.preset", {{"res", res}},
                   [&](const char* of_preset) { *res = preset(of_preset, name, max_kv_size); });
}
