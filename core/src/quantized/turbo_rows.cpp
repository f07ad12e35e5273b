// Rows to codes of rotated directions and back, as MLX operations.
#include <algorithm>
#include <climits>
#include <vector>

#include "cpu/cpu_primitive.h"
#include "cpu/thread_pool.h"
#include "mlx_h2o/ops.h"
#include "quantized/stored_rows.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

constexpr const char* kEncode = "encode_rows";
constexpr const char* kDecode = "decode_rows";
constexpr int64_t kTogether = 128;  // rows that are worth a thread

/// Inputs: rows [B, H, N, D], or words and norms. Outputs: the other of the two.
struct TurboRows : CpuOperation {
  bool encodes;
  int size, bits;
  uint32_t seed;

  bool operator==(const TurboRows&) const = default;

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) const {
    mx::Shape rows = inputs[0].shape(), norms = rows;
    rows[3] = encodes ? size * bits / 32 : size;
    norms[3] = 1;
    return encodes ? std::vector<mx::Shape>{rows, norms} : std::vector<mx::Shape>{rows};
  }
  Layout layout(size_t /*input*/) const { return Layout::contiguous; }
  bool waits(const Arrays& /*inputs*/, const Arrays& outputs) const { return is_large(outputs); }

  void run(Arrays& inputs, Arrays& outputs) const {
    mx::array& dense = (encodes ? inputs : outputs)[0];
    const int64_t count = static_cast<int64_t>(dense.size()) / size;
    const kernels::StoredRows codes =
        stored_rows((encodes ? outputs : inputs).data(), 2, dense.dtype(), size, bits, size, seed);
    const kernels::StoredRows rows = stored_rows(&dense, 1, dense.dtype(), size, 0, 0);
    const auto convert = [&](int64_t row) {
      if (encodes) return write_row(rows.dense_row(row), codes, row, kernels::simd_target());
      read_row(codes, row, rows.dense_row(row));
    };
    kernels::parallel_for(count, convert, kTogether);
  }
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
  const TurboRows operation{{}, true, size, bits, static_cast<uint32_t>(seed)};
  return outputs_of(kEncode, operation, {rows}, {mx::uint32, mx::float32}, s);
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
  const TurboRows operation{{}, false, given["D"], bits, static_cast<uint32_t>(seed)};
  return outputs_of(kDecode, operation, {words, norms}, {dtype}, s)[0];
}

}  // namespace mlx_h2o
