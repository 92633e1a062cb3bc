// Pool. The GIL is held for what cannot block (a slot on a lasting stream) and released for everything else.
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "facts.hpp"
#include "pool_objects.hpp"
#include "support.hpp"

namespace streampool::python {
namespace {

using pool::Core;
using pool::Errc;
using pool::Failure;

Bytes size_argument(nb::handle size) {
  if (PyBool_Check(size.ptr()) || !PyLong_Check(size.ptr()))
    throw nb::type_error(("a size is a whole number of bytes, not " + nb::cast<std::string>(nb::repr(size)) +
                          " of type " + nb::cast<std::string>(nb::str(size.type().attr("__name__"))))
                             .c_str());
  int overflow = 0;
  const long long small = PyLong_AsLongLongAndOverflow(size.ptr(), &overflow);
  if (overflow < 0 || (overflow == 0 && small < 0))
    throw nb::value_error(("a size is 0 bytes or more, not " + nb::cast<std::string>(nb::str(size))).c_str());
  if (overflow == 0) return static_cast<Bytes>(small);
  const unsigned long long large = PyLong_AsUnsignedLongLong(size.ptr());
  if (PyErr_Occurred() == nullptr) return large;
  PyErr_Clear();
  throw nb::value_error(("a size fits 64 bits; " + nb::cast<std::string>(nb::str(size)) + " does not").c_str());
}

Bytes alignment_argument(nb::handle alignment) {
  if (PyBool_Check(alignment.ptr()) || !PyLong_Check(alignment.ptr()))
    throw nb::type_error(
        ("an alignment is a whole number of bytes, not " + nb::cast<std::string>(nb::repr(alignment))).c_str());
  const unsigned long long value = PyLong_AsUnsignedLongLong(alignment.ptr());
  if (PyErr_Occurred() == nullptr) return value;
  PyErr_Clear();
  throw nb::value_error(
      ("an alignment is a power of two from 1 to 2097152 (2 MiB), not " + nb::cast<std::string>(nb::str(alignment)))
          .c_str());
}

// A size that may be written as text.
Bytes flexible_size(nb::handle value) {
  if (!nb::isinstance<nb::str>(value)) return size_argument(value);
  Bytes bytes = 0;
  std::string error;
  if (!pool::parse_size(nb::cast<std::string>(value), &bytes, &error)) throw nb::value_error(error.c_str());
  return bytes;
}

// on_fault=raise: at the pool's next call after a finding arrived, before that call does anything.
void raise_found_faults(PyPool& self) {
  if (!self.core->options().raise_on_fault) return;
  const nb::object hook = nb::module_::import_("streampool._core").attr("_fault_hook");
  // The Python layer formats and raises; nothing to do where it did not ask.
  if (!hook.is_none()) hook(nb::cast(&self, nb::rv_policy::reference));
}

pool::BlockRef allocate(PyPool& self, Bytes size, Bytes alignment, nb::handle stream, bool stream_ordered, bool raw,
                        std::string_view tag) {
  raise_found_faults(self);
  Core& core = *self.core;
  pool::AllocRequest request;
  request.size = size;
  request.alignment = alignment;
  request.stream = stream_handle(stream, core, "allocate");
  request.stream_ordered = stream_ordered;
  request.raw = raw;
  request.tag = tag;
  if (self.stack_depth != 0) request.stack = capture_stack(self.stack_depth);
  pool::BlockRef block;
  if (core.try_allocate(request, &block)) return block;
  Failure failure;
  Errc errc = Errc::ok;
  {
    WithoutGil release;
    errc = core.allocate(request, &block, &failure);
  }
  if (errc != Errc::ok) raise(failure);
  return block;
}

void free_raw(PyPool& self, nb::handle pointer, nb::handle stream) {
  if (PyBool_Check(pointer.ptr()) || !PyLong_Check(pointer.ptr()))
    throw nb::type_error("free_raw: a pointer is an int address");
  const unsigned long long address = PyLong_AsUnsignedLongLong(pointer.ptr());
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw nb::value_error("free_raw: a pointer is an address from 0 to 2^64 - 1");
  }
  if (frees_ignored()) return;
  raise_found_faults(self);
  pool::FreeRequest request;
  if (!stream.is_none()) request.stream = stream_handle(stream, *self.core, "free_raw");
  if (self.core->debugging()) request.stack = capture_stack(self.stack_depth);
  if (self.core->try_free(address, request)) return;
  Failure failure;
  Errc errc = Errc::ok;
  {
    WithoutGil release;
    errc = self.core->free(address, request, &failure);
  }
  if (errc != Errc::ok) raise(failure);
}

std::unique_ptr<PyPool> make_pool(std::shared_ptr<driver::Driver> driver, const std::string& kind,
                                  const std::string& name, nb::dict options) {
  Kind k = Kind::device;
  if (kind == "pinned")
    k = Kind::pinned;
  else if (kind == "managed")
    k = Kind::managed;
  else if (kind != "device")
    throw nb::value_error(("kind is 'device', 'pinned' or 'managed', not '" + kind + "'").c_str());
  pool::OptionMap map;
  for (auto [key, value] : options) map[nb::cast<std::string>(key)] = nb::cast<std::string>(value);
  pool::Options parsed;
  std::string error;
  if (!pool::to_options(map, &parsed, &error)) throw nb::value_error(error.c_str());
  auto self = std::make_unique<PyPool>();
  Failure failure;
  {
    WithoutGil release;
    self->core = Core::create(std::move(driver), k, name, parsed, &failure);
  }
  if (!self->core) raise(failure);
  self->stack_depth = parsed.stack_depth;
  self->options = options;
  pool::Hooks& hooks = self->core->hooks();
  hooks.interrupted = [] {
    if (driver::ending() != driver::Ending::no || Py_IsInitialized() == 0) return false;
    WithGil gil;
    return PyErr_Occurred() != nullptr || PyErr_CheckSignals() != 0;
  };
  hooks.collect_garbage = [] {
    if (driver::ending() != driver::Ending::no || Py_IsInitialized() == 0) return;
    WithGil gil;
    PyGC_Collect();
  };
  return self;
}

nb::dict stats_dict(Core& core) {
  must_not_be_forked();
  pool::Stats s;
  {
    WithoutGil release;
    s = core.stats();
  }
  nb::dict d;
#define PUT(field) d[#field] = s.field
  PUT(in_use);
  PUT(rounding);
  PUT(guards);
  PUT(quarantined);
  PUT(pending);
  PUT(cached);
  PUT(reserved);
  PUT(in_use_peak);
  PUT(reserved_peak);
  PUT(limit);
  PUT(largest_free);
  PUT(allocations);
  PUT(frees);
  PUT(live_blocks);
  PUT(allocated_bytes);
  PUT(segments);
  PUT(handles);
  PUT(streams);
  PUT(slabs);
  PUT(extents);
  PUT(fences);
  PUT(fences_failed);
  PUT(polls);
  PUT(wait_edges);
  PUT(context_events);
  PUT(stream_lookups);
  PUT(host_waits);
  PUT(out_of_memory);
  PUT(trampled);
  PUT(legacy_fences);
#undef PUT
  nb::dict paths;
  for (std::size_t i = 0; i < pool::kPathCount; ++i) paths[pool::path_words()[i]] = s.paths[i];
  d["paths"] = paths;
  return d;
}

}  // namespace

std::shared_ptr<Core> core_of(nb::handle pool) { return nb::cast<PyPool&>(pool).core; }

void bind_pool(nb::module_& m) {
  m.attr("_fault_hook") = nb::none();
  nb::class_<PyPool>(m, "Pool", nb::dynamic_attr(), nb::is_weak_referenceable(),
                     "A stream-ordered memory pool. Use streampool.Pool.")
      .def(
          "__init__",
          [](PyPool* self, std::shared_ptr<driver::Driver> driver, const std::string& kind, const std::string& name,
             nb::dict options) { new (self) PyPool(std::move(*make_pool(std::move(driver), kind, name, options))); },
          nb::arg("driver"), nb::kw_only(), nb::arg("kind"), nb::arg("name"), nb::arg("options"))
      .def_prop_ro("name", [](const PyPool& p) { return p.core->name(); })
      .def_prop_ro("kind", [](const PyPool& p) { return std::string(kind_name(p.core->kind())); })
      .def_prop_ro("driver", [](const PyPool& p) { return p.core->shared_driver(); })
      .def_prop_ro("options", [](const PyPool& p) { return nb::dict(p.options); })
      .def_prop_ro("is_closed", [](const PyPool& p) { return p.core->closed(); })
      .def(
          "allocate",
          [](nb::object self, nb::object size, nb::object stream, nb::object alignment,
             std::optional<bool> stream_ordered, std::optional<std::string> tag) {
            PyPool& p = nb::cast<PyPool&>(self);
            const Bytes bytes = size_argument(size);
            stream = resolve_current(stream, *p.core);
            const pool::BlockRef block =
                allocate(p, bytes, alignment_argument(alignment), stream, stream_ordered.value_or(false), false,
                         tag ? std::string_view(*tag) : std::string_view());
            nb::object buffer = nb::inst_alloc(nb::type<PyBuffer>());
            PyBuffer* b = nb::inst_ptr<PyBuffer>(buffer);
            new (b) PyBuffer{p.core, block, bytes, false, 0, self, stream, {}};
            nb::inst_mark_ready(buffer);
            return buffer;
          },
          nb::arg("size"), nb::kw_only(), nb::arg("stream").none() = nb::none(), nb::arg("alignment") = 256,
          nb::arg("stream_ordered") = nb::none(), nb::arg("tag") = nb::none(),
          "Allocate `size` bytes on `stream`. Raises OutOfMemoryError, StreamError, PoolClosedError, ValueError, "
          "TypeError.")
      .def(
          "allocate_raw",
          [](PyPool& p, nb::object size, nb::object stream, nb::object alignment) {
            const Address address =
                allocate(p, size_argument(size), alignment_argument(alignment), stream, false, true, {}).address;
            return address;
          },
          nb::arg("size"), nb::kw_only(), nb::arg("stream").none() = nb::none(), nb::arg("alignment") = 256,
          "As allocate, but gives the address; free it with free_raw.")
      .def("free_raw", &free_raw, nb::arg("ptr"), nb::kw_only(), nb::arg("stream").none() = nb::none(),
           "Free a block by address, on `stream`; None: on the block's own. Raises InvalidFreeError, StreamError.")
      .def(
          "record_stream_raw",
          [](PyPool& p, Address address, nb::object stream) {
            const driver::StreamHandle handle = stream_handle(stream, *p.core, "record_stream", true);
            guarded([&](Failure* f) { return p.core->record_stream(address, handle, f); });
          },
          nb::arg("ptr"), nb::arg("stream"))
      .def(
          "record_event_raw",
          [](PyPool& p, Address address, nb::object event) {
            const driver::EventHandle handle = event_handle(event);
            guarded([&](Failure* f) { return p.core->record_event(address, handle, f); });
          },
          nb::arg("ptr"), nb::arg("event"))
      .def(
          "register_stream",
          [](PyPool& p, nb::object stream) {
            const driver::StreamHandle handle = stream_handle(stream, *p.core, "register_stream");
            guarded([&](Failure* f) { return p.core->register_stream(handle, f); });
          },
          nb::arg("stream"))
      .def(
          "forget_stream",
          [](PyPool& p, nb::object stream) {
            const driver::StreamHandle handle = stream_handle(stream, *p.core, "forget_stream");
            guarded([&](Failure* f) { return p.core->forget_stream(handle, f); });
          },
          nb::arg("stream"))
      .def(
          "begin_capturing",
          [](PyPool& p, nb::object) {
            WithoutGil release;
            p.core->begin_capture();
          },
          nb::arg("stream").none())
      .def(
          "end_capturing",
          [](PyPool& p, nb::object) {
            WithoutGil release;
            p.core->end_capture();
          },
          nb::arg("stream").none())
      .def(
          "reserve",
          [](PyPool& p, nb::object size) {
            const Bytes bytes = flexible_size(size);
            Bytes reserved = 0;
            guarded([&](Failure* f) { return p.core->reserve(bytes, &reserved, f); });
            return reserved;
          },
          nb::arg("size"),
          "Take memory from the driver in advance, up to `size` bytes in all; gives the bytes reserved.")
      .def(
          "trim",
          [](PyPool& p, nb::object keep) {
            must_not_be_forked();
            const Bytes bytes = flexible_size(keep);
            pool::TrimResult r;
            {
              WithoutGil release;
              r = p.core->trim(bytes);
            }
            check_interrupt();
            nb::dict d;
            d["released"] = r.released;
            d["pinned_by_live"] = r.pinned_by_live;
            d["pending"] = r.pending;
            d["reserved"] = r.reserved;
            return d;
          },
          nb::arg("keep_bytes") = 0)
      .def("stats", [](PyPool& p) { return stats_dict(*p.core); })
      .def("reset_peaks",
           [](PyPool& p) {
             must_not_be_forked();
             p.core->reset_peaks();
           })
      .def(
          "check",
          [](PyPool& p, double timeout) {
            must_not_be_forked();
            pool::CheckReport r;
            {
              WithoutGil release;
              r = p.core->check(timeout);
            }
            check_interrupt();
            if (r.errc == Errc::driver) raise_driver_error(r.text);
            nb::dict d;
            d["checked_blocks"] = r.result.checked_blocks;
            d["checked_bytes"] = r.result.checked_bytes;
            d["faults"] = r.result.faults;
            nb::list skipped;
            for (const debug::BlockFacts& f : r.result.not_checked) skipped.append(facts_dict(f));
            d["not_checked"] = skipped;
            return d;
          },
          nb::arg("timeout") = 10.0)
      .def("take_faults",
           [](PyPool& p) {
             must_not_be_forked();
             nb::list out;
             for (const debug::Fault& fault : p.core->take_faults()) out.append(fault_dict(fault));
             return out;
           })
      .def("live_blocks",
           [](PyPool& p) {
             must_not_be_forked();
             std::vector<debug::BlockFacts> blocks;
             {
               WithoutGil release;
               blocks = p.core->live_blocks();
             }
             nb::list out;
             for (const debug::BlockFacts& f : blocks) {
               nb::dict d = facts_dict(f);
               d["owner"] = f.raw ? "raw" : f.state == debug::BlockState::released ? "released" : "buffer";
               out.append(d);
             }
             return out;
           })
      .def("debug_totals",
           [](PyPool& p) {
             must_not_be_forked();
             return totals_dict(p.core->debug_totals());
           })
      .def(
          "audit",
          [](PyPool& p) {
            must_not_be_forked();
            WithoutGil release;
            return p.core->audit();
          },
          "Recompute all counters and check all structures: an empty text, or what does not hold. For tests.")
      .def(
          "set_oom_callback",
          [](PyPool& p, nb::object callback) {
            if (callback.is_none()) {
              p.core->hooks().out_of_memory = nullptr;
              return;
            }
            // Held for ever rather than dropped without the GIL: the core may outlive the interpreter.
            PyObject* held = callback.release().ptr();
            p.core->hooks().out_of_memory = [held](Bytes size) {
              if (driver::ending() != driver::Ending::no || Py_IsInitialized() == 0) return false;
              WithGil gil;
              PyObject* answer = PyObject_CallFunction(held, "K", static_cast<unsigned long long>(size));
              if (answer == nullptr) {
                PyErr_WriteUnraisable(held);
                return false;
              }
              const bool again = PyObject_IsTrue(answer) == 1;
              Py_DECREF(answer);
              return again;
            };
          },
          nb::arg("callback").none())
      .def("close", [](PyPool& p) {
        {
          WithoutGil release;
          p.core->close();
        }
        check_interrupt();
      });
}

}  // namespace streampool::python
