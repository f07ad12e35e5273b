// Checked arguments, as the back ends receive them. Plain handles are borrowed from the caller.
#pragma once

#include "../../core/include/mlx_h2o/attention_numbers.h"
#include "arrays.h"

namespace mlx_h2o_c {

// How keys and values are packed; without `v_bits`, values have the bits of the keys.
struct Packing {
  int bits;
  int group_size;
  mlx_optional_int v_bits;

  int of_values() const { return v_bits.has_value ? v_bits.value : bits; }
};

// Keys or values [B, Hkv, N, D]: one dense array, the arrays of mlx_quantize, or codes of rotated
// rows (docs/design.md).
struct Rows {
  std::vector<Array> parts;  // the array; words, scales and biases; or words and norms
  int bits = 0;              // 0: dense
  int group_size = 0;
  int size = 0;  // D

  bool packed() const { return bits != 0; }
  bool codes() const { return parts.size() == 2; }
  int count() const { return mlx_array_dim(parts[0], 2); }  // N
  // The dtype of the rows before packing.
  mlx_dtype dtype() const { return dtype_of(parts[packed() ? 1 : 0]); }
  Shape shape() const {
    Shape unpacked = shape_of(parts[0]);
    unpacked[3] = size;
    return unpacked;
  }
};

// Codes of keys and codes of values have different bases.
enum class Side : bool { keys, values };

using mlx_h2o::AttentionNumbers;

// The arguments of every kind of attention besides its rows and numbers, as the caller gave them.
struct AttentionArguments {
  const char* mask_mode;
  mlx_array mask_arr;
  mlx_array sinks;     // may be empty
  mlx_array row_bias;  // float32 [B, Hkv, N], may be empty
  mlx_stream stream;
};

// What all parts of a request share.
struct AttentionTerms : AttentionNumbers {
  const char* op;
  mlx_array sinks;
  mlx_stream stream;
  int batch, heads, kv_heads, length, rows, head_size, value_size;
  float mask_threshold;  // an additive mask hides pairs at or below it
  bool on_gpu;

  Shape pairs() const { return {batch, heads, length, rows}; }
};

struct AttentionRequest : AttentionTerms {
  Array queries;
  Rows keys;
  Rows values;
  Array mask;      // broadcast to [B, Hq, Lq, N], or empty; a causal mask once built
  Array row_bias;  // float32 [B, Hkv, N], or empty

  bool packed() const { return keys.packed() || values.packed(); }
  bool has_codes() const { return keys.codes() || values.codes(); }
};

// Arrays that were not requested are empty.
struct AttentionResult {
  Array out{}, scores{}, lse{}, skipped{};
};

// Drops `count` of the N rows of a head.
struct RetentionRequest {
  mlx_array scores;
  mlx_array positions;
  int batch, heads, rows, count;
  int sink_size;
  mlx_array recent_start;  // int32 [] or [B], may be empty
  mlx_stream stream;
};

struct AccumulateRequest {
  mlx_array importance;
  mlx_array scores;
  double decay;
  bool masked;  // off: every score is finite
  mlx_stream stream;
};

// For a step; or, without values, for the scored queries of a chunk.
struct AccumulatingRequest : AttentionRequest {
  mlx_array importance;  // may be empty for a chunk
  bool mass;             // else the moving average
  double decay;
};

struct AttentionAccumulated {
  Array out;
  Array importance;
};

struct KeyDiversityRequest {
  mlx_array keys;
  mlx_stream stream;
};

// Rows; those not kept are folded into others.
struct FoldRequest {
  mlx_array keys;
  mlx_array values;
  mlx_array bias, mass, weights, eligible;  // [B, H, N]
  mlx_array kept;                           // [B, H, K]
  double share;
  mlx_stream stream;
};

// The slots of the changed rows, and their new contents.
struct Folded {
  Array into;
  Array keys;
  Array values;
  Array bias;
  Array mass;
};

// Rows to encode as codes of `bits`.
struct EncodeRequest {
  mlx_array rows;
  int bits;
  Side side;
  mlx_stream stream;
};

// Codes to decode to float32 rows.
struct DecodeRequest {
  Rows rows;
  Side side;
  mlx_stream stream;
};

// Stored keys and values, and new rows of both for the slots uint32 [B, H, L].
struct AppendRequest {
  Rows keys;
  Rows values;
  mlx_array new_keys;
  mlx_array new_values;
  mlx_array slots;
  mlx_stream stream;
};

// The parts of the keys and of the values.
struct Written {
  std::vector<Array> keys;
  std::vector<Array> values;
};

}  // namespace mlx_h2o_c
