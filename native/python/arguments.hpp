// From what a caller gave for a parameter to a C++ value, or to a TypeError or ValueError in one form of words:
//
//   size must be a whole number of bytes from 0 to 2^64 - 1, not 1.5 of type float
//
// A parameter is one row: its kind (a struct below), its name and what it must be. A bound function takes Given<row>,
// bound with parameter<row>(): nanobind lets any object through, and the row's kind converts or refuses it. (nanobind's
// own refusal lists signatures, and does not say which argument was wrong, or why.)
//
//   constexpr Whole<> kSize{"size", "a whole number of bytes"};
//   .def("reserve", [](PyPool& pool, Given<kSize> size) { ... *size ... }, parameter<kSize>())
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/types.hpp"

namespace streampool::python {

namespace nb = nanobind;

// Raises `error`: "<name> must be <wanted>, not <given>", with the type where that is what is wrong.
[[noreturn]] void refuse(PyObject* error, std::string_view name, std::string_view wanted, nb::handle given);

// What a list or a tuple holds; refuses anything else.
std::vector<nb::handle> items(nb::handle given, const char* name, const char* wanted);

// -- kinds of parameters: each a struct of words, and the function that converts -------------------------------------

// A whole number: an int or what stands for one (`__index__`, as NumPy's integers). A bool is none, nor is a float.
template <typename T = std::uint64_t>
struct Whole {
  static constexpr auto signature() { return nb::detail::const_name("int"); }
  const char* name;
  const char* wanted;
  std::int64_t least = 0;
  std::uint64_t most = static_cast<std::uint64_t>(std::numeric_limits<T>::max());
};
// A negative number comes as two's complement.
std::uint64_t whole_number(nb::handle given, const char* name, const char* wanted, std::int64_t least,
                           std::uint64_t most);
// Inline, since alloc and free come here: a plain int in range is nearly every argument.
template <typename T>
T convert(nb::handle given, const Whole<T>& row) {
  if (PyLong_CheckExact(given.ptr())) [[likely]] {
    const std::uint64_t value = PyLong_AsUnsignedLongLong(given.ptr());  // all ones: perhaps an error
    const std::uint64_t least = row.least > 0 ? static_cast<std::uint64_t>(row.least) : 0;
    if (value >= least && value <= row.most && value != std::numeric_limits<std::uint64_t>::max()) [[likely]]
      return static_cast<T>(value);
  }
  return static_cast<T>(whole_number(given, row.name, row.wanted, row.least, row.most));
}

// Bytes: a whole number, or text such as '2GiB'.
struct Size {
  static constexpr auto signature() { return nb::detail::const_name("int | str"); }
  const char* name;
};
Bytes convert(nb::handle given, const Size& row);

// Seconds: a finite number, 0 or more.
struct Seconds {
  static constexpr auto signature() { return nb::detail::const_name("float"); }
  const char* name;
};
double convert(nb::handle given, const Seconds& row);

// The text stays valid as long as the argument.
struct Text {
  static constexpr auto signature() { return nb::detail::const_name("str"); }
  const char* name;
};
std::string_view convert(nb::handle given, const Text& row);
struct OptionalText {
  static constexpr auto signature() { return nb::detail::const_name("str"); }
  const char* name;
};
std::optional<std::string_view> convert(nb::handle given, const OptionalText& row);

struct Flag {
  static constexpr auto signature() { return nb::detail::const_name("bool"); }
  const char* name;
};
bool convert(nb::handle given, const Flag& row);
struct OptionalFlag {
  static constexpr auto signature() { return nb::detail::const_name("bool"); }
  const char* name;
};
std::optional<bool> convert(nb::handle given, const OptionalFlag& row);

// One of a few words.
template <typename T>
struct Choice {
  struct Word {
    const char* text;
    T value;
  };
  static constexpr auto signature() { return nb::detail::const_name("str"); }
  const char* name;
  const char* wanted;
  std::span<const Word> words;
};
template <typename T>
T convert(nb::handle given, const Choice<T>& row) {
  if (PyUnicode_Check(given.ptr()))
    for (const auto& word : row.words)
      if (PyUnicode_CompareWithASCIIString(given.ptr(), word.text) == 0) return word.value;
  refuse(PyUnicode_Check(given.ptr()) ? PyExc_ValueError : PyExc_TypeError, row.name, row.wanted, given);
}

// Something that can be called, or None.
struct Callable {
  static constexpr auto signature() { return nb::detail::const_name("collections.abc.Callable"); }
  const char* name;
};
nb::object convert(nb::handle given, const Callable& row);

// An object of one of our classes, as `Value`: a reference, a shared_ptr, or a pointer, which None makes null.
template <typename Bound, typename Value = Bound&>
struct Instance {
  static constexpr auto signature() { return nb::detail::make_caster<Bound>::Name; }
  const char* name;
  const char* wanted;
};
template <typename Bound, typename Value>
Value convert(nb::handle given, const Instance<Bound, Value>& row) {
  constexpr bool kReference = std::is_reference_v<Value>;
  std::conditional_t<kReference, Bound*, Value> found{};
  if ((given.is_none() && !std::is_pointer_v<Value>) || !nb::try_cast(given, found, false))
    refuse(PyExc_TypeError, row.name, row.wanted, given);
  if constexpr (kReference)
    return *found;
  else
    return found;
}

// An object of one of Python's classes: nb::dict, nb::bytes.
template <typename T>
struct Builtin {
  static constexpr auto signature() { return T::Name; }
  const char* name;
  const char* wanted;
};
template <typename T>
T convert(nb::handle given, const Builtin<T>& row) {
  if (!nb::isinstance<T>(given)) refuse(PyExc_TypeError, row.name, row.wanted, given);
  return nb::borrow<T>(given);
}

// -- rows that several files bind ------------------------------------------------------------------------------------

inline constexpr Text kName{"name"};
inline constexpr Text kOptionName{"an option's name"};
inline constexpr Whole<> kSize{"size", "a whole number of bytes"};
inline constexpr Flag kByTag{"by_tag"};
inline constexpr Whole<std::uint32_t> kStack{"stack", "the number of a stack"};

// -- binding ---------------------------------------------------------------------------------------------------------

// The value of an argument, converted as `row` says.
template <const auto& row>
struct Given {
  using Value = decltype(convert(nb::handle(), row));
  static Given of(nb::handle given) { return {convert(given, row)}; }
  Value value;
  const std::remove_reference_t<Value>& operator*() const { return value; }
  const std::remove_reference_t<Value>* operator->() const { return &value; }
};

// The parameter of `row` in a def(); give it a default with `=`.
template <const auto& row>
auto parameter() {
  return nb::arg(row.name).none();
}

}  // namespace streampool::python

namespace nanobind::detail {

// Takes whatever comes; the conversion follows when the function is called, where it may throw.
template <const auto& row>
struct type_caster<streampool::python::Given<row>> {
  using Value = streampool::python::Given<row>;
  static constexpr auto Name = std::remove_cvref_t<decltype(row)>::signature();
  template <typename>
  using Cast = Value;
  template <typename>
  static constexpr bool can_cast() {
    return true;
  }
  bool from_python(handle given, std::uint32_t, cleanup_list*) noexcept {
    given_ = given;
    return true;
  }
  explicit operator Value() { return Value::of(given_); }

 private:
  handle given_;
};

}  // namespace nanobind::detail
