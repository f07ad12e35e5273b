// Arguments of the C interface made of bytes, for libFuzzer: most fit, some do not. Every call ends
// with a status, and what it returned can be evaluated; the sanitizers see anything else.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "arrays.h"
#include "mlx_h2o/c/h2o.h"

using namespace mlx_h2o_c;

namespace {

constexpr size_t largest = 1 << 14;  // elements of an array

class Input {
 public:
  Input(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}

  // 0 to count - 1; 0 where the bytes have ended.
  int pick(int count) { return at_ == end_ ? 0 : *at_++ % count; }
  template <class T>
  T one_of(const std::vector<T>& choices) {
    return choices[pick(static_cast<int>(choices.size()))];
  }
  // True once in `times`, and never without bytes.
  bool rarely(int times) { return pick(times) == times - 1; }

  float number() {
    constexpr float huge = std::numeric_limits<float>::infinity();
    const int drawn = pick(256);
    switch (drawn) {
      case 255:
        return std::nanf("");
      case 254:
        return huge;
      case 253:
        return -huge;
      case 252:
        return 3e38F;
      case 251:
        return 1e-40F;
      default:
        return static_cast<float>(drawn - 125) / 32;
    }
  }
  int setting(int usual) {
    const std::vector<int> wild = {0, -1, 1, 3, 64, 1 << 20, INT32_MAX, INT32_MIN};
    return rarely(12) ? one_of(wild) : usual;
  }

 private:
  const uint8_t *at_, *end_;
};

const mlx_dtype dtypes[] = {MLX_FLOAT32, MLX_FLOAT16, MLX_BFLOAT16, MLX_INT32,
                            MLX_UINT32,  MLX_BOOL,    MLX_INT64,    MLX_FLOAT64};

// Sizes that go together, and arrays of them; now and then one that does not.
struct Sizes {
  Input& in;
  mlx_stream s;
  int batch = 1 + in.pick(3), heads = 1 + in.pick(3), group = 1 + in.pick(3);
  int rows = 1 + in.pick(70), queries = 1 + (in.rarely(4) ? in.pick(40) : in.pick(3));
  int width = in.one_of<int>({64, 32, 128, 16, 80, 96, 33, 256});
  int value_width = in.rarely(4) ? in.one_of<int>({32, 64, 128, 1}) : width;
  int bits = in.setting(in.one_of<int>({8, 4, 2, 3, 6, 5}));
  int group_size = in.setting(in.one_of<int>({32, 64, 128}));
  mlx_optional_int v_bits = {in.one_of<int>({4, 8, 3}), in.rarely(4)};
  mlx_dtype dtype = in.one_of<mlx_dtype>({MLX_FLOAT32, MLX_FLOAT16, MLX_BFLOAT16});

  Array array(Shape shape, mlx_dtype of) const {
    if (in.rarely(24)) {
      const int what = in.pick(4), axis = in.pick(static_cast<int>(shape.size()));
      if (what == 0) shape[axis] = in.pick(5);
      if (what == 1) shape.erase(shape.begin() + axis);
      if (what == 2) shape.insert(shape.begin() + axis, in.pick(3));
      if (what == 3) of = dtypes[in.pick(std::size(dtypes))];
    }
    size_t count = 1;
    for (const int size : shape) count *= size;
    if (count > largest) {
      std::fill(shape.begin(), shape.end(), 1);
      count = 1;
    }
    // A few drawn numbers, again and again.
    std::vector<float> drawn(1 + in.pick(24)), values(count);
    for (float& value : drawn) value = in.number();
    for (size_t i = 0; i < count; ++i) values[i] = drawn[(i * 7 + i / 13) % drawn.size()];
    const Array found(mlx_array_new_data(values.data(), shape.data(), shape.size(), MLX_FLOAT32));
    if (in.rarely(8) && shape.size() > 1) {  // rows that do not lie as their shape says
      const Array turned = call(mlx_transpose, found, s);
      const Array back = call(mlx_contiguous, turned, false, s);
      return call(mlx_astype, call(mlx_transpose, back, s), of, s);
    }
    return call(mlx_astype, found, of, s);
  }
  Array query_rows() const { return array({batch, heads * group, queries, width}, dtype); }
  Array key_rows(int count) const { return array({batch, heads, count, width}, dtype); }
  Array value_rows(int count) const { return array({batch, heads, count, value_width}, dtype); }
  Array scores() const { return array({batch, heads, rows}, MLX_FLOAT32); }
  Array positions() const {
    const Array counted =
        range(in.rarely(8) ? -5 : 0, in.rarely(8) ? rows - 5 : rows, MLX_INT32, s);
    if (in.rarely(8) || mlx_array_size(counted) != size_t(rows)) {
      return array({batch, heads, rows}, MLX_INT32);
    }
    return broadcast(counted, {batch, heads, rows}, s);
  }
  Array optional(const std::function<Array()>& make) const {
    return in.rarely(3) ? make() : Array();
  }
  Array starts() const {
    return optional([&] { return array({in.rarely(4) ? 1 : batch}, MLX_INT32); });
  }
  Array sinks() const {
    return optional([&] { return array({heads * group}, dtype); });
  }
  Array row_bias() const {
    return optional([&] { return scores(); });
  }
  const char* mask_mode() const { return in.one_of<const char*>({"", "causal", "array", "else"}); }
  Array mask() const {
    return optional([&] {
      const Shape shape = {in.rarely(2) ? 1 : batch, in.rarely(2) ? 1 : heads * group, queries,
                           rows};
      return array(shape, in.rarely(2) ? MLX_BOOL : dtype);
    });
  }
  ArrayVector stored(const Array& rows_, mlx_optional_int of) const {
    if (!in.rarely(2)) return vector_of({rows_});
    ArrayVector parts(mlx_vector_array_new());
    // MLX itself divides by a group of none.
    check(mlx_quantize(parts.out(), rows_, {group_size == 0 ? 64 : group_size, true}, of, "affine",
                       mlx_array{}, s));
    if (in.rarely(24)) return vector_of({items(parts)[0]});
    return parts;
  }
  ArrayVector stored_keys() const { return stored(key_rows(rows), {bits, true}); }
  ArrayVector stored_values() const {
    return stored(value_rows(rows), v_bits.has_value ? v_bits : mlx_optional_int{bits, true});
  }
};

struct Results {
  Array arrays[6];
  ArrayVector vectors[2];

  void evaluate() const {
    for (const Array& one : arrays) {
      if (!one.empty()) mlx_array_eval(one);
    }
    for (const ArrayVector& parts : vectors) {
      if (parts.empty()) continue;
      for (const Array& one : items(parts)) mlx_array_eval(one);
    }
  }
};

int called(Input& in, const Sizes& z, Results& r) {
  const mlx_stream s = z.s;
  const float scale = in.number();
  const double decay = in.number();
  const float sparse = in.rarely(4) ? in.number() : 0;
  auto* a = r.arrays;
  auto* v = r.vectors;
  switch (in.pick(11)) {
    case 0:
      return mlx_h2o_scaled_dot_product_attention_with_scores(
          a[0].out(), a[1].out(), in.rarely(2) ? a[2].out() : nullptr, z.query_rows(),
          z.key_rows(z.rows), z.value_rows(z.rows), scale, z.mask_mode(), z.mask(), z.sinks(),
          z.row_bias(), s);
    case 1: {
      const auto keys = items(z.stored_keys()), values = items(z.stored_values());
      const auto part = [](const std::vector<Array>& parts, size_t i) {
        return mlx_array(parts[std::min(i, parts.size() - 1)]);
      };
      return mlx_h2o_scaled_dot_product_attention_quantized_with_scores(
          a[0].out(), a[1].out(), a[2].out(), in.rarely(2) ? a[3].out() : nullptr, z.query_rows(),
          part(keys, 0), part(keys, 1), part(keys, 2), part(values, 0), part(values, 1),
          part(values, 2), scale, z.bits, z.group_size, z.v_bits, z.mask_mode(), z.mask(),
          z.sinks(), z.row_bias(), sparse, s);
    }
    case 2:
      return mlx_h2o_prefill_scores(
          a[0].out(), z.query_rows(), z.key_rows(z.rows), scale, z.mask_mode(), z.mask(), z.sinks(),
          z.row_bias(), in.one_of<const char*>({"ema", "mass", "last", ""}),
          z.optional([&] { return z.scores(); }), decay, in.setting(8), s);
    case 3:
      return mlx_h2o_accumulate_scores(
          a[0].out(), z.scores(),
          z.array({z.batch, z.heads * z.group, z.queries, z.rows}, MLX_FLOAT32), decay,
          in.rarely(2), s);
    case 4:
      return mlx_h2o_attention_and_accumulate(
          a[0].out(), a[1].out(), z.query_rows(), z.stored_keys(), z.stored_values(), z.scores(),
          scale, in.one_of<const char*>({"ema", "mass", "last", ""}), decay, z.mask_mode(),
          z.mask(), z.sinks(), z.row_bias(), z.bits, z.group_size, z.v_bits, sparse, s);
    case 5:
      return mlx_h2o_key_diversity(a[0].out(), z.key_rows(z.rows), s);
    case 6:
      return mlx_h2o_fold(a[0].out(), a[1].out(), a[2].out(), a[3].out(), a[4].out(),
                          z.key_rows(z.rows), z.value_rows(z.rows), z.scores(), z.scores(),
                          z.scores(), z.array({z.batch, z.heads, z.rows}, MLX_BOOL),
                          z.array({z.batch, z.heads, 1 + in.pick(z.rows)}, MLX_UINT32),
                          in.one_of<double>({0.0, 0.5, 1.0, 2.0}), s);
    case 7:
      return mlx_h2o_quantize_append(v[0].out(), v[1].out(), z.stored_keys(), z.stored_values(),
                                     z.key_rows(z.queries), z.value_rows(z.queries),
                                     z.array({z.batch, z.heads, z.queries}, MLX_UINT32), z.bits,
                                     z.group_size, z.v_bits, s);
    case 8:
      return mlx_h2o_keep_indices(a[0].out(), z.scores(), z.positions(),
                                  in.setting(1 + in.pick(z.rows)), in.setting(in.pick(6)),
                                  z.starts(), s);
    case 9:
      return mlx_h2o_encode_rows(a[0].out(), a[1].out(), z.key_rows(z.rows), z.bits, in.rarely(2),
                                 s);
    default: {
      const auto keys = items(z.stored_keys());
      return mlx_h2o_decode_rows(a[0].out(), keys.front(), keys.back(), z.bits, in.rarely(2), s);
    }
  }
}

struct Stream {
  mlx_stream s = mlx_default_cpu_stream_new();
  ~Stream() { mlx_stream_free(s); }
};

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* /*count*/, char*** /*arguments*/) {
  mlx_set_error_handler(mlx_h2o_keep_error, nullptr, nullptr);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  thread_local const Stream own;
  Input in(data, size);
  mlx_h2o_set_backend(in.one_of<const char*>({"native", "composed"}));
  Results found;
  try {
    const Sizes sizes{in, own.s};
    if (called(in, sizes, found) == 0) {
      found.evaluate();
    } else if (mlx_h2o_last_error()[0] == '\0') {
      std::abort();  // a failure without a word
    }
  } catch (const Reported&) {  // arrays that MLX itself does not make
  }
  return 0;
}
