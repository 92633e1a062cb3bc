// The extension through which pytest runs the native tests one by one (tests/test_native.py). Not part of the wheel.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <exception>
#include <optional>
#include <string>

#include "lock_holder.hpp"
#include "test.hpp"

namespace nb = nanobind;

namespace {

// (file, name) of every test, in the table's order.
nb::list list_tests() {
  nb::list out;
  for (const auto& test : streampool::testing::table()) {
    out.append(nb::make_tuple(test.file, test.name));
  }
  return out;
}

// Runs one test. Returns what failed, or None.
nb::object run_test(const std::string& name) {
  for (const auto& test : streampool::testing::table()) {
    if (name != test.name) continue;
    std::optional<std::string> failure;
    {
      nb::gil_scoped_release release;  // the core may not need the GIL, and a test may wait for another thread
      try {
        test.run();
      } catch (const std::exception& error) {
        failure = error.what();
      }
    }
    return failure ? nb::cast(*failure) : nb::none();
  }
  throw nb::key_error(name.c_str());
}

}  // namespace

NB_MODULE(_native_tests, module) {
  module.def("list", &list_tests, "(file, name) of every native test.");
  using streampool::testing::LockHolder;
  nb::class_<LockHolder>(module, "LockHolder", "A thread that stays inside the lock of a pool's stream.")
      .def(nb::init<const std::string&, std::uintptr_t>(), nb::arg("pool"), nb::arg("stream"),
           nb::call_guard<nb::gil_scoped_release>())
      .def("release", &LockHolder::release, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("timed_out", &LockHolder::timed_out);
  module.def("run", &run_test, nb::arg("name"), "Run one native test; what failed as text, or None.");
}
