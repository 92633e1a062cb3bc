// Wait edges and context events, and all of it from many threads (R1 and R3 of docs/design.md), without any driver.
#include <atomic>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "order_scene.hpp"

namespace {

using namespace streampool;
using namespace streampool::order;
using testing::EventId;
using testing::OrderScene;
using testing::OrderStream;
using testing::Position;

// -- wait edges ------------------------------------------------------------------------------------------------------

STREAMPOOL_TEST("a stream is made to wait only on the fence that the freeing call itself recorded") {
  OrderScene scene;
  OrderStream& s = scene.stream();
  OrderStream& t = scene.stream();
  const Mark exact = scene.free(s);
  CHECK(!scene.fences.can_wait(t.state, exact));  // no fence at all
  CHECK(scene.record(s, exact.ticket));
  const EventId event = s.state.fences.back().event;
  const Mark later = scene.free(s);
  CHECK(scene.record(s));  // somebody else's fence, made later: it covers later work
  const Mark third = scene.free(s);
  CHECK(scene.fences.can_wait(t.state, exact));
  CHECK(!scene.fences.can_wait(t.state, later));
  CHECK(!scene.fences.can_wait(t.state, third));
  CHECK(!scene.fences.wait(t.state, t.handle, later));
  CHECK(!scene.fences.wait(t.state, t.handle, third));
  CHECK(scene.events.waits().empty());
  CHECK(scene.fences.wait(t.state, t.handle, exact));
  CHECK(scene.events.waits() == (std::vector<std::pair<std::uintptr_t, EventId>>{{t.handle, event}}));
  CHECK(may_use(t.state, exact));
  CHECK(!may_use(t.state, later));
  CHECK_EQ(scene.fences.counts().waits.load(), std::uint64_t{1});
  CHECK(!complete(exact));  // the wait is T's alone
  scene.finish();
}

STREAMPOOL_TEST("a fence that came to cover a later free as well is no longer exact") {
  OrderScene scene;
  OrderStream& s = scene.stream();
  OrderStream& t = scene.stream();
  const Mark mine = scene.free(s);
  const Mark others = scene.free(s);  // another thread's, before this call comes to its record
  CHECK(scene.record(s, mine.ticket));
  CHECK(!scene.fences.can_wait(t.state, mine));
  CHECK(!scene.fences.can_wait(t.state, others));
  scene.finish();
}

STREAMPOOL_TEST("a wait is published only after the call returned, and not when it failed") {
  OrderScene scene;
  OrderStream& s = scene.stream();
  OrderStream& t = scene.stream();
  const Mark mark = scene.free(s);
  CHECK(scene.record(s, mark.ticket));
  bool asked = false;
  scene.events.on_wait = [&](EventId) {
    asked = true;
    CHECK(!may_use(t.state, mark));
  };
  scene.events.fail_wait = true;
  CHECK(!scene.fences.wait(t.state, t.handle, mark));
  CHECK(asked);
  CHECK(!may_use(t.state, mark));
  CHECK_EQ(scene.fences.counts().waits.load(), std::uint64_t{0});
  scene.events.fail_wait = false;
  CHECK(scene.fences.wait(t.state, t.handle, mark));
  CHECK(may_use(t.state, mark));
  scene.events.on_wait = nullptr;
  scene.finish();
}

STREAMPOOL_TEST("nobody waits for the own stream, for complete work, or twice for the same") {
  OrderScene scene;
  OrderStream& s = scene.stream();
  OrderStream& t = scene.stream();
  const Mark first = scene.free(s);
  CHECK(scene.record(s, first.ticket));
  const Mark second = scene.free(s);
  CHECK(scene.record(s, second.ticket));
  CHECK(scene.fences.wait(s.state, s.handle, first));
  CHECK(scene.fences.wait(t.state, t.handle, second));
  CHECK(scene.fences.wait(t.state, t.handle, second));
  CHECK(scene.fences.wait(t.state, t.handle, first));  // the later wait covers it
  CHECK_EQ(scene.events.waits().size(), std::size_t{1});
  scene.events.run(s.handle);
  scene.poll(s);
  OrderStream& u = scene.stream();
  CHECK(scene.fences.wait(u.state, u.handle, second));
  CHECK(scene.events.waits().empty());
  scene.finish();
}

STREAMPOOL_TEST("a wait holds its fence: it is neither recycled nor recorded again under the call") {
  OrderScene scene;
  OrderStream& s = scene.stream();
  OrderStream& t = scene.stream();
  const Mark mark = scene.free(s);
  CHECK(scene.record(s, mark.ticket));
  const EventId event = s.state.fences.front().event;
  scene.events.on_wait = [&](EventId) {
    scene.events.run(s.handle);
    scene.poll(s);  // done, but held
    for (std::size_t i = 0; i < 2 * Fences::kMaxFences; ++i) {
      scene.free(s);
      scene.events.recorded();
      CHECK(scene.record(s));
      CHECK(scene.events.recorded() != std::vector<EventId>{event});
    }
  };
  CHECK(scene.fences.wait(t.state, t.handle, mark));
  scene.events.on_wait = nullptr;
  scene.events.run(s.handle);
  scene.poll(s);
  CHECK(s.state.idle());
  scene.finish();
}

// -- context events --------------------------------------------------------------------------------------------------

STREAMPOOL_TEST("a context event completes the open marks of every stream, and nothing that came after it") {
  OrderScene scene;
  OrderStream& gone = scene.stream();
  OrderStream& other = scene.stream();
  OrderStream& idle = scene.stream();
  const Mark stranded = scene.free(gone), second = scene.free(other);
  Mark during;
  scene.events.on_record = [&](EventId) { during = scene.free(other); };
  CHECK(scene.fences.record_context(scene.states()));
  scene.events.on_record = nullptr;
  const Mark after = scene.free(gone);
  CHECK(scene.fences.context_pending());
  scene.fences.poll_context();
  CHECK(!complete(stranded));
  scene.events.run_to(gone.handle, 1);
  scene.fences.poll_context();
  CHECK(!complete(stranded));  // the context is not done before all of its streams are
  scene.events.run_all();
  scene.fences.poll_context();
  CHECK(!scene.fences.context_pending());
  CHECK(complete(stranded));
  CHECK(complete(second));
  CHECK(!complete(during));
  CHECK(!complete(after));
  CHECK(idle.state.idle());
  CHECK_EQ(scene.fences.counts().context_events.load(), std::uint64_t{1});
  scene.finish();
}

STREAMPOOL_TEST("no context event is recorded where nothing is open, and a failed one is destroyed") {
  OrderScene scene;
  OrderStream& s = scene.stream();
  CHECK(scene.fences.record_context(scene.states()));
  CHECK_EQ(scene.events.created(), std::uint64_t{0});
  const Mark mark = scene.free(s);
  scene.events.fail_record = true;
  CHECK(!scene.fences.record_context(scene.states()));
  CHECK_EQ(scene.events.live(), std::size_t{0});
  CHECK(!scene.fences.context_pending());
  scene.fences.poll_context();
  CHECK(!complete(mark));
  scene.finish();
}

STREAMPOOL_TEST("context events stay bounded, and the one being polled is held") {
  OrderScene scene;
  OrderStream& s = scene.stream();
  const Mark first = scene.free(s);
  CHECK(scene.fences.record_context(scene.states()));
  Mark last;
  const auto more = [&] {
    for (int i = 0; i < 20; ++i) {
      last = scene.free(s);
      CHECK(scene.fences.record_context(scene.states()));
    }
    constexpr std::size_t kFewEvents = 6;
    CHECK(scene.events.live() <= kFewEvents);
  };
  more();
  scene.events.on_query = [&](EventId) {
    scene.events.on_query = nullptr;
    more();
    scene.events.run_to(s.handle, 1);
  };
  scene.fences.poll_context();
  CHECK(complete(first));
  CHECK(!complete(last));
  scene.events.run_all();
  scene.fences.poll_context();
  CHECK(complete(last));
  scene.finish();
}

STREAMPOOL_TEST("a context event that is late for a mark completed meanwhile takes nothing back") {
  OrderScene scene;
  OrderStream& s = scene.stream();
  scene.free(s);
  CHECK(scene.fences.record_context(scene.states()));
  const Mark later = scene.free(s);
  CHECK(scene.record(s));
  scene.events.run_all();
  scene.poll(s);
  CHECK(complete(later));
  scene.fences.poll_context();
  CHECK_EQ(s.state.completed.load(), later.ticket);
  scene.finish();
}

// -- threads ---------------------------------------------------------------------------------------------------------

// Threads that free, record, poll and wait on shared streams while another one lets work run. The fake complains about
// any event that is used wrongly; a completed ticket whose work has not run is early reuse.
STREAMPOOL_TEST("concurrent frees, records, polls and waits complete nothing early and lose no event") {
  constexpr int kThreads = 4, kRounds = 5000, kStreams = 3;
  OrderScene scene;
  for (int i = 0; i < kStreams; ++i) scene.stream();
  // By stream: the position of the work in front of each ticket. Guarded by the stream's own lock.
  std::vector<std::vector<Position>> position(kStreams, std::vector<Position>(1, 0));
  std::atomic<bool> early{false};
  std::atomic<int> left{kThreads};

  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      std::uint32_t x = 12345u + static_cast<std::uint32_t>(t) * 77777u;
      for (int i = 0; i < kRounds && !early; ++i) {
        x ^= x << 13, x ^= x >> 17, x ^= x << 5;
        const std::size_t at = x % kStreams;
        OrderStream& s = scene.streams[at];
        OrderStream& other = scene.streams[(at + 1) % kStreams];
        Mark mark;
        {
          std::lock_guard lock(s.state.lock);
          position[at].push_back(scene.events.queue(s.handle));
          mark = {&s.state, s.state.take_ticket()};
        }
        s.state.unfenced_frees.fetch_add(1);
        s.state.unfenced_bytes.fetch_add(64);
        if (x & 0x100) scene.record(s, mark.ticket);
        if (x & 0x200) scene.fences.wait(other.state, other.handle, mark);
        if (x & 0x400) scene.fences.record_context({&s.state, &other.state});
        scene.poll(other);
        scene.poll(s);
        scene.fences.poll_context();
        const Ticket completed = s.state.completed.load();
        const Position ran = scene.events.ran(s.handle);
        std::lock_guard lock(s.state.lock);
        if (position[at][completed] > ran) early = true;
      }
      left.fetch_sub(1);
    });
  threads.emplace_back([&] {
    std::uint32_t x = 99u;
    while (left.load() != 0) {
      x ^= x << 13, x ^= x >> 17, x ^= x << 5;
      scene.events.run(scene.streams[x % kStreams].handle);
      std::this_thread::yield();
    }
  });
  for (std::thread& thread : threads) thread.join();
  CHECK(!early);
  scene.events.run_all();
  for (OrderStream& s : scene.streams) {
    scene.record(s);
    scene.poll(s);
    CHECK(s.state.idle());
    // No count wrapped around when two records took it down at the same time.
    CHECK(s.state.unfenced_frees.load() <= kThreads * kRounds);
    CHECK(s.state.unfenced_bytes.load() <= 64u * kThreads * kRounds);
  }
  constexpr std::size_t kMostEvents = 256 + kStreams * (Fences::kMaxFences + kThreads) + 4;
  CHECK(scene.events.most_live() <= kMostEvents);
  scene.finish();
}

STREAMPOOL_TEST("two records at a time never take the counts of unfenced frees below zero") {
  OrderScene scene;
  OrderStream& s = scene.stream();
  scene.free(s);
  s.state.unfenced_frees = 10;
  s.state.unfenced_bytes = 1000;
  // The second record starts, and ends, while the first is in the middle of its driver call.
  bool inner = false;
  scene.events.on_record = [&](EventId) {
    if (std::exchange(inner, true)) return;
    scene.free(s);
    CHECK(scene.record(s));
  };
  CHECK(scene.record(s));
  CHECK(s.state.unfenced_frees.load() <= 10u);
  CHECK(s.state.unfenced_bytes.load() <= 1000u);
  scene.events.on_record = nullptr;
  scene.finish();
}

}  // namespace
