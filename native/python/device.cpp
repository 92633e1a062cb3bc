// Devices: streampool._core.Driver, and what a process tells the core about its end.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "arguments.hpp"
#include "support.hpp"

namespace streampool::python {

using driver::Driver;

void bind_device(nb::module_& m) {
  nb::class_<Driver>(m, "Driver", "One device and its context.")
      .def_prop_ro("name", [](const Driver& d) { return std::string(d.name()); })
      .def_prop_ro("ordinal", &Driver::ordinal)
      .def_prop_ro("simulated", &Driver::simulated)
      .def_prop_ro("version", &Driver::version)
      .def_prop_ro("handle", [](const Driver& d) { return reinterpret_cast<std::uintptr_t>(&d); })
      .def("capabilities",
           [](const Driver& d) {
             const driver::Capabilities& c = d.capabilities();
             nb::dict out;
             out["virtual_memory"] = c.virtual_memory;
             out["managed_memory"] = c.managed_memory;
             out["context_events"] = c.context_events;
             out["device_memory_on_host"] = c.device_memory_on_host;
             out["driver_pools"] = c.driver_pools;
             out["export_posix_fd"] = c.export_posix_fd;
             out["export_fabric"] = c.export_fabric;
             out["rdma"] = c.rdma;
             nb::list peers;
             for (const int peer : c.peers) peers.append(peer);
             out["peers"] = peers;
             out["granularity"] = c.granularity;
             out["total_memory"] = c.total_memory;
             out["address_chunk"] = c.address_chunk;
             return out;
           })
      .def("calls",
           [](const Driver& d) {
             const auto counts = d.calls();
             nb::dict out;
             for (std::size_t i = 0; i < counts.size(); ++i) out[driver::kCallNames[i]] = counts[i];
             return out;
           })
      .def("now", &Driver::now)
      .def("memory_info",
           [](Driver& d) {
             Bytes free = 0, total = 0;
             driver::Status status;
             {
               WithoutGil release;
               status = d.mem_info(&free, &total);
             }
             if (!status.ok()) raise_driver_error(driver::describe(status));
             return std::make_pair(free, total);
           })
      .def("__repr__",
           [](const Driver& d) { return "<streampool device " + std::string(d.name()) + ", " + d.version() + ">"; });

  m.def(
      "open_device",
      [](Given<kName> name) {
        driver::OpenError kind = driver::OpenError::none;
        std::string error;
        std::shared_ptr<Driver> d;
        {
          WithoutGil release;
          d = driver::open(std::string(*name), &kind, &error);
        }
        if (!d) raise_driver_error(kind, error);
        return d;
      },
      parameter<kName>());
  m.def("set_exiting", [] {
    pool::end_of(driver::Ending::exiting);
    process_ends_here();
  });
#ifdef STREAMPOOL_TEST_SWITCHES
  m.def("break_r1", &order::break_r1, "Test builds only: break the reuse rule.");
#endif
  m.def("build_info", [] {
    nb::dict out;
    out["compiler"] = __VERSION__;
    out["cxx"] = std::to_string(__cplusplus);
#ifdef STREAMPOOL_TEST_SWITCHES
    out["test_switches"] = "on";
#else
    out["test_switches"] = "off";
#endif
    return out;
  });
}

}  // namespace streampool::python
