// The options table as Python sees it.
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <sstream>

#include "support.hpp"

namespace streampool::python {
namespace {

struct Option {
  std::string name, type, fallback, help;
  std::vector<std::string> choices;
};

// An option's value as text. None: not given.
bool value_text(const std::string& name, nb::handle value, std::string* out) {
  if (value.is_none()) return false;
  if (nb::isinstance<nb::str>(value))
    *out = nb::cast<std::string>(value);
  else if (PyBool_Check(value.ptr()))
    *out = value.is(Py_True) ? "true" : "false";
  else if (PyLong_Check(value.ptr()) || PyFloat_Check(value.ptr()))
    *out = nb::cast<std::string>(nb::str(value));
  else if (PyObject_HasAttrString(value.ptr(), "value"))
    *out = nb::cast<std::string>(nb::str(value.attr("value")));  // an enum member
  else
    throw nb::type_error(("option '" + name + "' takes text, a number or a bool, not " +
                          nb::cast<std::string>(nb::str(value.type().attr("__name__"))))
                             .c_str());
  return true;
}

}  // namespace

void bind_options(nb::module_& m) {
  nb::class_<Option>(m, "Option", "One row of the options table.")
      .def_ro("name", &Option::name)
      .def_ro("type", &Option::type)
      .def_ro("default", &Option::fallback)
      .def_ro("choices", &Option::choices)
      .def_ro("help", &Option::help)
      .def("__repr__", [](const Option& o) { return "<option " + o.name + "=" + o.fallback + ">"; });
  m.def("option_table", [] {
    std::vector<Option> rows;
    for (const pool::OptionRow& row : pool::option_table()) {
      Option o{row.name, std::string(pool::option_type_word(row.type)), row.fallback, row.help, {}};
      std::istringstream choices(row.choices);
      for (std::string word; std::getline(choices, word, '|');) o.choices.push_back(word);
      rows.push_back(std::move(o));
    }
    return rows;
  });
  m.def("presets", [] {
    nb::dict out;
    for (const auto& [mode, options] : pool::presets()) {
      nb::dict d;
      for (const auto& [name, value] : options) d[name.c_str()] = value;
      out[mode.c_str()] = d;
    }
    return out;
  });
  m.def(
      "resolve_options",
      [](nb::dict arguments, nb::object environment) {
        pool::OptionMap given, resolved;
        for (auto [key, value] : arguments) {
          const std::string name = nb::cast<std::string>(key);
          std::string text;
          if (value_text(name, value, &text)) given[name] = text;
        }
        std::string error;
        const std::string env = environment.is_none() ? std::string() : nb::cast<std::string>(environment);
        if (!pool::resolve_options(given, env, &resolved, &error)) throw nb::value_error(error.c_str());
        nb::dict out;
        for (const auto& [name, value] : resolved) out[name.c_str()] = value;
        return out;
      },
      nb::arg("arguments"), nb::arg("environment").none() = nb::none());
  m.def("parse_size", [](nb::object value) -> Bytes {
    if (PyBool_Check(value.ptr()))
      throw nb::type_error("a size is a number of bytes or a text like '2GiB', not a bool");
    if (PyFloat_Check(value.ptr())) {
      const double d = PyFloat_AsDouble(value.ptr());
      if (!(d >= 0) || d != std::floor(d) || d >= 18446744073709551616.0)
        throw nb::value_error(
            ("a size is a whole number of bytes from 0 to 2^64 - 1, not " + nb::cast<std::string>(nb::repr(value)))
                .c_str());
      return static_cast<Bytes>(d);
    }
    if (!PyLong_Check(value.ptr()) && !nb::isinstance<nb::str>(value))
      throw nb::type_error("a size is a number of bytes or a text like '2GiB'");
    const std::string text = nb::cast<std::string>(nb::str(value));
    Bytes bytes = 0;
    std::string error;
    if (!pool::parse_size(text, &bytes, &error)) throw nb::value_error(error.c_str());
    return bytes;
  });
}

}  // namespace streampool::python
