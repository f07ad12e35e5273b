// Generated from metal/operations.toml by tools/package_kernels.py; do not edit.
// clang-format off
#pragma once

#include <cstddef>
#include <iterator>
#include <limits>

namespace mlx_h2o::table {

enum class Kind { array, mask, rows, number, integer, per_sequence, one_of };
enum class Relation { divides, at, below };

inline constexpr double none = std::numeric_limits<double>::quiet_NaN();

struct Bounds {
  double least, above, most, below;
};

// metal/operations.toml explains them. Sizes are numbers of names of the operation; `most` is that
// of a size which bounds an integer, or -1.
struct Argument {
  const char* name;
  Kind kind;
  const char* dtype;
  const char* layout;
  int sizes[4];
  int rank;
  const char* scales;
  bool optional;
  Bounds bounds;
  int most;
  const char* values;
};

// Of two sizes, or of one and a limit.
struct Rule {
  int first;
  Relation relation;
  int second, limit;
};

struct Operation {
  const char* name;
  const Argument* arguments;
  size_t count;
  const char* sizes[8];
  Rule rules[2];
  size_t rule_count;
};

inline constexpr Argument scaled_dot_product_attention_with_scores_arguments[] = {
    {"queries", Kind::array, "T", "[B, Hq, Lq, D]", {0, 1, 2, 3}, 4, "", false, {none, none, none, none}, -1, ""},
    {"keys", Kind::array, "T", "[B, Hkv, N, D]", {0, 4, 5, 3}, 4, "", false, {none, none, none, none}, -1, ""},
    {"values", Kind::array, "T", "[B, Hkv, N, Dv]", {0, 4, 5, 6}, 4, "", false, {none, none, none, none}, -1, ""},
    {"scale", Kind::number, "", "", {}, 0, "", false, {none, none, none, none}, -1, ""},
    {"mask", Kind::mask, "bool|F", "[B, Hq, Lq, N]", {0, 1, 2, 5}, 4, "", true, {none, none, none, none}, -1, ""},
    {"sinks", Kind::array, "F", "[Hq]", {1}, 1, "", true, {none, none, none, none}, -1, ""},
    {"row_bias", Kind::array, "float32", "[B, Hkv, N]", {0, 4, 5}, 3, "", true, {none, none, none, none}, -1, ""},
};
inline constexpr Argument scaled_dot_product_attention_quantized_with_scores_arguments[] = {
    {"queries", Kind::array, "T", "[B, Hq, Lq, D]", {0, 1, 2, 3}, 4, "", false, {none, none, none, none}, -1, ""},
    {"keys", Kind::rows, "T", "[B, Hkv, N, D]", {0, 4, 5, 3}, 4, "S", false, {none, none, none, none}, -1, ""},
    {"values", Kind::rows, "T", "[B, Hkv, N, Dv]", {0, 4, 5, 6}, 4, "S", false, {none, none, none, none}, -1, ""},
    {"scale", Kind::number, "", "", {}, 0, "", false, {none, none, none, none}, -1, ""},
    {"bits", Kind::one_of, "", "", {}, 0, "", true, {none, none, none, none}, -1, "2, 3, 4, 5, 6, 8"},
    {"group_size", Kind::one_of, "", "", {}, 0, "", true, {none, none, none, none}, -1, "32, 64, 128"},
    {"v_bits", Kind::one_of, "", "", {}, 0, "", true, {none, none, none, none}, -1, "2, 3, 4, 5, 6, 8"},
    {"mask", Kind::mask, "bool|F", "[B, Hq, Lq, N]", {0, 1, 2, 5}, 4, "", true, {none, none, none, none}, -1, ""},
    {"sinks", Kind::array, "F", "[Hq]", {1}, 1, "", true, {none, none, none, none}, -1, ""},
    {"row_bias", Kind::array, "float32", "[B, Hkv, N]", {0, 4, 5}, 3, "", true, {none, none, none, none}, -1, ""},
    {"sparse_v_threshold", Kind::number, "", "", {}, 0, "", true, {0.0, none, none, 1.0}, -1, ""},
};
inline constexpr Argument attention_and_accumulate_arguments[] = {
    {"queries", Kind::array, "T", "[B, Hq, Lq, D]", {0, 1, 2, 3}, 4, "", false, {none, none, none, none}, -1, ""},
    {"keys", Kind::rows, "T", "[B, Hkv, N, D]", {0, 4, 5, 3}, 4, "S", false, {none, none, none, none}, -1, ""},
    {"values", Kind::rows, "T", "[B, Hkv, N, Dv]", {0, 4, 5, 6}, 4, "S", false, {none, none, none, none}, -1, ""},
    {"importance", Kind::array, "float32", "[B, Hkv, N]", {0, 4, 5}, 3, "", false, {none, none, none, none}, -1, ""},
    {"scale", Kind::number, "", "", {}, 0, "", false, {none, none, none, none}, -1, ""},
    {"kind", Kind::one_of, "", "", {}, 0, "", true, {none, none, none, none}, -1, "'ema', 'mass'"},
    {"decay", Kind::number, "", "", {}, 0, "", true, {0.0, none, none, 1.0}, -1, ""},
    {"mask", Kind::mask, "bool|F", "[B, Hq, Lq, N]", {0, 1, 2, 5}, 4, "", true, {none, none, none, none}, -1, ""},
    {"sinks", Kind::array, "F", "[Hq]", {1}, 1, "", true, {none, none, none, none}, -1, ""},
    {"row_bias", Kind::array, "float32", "[B, Hkv, N]", {0, 4, 5}, 3, "", true, {none, none, none, none}, -1, ""},
    {"bits", Kind::one_of, "", "", {}, 0, "", true, {none, none, none, none}, -1, "2, 3, 4, 5, 6, 8"},
    {"group_size", Kind::one_of, "", "", {}, 0, "", true, {none, none, none, none}, -1, "32, 64, 128"},
    {"v_bits", Kind::one_of, "", "", {}, 0, "", true, {none, none, none, none}, -1, "2, 3, 4, 5, 6, 8"},
    {"sparse_v_threshold", Kind::number, "", "", {}, 0, "", true, {0.0, none, none, 1.0}, -1, ""},
};
inline constexpr Argument prefill_scores_arguments[] = {
    {"queries", Kind::array, "T", "[B, Hq, Lq, D]", {0, 1, 2, 3}, 4, "", false, {none, none, none, none}, -1, ""},
    {"keys", Kind::array, "T", "[B, Hkv, N, D]", {0, 4, 5, 3}, 4, "", false, {none, none, none, none}, -1, ""},
    {"scale", Kind::number, "", "", {}, 0, "", false, {none, none, none, none}, -1, ""},
    {"mask", Kind::mask, "bool|F", "[B, Hq, Lq, N]", {0, 1, 2, 5}, 4, "", true, {none, none, none, none}, -1, ""},
    {"sinks", Kind::array, "F", "[Hq]", {1}, 1, "", true, {none, none, none, none}, -1, ""},
    {"row_bias", Kind::array, "float32", "[B, Hkv, N]", {0, 4, 5}, 3, "", true, {none, none, none, none}, -1, ""},
    {"kind", Kind::one_of, "", "", {}, 0, "", true, {none, none, none, none}, -1, "'ema', 'mass'"},
    {"importance", Kind::array, "float32", "[B, Hkv, N]", {0, 4, 5}, 3, "", true, {none, none, none, none}, -1, ""},
    {"decay", Kind::number, "", "", {}, 0, "", true, {0.0, none, none, 1.0}, -1, ""},
    {"queries", Kind::integer, "", "", {}, 0, "", true, {1.0, none, none, none}, -1, ""},
};
inline constexpr Argument accumulate_scores_arguments[] = {
    {"importance", Kind::array, "float32", "[B, H, N]", {0, 1, 2}, 3, "", false, {none, none, none, none}, -1, ""},
    {"scores", Kind::array, "float32", "[B, Hq, Lq, N]", {0, 3, 4, 2}, 4, "", false, {none, none, none, none}, -1, ""},
    {"decay", Kind::number, "", "", {}, 0, "", false, {0.0, none, none, 1.0}, -1, ""},
};
inline constexpr Argument keep_indices_arguments[] = {
    {"scores", Kind::array, "float32", "[B, H, N]", {0, 1, 2}, 3, "", false, {none, none, none, none}, -1, ""},
    {"positions", Kind::array, "int32", "[B, H, N]", {0, 1, 2}, 3, "", false, {none, none, none, none}, -1, ""},
    {"keep", Kind::integer, "", "", {}, 0, "", false, {1.0, none, none, none}, 2, ""},
    {"sink_size", Kind::integer, "", "", {}, 0, "", true, {0.0, none, none, none}, -1, ""},
    {"recent_start", Kind::per_sequence, "int32", "", {}, 0, "", true, {none, none, none, none}, -1, ""},
};
inline constexpr Argument key_diversity_arguments[] = {
    {"keys", Kind::array, "T", "[B, H, N, D]", {0, 1, 2, 3}, 4, "", false, {none, none, none, none}, -1, ""},
};
inline constexpr Argument quantize_append_arguments[] = {
    {"new_keys", Kind::array, "T", "[B, H, L, D]", {0, 1, 2, 3}, 4, "", false, {none, none, none, none}, -1, ""},
    {"new_values", Kind::array, "U", "[B, H, L, Dv]", {0, 1, 2, 4}, 4, "", false, {none, none, none, none}, -1, ""},
    {"keys", Kind::rows, "T", "[B, H, N, D]", {0, 1, 5, 3}, 4, "T", false, {none, none, none, none}, -1, ""},
    {"values", Kind::rows, "U", "[B, H, N, Dv]", {0, 1, 5, 4}, 4, "U", false, {none, none, none, none}, -1, ""},
    {"slots", Kind::array, "uint32", "[B, H, L]", {0, 1, 2}, 3, "", false, {none, none, none, none}, -1, ""},
    {"bits", Kind::one_of, "", "", {}, 0, "", true, {none, none, none, none}, -1, "2, 3, 4, 5, 6, 8"},
    {"group_size", Kind::one_of, "", "", {}, 0, "", true, {none, none, none, none}, -1, "32, 64, 128"},
    {"v_bits", Kind::one_of, "", "", {}, 0, "", true, {none, none, none, none}, -1, "2, 3, 4, 5, 6, 8"},
};
inline constexpr Argument fold_arguments[] = {
    {"keys", Kind::array, "T", "[B, H, N, D]", {0, 1, 2, 3}, 4, "", false, {none, none, none, none}, -1, ""},
    {"values", Kind::array, "T", "[B, H, N, Dv]", {0, 1, 2, 4}, 4, "", false, {none, none, none, none}, -1, ""},
    {"bias", Kind::array, "float32", "[B, H, N]", {0, 1, 2}, 3, "", false, {none, none, none, none}, -1, ""},
    {"mass", Kind::array, "float32", "[B, H, N]", {0, 1, 2}, 3, "", false, {none, none, none, none}, -1, ""},
    {"weights", Kind::array, "float32", "[B, H, N]", {0, 1, 2}, 3, "", false, {none, none, none, none}, -1, ""},
    {"eligible", Kind::array, "bool", "[B, H, N]", {0, 1, 2}, 3, "", false, {none, none, none, none}, -1, ""},
    {"kept", Kind::array, "uint32", "[B, H, K]", {0, 1, 5}, 3, "", false, {none, none, none, none}, -1, ""},
    {"share", Kind::number, "", "", {}, 0, "", true, {none, 0.0, 1.0, none}, -1, ""},
};
inline constexpr Argument encode_rows_arguments[] = {
    {"rows", Kind::array, "T", "[B, H, N, D]", {0, 1, 2, 3}, 4, "", false, {none, none, none, none}, -1, ""},
    {"bits", Kind::one_of, "", "", {}, 0, "", false, {none, none, none, none}, -1, "2, 3, 4"},
};
inline constexpr Argument decode_rows_arguments[] = {
    {"rows", Kind::rows, "T", "[B, H, N, D]", {0, 1, 2, 3}, 4, "S", false, {none, none, none, none}, -1, ""},
    {"bits", Kind::one_of, "", "", {}, 0, "", false, {none, none, none, none}, -1, "2, 3, 4"},
};
inline constexpr Operation operations[] = {
    {"scaled_dot_product_attention_with_scores", scaled_dot_product_attention_with_scores_arguments, std::size(scaled_dot_product_attention_with_scores_arguments), {"B", "Hq", "Lq", "D", "Hkv", "N", "Dv"}, {{4, Relation::divides, 1, 0}}, 1},
    {"scaled_dot_product_attention_quantized_with_scores", scaled_dot_product_attention_quantized_with_scores_arguments, std::size(scaled_dot_product_attention_quantized_with_scores_arguments), {"B", "Hq", "Lq", "D", "Hkv", "N", "Dv"}, {{4, Relation::divides, 1, 0}}, 1},
    {"attention_and_accumulate", attention_and_accumulate_arguments, std::size(attention_and_accumulate_arguments), {"B", "Hq", "Lq", "D", "Hkv", "N", "Dv"}, {{4, Relation::divides, 1, 0}, {2, Relation::at, -1, 128}}, 2},
    {"prefill_scores", prefill_scores_arguments, std::size(prefill_scores_arguments), {"B", "Hq", "Lq", "D", "Hkv", "N"}, {{4, Relation::divides, 1, 0}}, 1},
    {"accumulate_scores", accumulate_scores_arguments, std::size(accumulate_scores_arguments), {"B", "H", "N", "Hq", "Lq"}, {{1, Relation::divides, 3, 0}, {4, Relation::at, -1, 128}}, 2},
    {"keep_indices", keep_indices_arguments, std::size(keep_indices_arguments), {"B", "H", "N"}, {}, 0},
    {"key_diversity", key_diversity_arguments, std::size(key_diversity_arguments), {"B", "H", "N", "D"}, {}, 0},
    {"quantize_append", quantize_append_arguments, std::size(quantize_append_arguments), {"B", "H", "L", "D", "Dv", "N"}, {}, 0},
    {"fold", fold_arguments, std::size(fold_arguments), {"B", "H", "N", "D", "Dv", "K"}, {{5, Relation::below, 2, 0}}, 1},
    {"encode_rows", encode_rows_arguments, std::size(encode_rows_arguments), {"B", "H", "N", "D"}, {}, 0},
    {"decode_rows", decode_rows_arguments, std::size(decode_rows_arguments), {"B", "H", "N", "D"}, {}, 0},
};

}  // namespace mlx_h2o::table
