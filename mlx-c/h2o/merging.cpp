// The public function of rows that merge.
#include "backend.h"
#include "boundary.h"
#include "mlx_h2o/c/rows.h"

using namespace mlx_h2o_c;

int mlx_h2o_mergers(mlx_array* kept, mlx_array* into, mlx_array* new_keys, mlx_array* new_values,
                    mlx_array* new_bias, mlx_array* new_positions, mlx_array keys, mlx_array values,
                    mlx_array bias, mlx_array positions, int keep, int sink_size,
                    mlx_array recent_start, bool shared, mlx_stream s) {
  const Places places = {{"kept", kept},         {"into", into},
                         {"new_keys", new_keys}, {"new_values", new_values},
                         {"new_bias", new_bias}, {"new_positions", new_positions}};
  return operation("mergers", places, [&](const char* op) {
    check_rows(op, {"keys", keys, "[B, H, N, D]"});
    check_rows(op, {"values", values, "[B, H, N, Dv]"});
    Shape rows = shape_of(keys), others = shape_of(values);
    rows.pop_back();
    others.pop_back();
    expect(rows == others && dtype_of(keys) == dtype_of(values), op, "keys are ", keys,
           " and values ", values, ", expected as many rows of one float dtype.");
    check_array(op, {"bias", bias, "[B, H, N]"}, MLX_FLOAT32, rows);
    check_array(op, {"positions", positions, "[B, H, N]"}, MLX_INT32, rows);
    expect(keep >= 1 && keep < rows[2], op, "keep is ", keep,
           ", expected 1 to N - 1 = ", rows[2] - 1, ".");
    check_zones(op, sink_size, recent_start, rows[0]);
    const Array beyond = integer(1 << 30);  // every position
    const mlx_array start = recent_start.ctx == nullptr ? mlx_array(beyond) : recent_start;
    const Merged found =
        serve(op, &Backend::mergers,
              MergeRequest{keys, values, bias, positions, keep, sink_size, start, shared, s});
    give(kept, found.kept);
    give(into, found.into);
    give(new_keys, found.keys);
    give(new_values, found.values);
    give(new_bias, found.bias);
    give(new_positions, found.positions);
  });
}
