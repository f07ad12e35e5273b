// Writes rows to their slots, in place.
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "cpu/checks.h"
#include "cpu/donation.h"
#include "cpu/new_arrays.h"
#include "mlx_h2o/ops.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

constexpr const char* kPutRows = "put_rows";

/// Inputs: a buffer [B, H, C, ...], slots uint32 [B, H, n], rows [B, H, n, ...]. Output: the
/// buffer, in place if nothing else holds it.
class PutRows : public CpuPrimitive {
 public:
  explicit PutRows(mx::Stream stream) : CpuPrimitive(stream, kPutRows) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;

  const char* name() const override { return "PutRows"; }

  bool is_equivalent(const Primitive& /*other*/) const override { return true; }
};

/// The arrays own no memory.
struct Writing {
  mx::array before, buffer, slots, rows;
  bool in_place;

  void operator()() {
    if (!in_place) copy_elements(before, buffer.data<void>());
    const Flat flat(rows);
    const char* from = flat.data<char>();
    const auto count = static_cast<size_t>(slots.shape(2));
    const auto capacity = static_cast<uint32_t>(buffer.shape(2));
    size_t bytes = buffer.itemsize();
    for (int axis = 3; axis < static_cast<int>(buffer.ndim()); ++axis)
      bytes *= static_cast<size_t>(buffer.shape(axis));
    char* to = buffer.data<char>();
    for (int sequence = 0; sequence < slots.shape(0); ++sequence) {
      for (int head = 0; head < slots.shape(1); ++head, to += capacity * bytes) {
        for (size_t row = 0; row < count; ++row, from += bytes) {
          const int64_t at = sequence * slots.strides(0) + head * slots.strides(1) +
                             static_cast<int64_t>(row) * slots.strides(2);
          const uint32_t slot = slots.data<uint32_t>()[at];
          if (slot < capacity) std::memcpy(to + slot * bytes, from, bytes);
        }
      }
    }
  }
};

void PutRows::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  // Queued work that makes the rows may still hold the buffer, which would force a copy: wait.
  if (!inputs[0].is_donatable()) mx::synchronize(stream());
  const bool in_place = take_over(inputs[0], outputs[0]);
  mx::cpu::get_command_encoder(stream()).dispatch(Writing{
      mx::array::unsafe_weak_copy(inputs[0]), mx::array::unsafe_weak_copy(outputs[0]),
      mx::array::unsafe_weak_copy(inputs[1]), mx::array::unsafe_weak_copy(inputs[2]), in_place});
}

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
  auto primitive = std::make_shared<PutRows>(cpu_stream(kPutRows, s));
  return mx::array(buffer.shape(), buffer.dtype(), std::move(primitive), {buffer, slots, rows});
}

}  // namespace mlx_h2o
