// What is known of the captures in one context. A context event ends them all, so every pool of the context asks here.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "../base/types.hpp"

namespace streampool::driver {

// A stream while it captures: its handle, and for the per-thread default stream, which is another one in each thread,
// the thread.
std::uint64_t capture_key(std::uintptr_t stream);

class Captures {
 public:
  // `changed` is called when a capture begins or is seen: what was known of streams that did not capture may be wrong.
  void listen(const void* who, std::function<void()> changed);
  void leave(const void* who);

  // Declared ones are counted.
  void begin();
  // What was seen of the capture that the stream took part in is over with it (key 0: not known). False: none was
  // declared.
  bool end(std::uint64_t key);
  // An undeclared one counts for a second after it was seen, or until its stream is found not capturing: its handle
  // cannot be asked again without its owner. `now`: seconds on the device's clock.
  void saw(std::uint64_t key, std::uint64_t capture, double now);
  void saw_none(std::uint64_t key, double now);

  bool known(double now) const {
    if (declared()) return true;
    const double until = seen_until_.load(std::memory_order_acquire);
    return until != 0 && now < until;
  }
  bool declared() const { return declared_.load(std::memory_order_acquire) != 0; }
  std::vector<std::uint64_t> seen_keys();
  bool any_seen() const { return seen_until_.load(std::memory_order_acquire) != 0; }

  // Held shared around what touches streams without their owners in the call: whoever declares a capture waits for it.
  // Searches for memory ask declared() inside, since a stream may begin to capture, or join, right after it was asked;
  // and before, so that who declares one gets there. A call that was given its streams asks each before touching it.
  std::shared_mutex& gate() { return gate_; }

 private:
  struct Seen {
    std::uint64_t key = 0;
    std::uint64_t capture = 0;
    double until = 0;
  };
  void forget(const std::function<bool(const Seen&)>& over);
  void tell();

  std::shared_mutex gate_;
  std::atomic<std::uint32_t> declared_{0};
  std::atomic<double> seen_until_{0};
  std::mutex mutex_;  // guards what follows; `changed` is called under it, and takes no lock
  std::vector<Seen> seen_;
  std::map<const void*, std::function<void()>> listeners_;
};

}  // namespace streampool::driver
