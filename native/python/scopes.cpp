// Named scopes of the program: streampool/scopes.py.
#include <nanobind/stl/string.h>

#include "arguments.hpp"
#include "debug/scopes.hpp"
#include "support.hpp"

namespace streampool::python {
namespace {

constexpr Text kScopeName{"name"};
constexpr Whole<> kScope{"scope", "the number of a scope"};

}  // namespace

void bind_scopes(nb::module_& m) {
  m.def("enter_scope", [](Given<kScopeName> name) { return debug::enter_scope(*name); }, parameter<kScopeName>());
  m.def("leave_scope", [](Given<kScope> scope) { debug::leave_scope(*scope); }, parameter<kScope>());
}

}  // namespace streampool::python
