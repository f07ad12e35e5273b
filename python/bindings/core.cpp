// The module mlx_h2o._core: core/ for Python. It shares mlx.core's types through the nanobind
// domain "mlx"; Python-side checks and documentation stand in mlx_h2o.fast.
#include <cstdint>

#include <mlx/mlx.h>
#include <mlx/version.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "mlx_h2o/ops.h"
#include "mlx_h2o/simd.h"
#include "mlx_h2o/threads.h"

namespace mx = mlx::core;
namespace nb = nanobind;
using namespace nb::literals;

#define MLX_H2O_TEXT_OF(value) #value
#define MLX_H2O_TEXT(value) MLX_H2O_TEXT_OF(value)

namespace {

/// One number for all sequences, or an array of one each.
using PerSequence = std::variant<int, mx::array>;

mx::array keep_indices(const mx::array& scores, const mx::array& positions, int keep, int sink_size,
                       const std::optional<PerSequence>& recent_start, mx::StreamOrDevice s) {
  std::optional<mx::array> start;
  if (recent_start) start = std::visit([](const auto& of) { return mx::array(of); }, *recent_start);
  return mlx_h2o::keep_indices(scores, positions, keep, sink_size, start, s);
}

/// Keys or values as they are stored: an array, or the arrays that a packed one has.
using Rows = std::variant<mx::array, std::vector<mx::array>>;

std::vector<mx::array> parts(const Rows& rows) {
  if (const auto* alone = std::get_if<mx::array>(&rows)) return {*alone};
  return std::get<std::vector<mx::array>>(rows);
}

nb::tuple attention(const mx::array& queries, const Rows& keys, const Rows& values,
                    const std::optional<mx::array>& importance, float scale,
                    std::optional<double> decay, bool causal, const std::optional<mx::array>& mask,
                    const std::optional<mx::array>& sinks, float sparse_v_threshold, int bits,
                    int v_bits, int group_size, bool return_scores, bool return_lse,
                    bool return_skipped, const std::optional<mx::array>& row_bias,
                    mx::StreamOrDevice s) {
  const mlx_h2o::AttentionOptions options{
      {scale, causal, sparse_v_threshold, return_scores, return_lse, return_skipped},
      mask,
      sinks,
      importance,
      decay,
      bits,
      v_bits,
      group_size,
      row_bias};
  const auto found = mlx_h2o::attention(queries, parts(keys), parts(values), options, s);
  if (importance) return nb::make_tuple(found[0], found[1]);
  auto next = found.begin();
  const auto given = [&](bool asked) { return asked ? nb::cast(*next++) : nb::none(); };
  nb::object out = given(true), scores = given(return_scores), lse = given(return_lse);
  return nb::make_tuple(out, scores, lse, given(return_skipped));
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "Native CPU operations of mlx_h2o on MLX arrays; use mlx_h2o.fast.";
  m.attr("built_for_mlx") = MLX_H2O_TEXT(MLX_VERSION_MAJOR) "." MLX_H2O_TEXT(
      MLX_VERSION_MINOR) "." MLX_H2O_TEXT(MLX_VERSION_PATCH);

  m.def("simd_target", &mlx_h2o::simd_target,
        "The SIMD target in use: scalar, avx2, avx512 or neon. Raises ValueError where "
        "MLX_H2O_SIMD names none that this machine runs.");
  m.def("simd_targets", &mlx_h2o::simd_targets,
        "Every SIMD target that this machine runs, the best first.");
  m.def("threads", &mlx_h2o::threads,
        "The number of threads in use. Raises ValueError where MLX_H2O_THREADS is none.");
  m.def("set_threads", &mlx_h2o::set_threads, "count"_a,
        "Sets the number of threads; 0 is the default.");
  m.def(
      "buffer_address",
      [](const mx::array& array) -> uintptr_t {
        if (array.status() == mx::array::Status::unscheduled) return 0;
        return reinterpret_cast<uintptr_t>(array.buffer().ptr());
      },
      "array"_a,
      "The address of the array's buffer, which is known as soon as its computation is under way, "
      "or 0 before. Waits for nothing and holds nothing: to see whether memory is reused.");

  m.def("keep_indices", &keep_indices, "scores"_a, "positions"_a, nb::kw_only(), "keep"_a,
        "sink_size"_a = 0, "recent_start"_a = nb::none(), "stream"_a = nb::none(),
        "Slots of the rows to keep, ascending; see mlx_h2o.fast.");

  m.def("scaled_dot_product_attention", &mlx_h2o::scaled_dot_product_attention, "queries"_a,
        "keys"_a, "values"_a, nb::kw_only(), "scale"_a, "causal"_a = false, "mask"_a = nb::none(),
        "sinks"_a = nb::none(), "stream"_a = nb::none(), "The output of attention alone.");
  m.def("attention", &attention, "queries"_a, "keys"_a, "values"_a, "importance"_a = nb::none(),
        nb::kw_only(), "scale"_a, "decay"_a = nb::none(), "causal"_a = false, "mask"_a = nb::none(),
        "sinks"_a = nb::none(), "sparse_v_threshold"_a = 0.0f, "bits"_a = 8, "v_bits"_a = 8,
        "group_size"_a = 64, "return_scores"_a = false, "return_lse"_a = false,
        "return_skipped"_a = false, "row_bias"_a = nb::none(), "stream"_a = nb::none(),
        "Keys and values are an array each, or the arrays of packed rows. (out, scores, lse, "
        "skipped), with None for what is not asked for. With an importance (out, importance), of "
        "the mass where decay is None; see mlx_h2o.fast.");
  m.def("plain_read", &mlx_h2o::plain_read, "arrays"_a, nb::call_guard<nb::gil_scoped_release>(),
        "Reads all of the memory of evaluated arrays: what benchmarks compare with.");
  m.def(
      "accumulate_scores",
      [](const mx::array& importance, const mx::array& scores, double decay, bool,
         mx::StreamOrDevice s) { return mlx_h2o::accumulate_scores(importance, scores, decay, s); },
      "importance"_a, "scores"_a, nb::kw_only(), "decay"_a, "masked"_a = true,
      "stream"_a = nb::none(), "The new importance; `masked` says nothing here.");
  m.def("prefill_scores", &mlx_h2o::prefill_scores, "queries"_a, "keys"_a, nb::kw_only(), "scale"_a,
        "causal"_a = false, "mask"_a = nb::none(), "sinks"_a = nb::none(), "decay"_a = nb::none(),
        "importance"_a = nb::none(), "row_bias"_a = nb::none(), "stream"_a = nb::none(),
        "float32 [B, Hkv, N], the mass where decay is None; see mlx_h2o.fast.");
  m.def("key_diversity", &mlx_h2o::key_diversity, "keys"_a, nb::kw_only(), "stream"_a = nb::none(),
        "float32 [B, H, N]; see mlx_h2o.fast.");
  m.def("fold", &mlx_h2o::fold, "keys"_a, "values"_a, "bias"_a, "mass"_a, "weights"_a, "eligible"_a,
        "kept"_a, nb::kw_only(), "share"_a = 1.0, "stream"_a = nb::none(),
        "Slots, keys, values, bias and mass of the rows that change.");
  m.def("append_rows", &mlx_h2o::append_rows, "buffers"_a, "rows"_a, "start"_a, nb::kw_only(),
        "stream"_a = nb::none());
  m.def("encode_rows", &mlx_h2o::encode_rows, "rows"_a, "bits"_a, "seed"_a, nb::kw_only(),
        "stream"_a = nb::none());
  m.def("decode_rows", &mlx_h2o::decode_rows, "words"_a, "norms"_a, "bits"_a, "seed"_a, "dtype"_a,
        nb::kw_only(), "stream"_a = nb::none());
  m.def("compact_rows", &mlx_h2o::compact_rows, "buffer"_a, "kept"_a, "sequences"_a, "start"_a = 0,
        "tail"_a = 0, nb::kw_only(), "stream"_a = nb::none());
  m.def("put_rows", &mlx_h2o::put_rows, "buffer"_a, "slots"_a, "rows"_a, nb::kw_only(),
        "stream"_a = nb::none());
  m.def(
      "reserved_rows",
      [](const std::vector<int>& shape, mx::Dtype dtype) {
        return mlx_h2o::reserved_rows(mx::Shape(shape.begin(), shape.end()), dtype);
      },
      "shape"_a, "dtype"_a);
  m.def("discard_rows", &mlx_h2o::discard_rows, "buffer"_a, "from_slot"_a);
  m.def("committed_bytes", &mlx_h2o::committed_bytes, "buffer"_a);
  m.def("commits_pages", &mlx_h2o::commits_pages);
  m.def("merge_segments", &mlx_h2o::merge_segments, "outs"_a, "lses"_a, nb::kw_only(),
        "stream"_a = nb::none());
  m.def("segment_rows", &mlx_h2o::segment_rows, "tiers"_a, "newest"_a, "bits"_a, "group_size"_a,
        "slots"_a = nb::none(), "to"_a = 0, nb::kw_only(), "stream"_a = nb::none());
  m.def("quantize_append", &mlx_h2o::quantize_append, "keys"_a, "values"_a, "new_keys"_a,
        "new_values"_a, "slots"_a, nb::kw_only(), "bits"_a, "group_size"_a, "v_bits"_a,
        "stream"_a = nb::none(),
        "Words, scales and biases of the keys, then of the values; see mlx_h2o.fast.");
}
