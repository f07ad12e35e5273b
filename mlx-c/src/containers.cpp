// Strings, vectors and maps.
#include "handles.h"

using namespace mlx_c;

namespace {

std::vector<mx::array> arrays(const mlx_array* data, size_t size) {
  std::vector<mx::array> values;
  values.reserve(size);
  for (const mlx_array handle : list<std::vector<mlx_array>>(data, size)) {
    values.push_back(get(handle));
  }
  return values;
}

std::vector<std::string> strings(const char** data, size_t size) {
  std::vector<std::string> values;
  values.reserve(size);
  for (const char* characters : list<std::vector<const char*>>(data, size)) {
    values.emplace_back(text(characters));
  }
  return values;
}

template <class T>
void append(std::vector<T>& values, const std::vector<T>& more) {
  values.insert(values.end(), more.begin(), more.end());
}

}  // namespace

// NOLINTBEGIN(bugprone-macro-parentheses): the macros' arguments are types and names.

// The functions that a vector of any element has.
#define VECTOR(vector, element, data_type, convert)                                      \
  vector vector##_new(void) { return vector##_new_data(nullptr, 0); }                    \
  vector vector##_new_data(data_type* data, size_t size) {                               \
    return value_or(vector{nullptr}, [&] { return make<vector>(convert(data, size)); }); \
  }                                                                                      \
  vector vector##_new_value(element val) {                                               \
    return value_or(vector{nullptr}, [&] {                                               \
      data_type value = val;                                                             \
      return make<vector>(convert(&value, 1));                                           \
    });                                                                                  \
  }                                                                                      \
  int vector##_free(vector vec) {                                                        \
    return status([&] { destroy(vec); });                                                \
  }                                                                                      \
  int vector##_set(vector* vec, const vector src) {                                      \
    return status([&] { set(vec, get(src)); });                                          \
  }                                                                                      \
  int vector##_set_data(vector* vec, data_type* data, size_t size) {                     \
    return status([&] { set(vec, convert(data, size)); });                               \
  }                                                                                      \
  int vector##_set_value(vector* vec, element val) {                                     \
    data_type value = val;                                                               \
    return vector##_set_data(vec, &value, 1);                                            \
  }                                                                                      \
  int vector##_append_data(vector vec, data_type* data, size_t size) {                   \
    return status([&] { append(get(vec), convert(data, size)); });                       \
  }                                                                                      \
  int vector##_append_value(vector vec, element val) {                                   \
    data_type value = val;                                                               \
    return vector##_append_data(vec, &value, 1);                                         \
  }                                                                                      \
  size_t vector##_size(vector vec) {                                                     \
    return value_or(size_t{0}, [&] { return get(vec).size(); });                         \
  }

// `value` and `read` say how a map's value enters and leaves.
#define MAP(map, in_type, out_type, value, read)                                 \
  map map##_new(void) {                                                          \
    return value_or(map{nullptr}, [&] { return make<map>({}); });                \
  }                                                                              \
  int map##_set(map* target, const map src) {                                    \
    return status([&] { set(target, get(src)); });                               \
  }                                                                              \
  int map##_free(map target) {                                                   \
    return status([&] { destroy(target); });                                     \
  }                                                                              \
  int map##_insert(map target, const char* key, in_type val) {                   \
    return status([&] { get(target).insert_or_assign(text(key), value(val)); }); \
  }                                                                              \
  int map##_get(out_type* res, const map source, const char* key) {              \
    return value_or(1, [&] {                                                     \
      const auto found = get(source).find(text(key));                            \
      if (found == get(source).end()) {                                          \
        return 2;                                                                \
      }                                                                          \
      read(res, found->second);                                                  \
      return 0;                                                                  \
    });                                                                          \
  }                                                                              \
  map##_iterator map##_iterator_new(map source) {                                \
    using Iterator = HeldType<map>::iterator;                                    \
    return value_or(map##_iterator{nullptr, nullptr}, [&] {                      \
      return map##_iterator{new Iterator(get(source).begin()), source.ctx};      \
    });                                                                          \
  }                                                                              \
  int map##_iterator_free(map##_iterator it) {                                   \
    using Iterator = HeldType<map>::iterator;                                    \
    return status([&] { delete static_cast<Iterator*>(it.ctx); });               \
  }                                                                              \
  int map##_iterator_next(const char** key, out_type* res, map##_iterator it) {  \
    using Iterator = HeldType<map>::iterator;                                    \
    return value_or(1, [&] {                                                     \
      if (it.ctx == nullptr) {                                                   \
        throw std::invalid_argument("expected a non-empty " #map "_iterator");   \
      }                                                                          \
      auto& position = *static_cast<Iterator*>(it.ctx);                          \
      if (position == get(map{it.map_ctx}).end()) {                              \
        return 2;                                                                \
      }                                                                          \
      place(key) = position->first.c_str();                                      \
      read(res, position->second);                                               \
      ++position;                                                                \
      return 0;                                                                  \
    });                                                                          \
  }

// NOLINTEND(bugprone-macro-parentheses)

namespace {

void read_array(mlx_array* res, const mx::array& value) { set(res, value); }

void read_text(const char** res, const std::string& value) { place(res) = value.c_str(); }

}  // namespace

extern "C" {

mlx_string mlx_string_new(void) { return mlx_string_new_data(""); }

mlx_string mlx_string_new_data(const char* str) {
  return value_or(mlx_string{nullptr}, [&] { return make<mlx_string>(text(str)); });
}

int mlx_string_set(mlx_string* str, const mlx_string src) {
  return status([&] { set(str, get(src)); });
}

const char* mlx_string_data(mlx_string str) {
  return value_or<const char*>(nullptr, [&] { return get(str).c_str(); });
}

int mlx_string_free(mlx_string str) {
  return status([&] { destroy(str); });
}

VECTOR(mlx_vector_array, const mlx_array, const mlx_array, arrays)
VECTOR(mlx_vector_string, const char*, const char*, strings)

int mlx_vector_array_get(mlx_array* res, const mlx_vector_array vec, size_t idx) {
  return status([&] { set(res, get(vec).at(idx)); });
}

int mlx_vector_string_get(char** res, const mlx_vector_string vec, size_t idx) {
  return status([&] { place(res) = get(vec).at(idx).data(); });
}

MAP(mlx_map_string_to_array, const mlx_array, mlx_array, get, read_array)
MAP(mlx_map_string_to_string, const char*, const char*, text, read_text)

}  // extern "C"

#undef VECTOR
#undef MAP
