// The public functions between rows and their codes.
#include "backend.h"
#include "boundary.h"
#include "codes.h"
#include "mlx_h2o/c/rows.h"
#include "validate.h"

using namespace mlx_h2o_c;

namespace {

Side side_of(bool of_values) { return of_values ? Side::values : Side::keys; }

}  // namespace

int mlx_h2o_encode_rows(mlx_array* words, mlx_array* norms, mlx_array rows, int bits,
                        bool of_values, mlx_stream s) {
  return operation("encode_rows", {{"words", words}, {"norms", norms}}, [&](const char* op) {
    check_rows(op, {"rows", rows, "[B, H, N, D]"});
    const int size = mlx_array_dim(rows, 3);
    expect(bits >= 2 && bits <= 4 && codes_fit(size), op, "rows have ", size,
           " elements and codes of ", bits,
           " bits, expected a power of two from 32 to 1024, and 2, 3 or 4 bits.");
    const std::vector<Array> found =
        serve(op, &Backend::encode_rows, EncodeRequest{rows, bits, side_of(of_values), s});
    give(words, found[0]);
    give(norms, found[1]);
  });
}

int mlx_h2o_decode_rows(mlx_array* res, mlx_array words, mlx_array norms, int bits, bool of_values,
                        mlx_stream s) {
  return operation("decode_rows", {{"res", res}}, [&](const char* op) {
    check_present(op, {"row norms", norms, "[B, H, N, 1]"});
    Rows rows = coded_rows(op, "row", words, norms, bits);
    give(res,
         serve(op, &Backend::decode_rows, DecodeRequest{std::move(rows), side_of(of_values), s}));
  });
}
