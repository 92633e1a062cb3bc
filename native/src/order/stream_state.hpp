// Who may touch freed memory, in numbers: tickets, marks, and what the pool knows of one stream.
// Imports base/ only: events are opaque numbers here, so that the rule is tested without any driver.
//
// The rule (R1): memory may go to stream T only if each of its marks is on T itself, or complete, or T was made to wait
// for it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "../base/biased_lock.hpp"
#include "../base/spin_lock.hpp"
#include "../base/types.hpp"

namespace streampool::order {

// A per-stream counter; every mark takes a fresh one. Never goes back, not even when a StreamState is used again for
// another stream: so a mark that outlived its stream compares as complete, without any reference count.
using Ticket = std::uint64_t;

struct StreamState;
class Events;

// "Work in `stream` up to `ticket` may still touch this."
struct Mark {
  StreamState* stream = nullptr;
  Ticket ticket = 0;
};

// A recorded event. It covers the tickets up to `covers`, which was read before it was recorded.
struct Fence {
  std::uintptr_t event = 0;
  Ticket covers = 0;
  bool exact = false;   // recorded inside the freeing call that took ticket `covers`: fit for a wait edge
  bool polled = false;  // a thread is querying it: it must be neither recorded again nor destroyed
};

// What the pool knows of one stream. Memory of this type is never given back while its pool lives (see Ticket).
//
// Invariants: completed <= issued; fences are sorted by `covers`; completed is below the `covers` of every fence in
// the queue; `fenced` is the largest `covers` ever published, so issued > fenced means: marks that no fence covers yet.
struct StreamState {
  // Guards the taking of tickets, and the heap that goes with the stream.
  BiasedLock lock;
  std::atomic<Ticket> issued{0};
  std::atomic<Ticket> completed{0};

  std::atomic<std::uint64_t> id{0};  // the driver's: unique for ever
  // May be fenced by others, for polling (R6), through this handle. Written when streams are registered and forgotten:
  // what is read outside the capture gate is a hint, and may be old by the time it is used.
  std::atomic<std::uintptr_t> handle{0};  // only meaningful when lasting
  std::atomic<bool> lasting{false};
  std::atomic<bool> legacy{false};
  Events* events = nullptr;  // of the context it lives in, a peer's; null: the pool's own
  // What a stream captures into a graph: its marks are complete when no launch of the graph can come any more, and no
  // event ever says so. Nothing is recorded on it, and it is made to wait for nothing.
  std::atomic<bool> captured{false};

  // Guards what follows; short, never held over a driver call.
  SpinLock fence_lock;
  std::deque<Fence> fences;
  std::atomic<Ticket> fenced{0};
  std::vector<Mark> waited;  // this stream waits for these: a later ticket of the same stream replaces an earlier one

  // Frees that no fence covers yet, for streams that must be fenced in the call that names them.
  std::atomic<std::uint32_t> unfenced_frees{0};
  std::atomic<std::uint64_t> unfenced_bytes{0};
  std::atomic<bool> owed{false};  // a mark was put on this stream by a call that did not name it
  std::atomic<double> unfenced_since{0};
  std::atomic<std::uint64_t> age_asked{0};  // processor ticks

  // Under `lock`: a free on this stream, which no fence covers yet. (A fence takes away what it covers without the
  // lock: then they may count too many, and the next one comes early.)
  void count_unfenced(Bytes bytes) {
    unfenced_frees.store(unfenced_frees.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    unfenced_bytes.store(unfenced_bytes.load(std::memory_order_relaxed) + bytes, std::memory_order_relaxed);
  }

  // Under `lock`.
  Ticket take_ticket() {
    const Ticket ticket = issued.load(std::memory_order_relaxed) + 1;
    issued.store(ticket, std::memory_order_release);
    return ticket;
  }

  bool idle() const { return completed.load(std::memory_order_acquire) == issued.load(std::memory_order_acquire); }

  void raise_completed(Ticket to) {
    Ticket now = completed.load(std::memory_order_relaxed);
    while (now < to && !completed.compare_exchange_weak(now, to, std::memory_order_acq_rel)) {
    }
  }
};

inline bool complete(const Mark& mark) { return mark.ticket <= mark.stream->completed.load(std::memory_order_acquire); }

// Was T made to wait for the mark?
inline bool waited_for(StreamState& t, const Mark& mark) {
  t.fence_lock.lock();
  bool found = false;
  for (const Mark& w : t.waited) found = found || (w.stream == mark.stream && w.ticket >= mark.ticket);
  t.fence_lock.unlock();
  return found;
}

// Published only after the wait call returned (R3).
inline void publish_wait(StreamState& t, const Mark& mark) {
  t.fence_lock.lock();
  std::erase_if(t.waited, [](const Mark& w) { return complete(w); });
  bool found = false;
  for (Mark& w : t.waited)
    if (w.stream == mark.stream) {
      w.ticket = std::max(w.ticket, mark.ticket);
      found = true;
    }
  if (!found) t.waited.push_back(mark);
  t.fence_lock.unlock();
}

// The tickets that are found complete together with this one, as far as is known: no fence lies between them. Memory
// that merges across a fence would wait for work that was queued after its own.
inline std::pair<Ticket, Ticket> together(StreamState& s, Ticket ticket) {
  const Ticket fenced = s.fenced.load(std::memory_order_acquire);
  if (ticket > fenced) return {fenced + 1, ~Ticket{0}};
  Ticket first = s.completed.load(std::memory_order_acquire) + 1, last = fenced;
  s.fence_lock.lock();
  for (const Fence& fence : s.fences) {
    if (fence.covers >= ticket) {
      last = std::min(last, fence.covers);
      break;
    }
    first = std::max(first, fence.covers + 1);
  }
  s.fence_lock.unlock();
  return {first, last};
}

#ifdef STREAMPOOL_TEST_SWITCHES
// A switch of the test build: breaks the rule, so that a test can show that the tests would notice.
bool broken();
void break_r1(bool on);
#else
constexpr bool broken() { return false; }
#endif

// The reuse rule for one mark. Nothing else in the project decides this.
inline bool may_use(StreamState& t, const Mark& mark) {
  return broken() || mark.stream == &t || complete(mark) || waited_for(t, mark);
}

// The marks of one block or extent: at most one a stream, the latest. Most have one, which is kept without host memory
// of its own.
class MarkSet {
 public:
  bool empty() const { return size() == 0; }
  std::size_t size() const { return one_.stream != nullptr ? 1 : more_.size(); }
  const Mark* begin() const { return one_.stream != nullptr ? &one_ : more_.data(); }
  const Mark* end() const { return begin() + size(); }

  void add(Mark mark) {
    if (empty()) {
      one_ = mark;
      return;
    }
    Mark* const first = one_.stream != nullptr ? &one_ : more_.data();
    for (Mark* m = first; m != first + size(); ++m)
      if (m->stream == mark.stream) {
        m->ticket = std::max(m->ticket, mark.ticket);
        return;
      }
    if (one_.stream != nullptr) more_.push_back(std::exchange(one_, Mark{}));
    more_.push_back(mark);
  }
  void add(const MarkSet& other) {
    for (const Mark& m : other) add(m);
  }
  void drop_complete() {
    if (one_.stream != nullptr && complete(one_)) one_ = {};
    std::erase_if(more_, [](const Mark& m) { return complete(m); });
  }
  bool all_complete() const {
    return std::all_of(begin(), end(), [](const Mark& m) { return complete(m); });
  }
  bool may_use(StreamState& t) const {
    return std::all_of(begin(), end(), [&t](const Mark& m) { return order::may_use(t, m); });
  }
  // The ticket of T's own mark, 0 where there is none.
  Ticket ticket_of(const StreamState& t) const {
    for (const Mark& m : *this)
      if (m.stream == &t) return m.ticket;
    return 0;
  }

 private:
  // Either of them has marks, or neither.
  Mark one_;
  std::vector<Mark> more_;
};

}  // namespace streampool::order
