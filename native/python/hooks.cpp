#include "hooks.hpp"

#include <utility>

#include "gil.hpp"
#include "support.hpp"

namespace streampool::python {
namespace {

bool python_is_gone() { return driver::ending() != driver::Ending::no || Py_IsInitialized() == 0; }

bool interrupted() {
  if (python_is_gone()) return false;
  const WithGil gil;
  return PyErr_Occurred() != nullptr || PyErr_CheckSignals() != 0;
}

void collect_garbage() {
  if (python_is_gone()) return;
  const WithGil gil;
  PyGC_Collect();
}

std::vector<debug::SourceFrame> resolve_stack(debug::StackId stack) {
  if (python_is_gone()) return {};
  const WithGil gil;
  return frames_of(stack);
}

}  // namespace

void OomCallback::set(nanobind::object callable) {
  PyObject* old = std::exchange(callable_, callable.is_none() ? nullptr : callable.release().ptr());
  Py_XDECREF(old);
}

bool OomCallback::ask(Bytes size) {
  if (python_is_gone()) return false;
  const WithGil gil;
  if (callable_ == nullptr) return false;
  PyObject* callable = Py_NewRef(callable_);  // it may be replaced while it runs
  PyObject* answer = PyObject_CallFunction(callable, "K", static_cast<unsigned long long>(size));
  const int again = answer != nullptr ? PyObject_IsTrue(answer) : -1;
  // Ctrl-C stays set: the core asks `interrupted` next, and the allocation raises it. Nobody can catch anything else.
  if (again < 0 && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_WriteUnraisable(callable);
  Py_XDECREF(answer);
  Py_DECREF(callable);
  return again == 1;
}

void set_hooks(pool::Hooks& hooks, std::shared_ptr<OomCallback> oom_callback) {
  hooks.interrupted = interrupted;
  hooks.collect_garbage = collect_garbage;
  hooks.resolve_stack = resolve_stack;
  hooks.out_of_memory = [callback = std::move(oom_callback)](Bytes size) { return callback->ask(size); };
}

}  // namespace streampool::python
