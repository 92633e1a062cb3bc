// What the core asks of Python while it waits and when memory is short: signals, a garbage collection, the user's word.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "pool/core.hpp"

namespace streampool::python {

// The user's out-of-memory callback. Read and replaced with the GIL only, since a thread may be in the core, on its way
// to call it.
class OomCallback {
 public:
  OomCallback() = default;
  OomCallback(const OomCallback&) = delete;
  OomCallback& operator=(const OomCallback&) = delete;

  // With the GIL. None: there is none.
  void set(nanobind::object callable);
  // Without the GIL, from any thread. True: something was freed, try again.
  bool ask(Bytes size);

 private:
  // Not dropped with this object: the core may outlive the interpreter, and its last holder may be any thread.
  PyObject* callable_ = nullptr;
};

// Lends them to a core. They answer "no" once the interpreter is gone, or in a forked child.
void set_hooks(pool::Hooks& hooks, std::shared_ptr<OomCallback> oom_callback);

}  // namespace streampool::python
