// A device's context and the frame that every call runs in. Imports api.hpp and driver.hpp.
#pragma once

#include <atomic>
#include <cstdint>

#include "../driver.hpp"
#include "api.hpp"

namespace streampool::driver::cuda {

// One device's primary context, and whether it can still be used. `dead` goes from 0 to the first error after which no
// call can succeed (a device fault, a reset, the driver's end) and never back: from then on the driver is not called.
struct Session {
  const Api* api = nullptr;
  Device device = 0;
  Context context = nullptr;
  std::uint64_t generation = 0;  // cuCtxGetId: a reset context keeps its handle but not its id
  std::atomic<int> dead{0};

  // Whether the context is still the one that was opened.
  bool alive() const;

  // The status of a call that gave `result`; remembers what is final.
  Status status(Call call, Result result);
};

// Makes the session's context current and the thread's capture mode relaxed; the destructor restores both, also after
// an error. When `result()` is not 0 nothing was changed, and the call must not be made.
class Scope {
 public:
  explicit Scope(Session& session);
  ~Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

  Result result() const { return result_; }

 private:
  Result enter();

  Session& session_;
  int mode_ = kCaptureModeRelaxed;
  bool mode_changed_ = false;
  bool pushed_ = false;
  Result result_ = kSuccess;
};

}  // namespace streampool::driver::cuda
