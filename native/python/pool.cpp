// Pool and Buffer. The GIL is held for what cannot block (a slot on a lasting stream) and released for everything else.
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <map>
#include <mutex>

#include "facts.hpp"
#include "support.hpp"

namespace streampool::python {
namespace {

using pool::Core;
using pool::Errc;
using pool::Failure;

// Whoever drops the last holder of a pool settles it, which may call the driver: without the GIL.
void drop(std::shared_ptr<Core>& core) {
  if (core.use_count() != 1) return;
  const WithoutGil release;
  core.reset();
}

struct PyPool {
  PyPool() = default;
  PyPool(PyPool&&) = default;
  PyPool& operator=(PyPool&&) = default;
  ~PyPool() {
    if (core) drop(core);
  }
  std::shared_ptr<Core> core;
  nb::dict options;
  int stack_depth = 0;
};

struct PyBuffer {
  std::shared_ptr<Core> core;
  pool::BlockRef block;
  Bytes size = 0;
  bool closed = false;
  Py_ssize_t views = 0;     // exports of the buffer protocol
  nb::object pool, stream;  // as the caller gave it; keeps the stream alive as long as the block
  std::vector<nb::object> recorded;

  ~PyBuffer() {
    // The last reference is gone: an implicit release, ordered by the block's own streams. Makes no driver call.
    if (!closed && core) core->release(block);
    drop(core);
  }
};

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

void check_interrupt() {
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
}

// In a forked child, and while the process ends, frees are ignored (R22).
bool frees_ignored() { return driver::ending() != driver::Ending::no; }

// Anything but a free: locks of the parent's threads may be held for ever in a forked child.
void must_not_be_forked() {
  if (driver::ending() != driver::Ending::forked) return;
  Failure failure;
  failure.set(Errc::forked,
              "a pool cannot be used in a forked child: CUDA does not survive a fork. Start processes with "
              "multiprocessing.get_context('spawn')");
  raise(failure);
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

void close_buffer(PyBuffer& self, nb::handle stream) {
  if (self.closed) return;
  if (frees_ignored()) {
    self.closed = true;
    return;
  }
  if (self.views != 0)
    throw nb::buffer_error("the buffer cannot be closed while NumPy arrays or memoryviews of it exist");
  if (stream.is_none()) {
    self.closed = true;
    self.core->release(self.block);
  } else {
    pool::FreeRequest request;
    request.stream = stream_handle(stream, *self.core, "close");
    if (self.core->debugging()) request.stack = capture_stack(self.core->options().stack_depth);
    std::vector<driver::StreamHandle> too;
    for (const nb::object& s : self.recorded) {
      // An object that owns its handle, is open and held by the block may be fenced in this call (R6).
      try {
        if (nb::hasattr(s, "is_closed") && s.attr("is_closed").is(Py_True)) continue;
        // Whether a cuda.core stream owns its handle cannot be asked; its marks wait for the next call that names it.
        if (!nb::hasattr(s, "is_owner") || !s.attr("is_owner").is(Py_True)) continue;
        const driver::StreamHandle handle = stream_handle(s, *self.core, "close", true);
        if (handle > driver::kPerThreadStream) too.push_back(handle);
      } catch (nb::python_error& error) {
        error.discard_as_unraisable("a recorded stream");
      }
    }
    request.fence_too = too;
    Failure failure;
    Errc errc = Errc::ok;
    self.closed = true;  // before the GIL goes: of two threads that close it, one does
    if (!too.empty() || !self.core->try_free(self.block, request)) {
      WithoutGil release;
      errc = self.core->free(self.block, request, &failure);
    }
    if (errc != Errc::ok) {
      self.closed = false;
      raise(failure);
    }
  }
  self.recorded.clear();
  self.stream = nb::none();
}

void must_be_open(const PyBuffer& self, const char* verb) {
  must_not_be_forked();
  if (self.closed) throw nb::value_error((std::string(verb) + ": the buffer is closed").c_str());
  // Its memory may have been freed by address, and have a new owner since, who is not to be harmed.
  if (!self.core->live(self.block))
    throw nb::value_error(
        (std::string(verb) + ": the block at " + pool::hex(self.block.address) + " was freed by its address").c_str());
}

bool host_accessible(const PyBuffer& self) {
  return host_visible(self.core->kind()) || self.core->driver().capabilities().device_memory_on_host;
}

// Waits for what was queued on a stream just now, with the GIL released, for as long as it takes or until Ctrl-C (R24).
void wait_for_stream(Core& core, driver::StreamHandle stream) {
  driver::Driver& d = core.driver();
  driver::EventHandle event = 0;
  driver::Status status = d.event_create(&event);
  if (!status.ok()) raise_driver_error("copy: " + driver::describe(status));
  bool interrupted = false;
  {
    WithoutGil release;
    status = d.event_record(event, stream);
    double pause = 10e-6, next_check = d.now() + 0.05;
    while (status.ok() && !interrupted) {
      status = d.event_query(event);
      if (status.code != driver::Code::not_ready) break;
      status = {};
      d.pause(pause);
      pause = std::min(pause * 2, 1e-3);
      if (d.now() >= next_check) {
        WithGil gil;
        interrupted = PyErr_CheckSignals() != 0;
        next_check = d.now() + 0.05;
      }
    }
    d.event_destroy(event);
  }
  check_interrupt();
  if (!status.ok()) raise_driver_error("copy: " + driver::describe(status));
}

struct HostView {
  Py_buffer view{};
  explicit HostView(nb::handle object, bool writable) {
    if (PyObject_GetBuffer(object.ptr(), &view, writable ? PyBUF_CONTIG : PyBUF_CONTIG_RO) != 0)
      throw nb::python_error();
  }
  ~HostView() { PyBuffer_Release(&view); }
  HostView(const HostView&) = delete;
  HostView& operator=(const HostView&) = delete;
};

void copy(PyBuffer& self, nb::handle other, nb::handle stream, bool to_other) {
  const char* verb = to_other ? "copy_to" : "copy_from";
  must_be_open(self, verb);
  const driver::StreamHandle handle =
      stream_handle(stream.is_none() ? nb::handle(self.stream) : stream, *self.core, verb);
  const auto sizes = [&](Bytes there) {
    if (there != self.size)
      throw nb::value_error((std::string(verb) + ": the sizes differ: " + std::to_string(self.size) + " and " +
                             std::to_string(there) + " bytes")
                                .c_str());
  };
  const auto queue = [&](Address there) {
    driver::Status status;
    {
      WithoutGil release;
      if (self.size != 0)
        status = to_other ? self.core->driver().copy(handle, there, self.block.address, self.size)
                          : self.core->driver().copy(handle, self.block.address, there, self.size);
    }
    if (!status.ok()) raise_driver_error(std::string(verb) + ": " + driver::describe(status));
  };
  if (nb::isinstance<PyBuffer>(other)) {
    const PyBuffer& b = nb::cast<const PyBuffer&>(other);
    must_be_open(b, verb);
    sizes(b.size);
    queue(b.block.address);
    return;
  }
  HostView view(other, to_other);
  sizes(static_cast<Bytes>(view.view.len));
  // The driver's copy to or from ordinary host memory blocks until the stream is there, and knows no Ctrl-C: so the
  // wait comes first.
  wait_for_stream(*self.core, handle);
  queue(reinterpret_cast<Address>(view.view.buf));
  // Ordinary host memory is nobody's stream's: it must be done with before the caller goes on.
  wait_for_stream(*self.core, handle);
}

int get_buffer(PyObject* object, Py_buffer* view, int flags) noexcept {
  PyBuffer* self = nb::inst_ptr<PyBuffer>(object);
  if (self->closed || !Core::live(self->block) || !host_accessible(*self)) {
    PyErr_SetString(PyExc_BufferError,
                    self->closed
                        ? "the buffer is closed"
                        : "device memory cannot be viewed from the host; copy_to() a host array, or use kind='pinned'");
    view->obj = nullptr;
    return -1;
  }
  static char empty = 0;
  void* at = self->size == 0 ? static_cast<void*>(&empty) : reinterpret_cast<void*>(self->block.address);
  if (PyBuffer_FillInfo(view, object, at, static_cast<Py_ssize_t>(self->size), 0, flags) != 0) return -1;
  ++self->views;
  return 0;
}

void release_buffer(PyObject* object, Py_buffer*) noexcept { --nb::inst_ptr<PyBuffer>(object)->views; }

int traverse_buffer(PyObject* object, visitproc visit, void* arg) noexcept {
  Py_VISIT(Py_TYPE(object));
  if (!nb::inst_ready(object)) return 0;
  PyBuffer* self = nb::inst_ptr<PyBuffer>(object);
  Py_VISIT(self->pool.ptr());
  Py_VISIT(self->stream.ptr());
  for (const nb::object& s : self->recorded) Py_VISIT(s.ptr());
  return 0;
}

int clear_buffer(PyObject* object) noexcept {
  PyBuffer* self = nb::inst_ptr<PyBuffer>(object);
  self->pool.reset();
  self->stream.reset();
  self->recorded.clear();
  return 0;
}

PyType_Slot g_buffer_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)},
                                {Py_bf_releasebuffer, reinterpret_cast<void*>(release_buffer)},
                                {Py_tp_traverse, reinterpret_cast<void*>(traverse_buffer)},
                                {Py_tp_clear, reinterpret_cast<void*>(clear_buffer)},
                                {0, nullptr}};

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

// Calls a core function that gives an Errc and a Failure, without the GIL.
template <typename Call>
void guarded(Call&& call) {
  Failure failure;
  Errc errc = Errc::ok;
  {
    WithoutGil release;
    errc = call(&failure);
  }
  if (errc != Errc::ok) raise(failure);
  check_interrupt();
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

  nb::class_<PyBuffer>(m, "Buffer", nb::type_slots(g_buffer_slots), nb::is_weak_referenceable(),
                       "One block of a pool. Made by Pool.allocate; dropping the last reference releases it.")
      .def_prop_ro("handle", [](const PyBuffer& b) { return b.closed ? Address{0} : b.block.address; })
      .def_prop_ro("ptr", [](const PyBuffer& b) { return b.closed ? Address{0} : b.block.address; })
      .def_prop_ro("size", [](const PyBuffer& b) { return b.size; })
      .def_prop_ro("is_closed", [](const PyBuffer& b) { return b.closed; })
      .def_prop_ro("pool", [](const PyBuffer& b) { return b.pool; })
      .def_prop_ro("kind", [](const PyBuffer& b) { return std::string(kind_name(b.core->kind())); })
      .def_prop_ro("device_id", [](const PyBuffer& b) { return b.core->driver().ordinal(); })
      .def_prop_ro("is_device_accessible", [](const PyBuffer&) { return true; })
      .def_prop_ro("is_host_accessible", &host_accessible)
      .def_prop_ro("stream", [](const PyBuffer& b) { return b.stream; })
      .def_prop_ro("__cuda_array_interface__",
                   [](const PyBuffer& b) {
                     must_be_open(b, "__cuda_array_interface__");
                     if (b.core->driver().simulated())
                       throw nb::attribute_error("simulated memory is no CUDA memory; use numpy() for a view of it");
                     nb::dict d;
                     d["shape"] = nb::make_tuple(b.size);
                     d["typestr"] = "|u1";
                     d["data"] = nb::make_tuple(b.size == 0 ? Address{0} : b.block.address, false);
                     d["strides"] = nb::none();
                     d["version"] = 3;
                     // 0 is forbidden there; the legacy stream is 1.
                     const driver::StreamHandle s = stream_handle(b.stream, *b.core, "__cuda_array_interface__");
                     d["stream"] = s == driver::kDefaultStream ? driver::kLegacyStream : s;
                     return d;
                   })
      .def(
          "record_stream",
          [](PyBuffer& b, nb::object stream) {
            must_be_open(b, "record_stream");
            const driver::StreamHandle handle = stream_handle(stream, *b.core, "record_stream", true);
            guarded([&](Failure* f) { return b.core->record_stream(b.block, handle, f); });
            if (stream.is_none() || PyLong_Check(stream.ptr())) return;
            for (const nb::object& known : b.recorded)
              if (known.is(stream)) return;
            b.recorded.push_back(stream);
          },
          nb::arg("stream"), "Work queued on `stream` until the block is freed may touch it.")
      .def(
          "record_event",
          [](PyBuffer& b, nb::object event) {
            must_be_open(b, "record_event");
            const driver::EventHandle handle = event_handle(event);
            guarded([&](Failure* f) { return b.core->record_event(b.block, handle, f); });
          },
          nb::arg("event"), "Only what `event` covers may touch the block beside its own stream.")
      .def("close", &close_buffer, nb::arg("stream").none() = nb::none(),
           "Free on `stream`, which must be ordered after all use; None: release, ordered by the block's own streams. "
           "Twice is harmless.")
      .def(
          "fill",
          [](PyBuffer& b, nb::object value, nb::object stream) {
            must_be_open(b, "fill");
            if (PyBool_Check(value.ptr()) || !PyLong_Check(value.ptr()))
              throw nb::type_error("fill: a value is an int from 0 to 255");
            const long byte = PyLong_AsLong(value.ptr());
            if (byte < 0 || byte > 255) {
              PyErr_Clear();
              throw nb::value_error(
                  ("fill: a value is an int from 0 to 255, not " + nb::cast<std::string>(nb::str(value))).c_str());
            }
            const driver::StreamHandle handle =
                stream_handle(stream.is_none() ? nb::handle(b.stream) : stream, *b.core, "fill");
            driver::Status status;
            {
              WithoutGil release;
              if (b.size != 0)
                status = b.core->driver().fill(handle, b.block.address, static_cast<std::uint8_t>(byte), b.size);
            }
            if (!status.ok()) raise_driver_error("fill: " + driver::describe(status));
          },
          nb::arg("value"), nb::kw_only(), nb::arg("stream").none() = nb::none())
      .def(
          "copy_to", [](PyBuffer& b, nb::object dst, nb::object stream) { copy(b, dst, stream, true); }, nb::arg("dst"),
          nb::kw_only(), nb::arg("stream").none() = nb::none(),
          "Copy to a Buffer (queued) or to writable host memory (waits).")
      .def(
          "copy_from", [](PyBuffer& b, nb::object src, nb::object stream) { copy(b, src, stream, false); },
          nb::arg("src"), nb::kw_only(), nb::arg("stream").none() = nb::none(),
          "Copy from a Buffer (queued) or from host memory (waits).")
      .def(
          "numpy",
          [](nb::object self, nb::object dtype) {
            const PyBuffer& b = nb::cast<const PyBuffer&>(self);
            must_be_open(b, "numpy");
            const nb::module_ np = nb::module_::import_("numpy");
            if (b.size == 0) return np.attr("empty")(0, dtype);
            return np.attr("frombuffer")(self, dtype);
          },
          nb::arg("dtype") = "uint8",
          "A NumPy view of host-accessible memory; the block cannot be closed while it lives.")
      .def("facts",
           [](const PyBuffer& b) {
             const auto facts = b.core->facts(b.block);
             return facts ? nb::object(facts_dict(*facts)) : nb::none();
           })
      .def("__enter__",
           [](nb::object self) {
             must_be_open(nb::cast<PyBuffer&>(self), "with");
             return self;
           })
      .def("__exit__", [](PyBuffer& b, nb::args) { close_buffer(b, nb::none()); })
      .def("__len__", [](const PyBuffer& b) { return b.size; })
      .def("__repr__", [](const PyBuffer& b) {
        return "<streampool buffer, " + std::to_string(b.size) + " bytes of " + std::string(kind_name(b.core->kind())) +
               " memory on " + std::string(b.core->driver().name()) +
               (b.closed ? ", closed>" : " at " + pool::hex(b.block.address) + ">");
      });
}

}  // namespace streampool::python
