// What a method costs that does nothing: the floor under every call from Python, for `streampool bench`.
#include <cstdint>

#include "support.hpp"

namespace streampool::python {
namespace {

struct EmptyPair {};
constexpr std::uint64_t kLikeAnAddress = 0x7f0000000000;  // an int of the same size as a real pointer

}  // namespace

void bind_bench(nb::module_& m) {
  nb::class_<EmptyPair>(m, "_EmptyPair", "Methods with the arguments of Pool's raw pair that do nothing.")
      .def(nb::init<>())
      .def(
          "allocate_raw", [](EmptyPair&, std::uint64_t size, nb::handle) { return kLikeAnAddress + size; },
          nb::arg("size"), nb::kw_only(), nb::arg("stream").none() = nb::none())
      .def(
          "free_raw", [](EmptyPair&, std::uint64_t, nb::handle) {}, nb::arg("ptr"), nb::kw_only(),
          nb::arg("stream").none() = nb::none())
      .def("nothing", [](EmptyPair&) {});
}

}  // namespace streampool::python
