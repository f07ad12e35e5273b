// Rows that take the places of others, which are handed back: the MLX primitive and its task.
//
// One operation, because MLX copies a buffer that an operation writes while another one that reads
// it is still under way.
#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include <mlx/backend/cpu/encoder.h>

#include "cpu_primitive.h"
#include "donation.h"
#include "mlx_h2o/ops.h"
#include "strided_copy.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

constexpr const char* kExchangeRows = "exchange_rows";

/// Inputs: buffers [B, H, N, width], slots uint32 [B, H, n], and one array of new rows
/// [B, H, n, width] for each buffer unless they come from the slots `start` and up. Outputs: the
/// buffers, in place where nothing else holds them, and the rows that were at the slots.
class ExchangeRows : public CpuPrimitive {
 public:
  ExchangeRows(mx::Stream stream, int buffers, int start)
      : CpuPrimitive(stream, kExchangeRows), buffers_(buffers), start_(start) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;

  const char* name() const override { return "ExchangeRows"; }

  bool is_equivalent(const Primitive& other) const override {
    const auto& that = static_cast<const ExchangeRows&>(other);
    return buffers_ == that.buffers_ && start_ == that.start_;
  }

 private:
  int buffers_, start_;
};

/// One buffer and what goes in and comes out of it; the arrays own nothing.
struct Exchange {
  mx::array before, buffer, replaced, slots;
  std::vector<mx::array> rows;  // one, or none
  bool in_place;
  int start;

  void operator()() {
    if (!in_place) copy_elements(before, buffer.data<void>());
    const int count = slots.shape(2), heads = slots.shape(1);
    const size_t row_bytes = buffer.itemsize() * static_cast<size_t>(buffer.shape(3));
    std::vector<char> coming(row_bytes * static_cast<size_t>(count));
    for (int b = 0; b < slots.shape(0); ++b) {
      for (int h = 0; h < heads; ++h) exchange_head(b, h, row_bytes, coming);
    }
  }

  void exchange_head(int b, int h, size_t row_bytes, std::vector<char>& coming) {
    const int count = slots.shape(2), length = buffer.shape(2);
    const auto head =
        static_cast<size_t>(b) * static_cast<size_t>(slots.shape(1)) + static_cast<size_t>(h);
    char* stored = buffer.data<char>() + head * static_cast<size_t>(length) * row_bytes;
    char* old = replaced.data<char>() + head * static_cast<size_t>(count) * row_bytes;
    if (rows.empty()) {
      std::memcpy(coming.data(), stored + static_cast<size_t>(start) * row_bytes, coming.size());
    } else {
      const mx::array& given = rows[0];
      for (int i = 0; i < count; ++i) {
        const auto at = b * given.strides(0) + h * given.strides(1) + i * given.strides(2);
        std::memcpy(coming.data() + static_cast<size_t>(i) * row_bytes,
                    given.data<char>() + at * static_cast<int64_t>(given.itemsize()), row_bytes);
      }
    }
    // All are read before any is written: a slot may be one that a row comes from.
    for (int i = 0; i < count; ++i) {
      std::memcpy(old + static_cast<size_t>(i) * row_bytes, stored + slot(b, h, i) * row_bytes,
                  row_bytes);
    }
    for (int i = 0; i < count; ++i) {
      std::memcpy(stored + slot(b, h, i) * row_bytes,
                  coming.data() + static_cast<size_t>(i) * row_bytes, row_bytes);
    }
  }

  /// One beyond the end means the last: nothing is written out of bounds.
  size_t slot(int b, int h, int i) const {
    const auto at = b * slots.strides(0) + h * slots.strides(1) + i * slots.strides(2);
    return std::min<size_t>(slots.data<uint32_t>()[at], static_cast<size_t>(buffer.shape(2) - 1));
  }
};

void ExchangeRows::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  release_sibling_inputs(inputs, outputs);
  auto& encoder = mx::cpu::get_command_encoder(stream());
  const auto count = static_cast<size_t>(buffers_);
  std::vector<Exchange> tasks;
  tasks.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const bool in_place = take_over(inputs[i], outputs[i]);
    mx::array& replaced = outputs[count + i];
    replaced.set_data(mx::allocator::malloc(replaced.nbytes()));
    std::vector<mx::array> rows;
    if (inputs.size() > count + 1) {
      rows.push_back(
          mx::array::unsafe_weak_copy(with_unit_last_stride(inputs[count + 1 + i], encoder)));
    }
    tasks.push_back({mx::array::unsafe_weak_copy(inputs[i]),
                     mx::array::unsafe_weak_copy(outputs[i]), mx::array::unsafe_weak_copy(replaced),
                     mx::array::unsafe_weak_copy(inputs[count]), std::move(rows), in_place,
                     start_});
  }
  encoder.dispatch([tasks = std::move(tasks)]() mutable {
    for (Exchange& task : tasks) task();
  });
}

void check(const std::vector<mx::array>& buffers, const mx::array& slots,
           const std::vector<mx::array>& rows, int start) {
  if (buffers.empty() || (!rows.empty() && rows.size() != buffers.size())) {
    fail(kExchangeRows, "found ", buffers.size(), " buffers and ", rows.size(),
         " arrays of rows, expected as many of both, or no rows.");
  }
  check_dimensions(kExchangeRows, "slots", slots, 3, "[B, H, n]");
  check_not_empty(kExchangeRows, "slots", slots, "[B, H, n]");
  if (slots.dtype() != mx::uint32) {
    fail(kExchangeRows, "slots are ", to_text(slots.dtype()), ", expected uint32.");
  }
  for (size_t i = 0; i < buffers.size(); ++i) {
    const mx::array& buffer = buffers[i];
    check_dimensions(kExchangeRows, "buffer", buffer, 4, "[B, H, N, width]");
    check_not_empty(kExchangeRows, "buffer", buffer, "[B, H, N, width]");
    if (buffer.shape(0) != slots.shape(0) || buffer.shape(1) != slots.shape(1)) {
      fail(kExchangeRows, "a buffer has shape ", to_text(buffer.shape()), " and slots ",
           to_text(slots.shape()), ", expected the same B and H.");
    }
    if (rows.empty() && (start < 0 || start + slots.shape(2) > buffer.shape(2))) {
      fail(kExchangeRows, "start is ", start, " for ", slots.shape(2), " rows of a buffer of ",
           buffer.shape(2), ", expected them within it.");
    }
    if (rows.empty()) continue;
    const mx::Shape expected{slots.shape(0), slots.shape(1), slots.shape(2), buffer.shape(3)};
    if (rows[i].shape() != expected || rows[i].dtype() != buffer.dtype()) {
      fail(kExchangeRows, "rows are ", to_text(rows[i].dtype()), " ", to_text(rows[i].shape()),
           ", expected ", to_text(buffer.dtype()), " ", to_text(expected), ".");
    }
  }
}

}  // namespace

std::vector<mx::array> exchange_rows(const std::vector<mx::array>& buffers, const mx::array& slots,
                                     const std::vector<mx::array>& rows, int start,
                                     mx::StreamOrDevice s) {
  check(buffers, slots, rows, start);
  const mx::Stream stream = cpu_stream(kExchangeRows, s);
  std::vector<mx::array> inputs(buffers);
  inputs.push_back(slots);
  inputs.insert(inputs.end(), rows.begin(), rows.end());
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  shapes.reserve(2 * buffers.size());
  dtypes.reserve(2 * buffers.size());
  for (const mx::array& buffer : buffers) {
    shapes.push_back(buffer.shape());
    dtypes.push_back(buffer.dtype());
  }
  for (const mx::array& buffer : buffers) {
    shapes.push_back({slots.shape(0), slots.shape(1), slots.shape(2), buffer.shape(3)});
    dtypes.push_back(buffer.dtype());
  }
  auto primitive = std::make_shared<ExchangeRows>(stream, static_cast<int>(buffers.size()), start);
  return mx::array::make_arrays(shapes, dtypes, primitive, inputs);
}

}  // namespace mlx_h2o
