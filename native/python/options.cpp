// The options table as Python sees it.
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <sstream>

#include "arguments.hpp"
#include "debug/memory_regions.hpp"
#include "debug/page_guards.hpp"
#include "support.hpp"

namespace streampool::python {
namespace {

struct Option {
  std::string name, type, fallback, help;
  std::vector<std::string> choices;
};

constexpr Builtin<nb::dict> kArguments{"arguments", "a dict of options"};
constexpr OptionalText kEnvironment{"environment"};
constexpr Size kSizeOrText{"size"};

// An option's value as text. None: not given.
bool value_text(const std::string& name, nb::handle value, std::string* out) {
  const std::string about = "option '" + name + "'";
  const Text text{about.c_str()};
  if (value.is_none()) return false;
  if (PyBool_Check(value.ptr())) {
    *out = value.is(Py_True) ? "true" : "false";
  } else if (PyUnicode_Check(value.ptr())) {
    *out = convert(value, text);
  } else if (PyLong_Check(value.ptr()) || PyFloat_Check(value.ptr())) {
    *out = convert(nb::str(value), text);
  } else if (PyIndex_Check(value.ptr()) != 0) {
    const nb::object number = nb::steal(PyNumber_Index(value.ptr()));
    if (!number.is_valid()) throw nb::python_error();
    *out = convert(nb::str(number), text);
  } else if (PyObject_HasAttrString(value.ptr(), "value")) {
    *out = convert(nb::str(value.attr("value")), text);  // an enum member
  } else {
    refuse(PyExc_TypeError, about, "text, a number or a bool", value);
  }
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
  m.def("page_guard_seed", [] { return debug::PageGuards::seed_of({}); });
  // Why no tool is told of blocks; empty: one is.
  m.def("memory_regions_tool", [] {
    std::string why;
    debug::MemoryRegions::attached(&why);
    return why;
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
      [](Given<kArguments> arguments, Given<kEnvironment> environment) {
        pool::OptionMap given, resolved;
        for (auto [key, value] : *arguments) {
          const std::string name(convert(key, kOptionName));
          std::string text;
          if (value_text(name, value, &text)) given[name] = text;
        }
        std::string error;
        if (!pool::resolve_options(given, environment->value_or(""), &resolved, &error))
          throw nb::value_error(error.c_str());
        nb::dict out;
        for (const auto& [name, value] : resolved) out[name.c_str()] = value;
        return out;
      },
      parameter<kArguments>(), parameter<kEnvironment>() = nb::none());
  // The one place where a float is a size: what somebody computed or read from a file, when it is a whole number.
  m.def(
      "parse_size",
      [](nb::handle size) {
        if (!PyFloat_Check(size.ptr())) return convert(size, kSizeOrText);
        const double bytes = PyFloat_AS_DOUBLE(size.ptr());
        if (!(bytes >= 0) || bytes != std::floor(bytes) || bytes >= 0x1p64)
          refuse(PyExc_ValueError, kSizeOrText.name, "a whole number of bytes from 0 to 2^64 - 1", size);
        return static_cast<Bytes>(bytes);
      },
      nb::arg(kSizeOrText.name).none());
}

}  // namespace streampool::python
