// Checks the arguments of operations against the table of metal/operations.toml, with Python's
// error texts. No MLX in here: the C interface uses the same checks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace mlx_h2o {

namespace table {
struct Argument;
struct Operation;
struct Rule;
}  // namespace table

/// Throws std::invalid_argument with the text "[operation] part part ...".
template <typename... Parts>
[[noreturn]] void fail(const char* operation, const Parts&... parts) {
  std::ostringstream text;
  text << '[' << operation << "] ";
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

/// A number as Python writes it: the shortest digits that read back as the same.
std::string shown(double number);
std::string shown(float number);
/// A dtype as Python writes it, without the module; the numbers are those of MLX and mlx-c.
const char* dtype_name(int dtype);
/// A shape as Python writes it: (1, 2) or (3,).
std::string shown(const int* shape, size_t rank);

/// An array as checks see it; without a dtype it is absent.
struct Found {
  const char* dtype = nullptr;
  const int* shape = nullptr;
  size_t rank = 0;
};

/// The arguments of one call. Pass arrays in the order of the table, absent ones too; every
/// function throws what `fail` does.
class Arguments {
 public:
  explicit Arguments(const char* operation);

  /// How rows are packed; call it before passing them.
  void packing(int bits, int v_bits, int group_size);
  /// The same for codes.
  void code_bits(int bits);
  void array(const Found& found) { rows(&found, 1); }
  /// Keys or values in one array; words and norms; or words, scales and biases.
  void rows(const Found* parts, size_t count);

  template <class Number>
  void number(const char* name, Number value) const {
    if (const std::string wrong = fault_of(named(name), value); !wrong.empty()) {
      fail(name_, name, " is ", shown(value), ", expected ", wrong, ".");
    }
  }
  void integer(const char* name, int value) const;
  void one_of(const char* name, int value) const;
  void one_of(const char* name, const std::string& value) const;
  /// One number for all sequences, or one for each.
  void per_sequence(const char* name, const Found& found) const;

  /// Whether the operation takes an argument of this name.
  bool takes(const char* name) const;

  /// A known size, by its name in the table.
  int operator[](const char* size) const { return known_[index_of(size)]; }

 private:
  struct Spec;
  int index_of(const char* size) const;
  void match(const Spec& spec, const Found& found);
  bool holds(const table::Rule& rule, const int* known) const;
  bool has_dtype(const char* expected, const char* found) const;
  std::string expected(const Spec& spec) const;
  std::string limits_of(const table::Argument& argument) const;
  void match_mask(const table::Argument& argument, const Found& found) const;
  void match_width(const char* name, int64_t size, int found, const char* what, int bits,
                   bool codes) const;
  std::string fault_of(const table::Argument& argument, double value) const;
  const table::Argument& named(const char* name) const;

  const char* name_;
  const table::Operation* operation_;
  size_t next_ = 0;
  int known_[8] = {};  // 0: not known yet
  const char* dtypes_[3] = {};
  int bits_[2] = {};
  int group_size_ = 1;
  size_t rows_ = 0;
};

}  // namespace mlx_h2o
