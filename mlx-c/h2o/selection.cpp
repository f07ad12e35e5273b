// The public function that selects the rows that stay.
#include "mlx_h2o/c/selection.h"

#include "backend.h"
#include "boundary.h"

using namespace mlx_h2o_c;

int mlx_h2o_keep_indices(mlx_array* res, mlx_array scores, mlx_array positions, int keep,
                         int sink_size, mlx_array recent_start, mlx_stream s) {
  return operation("keep_indices", {{"res", res}}, [&](const char* op) {
    Arguments given(op);
    given.array(found(scores));
    given.array(found(positions));
    given.integer("keep", keep);
    given.integer("sink_size", sink_size);
    if (recent_start.ctx != nullptr) given.per_sequence("recent_start", found(recent_start));
    give(res, serve(op, &Backend::keep_indices,
                    RetentionRequest{scores, positions, given["B"], given["H"], given["N"],
                                     given["N"] - keep, sink_size, recent_start, s}));
  });
}
