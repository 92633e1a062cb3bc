#include "gil.hpp"

#include <unistd.h>

#include <atomic>

namespace streampool::python {
namespace {

bool finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// How often this thread let go of the GIL of an interpreter that was already being torn down: then it is the one that
// does.
thread_local int t_ends_it = 0;

[[noreturn]] void park() {
  for (;;) pause();
}

std::atomic<pid_t> g_ender{0};
std::atomic<int> g_inside{0};

bool another_ends_the_process() {
  const pid_t ender = g_ender.load();
  return ender != 0 && ender != gettid();
}

}  // namespace

void process_ends_here() {
  g_ender.store(gettid());
  constexpr int kLooks = 1000;
  constexpr useconds_t kLookEvery = 1000;
  const WithoutGil others_go_on;
  for (int look = 0; look < kLooks && g_inside.load() != 0; ++look) usleep(kLookEvery);
}

PythonCall::PythonCall() {
  if (another_ends_the_process()) {
    PyEval_SaveThread();
    park();
  }
  g_inside.fetch_add(1);
}

PythonCall::~PythonCall() { g_inside.fetch_sub(1); }

WithoutGil::WithoutGil() : ends_it_(finalizing()) {
  t_ends_it += ends_it_ ? 1 : 0;
  state_ = PyEval_SaveThread();
}

WithoutGil::~WithoutGil() {
  t_ends_it -= ends_it_ ? 1 : 0;
  // Counted while it waits for the GIL: who ends the process lets it have it first.
  g_inside.fetch_add(1);
  if (another_ends_the_process() || (!ends_it_ && finalizing())) {
    g_inside.fetch_sub(1);
    park();
  }
  PyEval_RestoreThread(state_);
  g_inside.fetch_sub(1);
}

WithGil::WithGil() {
  g_inside.fetch_add(1);
  if (another_ends_the_process() || (t_ends_it == 0 && finalizing())) {
    g_inside.fetch_sub(1);
    park();
  }
  state_ = PyGILState_Ensure();
  g_inside.fetch_sub(1);
}

}  // namespace streampool::python
