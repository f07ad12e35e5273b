// Rows to codes of rotated directions and back, as MLX operations.
#include <algorithm>
#include <climits>
#include <memory>
#include <utility>
#include <vector>

#include "cpu/checks.h"
#include "cpu/element_type.h"
#include "cpu/new_arrays.h"
#include "cpu/thread_pool.h"
#include "mlx_h2o/ops.h"
#include "quantized/quantization_kernel.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

constexpr const char* kEncode = "encode_rows";
constexpr const char* kDecode = "decode_rows";
constexpr int64_t kTogether = 128;  // rows that are worth an item

/// Inputs: rows [B, H, N, D], or words and norms. Outputs: the other of the two.
class TurboRows : public NewArrays {
 public:
  TurboRows(mx::Stream stream, bool encodes, int size, int bits, uint32_t seed)
      : NewArrays(stream, encodes ? kEncode : kDecode),
        encodes_(encodes),
        size_(size),
        bits_(bits),
        seed_(seed) {}

  const char* name() const override { return encodes_ ? "EncodeRows" : "DecodeRows"; }

  bool is_equivalent(const Primitive& other) const override {
    const auto& that = static_cast<const TurboRows&>(other);
    return encodes_ == that.encodes_ && size_ == that.size_ && bits_ == that.bits_ &&
           seed_ == that.seed_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    mx::Shape rows = inputs[0].shape(), norms = rows;
    rows[3] = encodes_ ? size_ * bits_ / 32 : size_;
    norms[3] = 1;
    return encodes_ ? std::vector<mx::Shape>{rows, norms} : std::vector<mx::Shape>{rows};
  }

 protected:
  void dispatch(mx::cpu::CommandEncoder& encoder, std::vector<mx::array> inputs,
                std::vector<mx::array> outputs) override {
    encoder.dispatch([encodes = encodes_, size = size_, bits = bits_,
                      book = &kernels::codebook(size_, bits_, seed_), inputs = std::move(inputs),
                      outputs = std::move(outputs), target = kernels::simd_target()]() mutable {
      const std::vector<Flat> flat(inputs.begin(), inputs.end());
      mx::array& dense = encodes ? inputs[0] : outputs[0];
      const kernels::ElementType type = element_type(dense.dtype());
      const int64_t count = static_cast<int64_t>(dense.size()) / size;
      // The kernels also write to rows of this type, so it takes no const.
      const auto memory = [&](size_t i) {
        return encodes ? outputs[i].data<void>() : const_cast<char*>(flat[i].data<char>());
      };
      const kernels::PackedRow packed{
          static_cast<uint32_t*>(memory(0)), memory(1), nullptr, bits, size, book};
      const auto convert = [&](int64_t item) {
        const int64_t end = std::min(count, (item + 1) * kTogether);
        for (int64_t row = item * kTogether; row < end; ++row) {
          const kernels::PackedRow own = kernels::packed_row(type, packed, size, row);
          const int64_t offset = row * size * kernels::element_size(type);
          if (encodes) {
            kernels::quantize_row(type, flat[0].data<char>() + offset, size, own, target);
            continue;
          }
          std::vector<float> numbers(static_cast<size_t>(size));
          kernels::dequantize_row(type, own, size, numbers.data());
          kernels::round_row(type, numbers.data(), size, outputs[0].data<char>() + offset);
        }
      };
      kernels::parallel_for((count + kTogether - 1) / kTogether, convert, 1);
    });
  }

 private:
  bool encodes_;
  int size_, bits_;
  uint32_t seed_;
};

void check_size(const char* operation, int size) {
  if (kernels::has_codebook(size)) return;
  fail(operation, "rows have ", size, " elements, expected a power of two from 32 to 1024.");
}

}  // namespace

std::vector<mx::array> encode_rows(const mx::array& rows, int bits, int seed,
                                   mx::StreamOrDevice s) {
  Arguments given(kEncode);
  mx::Shape shape;  // memory for the result of found_rows
  given.array(found_rows(rows, 1, INT_MAX, shape));
  given.one_of("bits", bits);
  const int size = given["D"];
  check_size(kEncode, size);
  const mx::Stream stream = cpu_stream(kEncode, s);
  const auto primitive =
      std::make_shared<TurboRows>(stream, true, size, bits, static_cast<uint32_t>(seed));
  return mx::array::make_arrays(primitive->output_shapes({rows}), {mx::uint32, mx::float32},
                                primitive, {rows});
}

mx::array decode_rows(const mx::array& words, const mx::array& norms, int bits, int seed,
                      mx::Dtype dtype, mx::StreamOrDevice s) {
  Arguments given(kDecode);
  given.code_bits(bits);
  mx::Shape shapes[2];  // memory for the results of found_rows
  const Found parts[2] = {found_rows(words, 1, INT_MAX, shapes[0]),
                          found_rows(norms, 1, INT_MAX, shapes[1])};
  given.rows(parts, 2);
  if (!is_float(dtype)) fail(kDecode, "found ", to_text(dtype), ", expected a float dtype.");
  const int size = given["D"];
  const mx::Stream stream = cpu_stream(kDecode, s);
  const auto primitive =
      std::make_shared<TurboRows>(stream, false, size, bits, static_cast<uint32_t>(seed));
  const std::vector<mx::array> inputs{words, norms};
  return mx::array::make_arrays(primitive->output_shapes(inputs), {dtype}, primitive, inputs)[0];
}

}  // namespace mlx_h2o
