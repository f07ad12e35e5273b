// Reads rows from segments of different formats as one array, or as packed rows of one format.
#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "cpu/checks.h"
#include "cpu/element_type.h"
#include "cpu/half.h"
#include "cpu/new_arrays.h"
#include "cpu/thread_pool.h"
#include "mlx_h2o/ops.h"
#include "quantized/quantization_kernel.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

using kernels::ElementType;
using kernels::PackedRow;

constexpr const char* kSegmentRows = "segment_rows";
constexpr size_t kPerTier = 3;  // words, scales and biases

/// Keys or values [heads, rows, width] of a cache, contiguous: dense, or packed where `dense` is
/// null. `type` is that of dense elements, or of scales and biases.
struct StoredRows {
  ElementType type;
  int width;
  void* dense = nullptr;
  PackedRow packed = {};  // the first row
};

uint32_t code(const PackedRow& row, int element) {
  const int bit = element * row.bits;
  return row.words[bit / 32] >> (bit % 32) & ((1u << row.bits) - 1);
}

/// Changes the bits of a row's codes, among 2, 4 and 8. With fewer bits, codes keep their upper
/// bits; with more, the numbers do not change. A group whose codes fit already is copied.
template <typename T>
void recode(const PackedRow& from, int width, const PackedRow& to) {
  const T* scales = static_cast<const T*>(from.scales);
  const T* biases = static_cast<const T*>(from.biases);
  std::fill_n(to.words, width / 32 * to.bits, 0u);
  for (int group = 0; group < width / from.group_size; ++group) {
    const int first = group * from.group_size, end = first + from.group_size;
    uint32_t most = 0;
    for (int i = first; i < end; ++i) most = std::max(most, code(from, i));
    const int lost = most >> to.bits == 0 ? 0 : from.bits - to.bits;
    for (int i = first; i < end; ++i)
      to.words[i * to.bits / 32] |= code(from, i) >> lost << (i * to.bits % 32);
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
void copy_row(const StoredRows& from, int64_t row, const StoredRows& to, int64_t at,
              kernels::SimdTarget target) {
  const int64_t element = kernels::element_size(to.type);
  if (to.dense != nullptr) {
    char* result = static_cast<char*>(to.dense) + at * to.width * element;
    if (from.dense != nullptr) {
      const char* source = static_cast<const char*>(from.dense) + row * to.width * element;
      std::memcpy(result, source, static_cast<size_t>(to.width * element));
      return;
    }
    std::vector<float> numbers(static_cast<size_t>(to.width));
    const PackedRow source = kernels::packed_row(to.type, from.packed, to.width, row);
    kernels::dequantize_row(to.type, source, to.width, numbers.data());
    return kernels::round_row(to.type, numbers.data(), to.width, result);
  }
  const PackedRow result = kernels::packed_row(to.type, to.packed, to.width, at);
  if (from.dense != nullptr) {
    const char* source = static_cast<const char*>(from.dense) + row * to.width * element;
    return kernels::quantize_row(to.type, source, to.width, result, target);
  }
  const PackedRow source = kernels::packed_row(to.type, from.packed, to.width, row);
  kernels::with_type(to.type, [&](auto zero) { recode<decltype(zero)>(source, to.width, result); });
}

/// Inputs: the arrays of the tiers, the newest rows, and the slots, if only some rows are wanted.
/// Outputs: one array, or words, scales and biases of `to` bits.
class SegmentRows : public NewArrays {
 public:
  SegmentRows(mx::Stream stream, std::vector<int> bits, int group_size, bool some, int to)
      : NewArrays(stream, kSegmentRows),
        bits_(std::move(bits)),
        group_size_(group_size),
        to_(to),
        some_(some) {}

  const char* name() const override { return "SegmentRows"; }

  bool is_equivalent(const Primitive& other) const override {
    const auto& that = static_cast<const SegmentRows&>(other);
    return bits_ == that.bits_ && group_size_ == that.group_size_ && to_ == that.to_ &&
           some_ == that.some_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    mx::Shape shape = inputs[kPerTier * bits_.size()].shape();
    const int width = shape[3];
    if (some_) {
      shape[2] = inputs.back().shape(2);
    } else {
      for (size_t tier = 0; tier < bits_.size(); ++tier)
        shape[2] += inputs[kPerTier * tier].shape(2);
    }
    if (to_ == 0) return {shape};
    mx::Shape words = shape;
    words[3] = width / 32 * to_;
    shape[3] = width / group_size_;
    return {words, shape, shape};
  }

 protected:
  void dispatch(mx::cpu::CommandEncoder& encoder, std::vector<mx::array> inputs,
                std::vector<mx::array> outputs) override {
    encoder.dispatch([bits = bits_, group_size = group_size_, to = to_, some = some_,
                      inputs = std::move(inputs), outputs = std::move(outputs),
                      target = kernels::simd_target()]() mutable {
      const size_t tiers = bits.size();
      std::vector<Flat> flat(inputs.begin(), inputs.end());
      const mx::array& newest = inputs[kPerTier * tiers];
      const ElementType type = element_type(newest.dtype());
      const int width = newest.shape(3);
      // The kernels also write to rows of this type, so it takes no const.
      const auto memory = [&](size_t input) { return const_cast<char*>(flat[input].data<char>()); };
      std::vector<StoredRows> segments;
      std::vector<int64_t> ends;
      for (size_t tier = 0; tier <= tiers; ++tier) {
        const size_t at = kPerTier * tier;
        StoredRows rows{type, width};
        if (tier == tiers) {
          rows.dense = memory(at);
        } else {
          rows.packed = {reinterpret_cast<uint32_t*>(memory(at)), memory(at + 1), memory(at + 2),
                         bits[tier], group_size};
        }
        segments.push_back(rows);
        ends.push_back((ends.empty() ? 0 : ends.back()) + inputs[at].shape(2));
      }
      StoredRows made{type, width};
      if (to == 0) {
        made.dense = outputs[0].data<void>();
      } else {
        made.packed = {outputs[0].data<uint32_t>(), outputs[1].data<void>(),
                       outputs[2].data<void>(), to, group_size};
      }
      const int64_t heads = int64_t{newest.shape(0)} * newest.shape(1);
      const int64_t count = outputs[0].shape(2);
      const uint32_t* slots = some ? flat.back().data<uint32_t>() : nullptr;
      if (ends.back() == 0) return;
      const auto copy_head = [&](int64_t head) {
        for (int64_t i = 0; i < count; ++i) {
          const int64_t wanted = some ? int64_t{slots[head * count + i]} : i;
          const int64_t slot = std::min(wanted, ends.back() - 1);
          const auto of =
              static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), slot) - ends.begin());
          const int64_t before = of == 0 ? 0 : ends[of - 1];
          const int64_t row = head * (ends[of] - before) + slot - before;
          copy_row(segments[of], row, made, head * count + i, target);
        }
      };
      kernels::parallel_for(heads, copy_head, 1);
    });
  }

 private:
  std::vector<int> bits_;  // of each tier
  int group_size_, to_;
  bool some_;
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
  const mx::Stream stream = cpu_stream(kSegmentRows, s);
  std::vector<mx::array> inputs(tiers);
  inputs.push_back(newest);
  if (slots.has_value()) inputs.push_back(*slots);
  auto primitive = std::make_shared<SegmentRows>(stream, bits, group_size, slots.has_value(), to);
  std::vector<mx::Dtype> dtypes{newest.dtype()};
  if (to != 0) dtypes = {mx::uint32, newest.dtype(), newest.dtype()};
  return mx::array::make_arrays(primitive->output_shapes(inputs), dtypes, primitive, inputs);
}

}  // namespace mlx_h2o
