// Writes rows to their slots, in place.
#include <cstring>

#include "cpu/cpu_primitive.h"
#include "mlx_h2o/ops.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

constexpr const char* kPutRows = "put_rows";

/// Inputs: a buffer [B, H, C, ...], slots uint32 [B, H, n], rows [B, H, n, ...]. Output: the
/// buffer, in place if nothing else holds it.
struct PutRows : CpuOperation {
  Layout layout(size_t input) const { return input == 2 ? Layout::contiguous : Layout::any; }
  int origin(size_t /*output*/) const { return 0; }
  // Queued work that makes the rows may still hold the buffer, which would force a copy.
  bool waits(const Arrays& inputs, const Arrays& /*outputs*/) const {
    return !inputs[0].is_donatable();
  }

  void run(Arrays& inputs, Arrays& outputs) const {
    const mx::array &slots = inputs[1], &rows = inputs[2];
    const uint32_t* first = nullptr;
    int64_t strides[3];
    locate(slots, first, strides);
    const auto count = static_cast<size_t>(slots.shape(2));
    const auto capacity = static_cast<uint32_t>(outputs[0].shape(2));
    const size_t bytes = row_bytes(rows);
    const char* from = rows.data<char>();
    char* to = outputs[0].data<char>();
    for (int sequence = 0; sequence < slots.shape(0); ++sequence) {
      for (int head = 0; head < slots.shape(1); ++head, to += capacity * bytes) {
        const uint32_t* own = first + sequence * strides[0] + head * strides[1];
        for (size_t row = 0; row < count; ++row, from += bytes) {
          const uint32_t slot = own[static_cast<int64_t>(row) * strides[2]];
          if (slot < capacity) std::memcpy(to + slot * bytes, from, bytes);
        }
      }
    }
  }
};

}  // namespace

mx::array put_rows(const mx::array& buffer, const mx::array& slots, const mx::array& rows,
                   mx::StreamOrDevice s) {
  check_dimensions(kPutRows, "slots", slots, 3, "[B, H, n]");
  mx::Shape expected = buffer.shape();
  if (expected.size() > 2) expected[2] = slots.shape(2);
  const bool axes = buffer.ndim() == 3 || buffer.ndim() == 4;
  if (!axes || rows.shape() != expected || rows.dtype() != buffer.dtype() ||
      slots.dtype() != mx::uint32 || slots.shape(0) != expected[0] ||
      slots.shape(1) != expected[1]) {
    fail(kPutRows, "found a buffer ", to_text(buffer.dtype()), ' ', to_text(buffer.shape()),
         ", slots ", to_text(slots.dtype()), ' ', to_text(slots.shape()), " and rows ",
         to_text(rows.dtype()), ' ', to_text(rows.shape()),
         ", expected [B, H, C] or [B, H, C, width], uint32 [B, H, n], and rows [B, H, n, ...] of "
         "the buffer's dtype.");
  }
  return outputs_of(kPutRows, PutRows{}, {buffer, slots, rows}, {buffer.dtype()}, s)[0];
}

}  // namespace mlx_h2o
