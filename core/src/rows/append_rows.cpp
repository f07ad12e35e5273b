// Appends rows in one call: a graph of MLX's own operations, built without Python in between,
// because the time to build it counts for every layer and token.
#include <vector>

#include <mlx/ops.h>

#include "cpu/checks.h"
#include "mlx_h2o/ops.h"

namespace mx = mlx::core;

namespace mlx_h2o {

std::vector<mx::array> append_rows(const std::vector<mx::array>& buffers,
                                   const std::vector<mx::array>& rows, int start,
                                   mx::StreamOrDevice s) {
  constexpr const char* kAppendRows = "append_rows";
  if (buffers.size() != rows.size()) {
    fail(kAppendRows, "found ", buffers.size(), " buffers and ", rows.size(),
         " arrays of rows, expected as many of both.");
  }
  std::vector<mx::array> found;
  found.reserve(2 * buffers.size());
  for (size_t i = 0; i < buffers.size(); ++i) {
    check_dimensions(kAppendRows, "buffer", buffers[i], 4, "[B, H, C, width]");
    check_dimensions(kAppendRows, "rows", rows[i], 4, "[B, H, L, width]");
    mx::Shape stop = buffers[i].shape();
    if (start < 0 || rows[i].shape(2) > stop[2] - start) {
      fail(kAppendRows, "found ", rows[i].shape(2), " rows from slot ", start,
           " on for a buffer of ", stop[2], ", expected them within it.");
    }
    stop[2] = start + rows[i].shape(2);
    found.push_back(mx::slice_update(buffers[i], rows[i], {0, 0, start, 0}, stop, s));
  }
  for (size_t i = 0; i < buffers.size(); ++i) {
    mx::Shape stop = buffers[i].shape();
    stop[2] = start + rows[i].shape(2);
    found.push_back(mx::slice(found[i], {0, 0, 0, 0}, stop, s));
  }
  return found;
}

}  // namespace mlx_h2o
