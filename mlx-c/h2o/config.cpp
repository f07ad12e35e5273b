// The settings of an evicting cache, checked as Python's H2OConfig checks them.
#include "mlx_h2o/c/config.h"

#include <algorithm>

#include "boundary.h"
#include "checks.h"

using namespace mlx_h2o_c;

namespace {

constexpr auto op = "H2OConfig";

struct Entry {
  const char* name;
  int divisor;
};
constexpr Entry policies[] = {{"h2o", 0}, {"h2o-ema", 0}, {"window", 0}, {"keydiff", 0}};
// Heavy hitters take budget / divisor (AtomGradient 2026, sec. 4.1 and table 4: 128, 64 and 32 of
// 256 rows); the recent window takes what the sinks leave.
constexpr Entry presets[] = {{"heavy", 2}, {"balanced", 4}, {"recent", 8}};

// The most rows, with room for a chunk more: sizes of MLX's arrays have 31 bits.
constexpr int largest = 1 << 30;
constexpr int fewest_recent = 32;  // of h2o; with fewer it loses much

void check_int(const char* name, int value, int least) {
  expect(value >= least, op, name, " is ", value, ", expected an int of at least ", least, ".");
  expect(value <= largest, op, name, " is ", value, ", expected at most ", largest, ".");
}

void check_known(const char* name, int value, const Shape& known) {
  const bool found = std::find(known.begin(), known.end(), value) != known.end();
  const std::string all = mlx_h2o::shown(known.data(), known.size());
  expect(found, op, name, " is ", value, ", expected one of ", all, ".");
}

// The entry of this name; `what` describes it in the message.
template <size_t count>
const Entry& named(const char* op, const char* what, const char* name,
                   const Entry (&known)[count]) {
  const std::string found = name == nullptr ? "" : name;
  std::string names;
  for (const Entry& each : known) {
    if (found == each.name) return each;
    names += (names.empty() ? "" : ", ") + std::string(each.name);
  }
  fail(op, what, " is '", found, "', expected one of: ", names, ".");
}

int given(mlx_optional_int size, int none) { return size.has_value ? size.value : none; }

void check_budget(const mlx_h2o_budget& budget) {
  const int rows = budget.max_kv_size;
  check_int("sink_size", budget.sink_size, 0);
  check_int("speculative", budget.speculative, 0);
  check_int("max_kv_size", rows, 1);
  check_int("evict_every", given(budget.evict_every, 1), 1);
  check_int("heavy_size", given(budget.heavy_size, 0), 0);
  check_int("recent_size", given(budget.recent_size, 0), 0);
  check_int("context_size", budget.context_size, 0);
  // In 64 bits, since three sizes are added.
  const int64_t sinks = budget.sink_size, drafts = sinks + budget.speculative + 2;
  const int64_t heavy = given(budget.heavy_size, 0), recent = given(budget.recent_size, 0);
  expect(sinks < rows, op, "sink_size is ", sinks, ", expected fewer than max_kv_size = ", rows,
         ": no row could ever be evicted.");
  expect(sinks + heavy + recent <= rows, op, "max_kv_size is ", rows,
         ", expected at least sink_size + heavy_size + recent_size = ", sinks, " + ", heavy, " + ",
         recent, " = ", sinks + heavy + recent, ".");
  expect(budget.speculative == 0 || drafts <= rows, op, "max_kv_size is ", rows,
         ", expected at least sink_size + speculative + 2 = ", drafts, ".");
}

void check_format(const mlx_h2o_format& format) {
  check_known("kv_group_size", format.kv_group_size, {32, 64, 128});
  expect(format.kv_bits.has_value || !format.v_bits.has_value, op, "v_bits is ",
         format.v_bits.value, ", expected kv_bits too.");
  check_known("kv_bits", given(format.kv_bits, 8), {2, 3, 4, 5, 6, 8});
  check_known("v_bits", given(format.v_bits, 8), {2, 3, 4, 5, 6, 8});
}

// Fills in all sizes; with "h2o", all but the recent rows are heavy.
mlx_h2o_budget filled(mlx_h2o_budget budget, bool is_h2o) {
  const int rows = budget.max_kv_size;
  const int left = rows - budget.sink_size - given(budget.recent_size, 0);
  if (!budget.heavy_size.has_value) {
    const bool has_recent = budget.recent_size.has_value;
    const int least = std::max(rows / 4, std::min(fewest_recent, rows / 2));
    const int usual = is_h2o ? left - (has_recent ? 0 : least) : rows / 2;
    // At least one recent row, so that the newest row has time to be scored.
    budget.heavy_size = some(std::max(0, std::min(usual, has_recent ? left : left - 1)));
  }
  budget.recent_size = some(rows - budget.sink_size - budget.heavy_size.value);
  budget.evict_every = some(given(budget.evict_every, std::max(1, rows / 32)));
  return budget;
}

mlx_h2o_config checked(mlx_h2o_config config) {
  const auto& [name, diversity, decay] = config.policy;
  expect(diversity >= 0 && diversity <= 1, op, "diversity is ", diversity,
         ", expected a number from 0 to 1.");
  expect(decay >= 0 && decay < 1, op, "decay is ", decay,
         ", expected a number of at least 0, below 1.");
  check_budget(config.budget);
  check_format(config.format);
  config.budget = filled(config.budget, &named(op, "policy", name, policies) == policies);
  return config;
}

}  // namespace

mlx_h2o_config mlx_h2o_config_new(void) {
  const mlx_optional_int none = {0, false};
  return {{256, 4, none, none, none, 0, 0}, {none, none, 64}, {"keydiff", 0.5F, 0.95F}};
}

int mlx_h2o_config_resolve(mlx_h2o_config* config) {
  return operation(op, {{"config", config}}, [&](auto) { *config = checked(*config); });
}

int mlx_h2o_config_preset(mlx_h2o_config* res, const char* name, int max_kv_size) {
  return operation("H2OConfig.preset", {{"res", res}}, [&](const char* of_preset) {
    const int divisor = named(of_preset, "name", name, presets).divisor;
    check_int("max_kv_size", max_kv_size, 1);
    mlx_h2o_config config = mlx_h2o_config_new();
    config.policy.name = "h2o-ema";  // as published
    config.budget.max_kv_size = max_kv_size;
    const int spare = max_kv_size - config.budget.sink_size - 1;
    config.budget.heavy_size = some(std::max(0, std::min(max_kv_size / divisor, spare)));
    *res = checked(config);
  });
}
