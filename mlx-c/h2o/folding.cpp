// The public function of rows that are folded.
#include "backend.h"
#include "boundary.h"
#include "mlx_h2o/c/rows.h"

using namespace mlx_h2o_c;

int mlx_h2o_fold(mlx_array* into, mlx_array* new_keys, mlx_array* new_values, mlx_array* new_bias,
                 mlx_array* new_mass, mlx_array keys, mlx_array values, mlx_array bias,
                 mlx_array mass, mlx_array weights, mlx_array eligible, mlx_array kept,
                 double share, mlx_stream s) {
  const Places places = {{"into", into},
                         {"new_keys", new_keys},
                         {"new_values", new_values},
                         {"new_bias", new_bias},
                         {"new_mass", new_mass}};
  return operation("fold", places, [&](const char* op) {
    check_rows(op, {"keys", keys, "[B, H, N, D]"});
    check_rows(op, {"values", values, "[B, H, N, Dv]"});
    Shape rows = shape_of(keys), others = shape_of(values);
    rows.pop_back();
    others.pop_back();
    expect(rows == others && dtype_of(keys) == dtype_of(values), op, "keys are ", keys,
           " and values ", values, ", expected as many rows of one float dtype.");
    check_array(op, {"bias", bias, "[B, H, N]"}, MLX_FLOAT32, rows);
    check_array(op, {"mass", mass, "[B, H, N]"}, MLX_FLOAT32, rows);
    check_array(op, {"weights", weights, "[B, H, N]"}, MLX_FLOAT32, rows);
    check_array(op, {"eligible", eligible, "[B, H, N]"}, MLX_BOOL, rows);
    check_present(op, {"kept", kept, "[B, H, K]"});
    const Shape stay = shape_of(kept);
    const bool fits = stay.size() == 3 && stay[0] == rows[0] && stay[1] == rows[1] && stay[2] > 0 &&
                      stay[2] < rows[2];
    expect(fits && dtype_of(kept) == MLX_UINT32, op, "kept are ", kept,
           ", expected uint32 [B, H, K] with K from 1 to N - 1 = ", rows[2] - 1, ".");
    expect(share > 0 && share <= 1, op, "share is ", share,
           ", expected a number above 0, at most 1.");
    const Folded found =
        serve(op, &Backend::fold,
              FoldRequest{keys, values, bias, mass, weights, eligible, kept, share, s});
    give(into, found.into);
    give(new_keys, found.keys);
    give(new_values, found.values);
    give(new_bias, found.bias);
    give(new_mass, found.mass);
  });
}
