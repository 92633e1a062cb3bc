// Recording, polling and waiting for fences (R3). Imports base/ and its own folder; the driver stands behind `Events`.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "stream_state.hpp"

namespace streampool::order {

// The few driver calls that ordering needs, in one context. Implementations count and never block.
class Events {
 public:
  virtual ~Events() = default;
  virtual bool create(std::uintptr_t* event) = 0;
  virtual void destroy(std::uintptr_t event) = 0;
  // True only when the record succeeded and the stream was found not capturing afterwards.
  virtual bool record(std::uintptr_t event, std::uintptr_t stream) = 0;
  virtual bool record_context(std::uintptr_t event) = 0;
  // True only when the event is known to be done; an error of any kind is "not done".
  virtual bool done(std::uintptr_t event) = 0;
  virtual bool wait(std::uintptr_t stream, std::uintptr_t event) = 0;
  // True only when nothing is left to do on the stream, which the caller knows not to capture.
  virtual bool idle(std::uintptr_t stream) = 0;
};

struct FenceCounts {
  std::atomic<std::uint64_t> recorded{0}, record_failed{0}, polled{0}, waits{0}, context_events{0}, thinned{0};
};

// The fences of one pool. Thread-safe; makes every driver call without holding a lock. Streams of a peer's context are
// fenced through their own `Events`, whose events are not pooled.
class Fences {
 public:
  explicit Fences(Events& own) : own_(own) {}
  ~Fences();
  Fences(const Fences&) = delete;
  Fences& operator=(const Fences&) = delete;

  // Fences everything issued on `s` so far, through `handle`. The caller has the right to touch the stream (R6).
  // `exact` is the ticket that the calling free took, when the fence is recorded inside that call; else 0.
  bool record(StreamState& s, std::uintptr_t handle, Ticket exact = 0);

  // Advances `completed` as far as the fences of `s` are done.
  void poll(StreamState& s);

  // Asks whether the stream has nothing left to do: then all that was issued on it is complete, without a fence. The
  // caller has the right to touch the stream, and knows that it does not capture.
  bool ask_idle(StreamState& s, std::uintptr_t handle);

  // The fences of an idle stream have nothing left to say: their events are pooled again.
  void retire(StreamState& s);

  // Makes T (through its handle) wait for exactly this mark. Only where a fence was recorded inside the freeing call.
  bool can_wait(StreamState& t, const Mark& mark);
  bool wait(StreamState& t, std::uintptr_t t_handle, const Mark& mark);

  // Context events, one a context, that cover all that was issued on these streams; polled by poll_context(). True: all
  // that were needed were made.
  bool record_context(const std::vector<StreamState*>& streams);
  void poll_context();
  bool context_pending();

  // Destroys what is pooled and drops what is queued (at the end of a pool).
  void clear(const std::vector<StreamState*>& streams);

  const FenceCounts& counts() const { return counts_; }

  // A stream keeps at most this many fences; in between, the second newest gives way (its marks complete later).
  static constexpr std::size_t kMaxFences = 32;

 private:
  bool take_event(Events& events, std::uintptr_t* event);
  void recycle(Events& events, std::uintptr_t event);
  Events& events_of(const StreamState& s) const { return s.events != nullptr ? *s.events : own_; }

  struct ContextFence {
    Events* events = nullptr;
    std::uintptr_t event = 0;
    std::vector<Mark> covers;
    bool polled = false;
  };

  bool record_context(Events& events, std::vector<Mark> covers);

  Events& own_;
  SpinLock pool_lock_;
  std::vector<std::uintptr_t> pooled_;
  SpinLock context_lock_;
  std::vector<ContextFence> context_;
  FenceCounts counts_;
};

}  // namespace streampool::order
