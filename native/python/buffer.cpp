// Buffer: one block as an object. The GIL is held for what cannot block and released for everything else.
#include <nanobind/stl/string.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "arguments.hpp"
#include "facts.hpp"
#include "pool_objects.hpp"
#include "support.hpp"

namespace streampool::python {
namespace {

using pool::Core;
using pool::Errc;
using pool::Failure;

constexpr Instance<PyBuffer> kSelf{"self", "a Buffer"};
constexpr Whole<std::uint8_t> kValue{"value", "a byte"};

// Calls the driver without the GIL, on behalf of `verb`.
template <typename Call>
void driver_call(const char* verb, Call&& call) {
  const driver::Status status = unlocked(call);
  if (status.ok()) return;
  const bool said = status.call != nullptr && std::string_view(status.call) == verb;  // `fill` is a call's name too
  raise_driver_error((said ? std::string() : std::string(verb) + ": ") + driver::describe(status));
}

// The recorded streams that may be fenced in the free (R6): objects that own their handle, are open and held by the
// block.
std::vector<driver::StreamHandle> owned_handles(const std::vector<nb::object>& recorded, const Core& core) {
  std::vector<driver::StreamHandle> handles;
  for (const nb::object& s : recorded) {
    try {
      if (nb::hasattr(s, "is_closed") && s.attr("is_closed").is(Py_True)) continue;
      // Whether a cuda.core stream owns its handle cannot be asked; its marks wait for the next call that names it.
      if (!nb::hasattr(s, "is_owner") || !s.attr("is_owner").is(Py_True)) continue;
      const driver::StreamHandle handle = stream_handle(s, core, "close", true);
      if (handle > driver::kPerThreadStream) handles.push_back(handle);
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("a recorded stream");
    }
  }
  return handles;
}

void close_buffer(PyBuffer& self, nb::handle stream) {
  if (self.closed) return;
  pool::FreeRequest request;
  if (!frees_ignored() && !stream.is_none()) {
    request.stream = stream_handle(stream, *self.core, "close");
    if (self.core->debugging())
      request.stack = capture_stack(self.core->options().stack_depth, self.core->options().native_depth);
  }
  // What runs Python lets other threads in: of two that close the buffer one does, the other finds it closed.
  if (self.closed) return;
  if (frees_ignored()) {
    self.closed = true;
    return;
  }
  if (self.views != 0)
    throw nb::buffer_error("the buffer cannot be closed while NumPy arrays or memoryviews of it exist");
  if (self.lease && self.lease->borrowers.load() != 0)
    throw nb::buffer_error("the buffer cannot be closed while other libraries' arrays of it exist (DLPack)");
  self.closed = true;
  // Out of others' reach while Python looks at them; the streams live until the free is done.
  std::vector<nb::object> recorded = std::exchange(self.recorded, {});
  nb::object own = std::exchange(self.stream, nb::none());
  if (!request.stream.has_value()) {
    self.core->release(self.block);
    return;
  }
  const std::vector<driver::StreamHandle> too = owned_handles(recorded, *self.core);
  request.fence_too = too;
  if (too.empty() && self.core->try_free(self.block, request)) return;
  Failure failure;
  if (unlocked([&] { return self.core->free(self.block, request, &failure); }) == Errc::ok) return;
  self.recorded = std::move(recorded);
  self.stream = std::move(own);
  self.closed = false;
  raise(failure);
}

}  // namespace

void must_be_open(const PyBuffer& self, const char* verb) {
  must_not_be_forked();
  if (self.closed) throw nb::value_error((std::string(verb) + ": the buffer is closed").c_str());
  // Its memory may have been freed by address, and have a new owner since, who is not to be harmed.
  if (!self.core->live(self.block))
    throw nb::value_error(
        (std::string(verb) + ": the block at " + pool::hex(self.block.address) + " was freed by its address").c_str());
}

namespace {

// A declared use, without the GIL. Where another thread closed the buffer meanwhile the core finds its block free.
template <typename Call>
void record(const PyBuffer& self, const char* verb, Call&& call) {
  Failure failure;
  const Errc errc = unlocked([&] { return call(&failure); });
  if (errc == Errc::double_free) must_be_open(self, verb);
  if (errc != Errc::ok) raise(failure);
  check_interrupt();
}

}  // namespace

driver::StreamHandle own_stream_handle(const PyBuffer& self, nb::handle stream, const char* verb) {
  // Held: another thread may close the buffer while Python is asked for the handle.
  const nb::object held = stream.is_none() ? self.stream : nb::borrow<nb::object>(stream);
  const driver::StreamHandle handle = stream_handle(held, *self.core, verb);
  must_be_open(self, verb);
  return handle;
}

bool host_accessible(const PyBuffer& self) {
  return host_visible(self.core->kind()) || self.core->driver().capabilities().device_memory_on_host;
}

std::uint64_t capture_of(Core& core, driver::StreamHandle stream, const char* verb) {
  driver::CaptureState capture;
  const driver::Status status = core.driver().stream_is_capturing(stream, &capture);
  std::string problem;
  if (status.code == driver::Code::capturing)
    problem =
        "the legacy default stream cannot be used while a blocking stream captures a graph; the capture is still "
        "valid";
  else if (!status.ok())
    raise_driver_error(std::string(verb) + ": " + driver::describe(status));
  else if (!capture.capturing)
    return 0;
  else if (capture.id != 0)
    return capture.id;
  else
    problem =
        "the capture of stream " + pool::hex(stream) + " was invalidated by another call: end it, and capture again";
  Failure failure;
  failure.set(Errc::capture, std::string(verb) + ": " + problem);
  raise(failure);
}

void refuse_capture(driver::StreamHandle stream, const char* verb, const char* why) {
  Failure failure;
  failure.set(Errc::capture, std::string(verb) + ": stream " + pool::hex(stream) + " is capturing a graph, " + why +
                                 "; the capture is still valid");
  raise(failure);
}

void wait_for_stream(Core& core, driver::StreamHandle stream, const char* verb) {
  driver::Driver& d = core.driver();
  driver::Status status;
  bool captured = false, interrupted = false;
  {
    WithoutGil release;
    driver::EventHandle event = 0;
    status = driver::record_uncaptured(d, stream, std::nullopt, &event, &captured);
    double pause = 10e-6, next_check = d.now() + 0.05;
    while (event != 0 && !interrupted) {
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
    if (event != 0) d.event_destroy(event);
  }
  check_interrupt();
  if (captured) {
    capture_of(core, stream, verb);  // has its own words for a capture that was lost, and for the legacy stream
    refuse_capture(stream, verb,
                   "and the host cannot wait for what is captured: call this before or after the capture");
  }
  if (!status.ok()) raise_driver_error(std::string(verb) + ": " + driver::describe(status));
}

namespace {

// Ordinary host memory that the caller gave to read or to write.
struct HostView {
  Py_buffer view{};
  HostView(nb::handle object, bool writable) {
    if (PyObject_GetBuffer(object.ptr(), &view, writable ? PyBUF_CONTIG : PyBUF_CONTIG_RO) == 0) return;
    // NumPy says what is wrong with its array; others only that something is.
    if (!PyErr_ExceptionMatches(PyExc_TypeError) && !PyErr_ExceptionMatches(PyExc_BufferError))
      throw nb::python_error();
    PyErr_Clear();
    refuse(PyExc_TypeError, writable ? "dst" : "src",
           writable ? "a Buffer or writable host memory in one piece, as a bytearray or a NumPy array"
                    : "a Buffer or host memory in one piece, as bytes or a NumPy array",
           object);
  }
  ~HostView() { PyBuffer_Release(&view); }
  HostView(const HostView&) = delete;
  HostView& operator=(const HostView&) = delete;
};

void copy(PyBuffer& self, nb::handle other, nb::handle stream, bool to_other) {
  const char* verb = to_other ? "copy_to" : "copy_from";
  must_be_open(self, verb);
  const driver::StreamHandle handle = own_stream_handle(self, stream, verb);
  const auto sizes = [&](Bytes there) {
    if (there != self.size)
      throw nb::value_error((std::string(verb) + ": the sizes differ: " + std::to_string(self.size) + " and " +
                             std::to_string(there) + " bytes")
                                .c_str());
  };
  const auto queue = [&](Address there) {
    if (self.size == 0) return;
    const Address from = to_other ? self.block.address : there, to = to_other ? there : self.block.address;
    driver_call(verb, [&] { return self.core->driver().copy(handle, to, from, self.size); });
  };
  const PyBuffer* buffer = nullptr;
  if (nb::try_cast(other, buffer, false) && buffer != nullptr) {
    must_be_open(*buffer, verb);
    sizes(buffer->size);
    queue(buffer->block.address);
    return;
  }
  HostView view(other, to_other);
  sizes(static_cast<Bytes>(view.view.len));
  // The driver's copy to or from ordinary host memory blocks until the stream is there, and knows no Ctrl-C: so the
  // wait comes first.
  wait_for_stream(*self.core, handle, verb);
  queue(reinterpret_cast<Address>(view.view.buf));
  // Ordinary host memory is nobody's stream's: it must be done with before the caller goes on.
  wait_for_stream(*self.core, handle, verb);
}

// Why the host cannot be given a view of the bytes; null: it can.
const char* why_no_view(const PyBuffer& b) {
  if (b.closed) return "the buffer is closed";
  if (!Core::live(b.block)) return "the buffer's block was freed by its address";
  if (!host_accessible(b))
    return "device memory cannot be viewed from the host; copy_to() a host array, or use kind='pinned'";
  return nullptr;
}

// Python may make an object and never initialise it (`Buffer.__new__`): there is nothing in it.
int get_buffer(PyObject* object, Py_buffer* view, int flags) noexcept {
  view->obj = nullptr;
  if (!nb::inst_ready(object)) {
    PyErr_SetString(PyExc_BufferError, "the buffer was never allocated; Pool.allocate makes buffers");
    return -1;
  }
  PyBuffer* self = nb::inst_ptr<PyBuffer>(object);
  if (const char* problem = why_no_view(*self)) {
    PyErr_SetString(PyExc_BufferError, problem);
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
  if (!nb::inst_ready(object)) return 0;
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

}  // namespace

void bind_buffer(nb::module_& m) {
  nb::class_<PyBuffer> buffer(m, "Buffer", nb::type_slots(g_buffer_slots), nb::is_weak_referenceable(),
                              "One block of a pool. Made by Pool.allocate; dropping the last reference releases it.");
  bind_dlpack(buffer);
  buffer.def_prop_ro("handle", [](const PyBuffer& b) { return b.closed ? Address{0} : b.block.address; })
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
                     const driver::StreamHandle s = own_stream_handle(b, nb::none(), "__cuda_array_interface__");
                     d["stream"] = s == driver::kDefaultStream ? driver::kLegacyStream : s;
                     return d;
                   })
      .def(
          "record_stream",
          [](PyBuffer& b, nb::object stream) {
            must_be_open(b, "record_stream");
            const driver::StreamHandle handle = named_stream_handle(stream, *b.core, "record_stream", true);
            must_be_open(b, "record_stream");
            record(b, "record_stream", [&](Failure* f) { return b.core->record_stream(b.block, handle, f); });
            if (PyLong_Check(stream.ptr())) return;
            for (const nb::object& known : b.recorded)
              if (known.is(stream)) return;
            b.recorded.push_back(stream);
          },
          nb::arg("stream").none(), "Work queued on `stream` until the block is freed may touch it.")
      .def(
          "record_event",
          [](PyBuffer& b, nb::handle event) {
            must_be_open(b, "record_event");
            const driver::EventHandle handle = event_handle(event);
            record(b, "record_event", [&](Failure* f) { return b.core->record_event(b.block, handle, f); });
          },
          nb::arg("event").none(), "Only what `event` covers may touch the block beside its own stream.")
      .def("close", &close_buffer, nb::arg("stream").none() = nb::none(),
           "Free on `stream`, which must be ordered after all use; None: release, ordered by the block's own streams. "
           "Twice is harmless.")
      .def(
          "fill",
          [](PyBuffer& b, Given<kValue> value, nb::handle stream) {
            must_be_open(b, "fill");
            const driver::StreamHandle handle = own_stream_handle(b, stream, "fill");
            if (b.size == 0) return;
            driver_call("fill", [&] { return b.core->driver().fill(handle, b.block.address, *value, b.size); });
          },
          parameter<kValue>(), nb::kw_only(), nb::arg("stream").none() = nb::none())
      .def(
          "copy_to", [](PyBuffer& b, nb::handle dst, nb::handle stream) { copy(b, dst, stream, true); },
          nb::arg("dst").none(), nb::kw_only(), nb::arg("stream").none() = nb::none(),
          "Copy to a Buffer (queued) or to writable host memory (waits).")
      .def(
          "copy_from", [](PyBuffer& b, nb::handle src, nb::handle stream) { copy(b, src, stream, false); },
          nb::arg("src").none(), nb::kw_only(), nb::arg("stream").none() = nb::none(),
          "Copy from a Buffer (queued) or from host memory (waits).")
      .def(
          "numpy",
          [](nb::handle self, nb::handle dtype) {
            const PyBuffer& b = convert(self, kSelf);
            must_be_open(b, "numpy");
            // NumPy would take it as float64.
            if (dtype.is_none()) refuse(PyExc_TypeError, "dtype", "a NumPy data type such as 'float32'", dtype);
            const nb::module_ np = nb::module_::import_("numpy");
            if (b.size == 0) return np.attr("empty")(0, dtype);
            return np.attr("frombuffer")(self, dtype);
          },
          nb::arg("dtype").none() = "uint8",
          "A NumPy view of host-accessible memory; the block cannot be closed while it lives.")
      .def(
          "__array__",
          [](nb::handle self, nb::handle dtype, nb::handle copy) {
            // NumPy comes here where it got no view, and would make an array of the object itself.
            if (const char* problem = why_no_view(convert(self, kSelf))) throw nb::buffer_error(problem);
            const nb::module_ np = nb::module_::import_("numpy");
            const nb::object view = np.attr("asarray")(nb::steal(PyMemoryView_FromObject(self.ptr())));
            if (dtype.is_none() && copy.is_none()) return view;
            return np.attr("array")(view, dtype, nb::arg("copy") = copy);
          },
          nb::arg("dtype").none() = nb::none(), nb::arg("copy").none() = nb::none(),
          "What NumPy asks where the buffer gave it no view: an error that says why.")
      .def("facts",
           [](const PyBuffer& b) {
             const auto facts = b.core->facts(b.block);
             return facts ? nb::object(facts_dict(*facts)) : nb::none();
           })
      .def("__enter__",
           [](nb::handle self) {
             must_be_open(convert(self, kSelf), "with");
             return nb::borrow(self);
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
