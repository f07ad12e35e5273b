#include "arguments.h"

#include <cfloat>
#include <charconv>
#include <cmath>
#include <cstring>

#include "operation_table.h"

namespace mlx_h2o {

namespace {

constexpr auto kFloats = "float32, float16 or bfloat16";

bool same(const char* one, const char* other) { return std::strcmp(one, other) == 0; }

bool is_float(const char* dtype) {
  return same(dtype, "float32") || same(dtype, "float16") || same(dtype, "bfloat16");
}

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// The argument's name in a message, and the verb.
std::string called(std::string name) {
  if (name.rfind("new_", 0) == 0) name[3] = ' ';
  const bool several = ends_with(name, "s") && !ends_with(name, "ss") && !ends_with(name, "bias");
  return name + (several ? " are " : " is ");
}

std::string described(const std::string& name, const Found& found) {
  return called(name) + found.dtype + " " + shown(found.shape, found.rank) + ", expected ";
}

template <class Number>
std::string shortest(Number number) {
  if (!std::isfinite(number)) return std::isnan(number) ? "nan" : number > 0 ? "inf" : "-inf";
  char digits[64];
  const std::string text(digits, std::to_chars(digits, digits + sizeof digits, number).ptr);
  return text.find_first_of(".e") == std::string::npos ? text + ".0" : text;
}

// Whether `value` is in a list separated by ", ".
bool is_listed(const char* values, const std::string& value) {
  return (", " + std::string(values) + ",").find(", " + value + ",") != std::string::npos;
}

}  // namespace

std::string shown(double number) { return shortest(number); }
std::string shown(float number) { return shortest(number); }

const char* dtype_name(int dtype) {
  static constexpr const char* names[] = {"bool",    "uint8",   "uint16",   "uint32",   "uint64",
                                          "int8",    "int16",   "int32",    "int64",    "float16",
                                          "float32", "float64", "bfloat16", "complex64"};
  return names[dtype];
}

std::string shown(const int* shape, size_t rank) {
  std::string text = "(";
  for (size_t i = 0; i < rank; ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return text + (rank == 1 ? ",)" : ")");
}

// One array of an argument. The last size of rows in parts has no name, but is `last` (0: unknown).
struct Arguments::Spec {
  const table::Argument& argument;
  const char* dtype;
  const char* part = nullptr;
  const char* last_names[2] = {};  // concatenated
  int last = 0;

  bool is_part() const { return part != nullptr; }
  std::string name() const {
    std::string whole = argument.name;
    if (!is_part()) return whole;
    return (ends_with(whole, "s") ? whole.substr(0, whole.size() - 1) : whole) + " " + part;
  }
  std::string layout() const {
    std::string whole = argument.layout;
    return is_part() ? whole.substr(0, whole.rfind(' ') + 1) + last_name() + "]" : whole;
  }
  std::string last_name() const { return std::string(last_names[0]) + last_names[1]; }
};

Arguments::Arguments(const char* operation) : name_(operation), operation_(nullptr) {
  // Attention without scores has the same arguments as attention with scores.
  const char* row = same(operation, "scaled_dot_product_attention")
                        ? "scaled_dot_product_attention_with_scores"
                        : operation;
  for (const table::Operation& each : table::operations) {
    if (same(each.name, row)) operation_ = &each;
  }
}

int Arguments::index_of(const char* size) const {
  int index = 0;
  while (!same(operation_->sizes[index], size)) ++index;
  return index;
}

const table::Argument& Arguments::named(const char* name) const {
  const table::Argument* argument = operation_->arguments;
  // Skip arrays, which can have the same name.
  while (argument->kind <= table::Kind::rows || !same(argument->name, name)) ++argument;
  return *argument;
}

bool Arguments::takes(const char* name) const {
  const table::Argument* const first = operation_->arguments;
  for (size_t i = 0; i < operation_->count; ++i) {
    if (same(first[i].name, name)) return true;
  }
  return false;
}

void Arguments::packing(int bits, int v_bits, int group_size) {
  one_of("bits", bits);
  one_of("v_bits", v_bits);
  one_of("group_size", group_size);
  bits_[0] = bits;
  bits_[1] = v_bits;
  group_size_ = group_size;
}

void Arguments::code_bits(int bits) {
  one_of("bits", bits);
  bits_[0] = bits;
}

void Arguments::rows(const Found* parts, size_t count) {
  const table::Argument* argument = operation_->arguments + next_;
  while (argument->kind > table::Kind::rows) argument = operation_->arguments + ++next_;
  ++next_;
  const bool of_rows = argument->kind == table::Kind::rows;
  const int bits = of_rows ? bits_[rows_++] : 0;
  if (count == 1) {
    const Spec whole{*argument, argument->dtype};
    if (parts->dtype == nullptr && argument->optional) return;
    if (argument->kind == table::Kind::mask) return match_mask(*argument, *parts);
    return match(whole, *parts);
  }
  const bool codes = count == 2;
  int& width = known_[argument->sizes[3]];
  const char* const name = operation_->sizes[argument->sizes[3]];
  if (width != 0) match_width(argument->name, width, width, " elements", bits, codes);
  const char* const of_bits = rows_ == 2 ? " * v_bits / 32" : " * bits / 32";
  match({*argument, "uint32", "words", {name, of_bits}, width / 32 * bits}, parts[0]);
  const int words = parts[0].shape[3];
  const int64_t elements = int64_t{32} * words;
  const bool whole = elements % bits == 0 && elements <= INT32_MAX;
  match_width(argument->name, whole ? elements / bits : -1, words, " words", bits, codes);
  width = static_cast<int>(elements / bits);
  if (codes) return match({*argument, "float32", "norms", {"1", ""}, 1}, parts[1]);
  const char* const dtype = argument->scales;
  const int groups = width / group_size_;
  match({*argument, dtype, "scales", {name, " / group_size"}, groups}, parts[1]);
  match({*argument, dtype, "biases", {name, " / group_size"}, groups}, parts[2]);
}

bool Arguments::has_dtype(const char* expected, const char* found) const {
  if (expected[1] != '\0') return same(expected, found);
  const char* known = expected[0] == 'F' ? nullptr : dtypes_[expected[0] - 'S'];
  return known == nullptr ? is_float(found) : same(known, found);
}

bool Arguments::holds(const table::Rule& rule, const int* known) const {
  const int one = known[rule.first], other = rule.second < 0 ? rule.limit : known[rule.second];
  if (one == 0 || other == 0) return true;
  if (rule.relation == table::Relation::divides) return other % one == 0;
  return rule.relation == table::Relation::below ? one < other : one <= other;
}

void Arguments::match(const Spec& spec, const Found& found) {
  if (found.dtype == nullptr) {
    fail(name_, called(spec.name()), "an empty handle, expected an array ", spec.layout(), ".");
  }
  const table::Argument& argument = spec.argument;
  const size_t rank = argument.rank;
  int known[8];
  std::memcpy(known, known_, sizeof known);
  bool fits = found.rank == rank && has_dtype(spec.dtype, found.dtype);
  for (size_t i = 0; fits && i < rank; ++i) {
    const int size = found.shape[i];
    const bool last_of_part = spec.is_part() && i + 1 == rank;
    int& expected = known[argument.sizes[i]];
    if (!last_of_part && expected == 0) expected = size;
    fits = size > 0 && (last_of_part ? spec.last == 0 || size == spec.last : size == expected);
  }
  for (size_t i = 0; fits && i < operation_->rule_count; ++i) {
    fits = holds(operation_->rules[i], known);
  }
  if (!fits) fail(name_, described(spec.name(), found), expected(spec));
  std::memcpy(known_, known, sizeof known);
  const char letter = spec.dtype[0];
  if (spec.dtype[1] == '\0' && letter != 'F') dtypes_[letter - 'S'] = found.dtype;
}

std::string Arguments::expected(const Spec& spec) const {
  const table::Argument& argument = spec.argument;
  std::string text = spec.dtype;
  if (spec.dtype[1] == '\0') {
    const char* known = spec.dtype[0] == 'F' ? nullptr : dtypes_[spec.dtype[0] - 'S'];
    text = known == nullptr ? kFloats : known;
  }
  text += " " + spec.layout();
  std::string sizes, notes;
  bool some_known = false, some_free = false;
  for (int i = 0; i < argument.rank; ++i) {
    const bool last_of_part = spec.is_part() && i + 1 == argument.rank;
    const int known = last_of_part ? spec.last : known_[argument.sizes[i]];
    (known != 0 ? some_known : some_free) = true;
    const std::string name = last_of_part ? spec.last_name() : operation_->sizes[argument.sizes[i]];
    sizes += (i > 0 ? ", " : "") + (known != 0 ? std::to_string(known) : name);
  }
  if (some_known) text += " = (" + sizes + (argument.rank == 1 ? ",)" : ")");
  if (some_free) notes += ", every size at least 1";
  const auto is_free = [&](int size) {
    for (int i = 0; i < argument.rank - (spec.is_part() ? 1 : 0); ++i) {
      if (argument.sizes[i] == size) return known_[size] == 0;
    }
    return false;
  };
  for (size_t i = 0; i < operation_->rule_count; ++i) {
    const table::Rule& rule = operation_->rules[i];
    const char* first = operation_->sizes[rule.first];
    const char* second = rule.second < 0 ? "" : operation_->sizes[rule.second];
    if (is_free(rule.first) && (rule.second < 0 || known_[rule.second] != 0)) {
      const std::string limit =
          rule.second < 0 ? std::to_string(rule.limit)
                          : std::string(second) + " = " + std::to_string(known_[rule.second]);
      const char* words = rule.relation == table::Relation::divides ? "a divisor of "
                          : rule.relation == table::Relation::below ? "below "
                                                                    : "at most ";
      notes += std::string(", ") + first + " " + words + limit;
    } else if (rule.second >= 0 && is_free(rule.second) && known_[rule.first] != 0) {
      notes += std::string(", ") + second + " a multiple of " + first + " = " +
               std::to_string(known_[rule.first]);
    }
  }
  return text + notes + ".";
}

void Arguments::match_mask(const table::Argument& argument, const Found& found) const {
  int full[4];
  for (int i = 0; i < argument.rank; ++i) full[i] = known_[argument.sizes[i]];
  const size_t rank = argument.rank;
  bool fits = found.rank <= rank && (same(found.dtype, "bool") || is_float(found.dtype));
  for (size_t back = 1; fits && back <= found.rank; ++back) {
    const int size = found.shape[found.rank - back];
    fits = size == 1 || size == full[rank - back];
  }
  if (fits) return;
  fail(name_, described(argument.name, found), "bool, ", kFloats, " that broadcasts to ",
       argument.layout, " = ", shown(full, rank), ".");
}

void Arguments::match_width(const char* name, int64_t size, int found, const char* what, int bits,
                            bool codes) const {
  const bool power = size >= 32 && size <= 1024 && (size & (size - 1)) == 0;
  if (codes && (bits > 4 || !power)) {
    fail(name_, name, " have ", found, what, " per row and codes of ", bits,
         " bits, expected a power of two of elements from 32 to 1024, and 2, 3 or 4 bits.");
  }
  if (!codes && (size < 0 || size % group_size_ != 0)) {
    fail(name_, name, " have ", found, what, " per row of ", bits,
         " bits, expected a multiple of group_size = ", group_size_, " elements.");
  }
}

std::string Arguments::limits_of(const table::Argument& argument) const {
  const table::Bounds& b = argument.bounds;
  const bool whole = argument.kind == table::Kind::integer;
  const auto limit = [&](double value) {
    return whole || value == std::floor(value) ? std::to_string(static_cast<int64_t>(value))
                                               : shown(value);
  };
  std::string text;
  const auto add = [&](const char* words, const std::string& what) {
    text += (text.empty() ? "" : " and ") + std::string(words) + what;
  };
  if (b.least == b.least) add("at least ", limit(b.least));
  if (b.above == b.above) add("above ", limit(b.above));
  if (b.most == b.most) add("at most ", limit(b.most));
  if (argument.most >= 0) {
    const char* name = operation_->sizes[argument.most];
    add("at most ", std::string(name) + " = " + std::to_string(known_[argument.most]));
  }
  if (b.below == b.below) add("below ", limit(b.below));
  return text;
}

std::string Arguments::fault_of(const table::Argument& argument, double value) const {
  if (!(std::abs(value) <= FLT_MAX))
    return "a finite number";  // every back end holds it in float32
  const table::Bounds& b = argument.bounds;
  // An unset bound is NaN, and every comparison with it is false.
  const bool beyond = value < b.least || value <= b.above || value > b.most || value >= b.below;
  return beyond ? limits_of(argument) : "";
}

void Arguments::integer(const char* name, int value) const {
  const table::Argument& argument = named(name);
  const bool too_many = argument.most >= 0 && value > known_[argument.most];
  if (!too_many && !(value < argument.bounds.least)) return;
  fail(name_, name, " is ", value, ", expected ", limits_of(argument), ".");
}

void Arguments::one_of(const char* name, int value) const {
  const char* values = named(name).values;
  if (value > 0 && is_listed(values, std::to_string(value))) return;
  fail(name_, name, " is ", value, ", expected one of (", values, ").");
}

void Arguments::one_of(const char* name, const std::string& value) const {
  const char* values = named(name).values;
  if (is_listed(values, "'" + value + "'")) return;
  fail(name_, name, " is '", value, "', expected one of (", values, ").");
}

void Arguments::per_sequence(const char* name, const Found& found) const {
  const int batch = known_[index_of("B")];
  const bool fits = found.rank == 0 || (found.rank == 1 && found.shape[0] == batch);
  if (fits && same(found.dtype, "int32")) return;
  fail(name_, described(name, found), "int32 () or [B] = (", batch, ",).");
}

}  // namespace mlx_h2o
