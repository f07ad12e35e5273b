// Moves rows that stay into the slots of evicted rows: the MLX primitive and its task.
#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "cpu/cpu_primitive.h"
#include "cpu/donation.h"
#include "cpu/encoder.h"
#include "cpu/strided_copy.h"
#include "mlx_h2o/ops.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

constexpr const char* kCompactRows = "compact_rows";

/// Inputs: a buffer [B, H, C, ...] and kept uint32 [b, H, K]. Output: the buffer, in place if
/// nothing else holds it.
class CompactRows : public CpuPrimitive {
 public:
  CompactRows(mx::Stream stream, std::vector<int> chosen, int start, int tail)
      : CpuPrimitive(stream, kCompactRows),
        chosen_(std::move(chosen)),
        start_(start),
        tail_(tail) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;

  const char* name() const override { return "CompactRows"; }

  bool is_equivalent(const Primitive& other) const override {
    const auto& that = static_cast<const CompactRows&>(other);
    return chosen_ == that.chosen_ && start_ == that.start_ && tail_ == that.tail_;
  }

 private:
  std::vector<int> chosen_;
  int start_, tail_;
};

/// The arrays own no memory.
struct Compaction {
  mx::array before, buffer, kept;
  std::vector<int> chosen;
  int start, tail;
  bool in_place;

  void operator()() {
    if (!in_place) copy_elements(before, buffer.data<void>());
    for (size_t n = 0; n < chosen.size(); ++n) {
      for (int head = 0; head < kept.shape(1); ++head) close_gaps(static_cast<int>(n), head);
    }
  }

  void close_gaps(int n, int head) {
    const int keep = kept.shape(2), capacity = buffer.shape(2);
    const auto width = static_cast<size_t>(buffer.ndim() == 4 ? buffer.shape(3) : 1);
    const size_t row_bytes = width * buffer.itemsize();
    const auto heads = static_cast<size_t>(buffer.shape(1));
    const auto place =
        static_cast<size_t>(chosen[static_cast<size_t>(n)]) * heads + static_cast<size_t>(head);
    char* rows = buffer.data<char>() + place * static_cast<size_t>(capacity) * row_bytes;
    const auto move = [&](int from, int to) {
      std::memmove(rows + static_cast<size_t>(to) * row_bytes,
                   rows + static_cast<size_t>(from) * row_bytes, row_bytes);
    };
    // Ascending: the first slots lie below `keep`; the last ones fill the holes between them.
    int last = keep - 1, next = 0;
    for (int hole = 0; hole < keep; ++hole) {
      if (next <= last && slot(n, head, next) == hole) {
        ++next;
      } else {
        move(std::min(slot(n, head, last--), capacity - 1), hole);
      }
    }
    for (int row = 0; row < tail; ++row) move(start + row, keep + row);
  }

  int slot(int n, int head, int i) const {
    const auto at = n * kept.strides(0) + head * kept.strides(1) + i * kept.strides(2);
    return static_cast<int>(std::min<uint32_t>(kept.data<uint32_t>()[at], INT32_MAX));
  }
};

void CompactRows::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  // Queued work that ranked the rows may still hold the buffer, which would force a copy: wait.
  if (!inputs[0].is_donatable()) mx::synchronize(stream());
  const bool in_place = take_over(inputs[0], outputs[0]);
  mx::cpu::get_command_encoder(stream()).dispatch(
      Compaction{mx::array::unsafe_weak_copy(inputs[0]), mx::array::unsafe_weak_copy(outputs[0]),
                 mx::array::unsafe_weak_copy(inputs[1]), chosen_, start_, tail_, in_place});
}

void check(const mx::array& buffer, const mx::array& kept, const std::vector<int>& chosen,
           int start, int tail) {
  check_dimensions(kCompactRows, "kept", kept, 3, "[b, H, K]");
  if (kept.dtype() != mx::uint32 || static_cast<size_t>(kept.shape(0)) != chosen.size()) {
    fail(kCompactRows, "kept are ", to_text(kept.dtype()), " ", to_text(kept.shape()), " for ",
         chosen.size(), " sequences, expected uint32 [b, H, K] with as many.");
  }
  const bool axes = buffer.ndim() == 3 || buffer.ndim() == 4;
  if (!axes || buffer.shape(1) != kept.shape(1)) {
    fail(kCompactRows, "a buffer has shape ", to_text(buffer.shape()), " and kept ",
         to_text(kept.shape()), ", expected [B, H, C] or [B, H, C, width] of the same H.");
  }
  if (start < 0 || tail < 0 || std::max(kept.shape(2), start) + tail > buffer.shape(2)) {
    fail(kCompactRows, "found ", kept.shape(2), " rows and ", tail, " from slot ", start,
         " on in a buffer of ", buffer.shape(2), ", expected them within it.");
  }
  for (int n : chosen) {
    if (n < 0 || n >= buffer.shape(0)) {
      fail(kCompactRows, "found sequence ", n, " of ", buffer.shape(0), ".");
    }
  }
}

}  // namespace

mx::array compact_rows(const mx::array& buffer, const mx::array& kept,
                       const std::vector<int>& chosen, int start, int tail, mx::StreamOrDevice s) {
  check(buffer, kept, chosen, start, tail);
  const mx::Stream stream = cpu_stream(kCompactRows, s);
  auto primitive = std::make_shared<CompactRows>(stream, chosen, start, tail);
  return mx::array(buffer.shape(), buffer.dtype(), std::move(primitive), {buffer, kept});
}

}  // namespace mlx_h2o
