// Exception classes, and the one place where a Failure becomes one.
#include <nanobind/stl/string.h>

#include "facts.hpp"
#include "support.hpp"

namespace streampool::python {
namespace {

// Leaked: classes live as long as the interpreter.
struct Classes {
  PyObject *base, *out_of_memory, *invalid_free, *double_free, *foreign_free, *interior_free, *wrong_pool,
      *size_mismatch, *trampled, *stream, *capture, *driver, *driver_not_found, *closed, *forked, *fault;
};
Classes g_classes;

PyObject* make(nb::module_& m, const char* name, PyObject* bases, const char* doc) {
  const std::string full = std::string("streampool.") + name;
  PyObject* cls = PyErr_NewExceptionWithDoc(full.c_str(), doc, bases, nullptr);
  if (cls == nullptr) throw nb::python_error();
  m.attr(name) = nb::handle(cls);
  return cls;
}

[[noreturn]] void raise_as(PyObject* cls, const std::string& text) {
  PyErr_SetString(cls, text.c_str());
  throw nb::python_error();
}

}  // namespace

void bind_errors(nb::module_& m) {
  m.attr("_oom_hook") = nb::none();
  Classes& c = g_classes;
  c.base = make(m, "StreamPoolError", PyExc_Exception, "What every error of streampool derives from.");
  const nb::tuple memory = nb::make_tuple(nb::handle(c.base), nb::handle(PyExc_MemoryError));
  c.out_of_memory = make(m, "OutOfMemoryError", memory.ptr(),
                         "No memory could be found. `fields` has all that the text says, in bytes.");
  c.invalid_free = make(m, "InvalidFreeError", c.base,
                        "A free or a declared use of something that is not a live block of the pool.");
  c.double_free = make(m, "DoubleFreeError", c.invalid_free, "The block is free already. Nothing was changed.");
  c.foreign_free = make(m, "ForeignFreeError", c.invalid_free, "No pool owns the address. Nothing was changed.");
  c.interior_free = make(m, "InteriorFreeError", c.invalid_free,
                         "The address lies inside a block, not at its start. Nothing was changed.");
  c.wrong_pool = make(m, "WrongPoolError", c.invalid_free, "The block belongs to another pool. Nothing was changed.");
  c.size_mismatch = make(m, "SizeMismatchError", c.invalid_free,
                         "The block has another size than the free says. Nothing was changed.");
  c.trampled = make(m, "TrampledRecordError", c.invalid_free,
                    "The pool's own record of the block was overwritten in host memory.");
  c.stream = make(m, "StreamError", c.base, "A stream that is closed, of another device, or not usable here.");
  c.capture = make(m, "CaptureError", c.stream, "The stream is capturing a graph. The capture is still valid.");
  c.driver =
      make(m, "DriverError", c.base, "The driver refused a call; the text names the call and the driver's error.");
  c.driver_not_found = make(m, "DriverNotFoundError", c.driver, "There is no driver library, or no device.");
  c.closed = make(m, "PoolClosedError", c.base, "The pool is closed: it hands out no more memory.");
  c.forked = make(m, "ForkedProcessError", c.base, "A pool was used in a forked child.");
  c.fault = make(m, "FaultError", c.base, "A fault was found and on_fault=raise is set.");
}

// Whoever wants to write down what happened (streampool.postmortem); the error is the same whatever comes of it.
static void tell_of_oom(const nb::object& error) {
  try {
    const nb::object hook = nb::module_::import_("streampool._core").attr("_oom_hook");
    if (!hook.is_none()) hook(error);
  } catch (nb::python_error& problem) {
    problem.discard_as_unraisable("streampool: a file about an out-of-memory error");
  }
}

void raise(pool::Failure& failure) {
  using pool::Errc;
  const Classes& c = g_classes;
  failure.text += pool::see_page(failure.code);
  switch (failure.code) {
    case Errc::out_of_memory: {
      // Only here, with the GIL, can call sites be named.
      if (failure.oom && !failure.oom->holders.empty()) failure.text = pool::describe(*failure.oom, site_of);
      const nb::object error = nb::steal(PyObject_CallFunction(c.out_of_memory, "s", failure.text.c_str()));
      if (!error.is_valid()) throw nb::python_error();
      nb::dict fields;
      if (failure.oom) {
        const pool::OomReport& r = *failure.oom;
        fields["request"] = r.request;
        fields["alignment"] = r.alignment;
        put_stream(fields, r.stream);
        fields["device"] = r.device;
        fields["pool"] = r.pool;
        fields["kind"] = r.kind;
        fields["limit"] = r.limit;
        fields["reserved"] = r.reserved;
        fields["in_use"] = r.in_use;
        fields["pending"] = r.pending;
        fields["cached"] = r.cached;
        fields["quarantined"] = r.quarantined;
        fields["largest_free"] = r.largest_free;
        fields["device_free"] = r.device_known ? nb::object(nb::int_(r.device_free)) : nb::none();
        fields["device_total"] = r.device_known ? nb::object(nb::int_(r.device_total)) : nb::none();
        fields["missing"] = r.missing;
        fields["reason"] = std::string(pool::oom_reason_word(r.reason));
        fields["driver_error"] = r.driver_error;
        nb::list holders;
        for (const pool::Holder& h : r.holders) holders.append(nb::make_tuple(h.bytes, h.blocks, h.stack));
        fields["holders"] = holders;
        fields["sample_bytes"] = r.sample_bytes;
      }
      error.attr("fields") = fields;
      tell_of_oom(error);
      PyErr_SetObject(c.out_of_memory, error.ptr());
      throw nb::python_error();
    }
    case Errc::invalid_value:
    case Errc::invalid_size:
    case Errc::invalid_alignment: raise_as(PyExc_ValueError, failure.text);
    case Errc::double_free: raise_as(c.double_free, failure.text);
    case Errc::foreign_free: raise_as(c.foreign_free, failure.text);
    case Errc::interior_free: raise_as(c.interior_free, failure.text);
    case Errc::wrong_pool: raise_as(c.wrong_pool, failure.text);
    case Errc::trampled_record: raise_as(c.trampled, failure.text);
    case Errc::size_mismatch: raise_as(c.size_mismatch, failure.text);
    case Errc::stream: raise_as(c.stream, failure.text);
    case Errc::capture: raise_as(c.capture, failure.text);
    case Errc::driver: raise_as(c.driver, failure.text);
    case Errc::closed: raise_as(c.closed, failure.text);
    case Errc::forked: raise_as(c.forked, failure.text);
    case Errc::interrupted:
      if (PyErr_Occurred() != nullptr) throw nb::python_error();
      PyErr_SetNone(PyExc_KeyboardInterrupt);
      throw nb::python_error();
    case Errc::ok:
    case Errc::exiting:
    case Errc::internal: break;
  }
  raise_as(c.base, failure.text);
}

void raise_stream_error(const std::string& text) { raise_as(g_classes.stream, text); }
void raise_driver_error(const std::string& text) { raise_as(g_classes.driver, text); }

void raise_driver_error(driver::OpenError kind, const std::string& text) {
  using driver::OpenError;
  if (kind == OpenError::bad_name) raise_as(PyExc_ValueError, text);
  raise_as(
      kind == OpenError::no_library || kind == OpenError::no_device ? g_classes.driver_not_found : g_classes.driver,
      text);
}

}  // namespace streampool::python
