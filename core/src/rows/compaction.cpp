// Moves rows that stay into the slots of evicted rows: the MLX primitive and its task.
#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/cpu_primitive.h"
#include "mlx_h2o/ops.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

constexpr const char* kCompactRows = "compact_rows";

/// Inputs: a buffer [B, H, C, ...] and kept uint32 [b, H, K]. Output: the buffer, in place if
/// nothing else holds it.
struct CompactRows : CpuOperation {
  std::vector<int> chosen;
  int start, tail;

  bool operator==(const CompactRows&) const = default;

  int origin(size_t /*output*/) const { return 0; }
  // Queued work that ranked the rows may still hold the buffer, which would force a copy.
  bool waits(const Arrays& inputs, const Arrays& /*outputs*/) const {
    return !inputs[0].is_donatable();
  }

  void run(Arrays& inputs, Arrays& outputs) const {
    const mx::array& kept = inputs[1];
    const uint32_t* slots = nullptr;
    int64_t strides[3];
    locate(kept, slots, strides);
    mx::array& buffer = outputs[0];
    const int capacity = buffer.shape(2), keep = kept.shape(2);
    const size_t bytes = row_bytes(buffer);
    for (size_t n = 0; n < chosen.size(); ++n) {
      for (int head = 0; head < kept.shape(1); ++head) {
        const int64_t place = int64_t{chosen[n]} * buffer.shape(1) + head;
        char* rows = buffer.data<char>() + static_cast<size_t>(place * capacity) * bytes;
        const uint32_t* own = slots + static_cast<int64_t>(n) * strides[0] + head * strides[1];
        const auto slot = [&](int i) {
          return static_cast<int>(std::min(own[i * strides[2]], uint32_t(capacity - 1)));
        };
        const auto move = [&](int from, int to) {
          std::memmove(rows + static_cast<size_t>(to) * bytes,
                       rows + static_cast<size_t>(from) * bytes, bytes);
        };
        // Ascending: the first slots lie below `keep`; the last ones fill the holes between them.
        int last = keep - 1, next = 0;
        for (int hole = 0; hole < keep; ++hole) {
          if (next <= last && slot(next) == hole) {
            ++next;
          } else {
            move(slot(last--), hole);
          }
        }
        for (int row = 0; row < tail; ++row) move(start + row, keep + row);
      }
    }
  }
};

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
  if (start < 0 || tail < 0 || tail > buffer.shape(2) - std::max(kept.shape(2), start)) {
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
  const CompactRows operation{{}, chosen, start, tail};
  return outputs_of(kCompactRows, operation, {buffer, kept}, {buffer.dtype()}, s)[0];
}

}  // namespace mlx_h2o
