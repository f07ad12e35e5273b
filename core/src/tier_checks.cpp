#include "tier_checks.h"

#include <string>

#include "checks.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

void check_array(const std::string& name, const mx::array& found, const mx::Shape& shape,
                 mx::Dtype dtype) {
  if (found.shape() == shape && found.dtype() == dtype) return;
  fail(kReplaceInTiers, name, " are ", to_text(found.dtype()), ' ', to_text(found.shape()),
       ", expected ", to_text(dtype), ' ', to_text(shape), '.');
}

void check_packing(const TierOptions& options) {
  const size_t count = options.bits.size();
  if (count < 1 || count > 2 || options.value_bits.size() != count) {
    fail(kReplaceInTiers, "bits are ", count, " numbers and value_bits ", options.value_bits.size(),
         ", expected one or two of each.");
  }
  for (const auto* bits : {&options.bits, &options.value_bits}) {
    for (int found : *bits) {
      if (found == 2 || found == 4 || found == 8) continue;
      if (count == 1 && (found == 3 || found == 5 || found == 6)) continue;
      fail(kReplaceInTiers, "bits are ", found,
           ", expected 2, 4 or 8 of each of two tiers, or 2, "
           "3, 4, 5, 6 or 8 of one.");
    }
    if (count == 2 && (*bits)[1] >= (*bits)[0]) {
      fail(kReplaceInTiers, "bits are ", (*bits)[0], " and ", (*bits)[1],
           ", expected fewer in the second tier.");
    }
  }
  const int size = options.group_size;
  if (size == 32 || size == 64 || size == 128) return;
  fail(kReplaceInTiers, "group_size is ", size, ", expected 32, 64 or 128.");
}

// The rows of one side of a tier.
void check_rows(const std::string& name, const mx::array* parts, const mx::array& newest, int rows,
                int bits, int group_size) {
  const int width = newest.shape(3);
  if (width % group_size != 0) {
    fail(kReplaceInTiers, name, " have ", width,
         " elements, expected a multiple of the group "
         "size ",
         group_size, '.');
  }
  mx::Shape shape = newest.shape();
  shape[2] = rows;
  shape[3] = width / 32 * bits;
  check_array("words of the " + name, parts[0], shape, mx::uint32);
  shape[3] = width / group_size;
  check_array("scales of the " + name, parts[1], shape, newest.dtype());
  check_array("biases of the " + name, parts[2], shape, newest.dtype());
}

void check_newest(const char* name, const mx::array& newest, const mx::array& new_rows) {
  check_dimensions(kReplaceInTiers, name, newest, 4, "[B, H, N, D]");
  check_not_empty(kReplaceInTiers, name, newest, "[B, H, N, D]");
  if (!is_float(newest.dtype())) {
    fail(kReplaceInTiers, name, " are ", to_text(newest.dtype()),
         ", expected float32, float16 or bfloat16.");
  }
  mx::Shape shape = newest.shape();
  shape[2] = 1;
  check_array(std::string("new ") + name, new_rows, shape, newest.dtype());
}

}  // namespace

void check_tiers(const std::vector<mx::array>& tiers, const mx::array& keys,
                 const mx::array& values, const mx::array& importance, const mx::array& positions,
                 const mx::array& new_keys, const mx::array& new_values, int position,
                 const TierOptions& options) {
  check_packing(options);
  const size_t count = options.bits.size();
  if (tiers.size() != 6 * count) {
    fail(kReplaceInTiers, "tiers are ", tiers.size(),
         " arrays, expected six of each: words, "
         "scales and biases of the keys, and of the values.");
  }
  check_newest("keys", keys, new_keys);
  check_newest("values", values, new_values);
  const mx::Shape heads{keys.shape(0), keys.shape(1), keys.shape(2)};
  if (mx::Shape{values.shape(0), values.shape(1), values.shape(2)} != heads) {
    fail(kReplaceInTiers, "keys and values have shapes ", to_text(keys.shape()), " and ",
         to_text(values.shape()), ", expected the same [B, H, N].");
  }
  int slots = keys.shape(2);
  for (size_t i = 0; i < count; ++i) {
    const mx::array* parts = &tiers[6 * i];
    check_dimensions(kReplaceInTiers, "words", parts[0], 4, "[B, H, N, D * bits / 32]");
    const int rows = parts[0].shape(2);
    if (rows < 1) fail(kReplaceInTiers, "a tier has no rows, expected at least one.");
    check_rows("keys", parts, keys, rows, options.bits[i], options.group_size);
    check_rows("values", parts + 3, values, rows, options.value_bits[i], options.group_size);
    slots += rows;
  }
  const mx::Shape rows{heads[0], heads[1], slots};
  check_array("importance values", importance, rows, mx::float32);
  check_array("positions", positions, rows, mx::int32);
  if (options.ranks.has_value()) check_array("ranks", *options.ranks, rows, mx::float32);
  if (!options.statistics.empty()) {
    if (options.statistics.size() != 2) {
      fail(kReplaceInTiers, "statistics are ", options.statistics.size(),
           " arrays, expected key_sum and inverse_norms.");
    }
    check_array("key_sum values", options.statistics[0], {heads[0], heads[1], keys.shape(3)},
                mx::float32);
    check_array("inverse_norms", options.statistics[1], rows, mx::float32);
  }
  if (position < 0) fail(kReplaceInTiers, "position is ", position, ", expected 0 or more.");
  if (options.sink_size < 0) {
    fail(kReplaceInTiers, "sink_size is ", options.sink_size, ", expected 0 or more.");
  }
}

}  // namespace mlx_h2o
