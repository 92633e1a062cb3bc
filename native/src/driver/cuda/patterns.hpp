// Runs the pattern kernels over ranges of memory. Imports session.hpp and pattern_piece.hpp.
#pragma once

#include <array>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "../driver.hpp"
#include "pattern_piece.hpp"
#include "session.hpp"

namespace streampool::driver::cuda {

// The kernels, the private stream they run on and the pinned memory through which they are told what to do. All of it
// is made when the driver opens: loading a module or allocating pinned memory later could block behind stuck work.
//
// A job is queued whole, told through a mailbox of its own, and says there what it found: it is read when the event
// behind it is done. Jobs too large for a mailbox, and more of them than there are, run while their start waits.
//
// A launch waits for nobody, but it needs room on the device: behind a kernel that fills all of it the wait ends after
// kWaitSeconds with `not ready`, what has not started is called off, and later jobs first wait for what is left.
class Patterns {
 public:
  static constexpr double kWaitSeconds = 10;  // the same bound as the pool's own waits

  explicit Patterns(double wait_seconds = kWaitSeconds) : wait_seconds_(wait_seconds) {}

  // With the session's context current. On failure `error` says what could not be made.
  Result start(Session& session, std::string* error);
  // Gives back what `start` made; only for an open that fails later.
  void stop();

  // With the session's context current and the capture mode relaxed.
  Result fill(std::span<const Range> ranges, std::uint64_t key);
  Result verify(std::span<const Range> ranges, std::uint64_t key, std::vector<Mismatch>* out);
  // True: queued. False: it is not, and must be done by the two calls above.
  bool start_job(PatternJob* job, Result* result);
  // Whether a queued job is done, or was called off (then `result` is `kNotReady`).
  bool finish_job(PatternJob* job, bool wait, Result* result);
  // The error of a device that a fault has ended, else kSuccess. Queries the private stream, and waits for nothing.
  Result device_error() const;

 private:
  struct Mailbox {
    PatternPiece* pieces = nullptr;  // pinned
    DevicePtr device_pieces = 0;
    Event done = nullptr;
    unsigned verify = 0, fill = 0;                                                // so many pieces
    enum class State : unsigned char { free, queued, left } state = State::free;  // left: called off, and still there
  };
  static constexpr unsigned kMailboxes = 4;

  Result make_mailboxes();
  Mailbox* free_mailbox();
  Result launch(Function kernel, DevicePtr pieces, unsigned count, std::uint64_t key);
  template <typename Query>
  Result wait_for(Query&& query, double seconds);
  Result run(Function kernel, std::span<const Range> ranges, std::uint64_t key, std::vector<Mismatch>* out);
  Result launch_and_wait(Function kernel, unsigned count, std::uint64_t key);
  Result wait(double seconds);
  static void call_off(PatternPiece* pieces, unsigned count);

  const double wait_seconds_;
  Session* session_ = nullptr;
  Module module_ = nullptr;
  Function fill_ = nullptr;
  Function verify_ = nullptr;
  Stream stream_ = nullptr;
  PatternPiece* pieces_ = nullptr;  // pinned; written by the host before and by the kernel during a launch
  DevicePtr device_pieces_ = 0;     // the same memory as the device sees it
  std::array<Mailbox, kMailboxes> mailboxes_;
  std::mutex mutex_;         // one job at a time
  bool unfinished_ = false;  // an earlier job may still be on the stream, and hold `pieces_`
};

// The same on the host, for pinned memory.
void fill_on_host(std::span<const Range> ranges, std::uint64_t key);
void verify_on_host(std::span<const Range> ranges, std::uint64_t key, std::vector<Mismatch>* out);

}  // namespace streampool::driver::cuda
