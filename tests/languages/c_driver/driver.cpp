// Every function of the C interface, with right and with wrong arguments, on two threads at once:
// a program for LeakSanitizer, which sees what is still held when it ends. Status 0: all is well.
//
// With "leak" as its argument it loses an array, which has to be noticed.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>

#include "arrays.h"
#include "mlx_h2o/c/h2o.h"

using namespace mlx_h2o_c;

namespace {

constexpr int heads = 2, rows = 16, size = 64, group = 64;
constexpr mlx_optional_int none = {0, false};

[[noreturn]] void stop(const char* what) {
  std::fprintf(stderr, "driver: %s; last error: %s\n", what, mlx_h2o_last_error());
  std::exit(1);
}

void succeeds(int status, const char* what) {
  if (status != 0) {
    stop(what);
  }
}

// The call has failed, and its thread can read what it said.
void fails(int status, const std::string& text) {
  if (status == 0 || text != mlx_h2o_last_error()) {
    stop(text.c_str());
  }
}

struct Thread {
  Array nothing;
  mlx_stream s = mlx_default_cpu_stream_new();
  Array queries = values({1, heads, 1, size}, 0.5F), keys = values({1, heads, rows, size}, 0.25F);
  Array importance = values({1, heads, rows}, 0.125F), bias = values({1, heads, rows}, 0.5F);
  Array positions = broadcast(range(0, rows, MLX_INT32, s), {1, heads, rows}, s);
  Array new_row = values({1, heads, 1, size}, 0.75F);
  Array next = integer(rows), each = broadcast(integer(12), {1}, s);  // for all, or one each
  Array slots = broadcast(scalar(uint32_t{3}, MLX_UINT32), {1, heads, 1}, s);
  ArrayVector dense = vector_of({keys}), packed = quantized(keys);

  ~Thread() { mlx_stream_free(s); }

  Array values(const std::vector<int>& shape, float step) const {
    Array counted = range(0, shape[1] * shape[2] * (shape.size() > 3 ? shape[3] : 1), MLX_INT32, s);
    const Array wave = call(mlx_sin, call(mlx_multiply, counted, number(step), s), s);
    return call(mlx_reshape, wave, shape.data(), shape.size(), s);
  }

  ArrayVector quantized(mlx_array dense_rows) const {
    ArrayVector parts(mlx_vector_array_new());
    check(
        mlx_quantize(parts.out(), dense_rows, {group, true}, {8, true}, "affine", mlx_array{}, s));
    return parts;
  }

  void attention() const {
    Array out, scores, lse, skipped;
    succeeds(mlx_h2o_scaled_dot_product_attention_with_scores(out.out(), scores.out(), lse.out(),
                                                              queries, keys, keys, 0.125F, "causal",
                                                              nothing, nothing, bias, s),
             "attention with scores");
    const std::vector<Array> parts = items(packed);
    const mlx_array words = parts[0], scales = parts[1], biases = parts[2];
    succeeds(
        mlx_h2o_scaled_dot_product_attention_quantized_with_scores(
            out.out(), scores.out(), lse.out(), skipped.out(), queries, words, scales, biases,
            words, scales, biases, 0.125F, 8, group, none, "", nothing, nothing, bias, 1e-3F, s),
        "quantised attention");
    for (const Array* made : {&out, &scores, &lse, &skipped}) {
      check(mlx_array_eval(*made));
    }
    for (const char* kind : {"ema", "mass"}) {
      Array result;
      succeeds(mlx_h2o_prefill_scores(result.out(), keys, keys, 0.125F, "causal", nothing, nothing,
                                      bias, kind, nothing, 0.5, 8, s),
               "prefill scores");
      check(mlx_array_eval(result));
    }
  }

  void rows_of_a_cache() const {
    Array out, average, diversity;
    ArrayVector new_keys, new_values;
    for (const ArrayVector* stored : {&dense, &packed}) {
      for (const char* kind : {"ema", "mass"}) {
        succeeds(mlx_h2o_attention_and_accumulate(out.out(), average.out(), queries, *stored,
                                                  *stored, importance, 0.125F, kind, 0.5, "",
                                                  nothing, nothing, bias, 8, group, none, 0, s),
                 "attention and accumulate");
        check(mlx_array_eval(out));
      }
    }
    succeeds(mlx_h2o_quantize_append(new_keys.out(), new_values.out(), packed, packed, new_row,
                                     new_row, slots, 8, group, none, s),
             "quantize append");
    check(mlx_array_eval(items(new_keys)[0]));
    Array words, norms, decoded;
    succeeds(mlx_h2o_encode_rows(words.out(), norms.out(), keys, 3, false, s), "encode rows");
    succeeds(mlx_h2o_decode_rows(decoded.out(), words, norms, 3, false, s), "decode rows");
    check(mlx_array_eval(decoded));
    const ArrayVector codes = vector_of({words, norms});
    succeeds(mlx_h2o_quantize_append(new_keys.out(), new_values.out(), codes, dense, new_row,
                                     new_row, slots, 3, group, none, s),
             "quantize append of codes");
    check(mlx_array_eval(items(new_keys)[0]));
    Array scores, lse;
    check(mlx_h2o_scaled_dot_product_attention_with_scores(out.out(), scores.out(), lse.out(),
                                                           queries, keys, keys, 1, "", nothing,
                                                           nothing, nothing, s));
    succeeds(mlx_h2o_accumulate_scores(average.out(), importance, scores, 0.5, true, s),
             "accumulate scores");
    succeeds(mlx_h2o_key_diversity(diversity.out(), keys, s), "key diversity");
    check(mlx_array_eval(average));
    check(mlx_array_eval(diversity));
    Array kept, into, folded_keys, folded_values, folded_bias, folded_mass;
    const Array eligible = call(mlx_isfinite, importance, s);
    succeeds(mlx_h2o_keep_indices(kept.out(), importance, positions, 8, 2, each, s), "keep");
    check(mlx_array_eval(kept));
    succeeds(mlx_h2o_fold(into.out(), folded_keys.out(), folded_values.out(), folded_bias.out(),
                          folded_mass.out(), keys, keys, importance, importance, importance,
                          eligible, kept, 0.5, s),
             "fold");
    for (const Array* made : {&into, &folded_keys, &folded_bias, &folded_mass}) {
      check(mlx_array_eval(*made));
    }
  }

  // `who` sets the messages of this thread apart from those of the other.
  void failures(int who) const {
    Array kept;
    fails(mlx_h2o_keep_indices(kept.out(), importance, positions, rows + who, 0, nothing, s),
          "[keep_indices] keep is " + std::to_string(rows + who) +
              ", expected at least 1 and at most N = 16.");
    // After the mask was broadcast, and in the checks of the rows.
    Array out, scores;
    const Array mask = values({1, 1, rows}, 0.5F);
    fails(mlx_h2o_scaled_dot_product_attention_with_scores(out.out(), scores.out(), nullptr,
                                                           queries, keys, keys, 1, "array", mask,
                                                           importance, nothing, s),
          "[scaled_dot_product_attention_with_scores] sinks are float32 (1, 2, 16), expected "
          "float32, float16 or bfloat16 [Hq] = (2,).");
    fails(mlx_h2o_scaled_dot_product_attention_with_scores(out.out(), scores.out(), nullptr,
                                                           queries, keys, new_row, 1, "", nothing,
                                                           nothing, nothing, s),
          "[scaled_dot_product_attention_with_scores] values are float32 (1, 2, 1, 64), expected "
          "float32 [B, Hkv, N, Dv] = (1, 2, 16, Dv), every size at least 1.");
    Array sum;
    if (mlx_add(sum.out(), keys, importance, s) == 0 ||
        std::strstr(mlx_h2o_last_error(), "broadcast") == nullptr) {
      stop("a failure of mlx-c itself");
    }
    const std::string name = "thread " + std::to_string(who);
    fails(mlx_h2o_set_backend(name.c_str()),
          "[use_backend] unknown back end '" + name +
              "', expected one of metal, cuda, native, composed.");
    mlx_h2o_config config = mlx_h2o_config_new();
    config.budget.sink_size = -who;
    fails(mlx_h2o_config_resolve(&config),
          "[H2OConfig] sink_size is " + std::to_string(-who) + ", expected an int of at least 0.");
  }
};

void settings() {
  mlx_h2o_config config = mlx_h2o_config_new();
  succeeds(mlx_h2o_config_resolve(&config), "resolve");
  succeeds(mlx_h2o_config_preset(&config, "heavy", 64), "preset");
  int count = 0;
  succeeds(mlx_h2o_threads(&count), "threads");
  succeeds(mlx_h2o_set_threads(2), "set threads");
  bool available = false;
  String reason;
  succeeds(mlx_h2o_backend_status("metal", &available, reason.out()), "status");
}

void everything(int who) {
  try {
    const Thread thread;
    for (const char* backend : {"native", "composed", ""}) {
      succeeds(mlx_h2o_set_backend(backend), backend);
      thread.attention();
      thread.rows_of_a_cache();
    }
    for (int i = 0; i < 200; ++i) {
      thread.failures(who);
    }
  } catch (const Reported&) {
    stop("a function of mlx-c");
  }
}

}  // namespace

int main(int count, char** arguments) {
  mlx_set_error_handler(mlx_h2o_keep_error, nullptr, nullptr);
  settings();
  std::thread other(everything, 2);
  everything(1);
  other.join();
  if (count > 1 && std::strcmp(arguments[1], "leak") == 0) {
    const float lost[] = {0};
    const int shape[] = {1};
    if (mlx_array_new_data(lost, shape, 1, MLX_FLOAT32).ctx == nullptr) {
      return 1;
    }
  }
  std::puts("no errors");
  return 0;
}
