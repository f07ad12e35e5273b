// The fingerprint of a model's weights, that of python/mlx_h2o/lm/profile.py.
#include <algorithm>
#include <map>

#include "boundary.h"
#include "mlx_h2o/c/profile.h"
#include "sha256.h"

using namespace mlx_h2o_c;

namespace {

constexpr size_t elements_of_each = 16;

// In order of the names.
std::map<std::string, Array> sorted_parameters(const char* op, mlx_map_string_to_array parameters) {
  using Iterator = Owned<mlx_map_string_to_array_iterator, mlx_map_string_to_array_iterator_free>;
  const Iterator next(mlx_map_string_to_array_iterator_new(parameters));
  std::map<std::string, Array> found;
  for (;;) {
    const char* name = nullptr;
    Array array;
    if (mlx_map_string_to_array_iterator_next(&name, array.out(), next) != 0) return found;
    const std::string text = name;
    const bool plain = std::all_of(text.begin(), text.end(), [](char sign) {
      return sign >= ' ' && sign <= '~' && sign != '\'' && sign != '\\';
    });
    expect(plain, op, "a parameter is called ", text,
           ", expected printable ASCII without quotes and backslashes.");
    found[text] = std::move(array);
  }
}

void add_parameter(Sha256& hash, const std::string& name, mlx_array array, mlx_stream s) {
  const mlx_dtype dtype = dtype_of(array);
  const bool real = is_float(array) || dtype == MLX_FLOAT64;
  const std::string kind = real ? "float" : "mlx.core." + shown(dtype);
  const std::string head = "('" + name + "', " + shown(shape_of(array)) + ", '" + kind + "')";
  hash.update(head.data(), head.size());
  const size_t size = mlx_array_size(array);
  if (size == 0) return;
  const auto step = static_cast<int>(std::max<size_t>(1, size / elements_of_each));
  const auto count = static_cast<int>(std::min(elements_of_each, (size + step - 1) / step));
  const int flat = -1, first = 0, last = (count - 1) * step + 1;
  Value some = Value(array, s).then(mlx_reshape, &flat, size_t{1});
  some = {call(mlx_slice, some, &first, 1, &last, 1, &step, 1, s), s};
  if (real) some = some.as(MLX_FLOAT32);
  const Value bytes = some.then(mlx_contiguous, false).then(mlx_view, MLX_UINT8);
  check(mlx_array_eval(bytes));
  hash.update(mlx_array_data_uint8(bytes), mlx_array_size(bytes));
}

}  // namespace

int mlx_h2o_fingerprint(mlx_string* res, mlx_map_string_to_array parameters, mlx_stream s) {
  return operation("fingerprint", {{"res", res}}, [&](const char* op) {
    expect(parameters.ctx != nullptr, op, "parameters are an empty handle, expected a map.");
    runs_on_gpu(op, s);  // refuses an empty handle
    Sha256 hash;
    for (const auto& [name, array] : sorted_parameters(op, parameters)) {
      add_parameter(hash, name, array, s);
    }
    const std::string digits = hash.finish().substr(0, 32);
    check(mlx_string_set(res, String(mlx_string_new_data(digits.c_str()))));
  });
}
