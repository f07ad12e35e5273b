// The public functions of settings and back ends.
#include "backend.h"
#include "boundary.h"
#include "config.h"
#include "mlx_h2o/c/h2o.h"

using namespace mlx_h2o_c;

extern "C" {

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

int mlx_h2o_threads(int* res) {
  return status([&] {
    check_place("threads", "res", res);
    *res = threads();
  });
}

int mlx_h2o_set_threads(int count) {
  return status([&] { set_threads(count); });
}

}  // extern "C"
