// From a stream argument to a handle. A stream object is read through __cuda_stream__(), never by int(handle): a closed
// cuda.core stream has handle 0, which is the legacy stream (NVIDIA/cuda-python#2627).
#include <nanobind/stl/string.h>

#include <utility>

#include "arguments.hpp"
#include "support.hpp"

namespace streampool::python {
namespace {

constexpr Callable kHook{"hook"};

PyObject* g_current_stream_hook = nullptr;  // callable(simulated) -> object or int; leaked at exit
PyObject *g_cuda_stream, *g_is_closed, *g_device, *g_device_id, *g_handle;

constexpr Whole<driver::StreamHandle> kStreamHandle{"stream", "a handle"};
constexpr Whole<driver::EventHandle> kEventHandle{"event", "a handle", 1};
constexpr const char* kNamedStream = "an int handle or an object with __cuda_stream__()";

[[noreturn]] void no_stream(nb::handle given) {
  refuse(PyExc_TypeError, "stream", std::string("None, ") + kNamedStream, given);
}
[[noreturn]] void no_event(nb::handle given) {
  refuse(PyExc_TypeError, "event", "an int handle or an object whose `handle` is one", given);
}

bool is_int(nb::handle given) { return PyLong_Check(given.ptr()) && !PyBool_Check(given.ptr()); }

nb::object attribute(nb::handle object, PyObject* name) {
  PyObject* found = PyObject_GetAttr(object.ptr(), name);
  if (found == nullptr) {
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw nb::python_error();
    PyErr_Clear();
  }
  return nb::steal(found);
}

// The stream object of the last call. Only objects of types that are known to keep their handle until they are closed,
// and say so: cuda.core's and ours. Another object may give another handle each time that it is asked.
struct LastStream {
  PyObject* object = nullptr;  // borrowed: good as long as the reference to it is
  PyObject* reference = nullptr;
  driver::StreamHandle handle = 0;
  long ordinal = -1;  // of its device; -1: not known
};
LastStream g_last;

bool is_last(nb::handle stream) {
  if (stream.ptr() != g_last.object) return false;
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* alive = nullptr;
  const bool same = PyWeakref_GetRef(g_last.reference, &alive) == 1 && alive == stream.ptr();
  Py_XDECREF(alive);
  return same;
#else
  return PyWeakref_GetObject(g_last.reference) == stream.ptr();
#endif
}

bool keeps_its_handle(PyTypeObject* type) {
  static PyTypeObject *yes = nullptr, *no = nullptr;  // as asked last; kept, so that no other gets the address
  if (type == yes || type == no) return type == yes;
  const nb::handle object(reinterpret_cast<PyObject*>(type));
  const std::string module = nb::cast<std::string>(object.attr("__module__"));
  const bool keeps =
      (module.rfind("cuda.core", 0) == 0 || module.rfind("streampool.", 0) == 0) && nb::hasattr(object, "is_closed");
  PyTypeObject*& place = keeps ? yes : no;
  Py_INCREF(type);
  Py_XDECREF(std::exchange(place, type));
  return keeps;
}

void remember(nb::handle stream, driver::StreamHandle handle, long ordinal) {
  if (!keeps_its_handle(Py_TYPE(stream.ptr()))) return;
  PyObject* reference = PyWeakref_NewRef(stream.ptr(), nullptr);
  if (reference == nullptr) return PyErr_Clear();
  Py_XDECREF(g_last.reference);
  g_last = {stream.ptr(), reference, handle, ordinal};
}

}  // namespace

nb::object resolve_current(nb::object stream, const pool::Core& core) {
  if (!stream.is_none()) return stream;
  if (g_current_stream_hook == nullptr) return nb::int_(driver::kLegacyStream);
  const PythonCall call;
  PyObject* simulated = const_cast<pool::Core&>(core).driver().simulated() ? Py_True : Py_False;
  nb::object current = nb::steal(PyObject_CallFunctionObjArgs(g_current_stream_hook, simulated, nullptr));
  if (!current.is_valid()) throw nb::python_error();
  return current;
}

driver::StreamHandle stream_handle(nb::handle stream, const pool::Core& core, const char* verb, bool other_devices) {
  nb::object current;
  if (stream.is_none()) {
    current = resolve_current(nb::none(), core);
    stream = current;
  }
  if (is_int(stream)) return convert(stream, kStreamHandle);
  const PythonCall call;
  const nb::object closed = attribute(stream, g_is_closed);
  if (closed.is_valid() && closed.is(Py_True))
    raise_stream_error(std::string(verb) +
                       ": the stream object is closed; nothing was done. Use a live stream, or its replacement");
  driver::Driver& d = const_cast<pool::Core&>(core).driver();
  if (is_last(stream) && (other_devices || g_last.ordinal == d.ordinal())) return g_last.handle;
  nb::object protocol = attribute(stream, g_cuda_stream);
  if (!protocol.is_valid()) no_stream(stream);
  if (PyCallable_Check(protocol.ptr())) {
    PyObject* result = PyObject_CallNoArgs(protocol.ptr());
    if (result == nullptr) {
      nb::python_error error;
      if (!error.matches(PyExc_Exception)) throw error;  // Ctrl-C, or the program's end
      raise_stream_error(std::string(verb) + ": the stream object gives no handle: " + error.what());
    }
    protocol = nb::steal(result);
  }
  if (!PyTuple_Check(protocol.ptr()) || PyTuple_GET_SIZE(protocol.ptr()) != 2)
    refuse(PyExc_TypeError, "what __cuda_stream__() gives", "a version and a handle", protocol);
  const driver::StreamHandle handle = convert(nb::handle(PyTuple_GET_ITEM(protocol.ptr(), 1)), kStreamHandle);
  long ordinal = -1;
  if (handle > driver::kPerThreadStream) {
    const nb::object device = attribute(stream, g_device);
    const nb::object id = device.is_valid() && !device.is_none() ? attribute(device, g_device_id) : nb::object();
    if (id.is_valid() && PyLong_Check(id.ptr())) ordinal = PyLong_AsLong(id.ptr());
    if (!other_devices && ordinal != -1 && ordinal != d.ordinal())
      raise_stream_error(std::string(verb) + ": the stream belongs to device " + std::to_string(ordinal) +
                         ", the pool to " + std::string(d.name()));
    remember(stream, handle, ordinal);
  }
  return handle;
}

driver::StreamHandle named_stream_handle(nb::handle stream, const pool::Core& core, const char* verb,
                                         bool other_devices) {
  if (stream.is_none()) refuse(PyExc_TypeError, "stream", kNamedStream, stream);
  return stream_handle(stream, core, verb, other_devices);
}

void must_look_like_a_stream(nb::handle stream) {
  if (stream.is_none()) refuse(PyExc_TypeError, "stream", kNamedStream, stream);
  if (is_int(stream))
    convert(stream, kStreamHandle);
  else if (!attribute(stream, g_cuda_stream).is_valid())
    no_stream(stream);
}

driver::EventHandle event_handle(nb::handle event) {
  if (is_int(event)) return convert(event, kEventHandle);
  const nb::object closed = attribute(event, g_is_closed);
  if (closed.is_valid() && closed.is(Py_True)) raise_stream_error("record_event: the event object is closed");
  const nb::object handle = attribute(event, g_handle);
  if (!handle.is_valid()) no_event(event);
  // The handle of a cuda.core event is an object of the bindings.
  const nb::object number = nb::steal(PyNumber_Long(handle.ptr()));
  if (!number.is_valid()) {
    PyErr_Clear();
    no_event(event);
  }
  if (PyObject_IsTrue(number.ptr()) == 0) raise_stream_error("record_event: the event object is closed");
  return convert(number, kEventHandle);
}

void bind_streams(nb::module_& m) {
  g_cuda_stream = PyUnicode_InternFromString("__cuda_stream__");
  g_is_closed = PyUnicode_InternFromString("is_closed");
  g_device = PyUnicode_InternFromString("device");
  g_device_id = PyUnicode_InternFromString("device_id");
  g_handle = PyUnicode_InternFromString("handle");
  m.def(
      "set_current_stream_hook",
      [](Given<kHook> hook) {
        PyObject* callable = hook.value.is_none() ? nullptr : Py_NewRef(hook.value.ptr());
        Py_XDECREF(std::exchange(g_current_stream_hook, callable));
      },
      parameter<kHook>());
}

}  // namespace streampool::python
