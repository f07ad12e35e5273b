// The public functions: one boundary that no exception crosses.
#include "mlx_h2o/c/h2o.h"

#include <stdexcept>

#include "backend.h"
#include "config.h"

using namespace mlx_h2o_c;

namespace {

template <class Body>
int status(Body&& body) noexcept {
  try {
    body();
    return 0;
  } catch (const Reported&) {
    // mlx-c has told the handler.
  } catch (const std::exception& error) {
    mlx_error("%s", error.what());
  } catch (...) {
    mlx_error("%s", "unknown exception");
  }
  return 1;
}

void check_place(const char* op, const char* name, const void* place) {
  if (place == nullptr) {
    throw std::invalid_argument(std::string("[") + op + "] " + name +
                                " is NULL, expected a place for the result.");
  }
}

using Select = Array (*Backend::*)(const RetentionRequest&);

int select(mlx_array* res, const char* op, const RetentionRequest& request, Select select) {
  const Backend& backend = backend_for_retention(op, request.on_gpu);
  const Array slots = (backend.*select)(request);
  return mlx_array_set(res, slots);
}

}  // namespace

extern "C" {

int mlx_h2o_scaled_dot_product_attention_with_scores(mlx_array* out, mlx_array* scores,
                                                     mlx_array* lse, const mlx_array queries,
                                                     const mlx_array keys, const mlx_array values,
                                                     float scale, const char* mask_mode,
                                                     const mlx_array mask_arr,
                                                     const mlx_array sinks, const mlx_stream s) {
  return status([&] {
    check_place(attention_name, "out", out);
    check_place(attention_name, "scores", scores);
    const AttentionRequest request = attention_request(queries, keys, values, scale, mask_mode,
                                                       mask_arr, sinks, lse != nullptr, s);
    const AttentionResult result = backend_for_attention(request).attention(request);
    check(mlx_array_set(out, result.out));
    check(mlx_array_set(scores, result.scores));
    if (lse != nullptr) {
      check(mlx_array_set(lse, result.lse));
    }
  });
}

int mlx_h2o_keep_indices(mlx_array* res, const mlx_array scores, const mlx_array positions,
                         int keep, int sink_size, mlx_optional_int recent_start,
                         const mlx_stream s) {
  return status([&] {
    check_place("keep_indices", "res", res);
    check(select(res, "keep_indices",
                 keep_request(scores, positions, keep, sink_size, recent_start, s),
                 &Backend::keep_indices));
  });
}

int mlx_h2o_evict_indices(mlx_array* res, const mlx_array scores, const mlx_array positions,
                          int count, int sink_size, mlx_optional_int recent_start,
                          const mlx_stream s) {
  return status([&] {
    check_place("evict_indices", "res", res);
    check(select(res, "evict_indices",
                 evict_request(scores, positions, count, sink_size, recent_start, s),
                 &Backend::evict_indices));
  });
}

mlx_h2o_config mlx_h2o_config_new(void) { return default_config(); }

int mlx_h2o_config_resolve(mlx_h2o_config* config) {
  return status([&] {
    check_place("H2OConfig", "config", config);
    *config = checked(*config);
  });
}

int mlx_h2o_config_preset(mlx_h2o_config* res, const char* name, int max_kv_size) {
  return status([&] {
    check_place("H2OConfig.preset", "res", res);
    *res = preset(name == nullptr ? "" : name, max_kv_size);
  });
}

int mlx_h2o_set_backend(const char* name) {
  return status([&] { set_backend(name == nullptr ? "" : name); });
}

int mlx_h2o_backend_status(const char* name, bool* available, mlx_string* reason) {
  return status([&] {
    const std::string why = backend_named(name == nullptr ? "" : name).unavailable_reason();
    if (reason != nullptr) {
      check(mlx_string_set(reason, String(mlx_string_new_data(why.c_str()))));
    }
    if (available != nullptr) {
      *available = why.empty();
    }
  });
}

}  // extern "C"
