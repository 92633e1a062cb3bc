// Letting go of the GIL and taking it back, also while the interpreter ends.
#pragma once

#include <Python.h>

namespace streampool::python {

// As nanobind's gil_scoped_release and _acquire, but a thread that would take the GIL of an interpreter which is being
// torn down is parked for good instead: Python 3.11 and 3.12 would end it by unwinding through frames that may not be
// unwound (R22). The thread that tears it down is the one that still has the GIL then, and goes on.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  bool ends_it_;
  PyThreadState* state_;
};

// Told by the thread that ends the process, with the GIL; waits a moment for threads that are inside a PythonCall. From
// then on any other thread that comes here, which can only be a daemon thread, lets go of the GIL for good: the
// interpreter would end it inside our frames otherwise.
void process_ends_here();

// Held around Python code that is called from our frames: the interpreter may switch threads in there, and would end
// this one there. Parks the thread when the process has begun to end.
class PythonCall {
 public:
  PythonCall();
  ~PythonCall();
  PythonCall(const PythonCall&) = delete;
  PythonCall& operator=(const PythonCall&) = delete;
};

class WithGil {
 public:
  WithGil();
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
};

}  // namespace streampool::python
