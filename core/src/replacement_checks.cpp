#include "replacement_checks.h"

#include <utility>

#include "checks.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

void check_like(const char* name, const mx::array& found, mx::Dtype dtype, mx::Shape expected,
                const char* what) {
  check_dimensions(kReplaceWorst, name, found, 4, "[B, H, 1, D]");
  expected[2] = 1;
  if (found.shape() == expected && found.dtype() == dtype) return;
  fail(kReplaceWorst, name, " are ", to_text(found.dtype()), ' ', to_text(found.shape()),
       ", expected ", to_text(dtype), ' ', to_text(expected), " as the ", what, '.');
}

void check_array(const char* name, const mx::array& found, const mx::Shape& shape, mx::Dtype dtype,
                 const char* layout) {
  if (found.shape() == shape && found.dtype() == dtype) return;
  fail(kReplaceWorst, name, " are ", to_text(found.dtype()), ' ', to_text(found.shape()),
       ", expected ", to_text(dtype), ' ', layout, " = ", to_text(shape), '.');
}

// The shape [B, H, N, D] of rows as they would be dense.
mx::Shape check_stored(const char* name, const std::vector<mx::array>& stored, mx::Dtype dtype,
                       int bits, int group_size) {
  if (stored.size() != 1 && stored.size() != 3) {
    fail(kReplaceWorst, name, " are ", stored.size(),
         " arrays, expected one, or words, scales and biases.");
  }
  check_dimensions(kReplaceWorst, name, stored[0], 4, "[B, H, N, D]");
  check_not_empty(kReplaceWorst, name, stored[0], "[B, H, N, D]");
  mx::Shape shape = stored[0].shape();
  if (stored.size() == 1) {
    if (is_float(stored[0].dtype())) return shape;
    fail(kReplaceWorst, name, " are ", to_text(stored[0].dtype()),
         ", expected float32, float16 or bfloat16.");
  }
  const int words = shape[3];
  const int width = words * 32 / bits;
  if (words * 32 % bits != 0 || width % group_size != 0) {
    fail(kReplaceWorst, "words of ", name, " have ", words, " words per row, which at ", bits,
         " bits is not a multiple of the group size ", group_size, '.');
  }
  const char* parts[] = {"words", "scales", "biases"};
  for (size_t i = 0; i < 3; ++i) {
    shape[3] = i == 0 ? words : width / group_size;
    const mx::Dtype expected = i == 0 ? mx::uint32 : dtype;
    if (stored[i].shape() == shape && stored[i].dtype() == expected) continue;
    fail(kReplaceWorst, parts[i], " of ", name, " are ", to_text(stored[i].dtype()), ' ',
         to_text(stored[i].shape()), ", expected ", to_text(expected), ' ', to_text(shape), '.');
  }
  shape[3] = width;
  return shape;
}

void check_packing(const ReplacementOptions& options) {
  for (int found : {options.bits, options.value_bits}) {
    if (found == 2 || found == 3 || found == 4 || found == 5 || found == 6 || found == 8) continue;
    fail(kReplaceWorst, "bits are ", found, ", expected 2, 3, 4, 5, 6 or 8.");
  }
  if (options.group_size != 32 && options.group_size != 64 && options.group_size != 128) {
    fail(kReplaceWorst, "group_size is ", options.group_size, ", expected 32, 64 or 128.");
  }
}

void check_ranks(const ReplacementOptions& options, const mx::Shape& rows, bool packed) {
  const bool by_array = options.ranked_by == RankedBy::array;
  if (options.ranks.has_value() != by_array) {
    fail(kReplaceWorst, "ranks are ", options.ranks.has_value() ? "" : "not ",
         "given, expected an array of them exactly where rows are ranked by an array.");
  }
  if (by_array) check_array("ranks", *options.ranks, rows, mx::float32, "[B, H, N]");
  if (!packed || options.ranked_by != RankedBy::key_diversity) return;
  fail(kReplaceWorst, "packed rows are ranked by key_diversity, expected an array of ranks.");
}

}  // namespace

void check_replacement(const std::vector<mx::array>& keys, const std::vector<mx::array>& values,
                       const mx::array& importance, const mx::array& positions,
                       const mx::array& new_keys, const mx::array& new_values,
                       const mx::array& position, const ReplacementOptions& options) {
  check_packing(options);
  for (const auto* found : {&new_keys, &new_values}) {
    if (is_float(found->dtype())) continue;
    fail(kReplaceWorst, "new rows are ", to_text(found->dtype()),
         ", expected float32, float16 or bfloat16.");
  }
  const bool packed = keys.size() == 3;
  const mx::Shape shape =
      check_stored("keys", keys, new_keys.dtype(), options.bits, options.group_size);
  const mx::Shape value_shape =
      check_stored("values", values, new_values.dtype(), options.value_bits, options.group_size);
  if (keys.size() != values.size()) {
    fail(kReplaceWorst, "keys and values are ", keys.size(), " and ", values.size(),
         " arrays, expected the same.");
  }
  const mx::Shape rows{shape[0], shape[1], shape[2]};
  if (mx::Shape{value_shape[0], value_shape[1], value_shape[2]} != rows) {
    fail(kReplaceWorst, "keys and values have shapes ", to_text(shape), " and ",
         to_text(value_shape), ", expected the same [B, H, N].");
  }
  check_array("importance values", importance, rows, mx::float32, "[B, H, N]");
  check_array("positions", positions, rows, mx::int32, "[B, H, N]");
  check_like("new keys", new_keys, packed ? keys[1].dtype() : keys[0].dtype(), shape, "keys");
  check_like("new values", new_values, packed ? values[1].dtype() : values[0].dtype(), value_shape,
             "values");
  check_per_sequence(kReplaceWorst, "position", position, rows[0]);
  if (options.recent_start.has_value()) {
    check_per_sequence(kReplaceWorst, "recent_start", *options.recent_start, rows[0]);
  }
  if (options.sink_size < 0) {
    fail(kReplaceWorst, "sink_size is ", options.sink_size, ", expected 0 or more.");
  }
  check_ranks(options, rows, packed);
}

}  // namespace mlx_h2o
