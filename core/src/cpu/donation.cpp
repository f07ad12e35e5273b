#include "cpu/donation.h"

#include <mlx/backend/common/utils.h>

#include "cpu/array_memory.h"

namespace mx = mlx::core;

namespace mlx_h2o {

void release_sibling_inputs(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  for (const mx::array& output : outputs) {
    if (output.is_tracer()) return;
  }
  for (mx::array& output : outputs) {
    if (&output.inputs() != &inputs) output.inputs().clear();
  }
}

bool take_over(const mx::array& input, mx::array& output) {
  if (input.flags().row_contiguous && mx::is_donatable(input, output)) {
    output.copy_shared_buffer(input);
    return true;
  }
  allocate(output);
  return false;
}

}  // namespace mlx_h2o
