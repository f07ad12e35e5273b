// Reads rows from segments of different formats as one array, or as packed rows of one format.
#include <algorithm>
#include <optional>
#include <vector>

#include "cpu/cpu_primitive.h"
#include "cpu/thread_pool.h"
#include "mlx_h2o/ops.h"
#include "quantized/packed_bits.h"
#include "quantized/stored_rows.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

using kernels::PackedRow;
using kernels::StoredRows;

constexpr const char* kSegmentRows = "segment_rows";
constexpr size_t kPerTier = 3;  // words, scales and biases

/// Changes the bits of a row's codes, among 2, 4 and 8. With fewer bits, codes keep their upper
/// bits; with more, the numbers do not change. A group whose codes fit already is copied.
template <typename T>
void recode(const PackedRow& from, int width, const PackedRow& to) {
  const T* scales = static_cast<const T*>(from.scales);
  const T* biases = static_cast<const T*>(from.biases);
  kernels::BitWriter writer(to.words);
  const auto code = [&](int i) { return kernels::read_bits(from.words, i, from.bits); };
  for (int group = 0; group < width / from.group_size; ++group) {
    const int first = group * from.group_size, end = first + from.group_size;
    uint32_t most = 0;
    for (int i = first; i < end; ++i) most = std::max(most, code(i));
    const int lost = most >> to.bits == 0 ? 0 : from.bits - to.bits;
    for (int i = first; i < end; ++i) writer.put(code(i) >> lost, to.bits);
    T& scale = static_cast<T*>(to.scales)[group];
    T& bias = static_cast<T*>(to.biases)[group];
    scale = scales[group];
    bias = biases[group];
    if (lost == 0) continue;
    // Decode to the middle of the levels that now share a code.
    const float step = kernels::to_float(scales[group]);
    const float together = static_cast<float>(1 << lost);
    scale = kernels::round_to<T>(step * together);
    bias = kernels::round_to<T>(kernels::to_float(biases[group]) + step * ((together - 1) / 2));
  }
}

/// Copies a row of `from` to a row of `to`; both have the same width and type.
void copy_row(const StoredRows& from, int64_t row, const StoredRows& to, int64_t at) {
  if (from.dense != nullptr) return write_row(from.dense_row(row), to, at, kernels::simd_target());
  if (to.dense != nullptr) return read_row(from, row, to.dense_row(at));
  kernels::with_type(to.type, [&]<typename T>(T) {
    recode<T>(from.packed_row(row), to.width, to.packed_row(at));
  });
}

/// Inputs: the arrays of the tiers, the newest rows, and the slots, if only some rows are wanted.
/// Outputs: one array, or words, scales and biases of `to` bits.
struct SegmentRows : CpuOperation {
  std::vector<int> bits;  // of each tier
  int group_size;
  bool some;
  int to;

  bool operator==(const SegmentRows&) const = default;

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) const {
    mx::Shape shape = inputs[kPerTier * bits.size()].shape();
    const int width = shape[3];
    if (some) {
      shape[2] = inputs.back().shape(2);
    } else {
      for (size_t tier = 0; tier < bits.size(); ++tier)
        shape[2] += inputs[kPerTier * tier].shape(2);
    }
    if (to == 0) return {shape};
    mx::Shape words = shape;
    words[3] = width / 32 * to;
    shape[3] = width / group_size;
    return {words, shape, shape};
  }
  Layout layout(size_t /*input*/) const { return Layout::contiguous; }
  bool waits(const Arrays& /*inputs*/, const Arrays& outputs) const { return is_large(outputs); }

  void run(Arrays& inputs, Arrays& outputs) const {
    const size_t tiers = bits.size();
    const mx::array& newest = inputs[kPerTier * tiers];
    std::vector<StoredRows> segments;
    std::vector<int64_t> ends;
    for (size_t tier = 0; tier <= tiers; ++tier) {
      mx::array* parts = &inputs[kPerTier * tier];
      segments.push_back(rows_of(newest, parts, tier == tiers ? 0 : bits[tier]));
      ends.push_back((ends.empty() ? 0 : ends.back()) + parts->shape(2));
    }
    if (ends.back() == 0) return;
    const StoredRows made = rows_of(newest, outputs.data(), to);
    const int64_t heads = int64_t{newest.shape(0)} * newest.shape(1);
    const int64_t count = outputs[0].shape(2);
    const uint32_t* slots = some ? inputs.back().data<uint32_t>() : nullptr;
    kernels::parallel_for(heads, [&](int64_t head) {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t wanted = some ? int64_t{slots[head * count + i]} : i;
        const int64_t slot = std::min(wanted, ends.back() - 1);
        const auto of =
            static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), slot) - ends.begin());
        const int64_t before = of == 0 ? 0 : ends[of - 1];
        const int64_t row = head * (ends[of] - before) + slot - before;
        copy_row(segments[of], row, made, head * count + i);
      }
    });
  }

  /// All rows are of the type of the newest.
  StoredRows rows_of(const mx::array& newest, mx::array* parts, int bits_of_rows) const {
    const size_t arrays = bits_of_rows == 0 ? 1 : kPerTier;
    return stored_rows(parts, arrays, newest.dtype(), newest.shape(3), bits_of_rows, group_size);
  }
};

void check_packing(int width, int bits, int group_size) {
  const bool known = bits >= 2 && bits <= 8 && bits != 7;
  if (known && (group_size == 32 || group_size == 64 || group_size == 128) &&
      width % group_size == 0) {
    return;
  }
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

}  // namespace

std::vector<mx::array> segment_rows(const std::vector<mx::array>& tiers, const mx::array& newest,
                                    const std::vector<int>& bits, int group_size,
                                    const std::optional<mx::array>& slots, int to,
                                    mx::StreamOrDevice s) {
  check_segments(tiers, newest, bits, group_size, slots, to);
  Arrays inputs(tiers);
  inputs.push_back(newest);
  if (slots.has_value()) inputs.push_back(*slots);
  std::vector<mx::Dtype> dtypes{newest.dtype()};
  if (to != 0) dtypes = {mx::uint32, newest.dtype(), newest.dtype()};
  const SegmentRows operation{{}, bits, group_size, slots.has_value(), to};
  return outputs_of(kSegmentRows, operation, inputs, dtypes, s);
}

}  // namespace mlx_h2o
