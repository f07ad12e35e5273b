// Checked arguments, as the back ends receive them. Plain handles are borrowed from the caller.
#pragma once

#include "../../core/include/mlx_h2o/attention_numbers.h"
#include "arrays.h"

namespace mlx_h2o_c {

// How keys are packed, and values; `v_bits` without a value: those have the bits of the keys.
struct Packing {
  int bits;
  int group_size;
  mlx_optional_int v_bits;

  int of_values() const { return v_bits.has_value ? v_bits.value : bits; }
};

// Keys or values [B, Hkv, N, D]: one dense array, what mlx_quantize made of it, or codes of rotated
// rows (docs/design.md).
struct Rows {
  std::vector<Array> parts;  // the array; words, scales and biases; or words and norms
  int bits = 0;              // 0: dense
  int group_size = 0;
  int size = 0;  // D

  bool packed() const { return bits != 0; }
  bool codes() const { return parts.size() == 2; }
  int count() const { return mlx_array_dim(parts[0], 2); }  // N
  // Of new ones.
  mlx_dtype dtype() const { return dtype_of(parts[packed() ? 1 : 0]); }
  Shape shape() const {
    Shape unpacked = shape_of(parts[0]);
    unpacked[3] = size;
    return unpacked;
  }
};

// Codes of keys and of values have each a basis of their own.
enum class Side : bool { keys, values };

using mlx_h2o::AttentionNumbers;

// What every kind of attention takes beside its rows and numbers, as the caller gave it.
struct AttentionArguments {
  const char* mask_mode;
  mlx_array mask_arr;
  mlx_array sinks;     // may be empty
  mlx_array row_bias;  // float32 [B, Hkv, N], may be empty
  mlx_stream stream;
};

// What the parts of a request have in common.
struct AttentionTerms : AttentionNumbers {
  const char* op;
  mlx_array sinks;
  mlx_stream stream;
  int batch, heads, kv_heads, length, rows, head_size, value_size;
  float mask_threshold;  // an additive mask masks at or below it
  bool on_gpu;

  Shape pairs() const { return {batch, heads, length, rows}; }
};

struct AttentionRequest : AttentionTerms {
  Array queries;
  Rows keys;
  Rows values;
  Array mask;      // broadcast to [B, Hq, Lq, N], or empty; of a causal one once it is made
  Array row_bias;  // float32 [B, Hkv, N], or empty

  bool packed() const { return keys.packed() || values.packed(); }
  bool has_codes() const { return keys.codes() || values.codes(); }
};

// Empty where they were not asked for.
struct AttentionResult {
  Array out{}, scores{}, lse{}, skipped{};
};

// Of the N rows of a head `count` are dropped.
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

// Of a step, or, without values, of the queries of a chunk that count.
struct AccumulatingRequest : AttentionRequest {
  mlx_array importance;  // of a chunk it may be empty
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

// Rows of which those that are not kept are folded into others.
struct FoldRequest {
  mlx_array keys;
  mlx_array values;
  mlx_array bias, mass, weights, eligible;  // [B, H, N]
  mlx_array kept;                           // [B, H, K]
  double share;
  mlx_stream stream;
};

// The slots of the rows that change, and these rows.
struct Folded {
  Array into;
  Array keys;
  Array values;
  Array bias;
  Array mass;
};

// Rows that become codes of `bits`.
struct EncodeRequest {
  mlx_array rows;
  int bits;
  Side side;
  mlx_stream stream;
};

// Codes that become rows again, in float32.
struct DecodeRequest {
  Rows rows;
  Side side;
  mlx_stream stream;
};

// Keys and values, and new rows of both for the slots uint32 [B, H, L].
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
