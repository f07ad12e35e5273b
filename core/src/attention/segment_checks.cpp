#include "attention/segment_checks.h"

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

void check_packing(int width, int bits, int group_size) {
  const bool known = bits == 2 || bits == 3 || bits == 4 || bits == 5 || bits == 6 || bits == 8;
  const bool grouped = group_size == 32 || group_size == 64 || group_size == 128;
  if (known && grouped && width % group_size == 0) return;
  fail(kSegmentRows, "rows of ", width, " elements have ", bits, " bits in groups of ", group_size,
       ", expected 2, 3, 4, 5, 6 or 8 in groups of 32, 64 or 128 that divide them.");
}

void check_packed(const mx::array* parts, const mx::array& newest, int bits, int group_size) {
  check_packing(newest.shape(3), bits, group_size);
  check_dimensions(kSegmentRows, "words", parts[0], 4, "[B, H, N, D * bits / 32]");
  mx::Shape shape = newest.shape();
  shape[2] = parts[0].shape(2);
  shape[3] = newest.shape(3) / 32 * bits;
  check_array(kSegmentRows, "words", parts[0], shape, mx::uint32);
  shape[3] = newest.shape(3) / group_size;
  check_array(kSegmentRows, "scales", parts[1], shape, newest.dtype());
  check_array(kSegmentRows, "biases", parts[2], shape, newest.dtype());
}

}  // namespace

void check_merge(const std::vector<mx::array>& outs, const std::vector<mx::array>& lses) {
  if (outs.empty() || outs.size() != lses.size()) {
    fail(kMergeSegments, "found ", outs.size(), " outputs and ", lses.size(),
         " lse, expected as many of each, and at least one.");
  }
  check_dimensions(kMergeSegments, "outputs", outs[0], 4, "[B, Hq, L, D]");
  if (!is_float(outs[0].dtype())) {
    fail(kMergeSegments, "outputs are ", to_text(outs[0].dtype()),
         ", expected float32, float16 or bfloat16.");
  }
  const mx::Shape& shape = outs[0].shape();
  for (size_t i = 0; i < outs.size(); ++i) {
    check_array(kMergeSegments, "outputs", outs[i], shape, outs[0].dtype());
    check_array(kMergeSegments, "lse", lses[i], {shape[0], shape[1], shape[2]}, mx::float32);
  }
}

void check_segments(const std::vector<mx::array>& tiers, const mx::array& newest,
                    const std::vector<int>& bits, int group_size,
                    const std::optional<mx::array>& slots, int to) {
  if (tiers.size() != 3 * bits.size()) {
    fail(kSegmentRows, "found ", tiers.size(), " arrays and ", bits.size(),
         " bits, expected three arrays of each tier, and its bits.");
  }
  check_dimensions(kSegmentRows, "the newest rows", newest, 4, "[B, H, N, D]");
  if (!is_float(newest.dtype())) {
    fail(kSegmentRows, "the newest rows are ", to_text(newest.dtype()),
         ", expected float32, float16 or bfloat16.");
  }
  const auto recoded = [](int width) { return width == 2 || width == 4 || width == 8; };
  if (to != 0 && !(recoded(to) && std::all_of(bits.begin(), bits.end(), recoded))) {
    fail(kSegmentRows, "rows are asked for in ", to, " bits, expected 2, 4 or 8, as of all tiers.");
  }
  for (size_t i = 0; i < bits.size(); ++i) check_packed(&tiers[3 * i], newest, bits[i], group_size);
  if (to != 0) check_packing(newest.shape(3), to, group_size);
  if (!slots.has_value()) return;
  check_dimensions(kSegmentRows, "slots", *slots, 3, "[B, H, K]");
  int rows = newest.shape(2);
  for (size_t i = 0; i < bits.size(); ++i) rows += tiers[3 * i].shape(2);
  if (rows == 0) fail(kSegmentRows, "there are no rows, expected those at the slots.");
  check_array(kSegmentRows, "slots", *slots, {newest.shape(0), newest.shape(1), slots->shape(2)},
              mx::uint32);
}

}  // namespace mlx_h2o
