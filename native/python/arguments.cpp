#include "arguments.hpp"

#include <cmath>

#include "pool/options.hpp"

namespace streampool::python {
namespace {

// An int is written in full up to a length that a person still reads; its text may be refused beyond some length.
constexpr Py_ssize_t kShownCharacters = 60;

std::string utf8(nb::handle text) {
  Py_ssize_t size = 0;
  const char* bytes = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (bytes != nullptr) return {bytes, static_cast<std::size_t>(size)};
  PyErr_Clear();
  return {};
}

// What an error shows of a value: its repr, shortened. Empty where there is none.
std::string shown(nb::handle given) {
  nb::object text = nb::steal(PyObject_Repr(given.ptr()));
  if (!text.is_valid()) {
    PyErr_Clear();
    return {};
  }
  if (PyUnicode_GET_LENGTH(text.ptr()) <= kShownCharacters) return utf8(text);
  return utf8(nb::steal(PyUnicode_Substring(text.ptr(), 0, kShownCharacters))) + "...";
}

std::string most_text(std::uint64_t value) {
  return value == std::numeric_limits<std::uint64_t>::max() ? "2^64 - 1" : std::to_string(value);
}

constexpr const char* kSizeWanted = "a whole number of bytes from 0 to 2^64 - 1 or text such as '2GiB'";
constexpr const char* kTextWanted = "text";

std::string_view text_of(nb::handle given, const char* name, const char* wanted) {
  if (!PyUnicode_Check(given.ptr())) refuse(PyExc_TypeError, name, wanted, given);
  Py_ssize_t size = 0;
  const char* bytes = PyUnicode_AsUTF8AndSize(given.ptr(), &size);
  if (bytes == nullptr) {
    PyErr_Clear();
    refuse(PyExc_ValueError, name, "text that UTF-8 can hold", given);
  }
  return {bytes, static_cast<std::size_t>(size)};
}

}  // namespace

void refuse(PyObject* error, std::string_view name, std::string_view wanted, nb::handle given) {
  std::string text = std::string(name) + " must be " + std::string(wanted) + ", not ";
  const std::string value = shown(given);
  text += value.empty() ? "an object" : value;
  if ((error == PyExc_TypeError && !given.is_none()) || value.empty())
    text += " of type " + utf8(nb::steal(PyType_GetName(Py_TYPE(given.ptr()))));
  PyErr_SetString(error, text.c_str());
  throw nb::python_error();
}

std::vector<nb::handle> items(nb::handle given, const char* name, const char* wanted) {
  if (!PyList_Check(given.ptr()) && !PyTuple_Check(given.ptr())) refuse(PyExc_TypeError, name, wanted, given);
  std::vector<nb::handle> out;
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(given.ptr());
  for (Py_ssize_t i = 0; i < count; ++i) out.emplace_back(PySequence_Fast_GET_ITEM(given.ptr(), i));
  return out;
}

std::uint64_t whole_number(nb::handle given, const char* name, const char* wanted, std::int64_t least,
                           std::uint64_t most) {
  PyErr_Clear();  // what the fast attempt left
  const auto refuse_as = [&](PyObject* error) {
    refuse(error, name, std::string(wanted) + " from " + std::to_string(least) + " to " + most_text(most), given);
  };
  if (PyBool_Check(given.ptr()) || PyIndex_Check(given.ptr()) == 0) refuse_as(PyExc_TypeError);
  const nb::object number = nb::steal(PyNumber_Index(given.ptr()));
  if (!number.is_valid()) {
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw nb::python_error();
    PyErr_Clear();
    refuse_as(PyExc_TypeError);
  }
  int beyond = 0;
  const long long small = PyLong_AsLongLongAndOverflow(number.ptr(), &beyond);
  if (beyond < 0 || (beyond == 0 && small < least)) refuse_as(PyExc_ValueError);
  if (beyond == 0 && small < 0) return static_cast<std::uint64_t>(small);
  const std::uint64_t value = PyLong_AsUnsignedLongLong(number.ptr());
  const bool fits = PyErr_Occurred() == nullptr;
  PyErr_Clear();
  if (!fits || value > most) refuse_as(PyExc_ValueError);
  return value;
}

Bytes convert(nb::handle given, const Size& row) {
  constexpr std::uint64_t kMost = std::numeric_limits<std::uint64_t>::max();
  if (PyUnicode_Check(given.ptr())) {
    Bytes bytes = 0;
    std::string error;
    if (pool::parse_size(text_of(given, row.name, kSizeWanted), &bytes, &error)) return bytes;
    throw nb::value_error((std::string(row.name) + ": " + error).c_str());
  }
  if (PyBool_Check(given.ptr()) || PyIndex_Check(given.ptr()) == 0)
    refuse(PyExc_TypeError, row.name, kSizeWanted, given);
  return whole_number(given, row.name, "a whole number of bytes", 0, kMost);
}

double convert(nb::handle given, const Seconds& row) {
  constexpr const char* kWanted = "a finite number of seconds, 0 or more";
  if (PyBool_Check(given.ptr()) || PyNumber_Check(given.ptr()) == 0) refuse(PyExc_TypeError, row.name, kWanted, given);
  const double seconds = PyFloat_AsDouble(given.ptr());
  if (PyErr_Occurred() != nullptr) {
    const bool too_large = PyErr_ExceptionMatches(PyExc_OverflowError) != 0;
    if (!too_large && !PyErr_ExceptionMatches(PyExc_TypeError)) throw nb::python_error();
    PyErr_Clear();
    refuse(too_large ? PyExc_ValueError : PyExc_TypeError, row.name, kWanted, given);
  }
  if (!std::isfinite(seconds) || seconds < 0) refuse(PyExc_ValueError, row.name, kWanted, given);
  return seconds;
}

std::string_view convert(nb::handle given, const Text& row) { return text_of(given, row.name, kTextWanted); }

std::optional<std::string_view> convert(nb::handle given, const OptionalText& row) {
  if (given.is_none()) return std::nullopt;
  return text_of(given, row.name, "text or None");
}

bool convert(nb::handle given, const Flag& row) {
  if (!PyBool_Check(given.ptr())) refuse(PyExc_TypeError, row.name, "True or False", given);
  return given.is(Py_True);
}

std::optional<bool> convert(nb::handle given, const OptionalFlag& row) {
  if (given.is_none()) return std::nullopt;
  if (!PyBool_Check(given.ptr())) refuse(PyExc_TypeError, row.name, "True, False or None", given);
  return given.is(Py_True);
}

nb::object convert(nb::handle given, const Callable& row) {
  if (!given.is_none() && PyCallable_Check(given.ptr()) == 0)
    refuse(PyExc_TypeError, row.name, "something to call, or None", given);
  return nb::borrow(given);
}

}  // namespace streampool::python
