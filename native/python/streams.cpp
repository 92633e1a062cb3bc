// From a stream argument to a handle. A stream object is read through __cuda_stream__(), never by int(handle): a closed
// cuda.core stream has handle 0, which is the legacy stream (NVIDIA/cuda-python#2627).
#include <nanobind/stl/string.h>

#include "support.hpp"

namespace streampool::python {
namespace {

PyObject* g_current_stream_hook = nullptr;  // callable(simulated) -> object or int; leaked at exit
PyObject *g_cuda_stream, *g_is_closed, *g_device, *g_device_id, *g_handle;

[[noreturn]] void wrong_type(nb::handle stream, const char* verb) {
  throw nb::type_error((std::string(verb) +
                        ": a stream is None, an int handle or an object with __cuda_stream__(), not " +
                        nb::cast<std::string>(nb::str(stream.type().attr("__name__"))))
                           .c_str());
}

driver::StreamHandle int_handle(nb::handle value, const char* verb) {
  const unsigned long long handle = PyLong_AsUnsignedLongLong(value.ptr());
  if (handle == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw nb::value_error((std::string(verb) + ": a stream handle is a number from 0 to 2^64 - 1, not " +
                           nb::cast<std::string>(nb::str(value)))
                              .c_str());
  }
  return static_cast<driver::StreamHandle>(handle);
}

nb::object attribute(nb::handle object, PyObject* name) {
  PyObject* found = PyObject_GetAttr(object.ptr(), name);
  if (found == nullptr) {
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw nb::python_error();
    PyErr_Clear();
  }
  return nb::steal(found);
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
  if (PyBool_Check(stream.ptr())) wrong_type(stream, verb);
  if (PyLong_Check(stream.ptr())) return int_handle(stream, verb);
  const PythonCall call;
  const nb::object closed = attribute(stream, g_is_closed);
  if (closed.is_valid() && closed.is(Py_True))
    raise_stream_error(std::string(verb) +
                       ": the stream object is closed; nothing was done. Use a live stream, or its replacement");
  nb::object protocol = attribute(stream, g_cuda_stream);
  if (!protocol.is_valid()) wrong_type(stream, verb);
  if (PyCallable_Check(protocol.ptr())) {
    PyObject* result = PyObject_CallNoArgs(protocol.ptr());
    if (result == nullptr) {
      nb::python_error error;
      raise_stream_error(std::string(verb) + ": the stream object gives no handle: " + error.what());
    }
    protocol = nb::steal(result);
  }
  if (!PyTuple_Check(protocol.ptr()) || PyTuple_GET_SIZE(protocol.ptr()) != 2) wrong_type(stream, verb);
  const driver::StreamHandle handle = int_handle(nb::handle(PyTuple_GET_ITEM(protocol.ptr(), 1)), verb);
  if (!other_devices && handle > driver::kPerThreadStream) {
    const nb::object device = attribute(stream, g_device);
    const nb::object id = device.is_valid() && !device.is_none() ? attribute(device, g_device_id) : nb::object();
    if (id.is_valid() && PyLong_Check(id.ptr())) {
      const long ordinal = PyLong_AsLong(id.ptr());
      driver::Driver& d = const_cast<pool::Core&>(core).driver();
      if (ordinal != d.ordinal())
        raise_stream_error(std::string(verb) + ": the stream belongs to device " + std::to_string(ordinal) +
                           ", the pool to " + std::string(d.name()));
    }
  }
  return handle;
}

driver::EventHandle event_handle(nb::handle event) {
  if (PyBool_Check(event.ptr())) throw nb::type_error("an event is an int handle or an object with a handle");
  if (PyLong_Check(event.ptr())) return int_handle(event, "record_event");
  const nb::object closed = attribute(event, g_is_closed);
  if (closed.is_valid() && closed.is(Py_True)) raise_stream_error("record_event: the event object is closed");
  const nb::object handle = attribute(event, g_handle);
  if (!handle.is_valid()) throw nb::type_error("record_event: an event is an int handle or an object with a handle");
  const nb::object number = nb::steal(PyNumber_Long(handle.ptr()));
  if (!number.is_valid()) throw nb::python_error();
  const driver::EventHandle value = int_handle(number, "record_event");
  if (value == 0) raise_stream_error("record_event: the event object is closed");
  return value;
}

void bind_streams(nb::module_& m) {
  g_cuda_stream = PyUnicode_InternFromString("__cuda_stream__");
  g_is_closed = PyUnicode_InternFromString("is_closed");
  g_device = PyUnicode_InternFromString("device");
  g_device_id = PyUnicode_InternFromString("device_id");
  g_handle = PyUnicode_InternFromString("handle");
  m.def(
      "set_current_stream_hook",
      [](nb::object hook) {
        Py_XDECREF(g_current_stream_hook);
        g_current_stream_hook = hook.is_none() ? nullptr : hook.release().ptr();
      },
      nb::arg("hook").none());
}

}  // namespace streampool::python
