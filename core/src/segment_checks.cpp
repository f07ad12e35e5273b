#include "segment_checks.h"

#include <algorithm>

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

void check_array(const char* operation, const char* name, const mx::array& found,
                 const mx::Shape& shape, mx::Dtype dtype) {
  if (found.shape() == shape && found.dtype() == dtype) return;
  fail(operation, name, " are ", to_text(found.dtype()), ' ', to_text(found.shape()), ", expected ",
       to_text(dtype), ' ', to_text(shape), '.');
}

void check_packed(const mx::array* parts, const mx::array& newest, int bits, int group_size) {
  const bool known = bits == 2 || bits == 3 || bits == 4 || bits == 5 || bits == 6 || bits == 8;
  const bool grouped = group_size == 32 || group_size == 64 || group_size == 128;
  if (!known || !grouped || newest.shape(3) % group_size != 0) {
    fail(kRowsAsArrays, "rows of ", newest.shape(3), " elements have ", bits, " bits in groups of ",
         group_size,
         ", expected 2, 3, 4, 5, 6 or 8 in groups of 32, 64 or "
         "128 that divide them.");
  }
  check_dimensions(kRowsAsArrays, "words", parts[0], 4, "[B, H, N, D * bits / 32]");
  mx::Shape shape = newest.shape();
  shape[2] = parts[0].shape(2);
  shape[3] = newest.shape(3) / 32 * bits;
  check_array(kRowsAsArrays, "words", parts[0], shape, mx::uint32);
  shape[3] = newest.shape(3) / group_size;
  check_array(kRowsAsArrays, "scales", parts[1], shape, newest.dtype());
  check_array(kRowsAsArrays, "biases", parts[2], shape, newest.dtype());
}

}  // namespace

void check_merge(const std::vector<mx::array>& outs, const std::vector<mx::array>& lses,
                 const std::vector<mx::array>& scores) {
  if (outs.empty() || outs.size() != lses.size() || outs.size() != scores.size()) {
    fail(kMergeSegments, "found ", outs.size(), " outputs, ", lses.size(), " lse and ",
         scores.size(), " scores, expected as many of each, and at least one.");
  }
  check_dimensions(kMergeSegments, "outputs", outs[0], 4, "[B, Hq, L, D]");
  check_dimensions(kMergeSegments, "scores", scores[0], 4, "[B, H, Q, N]");
  if (!is_float(outs[0].dtype())) {
    fail(kMergeSegments, "outputs are ", to_text(outs[0].dtype()),
         ", expected float32, float16 or bfloat16.");
  }
  const mx::Shape& shape = outs[0].shape();
  for (size_t i = 0; i < outs.size(); ++i) {
    check_array(kMergeSegments, "outputs", outs[i], shape, outs[0].dtype());
    check_array(kMergeSegments, "lse", lses[i], {shape[0], shape[1], shape[2]}, mx::float32);
    mx::Shape expected = scores[0].shape();
    expected.back() = scores[i].ndim() == 4 ? scores[i].shape(3) : expected.back();
    check_array(kMergeSegments, "scores", scores[i], expected, mx::float32);
  }
}

void check_segments(const std::vector<mx::array>& tiers, const mx::array& keys,
                    const mx::array& values, const std::vector<int>& bits,
                    const std::vector<int>& value_bits, int group_size) {
  if (bits.size() != value_bits.size() || tiers.size() != 6 * bits.size()) {
    fail(kRowsAsArrays, "found ", tiers.size(), " arrays, ", bits.size(), " bits and ",
         value_bits.size(), " of values, expected six arrays of each tier, and bits of each.");
  }
  for (const auto* rows : {&keys, &values}) {
    check_dimensions(kRowsAsArrays, "the newest rows", *rows, 4, "[B, H, N, D]");
    if (is_float(rows->dtype())) continue;
    fail(kRowsAsArrays, "the newest rows are ", to_text(rows->dtype()),
         ", expected float32, float16 or bfloat16.");
  }
  if (!std::equal(keys.shape().begin(), keys.shape().begin() + 3, values.shape().begin())) {
    fail(kRowsAsArrays, "keys and values have shapes ", to_text(keys.shape()), " and ",
         to_text(values.shape()), ", expected the same [B, H, N].");
  }
  for (size_t i = 0; i < bits.size(); ++i) {
    check_packed(&tiers[6 * i], keys, bits[i], group_size);
    check_packed(&tiers[6 * i + 3], values, value_bits[i], group_size);
    if (tiers[6 * i].shape(2) == tiers[6 * i + 3].shape(2)) continue;
    fail(kRowsAsArrays, "a tier has ", tiers[6 * i].shape(2), " keys and ",
         tiers[6 * i + 3].shape(2), " values, expected as many of each.");
  }
}

}  // namespace mlx_h2o
