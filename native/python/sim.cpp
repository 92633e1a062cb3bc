// See sim.hpp. Imports driver/sim/machine.hpp.
//
// Locks: the machine's lock is never held while the GIL is taken or a Python object is released. Bodies run on worker
// threads, which hold nothing; whoever drops a body without running it puts the reference into a graveyard, emptied by
// the next call that holds the GIL anyway. Waits release the GIL and look for signals.
#include "sim.hpp"

#include "arguments.hpp"
#include "gil.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <sys/syscall.h>
#include <unistd.h>

#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "driver/sim/machine.hpp"

namespace nb = nanobind;

namespace streampool::python {
namespace {

namespace sim = driver::sim;
using driver::Status;
using driver::StreamHandle;

PyObject* core_module = nullptr;  // for the exception classes; borrowed, it lives as long as we do

bool finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// Python objects that were dropped where the GIL may not be taken.
struct Graveyard {
  std::mutex mutex;
  std::vector<PyObject*> objects;
};
Graveyard& graveyard() {
  static Graveyard* const all = new Graveyard;  // never destroyed: worker threads outlive static objects
  return *all;
}
void bury(PyObject* object) {
  if (object == nullptr) return;
  const std::lock_guard lock(graveyard().mutex);
  graveyard().objects.push_back(object);
}
void empty_graveyard() {  // with the GIL
  std::vector<PyObject*> objects;
  {
    const std::lock_guard lock(graveyard().mutex);
    objects.swap(graveyard().objects);
  }
  for (PyObject* object : objects) Py_DECREF(object);
}

// A Python callable as a queued body: called with a memoryview for each access. It may not raise (sim.py sees to it).
class Body {
 public:
  Body(PyObject* callable, std::vector<sim::Access> accesses) : callable_(callable), accesses_(std::move(accesses)) {
    Py_INCREF(callable_);
  }
  Body(const Body&) = delete;
  Body& operator=(const Body&) = delete;
  ~Body() { bury(callable_); }

  // No WithGil: taking the GIL while the interpreter ends leaves the thread by unwinding it, which must
  // not meet a `noexcept`.
  void run() {
    if (finalizing() || Py_IsInitialized() == 0) return;
    const PyGILState_STATE state = PyGILState_Ensure();
    call();
    if (!sim::in_graph()) Py_CLEAR(callable_);
    empty_graveyard();
    PyGILState_Release(state);
  }

 private:
  void call() {
    PyObject* arguments = PyTuple_New(static_cast<Py_ssize_t>(accesses_.size()));
    if (arguments == nullptr) return PyErr_WriteUnraisable(callable_);
    for (std::size_t i = 0; i < accesses_.size(); ++i) {
      char* memory = reinterpret_cast<char*>(accesses_[i].begin);  // NOLINT: addresses are numbers here
      PyObject* view = PyMemoryView_FromMemory(memory, static_cast<Py_ssize_t>(accesses_[i].size),
                                               accesses_[i].write ? PyBUF_WRITE : PyBUF_READ);
      if (view == nullptr) {
        Py_DECREF(arguments);
        return PyErr_WriteUnraisable(callable_);
      }
      PyTuple_SET_ITEM(arguments, static_cast<Py_ssize_t>(i), view);
    }
    PyObject* result = PyObject_CallObject(callable_, arguments);
    Py_DECREF(arguments);
    if (result == nullptr) PyErr_WriteUnraisable(callable_);
    Py_XDECREF(result);
  }

  PyObject* callable_;
  std::vector<sim::Access> accesses_;
};

[[noreturn]] void raise(const char* kind, const std::string& text) {
  PyObject* type = core_module != nullptr ? PyObject_GetAttrString(core_module, kind) : nullptr;
  if (type == nullptr) {
    PyErr_Clear();
    PyErr_SetString(PyExc_RuntimeError, text.c_str());
  } else {
    PyErr_SetString(type, text.c_str());
    Py_DECREF(type);
  }
  throw nb::python_error();
}

// Raises what a failed call means; a wait that a signal ended raises what the handler raised.
void check(const Status& status) {
  if (status.ok()) return;
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  const std::string text = describe(status);
  raise(status.code == driver::Code::capturing ? "CaptureError" : "DriverError", text);
}

// Asked during waits, without the GIL and without any lock.
bool signalled() {
  const PyGILState_STATE state = PyGILState_Ensure();
  const bool stop = PyErr_CheckSignals() != 0;
  PyGILState_Release(state);
  return stop;
}

// Only the main thread handles signals; others leave the GIL alone while they wait, also while the interpreter ends.
sim::Interrupt interrupt() {
  if (syscall(SYS_gettid) != getpid()) return {};
  return signalled;
}

template <typename Call>
Status without_gil(Call call) {
  empty_graveyard();
  const WithoutGil release;
  return call();
}

std::shared_ptr<sim::Device> find(int ordinal) {
  std::string error;
  auto device = sim::device(ordinal, &error);
  if (!device) raise(driver::ending() == driver::Ending::no ? "DriverNotFoundError" : "ForkedProcessError", error);
  return device;
}

// Held by value: a nanobind shared_ptr of a Python object would take the GIL wherever its last copy goes.
struct GateRef {
  std::shared_ptr<sim::Gate> gate = std::make_shared<sim::Gate>();
};
struct DeviceRef {
  std::shared_ptr<sim::Device> device;
};
struct GraphRef {
  std::shared_ptr<sim::Device> device;
  std::shared_ptr<sim::Graph> graph;  // null: closed
};

// -- what functions are given ----------------------------------------------------------------------------------------

constexpr Whole<StreamHandle> kStream{"stream", "a handle"};
constexpr Whole<driver::EventHandle> kEvent{"event", "a handle"};
constexpr Text kLabel{"label"};

// Memory that work touches: a list of (address, bytes).
struct Ranges {
  static constexpr auto signature() { return nb::detail::const_name("list[tuple[int, int]]"); }
  const char* name;
};
constexpr Whole<> kAddress{"address", "an address"};
std::vector<std::pair<Address, Bytes>> convert(nb::handle given, const Ranges& row) {
  constexpr const char* kWanted = "a list of (address, bytes)";
  std::vector<std::pair<Address, Bytes>> out;
  for (const nb::handle one : items(given, row.name, kWanted)) {
    const std::vector<nb::handle> range = items(one, row.name, kWanted);
    if (range.size() != 2) refuse(PyExc_TypeError, row.name, kWanted, given);
    out.emplace_back(convert(range[0], kAddress), convert(range[1], kSize));
  }
  return out;
}
constexpr Ranges kReads{"reads"};
constexpr Ranges kWrites{"writes"};
constexpr Callable kBody{"body"};
constexpr Instance<GateRef, const GateRef*> kGate{"gate", "a Gate or None"};

void launch(const DeviceRef& self, Given<kStream> stream, Given<kBody> body, Given<kReads> reads, Given<kWrites> writes,
            Given<kGate> gate, Given<kLabel> label, Given<kStack> stack) {
  empty_graveyard();
  sim::Work work{.stream = *stream, .label = std::string(*label), .stack = *stack};
  for (const auto& [begin, size] : *reads) work.accesses.push_back(sim::reads(begin, size));
  for (const auto& [begin, size] : *writes) work.accesses.push_back(sim::writes(begin, size));
  if (*gate != nullptr) work.gate = (*gate)->gate;
  if (!body->is_none()) {
    work.body = [run = std::make_shared<Body>(body->ptr(), work.accesses)] { run->run(); };
  }
  check(self.device->launch(std::move(work)));
}

constexpr Whole<> kNth{"n", "a count", 1};
constexpr Whole<> kTimes{"times", "a count", 1};
constexpr Text kCode{"code"};

driver::Call call_of(std::string_view name) {
  for (std::size_t i = 0; i < driver::kCallCount; ++i)
    if (name == driver::kCallNames[i]) return static_cast<driver::Call>(i);
  throw nb::value_error(("no driver call is named '" + std::string(name) + "'; dev.calls() lists them").c_str());
}

driver::Code code_of(std::string_view name) {
  for (int i = 1; i <= static_cast<int>(driver::Code::failed); ++i)
    if (const auto code = static_cast<driver::Code>(i); driver::code_name(code) == name) return code;
  throw nb::value_error(
      ("no way to fail is named '" + std::string(name) + "'; for example 'out_of_memory', 'failed'").c_str());
}

nb::dict calls_of(const DeviceRef& self) {
  nb::dict out;
  const auto counts = self.device->calls();
  for (std::size_t i = 0; i < driver::kCallCount; ++i) out[driver::kCallNames[i]] = counts[i];
  return out;
}

using Side = std::tuple<bool, std::string, std::uint64_t, std::string, std::uint32_t>;
Side side(const sim::RaceSide& one) { return {one.write, one.label, one.stream, one.stream_name, one.stack}; }

// (device, address, size, count, first, second); a side is (write, label, stream id, stream name, stack).
std::vector<std::tuple<int, Address, Bytes, std::uint64_t, Side, Side>> take_races() {
  std::vector<std::tuple<int, Address, Bytes, std::uint64_t, Side, Side>> out;
  for (const sim::Race& race : sim::races())
    out.emplace_back(race.device, race.address, race.size, race.count, side(race.first), side(race.second));
  return out;
}

constexpr Whole<int> kDevices{"devices", "a number of devices"};
constexpr Whole<> kMemory{"memory", "a whole number of bytes"};
constexpr Whole<> kHostMemory{"host_memory", "a whole number of bytes"};
constexpr Choice<sim::Scheduler>::Word kSchedulers[] = {{"threads", sim::Scheduler::threads},
                                                        {"seeded", sim::Scheduler::seeded}};
constexpr Choice<sim::Scheduler> kScheduler{"scheduler", "'threads' or 'seeded'", kSchedulers};
constexpr Whole<> kSeed{"seed", "a whole number"};
constexpr Flag kVirtualMemory{"virtual_memory"};
constexpr Flag kManagedMemory{"managed_memory"};
constexpr Flag kContextEvents{"context_events"};
constexpr Flag kDriverPools{"driver_pools"};
constexpr Flag kCheckRaces{"check_races"};
constexpr Flag kAbortOnTrap{"abort_on_trap"};

void configure(Given<kDevices> devices, Given<kMemory> memory, Given<kHostMemory> host_memory,
               Given<kScheduler> scheduler, Given<kSeed> seed, Given<kVirtualMemory> virtual_memory,
               Given<kManagedMemory> managed_memory, Given<kContextEvents> context_events,
               Given<kDriverPools> driver_pools, Given<kCheckRaces> check_races, Given<kAbortOnTrap> abort_on_trap) {
  const sim::Config config{.devices = *devices,
                           .memory = *memory,
                           .host_memory = *host_memory,
                           .scheduler = *scheduler,
                           .seed = *seed,
                           .virtual_memory = *virtual_memory,
                           .managed_memory = *managed_memory,
                           .context_events = *context_events,
                           .driver_pools = *driver_pools,
                           .check_races = *check_races,
                           .abort_on_trap = *abort_on_trap};
  std::string error;
  if (sim::configure(config, &error)) return;
  if (sim::in_use()) {
    PyErr_SetString(PyExc_RuntimeError, error.c_str());
    throw nb::python_error();
  }
  throw nb::value_error(error.c_str());
}

nb::dict config_of_now() {
  const sim::Config config = sim::config();
  nb::dict out;
  out["devices"] = config.devices;
  out["memory"] = config.memory;
  out["host_memory"] = config.host_memory;
  out["scheduler"] = config.scheduler == sim::Scheduler::seeded ? "seeded" : "threads";
  out["seed"] = config.seed;
  out["virtual_memory"] = config.virtual_memory;
  out["managed_memory"] = config.managed_memory;
  out["context_events"] = config.context_events;
  out["driver_pools"] = config.driver_pools;
  out["check_races"] = config.check_races;
  out["abort_on_trap"] = config.abort_on_trap;
  return out;
}

// That there is no device of a negative number is said like of any other.
constexpr Whole<int> kOrdinal{"ordinal", "the number of a device", std::numeric_limits<int>::min()};
constexpr Seconds kSeconds{"seconds"};

void bind_machine(nb::module_& m) {
  m.def("configure", &configure, nb::kw_only(), parameter<kDevices>(), parameter<kMemory>(), parameter<kHostMemory>(),
        parameter<kScheduler>(), parameter<kSeed>(), parameter<kVirtualMemory>(), parameter<kManagedMemory>(),
        parameter<kContextEvents>(), parameter<kDriverPools>(), parameter<kCheckRaces>(), parameter<kAbortOnTrap>());
  m.def("config", &config_of_now);
  m.def("reset", [] {
    sim::reset();
    empty_graveyard();
  });
  m.def("in_use", &sim::in_use);
  m.def("device_count", &sim::device_count);
  m.def("device", [](Given<kOrdinal> ordinal) { return DeviceRef{find(*ordinal)}; }, parameter<kOrdinal>());
  m.def("settle", [] {
    empty_graveyard();
    {
      const WithoutGil release;
      sim::settle(interrupt());
    }
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
  });
  m.def("races", &take_races);
  m.def("traps", &sim::traps);
  m.def("history_size", &sim::history_size);
  m.def("clock_now", &sim::clock_now);
  m.def("clock_advance", [](Given<kSeconds> seconds) { sim::clock_advance(*seconds); }, parameter<kSeconds>());

  nb::class_<GateRef>(m, "Gate")
      .def(nb::init<>())
      .def("open", [](const GateRef& self) { self.gate->open(); })
      .def_prop_ro("is_open", [](const GateRef& self) { return self.gate->is_open(); });
}

void bind_graphs(nb::module_& m) {
  nb::class_<GraphRef>(m, "Graph")
      .def(
          "launch",
          [](const GraphRef& self, Given<kStream> stream) {
            empty_graveyard();
            if (!self.graph) throw nb::value_error("the graph is closed");
            check(self.device->launch_graph(self.graph, *stream));
          },
          parameter<kStream>())
      .def("close", [](GraphRef& self) { self.graph.reset(); });
}

constexpr Flag kBlocking{"blocking"};
constexpr Whole<int> kNumber{"number", "a driver's error", 1};
constexpr Flag kGone{"gone"};
constexpr Flag kWrite{"write"};

void bind_streams(nb::class_<DeviceRef>& device) {
  device
      .def(
          "create_stream",
          [](const DeviceRef& self, Given<kBlocking> blocking, Given<kName> name) {
            StreamHandle out = 0;
            check(self.device->create_stream(*blocking, std::string(*name), &out));
            return out;
          },
          parameter<kBlocking>(), parameter<kName>())
      .def(
          "destroy_stream",
          [](const DeviceRef& self, Given<kStream> stream) { check(self.device->stream_destroy(*stream)); },
          parameter<kStream>())
      .def(
          "drop_stream", [](const DeviceRef& self, Given<kStream> stream) { self.device->drop_stream(*stream); },
          parameter<kStream>())
      .def(
          "stream_id",
          [](const DeviceRef& self, Given<kStream> stream) {
            std::uint64_t out = 0;
            check(self.device->stream_id(*stream, &out));
            return out;
          },
          parameter<kStream>())
      .def(
          "capture_state",
          [](const DeviceRef& self, Given<kStream> stream) {
            driver::CaptureState out;
            check(self.device->stream_is_capturing(*stream, &out));
            return std::pair(out.capturing, out.id);
          },
          parameter<kStream>())
      .def(
          "begin_capture",
          [](const DeviceRef& self, Given<kStream> stream) { check(self.device->begin_capture(*stream)); },
          parameter<kStream>())
      .def(
          "end_capture",
          [](const DeviceRef& self, Given<kStream> stream) {
            empty_graveyard();
            GraphRef out{self.device, nullptr};
            check(self.device->end_capture(*stream, &out.graph));
            return out.graph ? nb::cast(std::move(out)) : nb::none();
          },
          parameter<kStream>())
      .def(
          "wait_event",
          [](const DeviceRef& self, Given<kStream> stream, Given<kEvent> event) {
            check(self.device->stream_wait_event(*stream, *event));
          },
          parameter<kStream>(), parameter<kEvent>())
      .def(
          "stream_done",
          [](const DeviceRef& self, Given<kStream> stream) {
            const Status status = without_gil([&] { return self.device->poll_stream(*stream); });
            if (status.code == driver::Code::not_ready) return false;
            check(status);
            return true;
          },
          parameter<kStream>())
      .def(
          "sync_stream",
          [](const DeviceRef& self, Given<kStream> stream) {
            check(without_gil([&] { return self.device->stream_synchronize(*stream, interrupt()); }));
          },
          parameter<kStream>())
      .def("sync",
           [](const DeviceRef& self) { check(without_gil([&] { return self.device->synchronize(interrupt()); })); })
      .def("launch", &launch, parameter<kStream>(), parameter<kBody>(), parameter<kReads>(), parameter<kWrites>(),
           parameter<kGate>(), parameter<kLabel>(), parameter<kStack>());
}

void bind_events(nb::class_<DeviceRef>& device) {
  device
      .def("create_event",
           [](const DeviceRef& self) {
             driver::EventHandle out = 0;
             check(self.device->event_create(&out));
             return out;
           })
      .def(
          "destroy_event",
          [](const DeviceRef& self, Given<kEvent> event) { check(self.device->event_destroy(*event)); },
          parameter<kEvent>())
      .def(
          "drop_event", [](const DeviceRef& self, Given<kEvent> event) { self.device->drop_event(*event); },
          parameter<kEvent>())
      .def(
          "record_event",
          [](const DeviceRef& self, Given<kEvent> event, Given<kStream> stream) {
            check(self.device->event_record(*event, *stream));
          },
          parameter<kEvent>(), parameter<kStream>())
      .def(
          "record_context_event",
          [](const DeviceRef& self, Given<kEvent> event) { check(self.device->context_event_record(*event)); },
          parameter<kEvent>())
      .def(
          "event_done",
          [](const DeviceRef& self, Given<kEvent> event) {
            const Status status = without_gil([&] { return self.device->poll(*event); });
            if (status.code == driver::Code::not_ready) return false;
            check(status);
            return true;
          },
          parameter<kEvent>())
      .def(
          "sync_event",
          [](const DeviceRef& self, Given<kEvent> event) {
            check(without_gil([&] { return self.device->event_synchronize(*event, interrupt()); }));
          },
          parameter<kEvent>());
}

void bind_levers(nb::class_<DeviceRef>& device) {
  device
      .def(
          "fail_call",
          [](const DeviceRef& self, Given<kName> name, Given<kNth> n, Given<kTimes> times, Given<kCode> code) {
            self.device->fail_call(call_of(*name), *n, *times, code_of(*code));
          },
          parameter<kName>(), parameter<kNth>(), parameter<kTimes>(), parameter<kCode>())
      .def(
          "before_call",
          [](const DeviceRef& self, Given<kName> name, Given<kBody> body) {
            const driver::Call call = call_of(*name);
            if (body->is_none()) return;
            empty_graveyard();
            self.device->before_call(
                call, [run = std::make_shared<Body>(body->ptr(), std::vector<sim::Access>{})] { run->run(); });
          },
          parameter<kName>(), parameter<kBody>())
      .def("clear_failures", [](const DeviceRef& self) { self.device->clear_failures(); })
      .def(
          "set_lost", [](const DeviceRef& self, Given<kNumber> number) { self.device->set_lost(*number); },
          parameter<kNumber>())
      .def(
          "set_gone", [](const DeviceRef& self, Given<kGone> gone) { self.device->set_gone(*gone); },
          parameter<kGone>())
      .def(
          "set_occupied", [](const DeviceRef& self, Given<kSize> size) { self.device->set_occupied(*size); },
          parameter<kSize>())
      .def(
          "host_access",
          [](const DeviceRef& self, Given<kAddress> address, Given<kSize> size, Given<kWrite> write,
             Given<kLabel> label,
             Given<kStack> stack) { self.device->host_access({*address, *size, *write}, std::string(*label), *stack); },
          parameter<kAddress>(), parameter<kSize>(), parameter<kWrite>(), parameter<kLabel>(), parameter<kStack>())
      .def("calls", &calls_of)
      .def("memory_info",
           [](const DeviceRef& self) {
             Bytes free_bytes = 0, total = 0;
             check(self.device->mem_info(&free_bytes, &total));
             return std::pair(free_bytes, total);
           })
      .def_prop_ro("used_memory", [](const DeviceRef& self) { return self.device->used_memory(); })
      .def_prop_ro("live_streams", [](const DeviceRef& self) { return self.device->live_streams(); })
      .def_prop_ro("live_events", [](const DeviceRef& self) { return self.device->live_events(); })
      .def_prop_ro("pending_work", [](const DeviceRef& self) { return self.device->pending_work(); })
      .def_prop_ro("fault", [](const DeviceRef& self) { return self.device->fault_text(); });
}

}  // namespace

void bind_sim(nb::module_& core) {
  core_module = core.ptr();
  // Queued functions may still run, and hold what they use, when the process ends: no leak, and nothing to print.
  nb::set_leak_warnings(false);
  nb::module_ m = core.def_submodule("sim", "Controls of the simulated machine; use streampool.sim.");
  bind_machine(m);
  bind_graphs(m);
  nb::class_<DeviceRef> device(m, "Device");
  device.def_prop_ro("driver", [](const DeviceRef& self) -> std::shared_ptr<driver::Driver> { return self.device; })
      .def_prop_ro("name", [](const DeviceRef& self) { return std::string(self.device->name()); })
      .def_prop_ro("ordinal", [](const DeviceRef& self) { return self.device->ordinal(); })
      .def("__eq__", [](const DeviceRef& self, const DeviceRef& other) { return self.device == other.device; })
      .def("__eq__", [](const DeviceRef&, const nb::object&) { return false; })
      .def("__hash__", [](const DeviceRef& self) { return std::hash<sim::Device*>()(self.device.get()); });
  bind_streams(device);
  bind_events(device);
  bind_levers(device);
}

}  // namespace streampool::python
