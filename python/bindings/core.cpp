// The module mlx_h2o._core: core/ for Python. It shares mlx.core's types through the nanobind
// domain "mlx"; Python-side checks and documentation stand in mlx_h2o.fast.
#include <mlx/mlx.h>
#include <mlx/version.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "mlx_h2o/ops.h"
#include "mlx_h2o/simd.h"

namespace mx = mlx::core;
namespace nb = nanobind;
using namespace nb::literals;

#define MLX_H2O_TEXT_OF(value) #value
#define MLX_H2O_TEXT(value) MLX_H2O_TEXT_OF(value)

NB_MODULE(_core, m) {
  m.doc() = "Native CPU operations of mlx_h2o on MLX arrays; use mlx_h2o.fast.";
  m.attr("built_for_mlx") = MLX_H2O_TEXT(MLX_VERSION_MAJOR) "." MLX_H2O_TEXT(
      MLX_VERSION_MINOR) "." MLX_H2O_TEXT(MLX_VERSION_PATCH);

  m.def("simd_target", &mlx_h2o::simd_target,
        "The SIMD target in use: scalar, avx2, avx512 or neon. Raises ValueError where "
        "MLX_H2O_SIMD names none that this machine runs.");
  m.def("simd_targets", &mlx_h2o::simd_targets,
        "Every SIMD target that this machine runs, the best first.");
  m.def(
      "ndim", [](const mx::array& array) { return array.ndim(); }, "array"_a,
      "The number of axes: a probe that the module and mlx.core know the same array type.");

  m.def("scaled_dot_product_attention_with_scores",
        &mlx_h2o::scaled_dot_product_attention_with_scores, "queries"_a, "keys"_a, "values"_a,
        nb::kw_only(), "scale"_a, "causal"_a = false, "mask"_a = nb::none(), "sinks"_a = nb::none(),
        "return_lse"_a = false, "stream"_a = nb::none(),
        "[out, scores] or, with return_lse, [out, scores, lse]; see mlx_h2o.fast.");
  m.def("keep_indices", &mlx_h2o::keep_indices, "scores"_a, "positions"_a, nb::kw_only(), "keep"_a,
        "sink_size"_a = 0, "recent_start"_a = nb::none(), "stream"_a = nb::none(),
        "Slots of the rows to keep, ascending; see mlx_h2o.fast.");
  m.def("evict_indices", &mlx_h2o::evict_indices, "scores"_a, "positions"_a, nb::kw_only(),
        "count"_a = 1, "sink_size"_a = 0, "recent_start"_a = nb::none(), "stream"_a = nb::none(),
        "Slots of the rows to drop, worst first; see mlx_h2o.fast.");
}
