// Fences: recorded, polled, bounded (R3 of docs/design.md), without any driver.
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
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
using testing::FakeEvents;
using testing::OrderScene;
using testing::OrderStream;
using testing::Position;

// -- recording -------------------------------------------------------------------------------------------------------

STREAMPOOL_TEST("a fence completes what was freed before it, once the work before it has run") {
  OrderScene scene;
  OrderStream& s = scene.stream();
  const Mark first = scene.free(s), second = scene.free(s);
  CHECK(scene.record(s));
  const Mark third = scene.free(s);
  scene.poll(s);
  CHECK(!complete(first));
  scene.events.run(s.handle);
  scene.poll(s);
  CHECK(complete(first));
  CHECK(complete(second));
  CHECK(!complete(third));  // its work has run, but no fence says so
  scene.finish();
}

STREAMPOOL_TEST("what is freed while a fence is being recorded is not covered by it") {
  OrderScene scene;
  OrderStream& s = scene.stream();
  const Mark before = scene.free(s);
  Mark during;
  scene.events.on_record = [&](EventId) { during = scene.free(s); };
  CHECK(scene.record(s));
  scene.events.on_record = nullptr;
  scene.events.run_to(s.handle, 1);  // the work before the record, not that which came during it
  scene.poll(s);
  CHECK(complete(before));
  CHECK(!complete(during));
  scene.finish();
}

STREAMPOOL_TEST("nothing is recorded where every free has its fence already") {
  OrderScene scene;
  OrderStream& s = scene.stream();
  CHECK(scene.record(s));
  CHECK_EQ(scene.events.created(), std::uint64_t{0});
  scene.free(s);
  CHECK(scene.record(s));
  CHECK(scene.record(s));
  CHECK_EQ(scene.events.recorded().size(), std::size_t{1});
  CHECK_EQ(s.state.fenced.load(), s.state.issued.load());
  scene.finish();
}

STREAMPOOL_TEST("an event whose record failed or was captured is destroyed, and neither polled nor pooled") {
  OrderScene scene;
  OrderStream& s = scene.stream();
  // One good event in the pool, so that a pooled one meets the failure too.
  scene.free(s);
  CHECK(scene.record(s));
  scene.events.run(s.handle);
  scene.poll(s);
  const Mark mark = scene.free(s);
  for (std::uint64_t failures = 1; failures <= 3; ++failures) {
    scene.events.fail_record = true;
    CHECK(!scene.record(s));
    CHECK_EQ(scene.events.destroyed(), failures);
    CHECK_EQ(scene.events.live(), std::size_t{0});
    CHECK_EQ(scene.fences.counts().record_failed.load(), failures);
    CHECK(s.state.owed.load());
    CHECK(s.state.fences.empty());
    scene.poll(s);
    CHECK(!complete(mark));
  }
  scene.events.fail_record = false;
  CHECK(scene.record(s));
  CHECK(!s.state.owed.load());
  scene.events.run(s.handle);
  scene.poll(s);
  CHECK(complete(mark));
  scene.finish();
}

STREAMPOOL_TEST("a driver that makes no event leaves the marks open and nothing to destroy") {
  OrderScene scene;
  OrderStream& s = scene.stream();
  const Mark mark = scene.free(s);
  scene.events.fail_create = true;
  CHECK(!scene.record(s));
  CHECK(!scene.fences.record_context(scene.states()));
  CHECK_EQ(scene.events.destroyed(), std::uint64_t{0});
  CHECK(!scene.fences.context_pending());
  scene.events.fail_create = false;
  CHECK(!complete(mark));
  CHECK(s.state.owed.load());
  CHECK(scene.record(s));
  scene.finish();
}

STREAMPOOL_TEST("counts of unfenced frees start again with each fence and keep what came during it") {
  OrderScene scene;
  OrderStream& s = scene.stream();
  scene.free(s);
  s.state.unfenced_frees = 5;
  s.state.unfenced_bytes = 500;
  scene.events.on_record = [&](EventId) {
    s.state.unfenced_frees.fetch_add(2);
    s.state.unfenced_bytes.fetch_add(20);
  };
  CHECK(scene.record(s));
  CHECK_EQ(s.state.unfenced_frees.load(), 2u);
  CHECK_EQ(s.state.unfenced_bytes.load(), 20u);
  scene.events.on_record = nullptr;
  scene.finish();
}

// -- polling (R3) ----------------------------------------------------------------------------------------------------

STREAMPOOL_TEST("a stuck stream holds up no other, and a poll asks for fences of its own stream only") {
  OrderScene scene;
  std::vector<std::pair<OrderStream*, Mark>> stuck;
  for (int i = 0; i < 3; ++i) {
    OrderStream& s = scene.stream();
    stuck.emplace_back(&s, scene.free(s));
    CHECK(scene.record(s));
  }
  OrderStream& quick = scene.stream();
  const Mark mark = scene.free(quick);
  CHECK(scene.record(quick));
  const EventId event = quick.state.fences.front().event;
  scene.events.run(quick.handle);
  for (auto& [s, m] : stuck) scene.poll(*s);
  scene.events.queried();
  scene.poll(quick);
  CHECK(complete(mark));
  CHECK(scene.events.queried() == std::vector<EventId>{event});
  for (auto& [s, m] : stuck) CHECK(!complete(m));
  scene.events.run_all();
  for (auto& [s, m] : stuck) {
    scene.poll(*s);
    CHECK(complete(m));
  }
  scene.finish();
}

STREAMPOOL_TEST("a poll stops at its stream's first fence that is not done") {
  OrderScene scene;
  OrderStream& s = scene.stream();
  std::vector<Mark> marks;
  for (int i = 0; i < 10; ++i) {
    marks.push_back(scene.free(s));
    CHECK(scene.record(s));
  }
  scene.events.run_to(s.handle, 4);
  scene.poll(s);
  CHECK_EQ(scene.events.queried().size(), std::size_t{5});
  for (std::size_t i = 0; i < marks.size(); ++i) CHECK_EQ(complete(marks[i]), i < 4);
  scene.finish();
}

STREAMPOOL_TEST("a poll that fails for any reason means not done, and is asked again") {
  OrderScene scene;
  OrderStream& s = scene.stream();
  const Mark mark = scene.free(s);
  CHECK(scene.record(s));
  scene.events.run(s.handle);
  scene.events.fail_query = true;
  for (int i = 0; i < 3; ++i) scene.poll(s);
  CHECK(!complete(mark));
  CHECK_EQ(s.state.fences.size(), std::size_t{1});
  scene.events.fail_query = false;
  scene.poll(s);
  CHECK(complete(mark));
  scene.finish();
}

STREAMPOOL_TEST("no driver call is made under a lock of the fast path or of the fences") {
  OrderScene scene;
  OrderStream& s = scene.stream();
  OrderStream& t = scene.stream();
  int seen = 0;
  const auto all_free = [&](EventId) {
    ++seen;
    for (OrderStream* stream : {&s, &t}) {
      CHECK(stream->state.lock.try_lock());
      stream->state.lock.unlock();
      CHECK(stream->state.fence_lock.try_lock());
      stream->state.fence_lock.unlock();
    }
    // A record takes an event from the pool and gives one back: those locks are free too.
    if (seen < 3) {
      scene.free(t);
      CHECK(scene.record(t));
    }
  };
  const Mark mark = scene.free(s);
  scene.events.on_record = scene.events.on_query = scene.events.on_wait = all_free;
  CHECK(scene.record(s, mark.ticket));
  CHECK(scene.fences.wait(t.state, t.handle, mark));
  scene.poll(s);
  CHECK(seen >= 3);
  scene.events.on_record = scene.events.on_query = scene.events.on_wait = nullptr;
  scene.finish();
}

STREAMPOOL_TEST("a second poll of a stream meanwhile returns at once and asks nothing") {
  OrderScene scene;
  OrderStream& s = scene.stream();
  scene.free(s);
  CHECK(scene.record(s));
  bool again = false;
  scene.events.on_query = [&](EventId) {
    if (std::exchange(again, true)) testing::fail(__FILE__, __LINE__, "asked twice at a time");
    scene.poll(s);
  };
  scene.poll(s);
  CHECK(again);
  CHECK_EQ(scene.events.queried().size(), std::size_t{1});
  scene.events.on_query = nullptr;
  scene.finish();
}

STREAMPOOL_TEST("a poll holds its fence: recording and thinning meanwhile touch other events only") {
  OrderScene scene;
  OrderStream& s = scene.stream();
  const Mark mark = scene.free(s);
  CHECK(scene.record(s));
  scene.events.on_query = [&](EventId) {
    scene.events.on_query = nullptr;
    for (std::size_t i = 0; i < 3 * Fences::kMaxFences; ++i) {
      scene.free(s);
      CHECK(scene.record(s));
    }
    scene.events.run_to(s.handle, 1);
  };
  scene.poll(s);
  CHECK(complete(mark));
  CHECK_EQ(s.state.completed.load(), mark.ticket);
  scene.finish();
}

// A record that is slow to publish ends up in front of a younger fence that is being polled at that moment.
STREAMPOOL_TEST("an older fence that arrives late, in front of one being polled, does no harm") {
  OrderScene scene;
  OrderStream& s = scene.stream();
  std::mutex mutex;
  std::condition_variable changed;
  bool recording = false, go_on = false;
  const auto until = [&](bool* what) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [what] { return *what; });
  };
  const auto set = [&](bool* what) {
    std::lock_guard lock(mutex);
    *what = true;
    changed.notify_all();
  };
  const Mark older = scene.free(s);
  std::atomic<int> records{0};
  scene.events.on_record = [&](EventId) {
    if (records.fetch_add(1) != 0) return;
    set(&recording);
    until(&go_on);
  };
  std::thread slow([&] { scene.record(s); });
  until(&recording);
  const Mark younger = scene.free(s);
  CHECK(scene.record(s));
  bool once = false;
  scene.events.on_query = [&](EventId) {
    if (std::exchange(once, true)) return;
    set(&go_on);
    slow.join();
  };
  scene.events.run(s.handle);
  scene.poll(s);
  CHECK(complete(older));
  CHECK(complete(younger));
  CHECK(s.state.fences.empty());
  CHECK_EQ(s.state.completed.load(), younger.ticket);
  scene.events.on_record = scene.events.on_query = nullptr;
  scene.finish();
}

// -- events stay bounded ---------------------------------------------------------------------------------------------

STREAMPOOL_TEST("events are used again") {
  OrderScene scene;
  OrderStream& s = scene.stream();
  for (int i = 0; i < 1000; ++i) {
    scene.free(s);
    CHECK(scene.record(s));
    scene.events.run(s.handle);
    scene.poll(s);
  }
  CHECK(s.state.idle());
  CHECK_EQ(scene.events.created(), std::uint64_t{1});
  scene.finish();
}

STREAMPOOL_TEST(
    "a stream whose work never ends keeps a bounded number of fences, and thinning completes no mark early") {
  OrderScene scene;
  OrderStream& s = scene.stream();
  std::vector<Mark> marks;  // mark i stands behind work i + 1
  constexpr std::size_t kFrees = 500;
  for (std::size_t i = 0; i < kFrees; ++i) {
    marks.push_back(scene.free(s));
    CHECK(scene.record(s, marks.back().ticket));
    scene.poll(s);
    CHECK(s.state.fences.size() <= Fences::kMaxFences);
    CHECK(scene.events.live() <= Fences::kMaxFences + 2);
  }
  CHECK(scene.fences.counts().thinned.load() >= kFrees - Fences::kMaxFences);
  for (const Fence& f : s.state.fences) CHECK(!f.polled);
  for (Position ran = 0; ran <= kFrees; ran += 7) {
    scene.events.run_to(s.handle, ran);
    scene.poll(s);
    for (std::size_t i = ran; i < marks.size(); ++i) CHECK(!complete(marks[i]));
  }
  scene.events.run(s.handle);
  scene.poll(s);
  for (const Mark& mark : marks) CHECK(complete(mark));
  scene.finish();
}

STREAMPOOL_TEST("a burst of fences on many streams leaves a bounded number of events behind") {
  OrderScene scene;
  constexpr std::size_t kStreams = 100;
  for (std::size_t i = 0; i < kStreams; ++i) {
    OrderStream& s = scene.stream();
    for (int k = 0; k < 20; ++k) {
      scene.free(s);
      CHECK(scene.record(s));
    }
  }
  CHECK_EQ(scene.events.live(), kStreams * 20);
  scene.events.run_all();
  for (OrderStream& s : scene.streams) scene.poll(s);
  constexpr std::size_t kMostPooled = 256;
  CHECK(scene.events.live() <= kMostPooled);
  scene.finish();
}

STREAMPOOL_TEST("without clear(), the end of the fences still destroys every pooled event") {
  FakeEvents events;
  StreamState s;
  {
    Fences fences(events);
    s.take_ticket();
    CHECK(fences.record(s, 7));
    events.run(7);
    fences.poll(s);
    CHECK_EQ(events.live(), std::size_t{1});
  }
  CHECK_EQ(events.live(), std::size_t{0});
  CHECK_EQ(events.misuse(), std::string());
}

STREAMPOOL_TEST("clear() drops pending fences, and marks that were open stay open") {
  OrderScene scene;
  OrderStream& s = scene.stream();
  const Mark mark = scene.free(s);
  CHECK(scene.record(s));
  scene.free(s);
  CHECK(scene.fences.record_context(scene.states()));
  scene.fences.clear(scene.states());
  CHECK_EQ(scene.events.live(), std::size_t{0});
  CHECK(!scene.fences.context_pending());
  CHECK(!complete(mark));
  scene.poll(s);
  scene.fences.poll_context();
  CHECK(scene.events.queried().empty());
  scene.finish();
}

}  // namespace
