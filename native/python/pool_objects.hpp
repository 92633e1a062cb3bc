// What a Python Pool and a Python Buffer are inside, and what both need around a call of the core.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "hooks.hpp"
#include "pool/core.hpp"
#include "support.hpp"

namespace streampool::python {

// Whoever drops the last holder of a pool settles it, which may call the driver: without the GIL.
inline void drop(std::shared_ptr<pool::Core>& core) {
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
  std::shared_ptr<pool::Core> core;
  nb::dict options;
  std::shared_ptr<OomCallback> oom_callback;
  int stack_depth = 0;
  int native_depth = 0;
};

// A block that is lent to another library through DLPack. Whoever lets go of it last, the Buffer or a borrower,
// releases the block: a borrower on any thread, without the GIL and without a driver call (R6).
struct Lease {
  std::shared_ptr<pool::Core> core;
  pool::BlockRef block;
  std::mutex counting;  // of borrowers, with what the block's record says of them
  std::atomic<int> borrowers{0};
  std::atomic<bool> orphan{false};  // the Buffer is gone, and left the block to its borrowers
  ~Lease();                         // dlpack.cpp
};

struct PyBuffer {
  std::shared_ptr<pool::Core> core;
  pool::BlockRef block;
  Bytes size = 0;
  bool closed = false;
  Py_ssize_t views = 0;     // exports of the buffer protocol
  nb::object pool, stream;  // as the caller gave it; keeps the stream alive as long as the block
  std::vector<nb::object> recorded;
  std::shared_ptr<Lease> lease{};  // from the first export through DLPack on

  ~PyBuffer() {
    // The last reference is gone: an implicit release, ordered by the block's own streams. Makes no driver call.
    if (!closed && core) {
      if (lease)
        lease->orphan.store(true);
      else
        core->release(block);
    }
    lease.reset();
    drop(core);
  }
};

// In a forked child, and while the process ends, frees are ignored (R22).
inline bool frees_ignored() { return driver::ending() != driver::Ending::no; }

// Anything but a free: locks of the parent's threads may be held for ever in a forked child.
inline void must_not_be_forked() {
  pool::Failure failure;
  if (pool::refuse_when_ending(&failure) == pool::Errc::forked) raise(failure);
}

// The capture that a stream is in; 0: none. Raises CaptureError where that capture was lost, and for the legacy stream
// beside a blocking stream's capture. Harms no capture.
std::uint64_t capture_of(pool::Core& core, driver::StreamHandle stream, const char* verb);
// Raises CaptureError: the stream captures, and `why` that is in the way.
[[noreturn]] void refuse_capture(driver::StreamHandle stream, const char* verb, const char* why);
// Waits for what was queued on a stream just now, with the GIL released, for as long as it takes or until Ctrl-C (R24).
// Raises CaptureError where the stream captures.
void wait_for_stream(pool::Core& core, driver::StreamHandle stream, const char* verb);
// Raises ValueError where the buffer is closed, or its block was freed by address.
void must_be_open(const PyBuffer& self, const char* verb);
// The stream of a call on the buffer: None is the one that it was allocated on. Raises where the buffer is closed.
driver::StreamHandle own_stream_handle(const PyBuffer& self, nb::handle stream, const char* verb);
bool host_accessible(const PyBuffer& self);

// A signal's handler may have raised while the core waited.
inline void check_interrupt() {
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
}

// Calls a function of the core or the driver without the GIL.
template <typename Call>
auto unlocked(Call&& call) {
  const WithoutGil release;
  return call();
}

// The same for a function of the core that may fail and leaves nothing behind that an interrupt would lose.
template <typename Call>
void guarded(Call&& call) {
  pool::Failure failure;
  if (unlocked([&] { return call(&failure); }) != pool::Errc::ok) raise(failure);
  check_interrupt();
}

}  // namespace streampool::python
