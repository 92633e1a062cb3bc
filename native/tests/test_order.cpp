// Tickets, marks and fences, rule by rule (R1 and R3 of docs/design.md), without any driver: `Events` is a fake that
// knows which work has run and complains about every event that is used wrongly. May import order/ only.
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "order/fences.hpp"
#include "test.hpp"

namespace {

using namespace streampool;
using namespace streampool::order;

using EventId = std::uintptr_t;
using Position = std::uint64_t;  // how much work of a stream was queued, or has run

// Streams as two numbers each, events as positions in them. Thread-safe; hooks are called without a lock.
class FakeEvents final : public Events {
 public:
  // -- the device's side
  Position queue(std::uintptr_t stream) {
    std::lock_guard lock(mutex_);
    return ++streams_[stream].queued;
  }
  void run(std::uintptr_t stream) {
    std::lock_guard lock(mutex_);
    streams_[stream].ran = streams_[stream].queued;
  }
  void run_to(std::uintptr_t stream, Position to) {
    std::lock_guard lock(mutex_);
    streams_[stream].ran = std::max(streams_[stream].ran, to);
  }
  void run_all() {
    std::lock_guard lock(mutex_);
    for (auto& [stream, s] : streams_) s.ran = s.queued;
  }
  Position ran(std::uintptr_t stream) {
    std::lock_guard lock(mutex_);
    return streams_[stream].ran;
  }

  // -- what the tests set and read
  std::function<void(EventId)> on_record, on_query, on_wait, on_idle;  // in the middle of the call
  std::atomic<bool> fail_create{false}, fail_record{false}, fail_query{false}, fail_wait{false};
  std::size_t live() {
    std::lock_guard lock(mutex_);
    return events_.size();
  }
  std::size_t most_live() {
    std::lock_guard lock(mutex_);
    return most_live_;
  }
  std::uint64_t created() const { return created_; }
  std::uint64_t destroyed() const { return destroyed_; }
  std::uint64_t queries(EventId event) {
    std::lock_guard lock(mutex_);
    return queries_[event];
  }
  std::vector<EventId> queried() { return take(&queried_); }
  std::vector<EventId> recorded() { return take(&recorded_); }
  std::vector<std::pair<std::uintptr_t, EventId>> waits() {
    std::lock_guard lock(mutex_);
    return std::exchange(waits_, {});
  }
  // Every event that was used in a way that a driver would punish; empty when all is well.
  std::string misuse() {
    std::lock_guard lock(mutex_);
    return misuse_;
  }

  // -- Events
  bool create(EventId* event) override {
    if (fail_create) return false;
    std::lock_guard lock(mutex_);
    *event = ++last_;
    events_[last_] = {};
    ++created_;
    most_live_ = std::max(most_live_, events_.size());
    return true;
  }
  void destroy(EventId event) override {
    std::lock_guard lock(mutex_);
    const auto it = events_.find(event);
    if (it == events_.end()) return complain("destroyed twice, or never created", event);
    if (it->second.held != 0) complain("destroyed while another call uses it", event);
    events_.erase(it);
    ++destroyed_;
  }
  bool record(EventId event, std::uintptr_t stream) override { return record_any(event, stream, false); }
  bool record_context(EventId event) override { return record_any(event, 0, true); }
  bool done(EventId event) override {
    if (!hold(event, "queried")) return false;
    call(on_query, event);
    std::lock_guard lock(mutex_);
    Event& e = events_[event];
    --e.held;
    ++queries_[event];
    queried_.push_back(event);
    if (!e.recorded) complain("queried without a good record, which reads as done", event);
    if (fail_query) return false;
    bool all = true;
    for (const auto& [stream, position] : e.positions) all = all && position <= streams_[stream].ran;
    return all;
  }
  bool idle(std::uintptr_t stream) override {
    bool all = false;
    {
      std::lock_guard lock(mutex_);
      all = streams_[stream].ran == streams_[stream].queued;
    }
    call(on_idle, stream);  // what comes meanwhile is not part of the answer
    return all && !fail_query;
  }
  bool wait(std::uintptr_t stream, EventId event) override {
    if (!hold(event, "waited for")) return false;
    call(on_wait, event);
    std::lock_guard lock(mutex_);
    Event& e = events_[event];
    --e.held;
    if (!e.recorded) complain("waited for without a good record", event);
    if (fail_wait) return false;
    waits_.emplace_back(stream, event);
    return true;
  }

 private:
  struct Event {
    bool recorded = false;
    int held = 0;  // queries and waits that are under way
    std::vector<std::pair<std::uintptr_t, Position>> positions;
  };
  struct Stream {
    Position queued = 0, ran = 0;
  };

  // A copy: a hook may take itself away.
  static void call(std::function<void(EventId)> hook, EventId event) {
    if (hook) hook(event);
  }
  bool record_any(EventId event, std::uintptr_t stream, bool context) {
    {
      std::lock_guard lock(mutex_);
      const auto it = events_.find(event);
      if (it == events_.end()) return complain("recorded after it was destroyed", event), false;
      if (it->second.held != 0) complain("recorded again while another call uses it", event);
      it->second.recorded = !fail_record;
      it->second.positions.clear();
      recorded_.push_back(event);
    }
    // What is queued while the call is under way is behind the record.
    std::vector<std::pair<std::uintptr_t, Position>> positions;
    {
      std::lock_guard lock(mutex_);
      for (const auto& [other, s] : streams_)
        if (context || other == stream) positions.emplace_back(other, s.queued);
    }
    call(on_record, event);
    std::lock_guard lock(mutex_);
    events_[event].positions = std::move(positions);
    return !fail_record;
  }
  bool hold(EventId event, const char* how) {
    std::lock_guard lock(mutex_);
    const auto it = events_.find(event);
    if (it == events_.end()) return complain(how, event), complain("after it was destroyed", event), false;
    ++it->second.held;
    return true;
  }
  void complain(const char* what, EventId event) {
    misuse_ += "event " + std::to_string(event) + " was " + what + "; ";
  }
  std::vector<EventId> take(std::vector<EventId>* from) {
    std::lock_guard lock(mutex_);
    return std::exchange(*from, {});
  }

  std::mutex mutex_;
  std::map<EventId, Event> events_;
  std::map<std::uintptr_t, Stream> streams_;
  std::map<EventId, std::uint64_t> queries_;
  std::vector<EventId> queried_, recorded_;
  std::vector<std::pair<std::uintptr_t, EventId>> waits_;
  EventId last_ = 0;
  std::size_t most_live_ = 0;
  std::atomic<std::uint64_t> created_{0}, destroyed_{0};
  std::string misuse_;
};

// A stream's state with the handle under which the fake knows it.
struct Stream {
  StreamState state;
  std::uintptr_t handle = 0;
};

// A fake, the fences over it, and streams. Ends with the question whether all events were used well and are gone.
struct OrderScene {
  FakeEvents events;
  Fences fences{events};
  std::deque<Stream> streams;

  Stream& stream() {
    Stream& s = streams.emplace_back();
    s.handle = 100 + streams.size();
    return s;
  }
  // Work, and a free behind it.
  Mark free(Stream& s) {
    events.queue(s.handle);
    s.state.lock.lock();
    const Ticket ticket = s.state.take_ticket();
    s.state.lock.unlock();
    return {&s.state, ticket};
  }
  bool record(Stream& s, Ticket exact = 0) { return fences.record(s.state, s.handle, exact); }
  void poll(Stream& s) { fences.poll(s.state); }
  std::vector<StreamState*> states() {
    std::vector<StreamState*> all;
    for (Stream& s : streams) all.push_back(&s.state);
    return all;
  }
  void finish() {
    fences.clear(states());
    CHECK_EQ(events.misuse(), std::string());
    CHECK_EQ(events.created() - events.destroyed(), std::uint64_t{0});
    CHECK_EQ(events.live(), std::size_t{0});
  }
};

// -- marks (R1) ------------------------------------------------------------------------------------------------------

STREAMPOOL_TEST("a mark lets its own stream in, everybody once complete, and who was made to wait; nobody else") {
  StreamState s, t, u;
  const Mark mark{&s, s.take_ticket()};
  CHECK(may_use(s, mark));
  CHECK(!may_use(t, mark));
  CHECK(!may_use(u, mark));
  publish_wait(t, mark);
  CHECK(may_use(t, mark));
  CHECK(!may_use(u, mark));
  s.raise_completed(mark.ticket);
  CHECK(may_use(u, mark));
}

STREAMPOOL_TEST(
    "an idle stream's marks are complete without a fence, and those that were put on it while it was asked are not") {
  OrderScene scene;
  Stream& s = scene.stream();
  const Mark before = scene.free(s);
  CHECK(!scene.fences.ask_idle(s.state, s.handle));  // its work has not run
  CHECK(!complete(before));
  scene.record(s);
  scene.events.run(s.handle);
  Mark meanwhile;
  scene.events.on_idle = [&](EventId) { meanwhile = scene.free(s); };
  CHECK(scene.fences.ask_idle(s.state, s.handle));
  scene.events.on_idle = {};
  CHECK(complete(before));
  CHECK(!complete(meanwhile));
  CHECK(s.state.fences.empty());  // its event is free for the next fence
  CHECK(s.state.issued.load() > s.state.fenced.load());
  scene.record(s);
  CHECK(!s.state.fences.empty());
  scene.events.run(s.handle);
  scene.events.fail_query = true;
  const Mark last = scene.free(s);
  scene.events.run(s.handle);
  CHECK(!scene.fences.ask_idle(s.state, s.handle));  // an error is no answer
  CHECK(!complete(last));
  scene.events.fail_query = false;
  scene.finish();
}

STREAMPOOL_TEST("every mark takes a fresh ticket, from many threads too") {
  StreamState s;
  constexpr int kThreads = 4, kEach = 2000;
  std::vector<std::vector<Ticket>> taken(kThreads);
  std::vector<std::thread> threads;
  for (auto& mine : taken)
    threads.emplace_back([&s, &mine] {
      for (int i = 0; i < kEach; ++i) {
        std::lock_guard lock(s.lock);
        mine.push_back(s.take_ticket());
      }
    });
  for (std::thread& thread : threads) thread.join();
  std::vector<bool> seen(kThreads * kEach + 1);
  for (const auto& mine : taken)
    for (std::size_t i = 0; i < mine.size(); ++i) {
      CHECK(mine[i] > (i == 0 ? 0 : mine[i - 1]));
      CHECK(!seen[mine[i]]);
      seen[mine[i]] = true;
    }
  CHECK_EQ(s.issued.load(), Ticket{kThreads * kEach});
}

STREAMPOOL_TEST("completion never goes back") {
  StreamState s;
  for (int i = 0; i < 9; ++i) s.take_ticket();
  s.raise_completed(7);
  s.raise_completed(3);
  CHECK_EQ(s.completed.load(), Ticket{7});
  CHECK(!s.idle());
  s.raise_completed(9);
  CHECK(s.idle());
}

STREAMPOOL_TEST("a mark of a vanished stream stays complete when its state serves another stream") {
  StreamState s;
  const Mark old{&s, s.take_ticket()};
  s.raise_completed(old.ticket);
  s.id = 99;  // another stream's from here on
  const Mark fresh{&s, s.take_ticket()};
  CHECK(complete(old));
  CHECK(!complete(fresh));
  CHECK(fresh.ticket > old.ticket);
}

STREAMPOOL_TEST("waiting for one free of a stream covers its earlier frees and none of its later ones") {
  StreamState s, t;
  const Mark first{&s, s.take_ticket()}, second{&s, s.take_ticket()}, third{&s, s.take_ticket()};
  publish_wait(t, second);
  CHECK(may_use(t, first));
  CHECK(may_use(t, second));
  CHECK(!may_use(t, third));
  publish_wait(t, first);  // an older wait takes nothing away
  CHECK(may_use(t, second));
  CHECK_EQ(t.waited.size(), std::size_t{1});
}

STREAMPOOL_TEST("what a stream waited for is forgotten once it is complete, so the list stays short") {
  StreamState t;
  std::deque<StreamState> others(100);
  for (StreamState& s : others) {
    const Mark mark{&s, s.take_ticket()};
    publish_wait(t, mark);
    s.raise_completed(mark.ticket);
    CHECK(t.waited.size() <= 2);
  }
}

STREAMPOOL_TEST("a mark set keeps one mark a stream, the latest, and lets a stream in when every mark does") {
  StreamState s, t, u;
  const Mark s1{&s, s.take_ticket()}, s2{&s, s.take_ticket()}, t1{&t, t.take_ticket()};
  MarkSet marks;
  CHECK(marks.empty());
  CHECK(marks.all_complete());
  CHECK(marks.may_use(u));
  marks.add(s2);
  marks.add(s1);
  marks.add(t1);
  CHECK_EQ(marks.size(), std::size_t{2});
  CHECK_EQ(marks.ticket_of(s), s2.ticket);
  CHECK_EQ(marks.ticket_of(u), Ticket{0});
  CHECK(!marks.may_use(s));  // the mark on t is open
  publish_wait(s, t1);
  CHECK(marks.may_use(s));
  CHECK(!marks.may_use(t));
  s.raise_completed(s1.ticket);
  marks.drop_complete();
  CHECK_EQ(marks.size(), std::size_t{2});
  CHECK(!marks.may_use(t));
  s.raise_completed(s2.ticket);
  CHECK(marks.may_use(t));
  CHECK(!marks.may_use(u));
  marks.drop_complete();
  CHECK_EQ(marks.size(), std::size_t{1});
  MarkSet sum;
  sum.add({&s, s.take_ticket()});
  sum.add(marks);
  CHECK_EQ(sum.size(), std::size_t{2});
  CHECK_EQ(sum.ticket_of(t), t1.ticket);
}

// -- recording -------------------------------------------------------------------------------------------------------

STREAMPOOL_TEST("a fence completes what was freed before it, once the work before it has run") {
  OrderScene scene;
  Stream& s = scene.stream();
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
  Stream& s = scene.stream();
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
  Stream& s = scene.stream();
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
  Stream& s = scene.stream();
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
  Stream& s = scene.stream();
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
  Stream& s = scene.stream();
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
  std::vector<std::pair<Stream*, Mark>> stuck;
  for (int i = 0; i < 3; ++i) {
    Stream& s = scene.stream();
    stuck.emplace_back(&s, scene.free(s));
    CHECK(scene.record(s));
  }
  Stream& quick = scene.stream();
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
  Stream& s = scene.stream();
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
  Stream& s = scene.stream();
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
  Stream& s = scene.stream();
  Stream& t = scene.stream();
  int seen = 0;
  const auto all_free = [&](EventId) {
    ++seen;
    for (Stream* stream : {&s, &t}) {
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
  Stream& s = scene.stream();
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
  Stream& s = scene.stream();
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
  Stream& s = scene.stream();
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
  Stream& s = scene.stream();
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
  Stream& s = scene.stream();
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
    Stream& s = scene.stream();
    for (int k = 0; k < 20; ++k) {
      scene.free(s);
      CHECK(scene.record(s));
    }
  }
  CHECK_EQ(scene.events.live(), kStreams * 20);
  scene.events.run_all();
  for (Stream& s : scene.streams) scene.poll(s);
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
  Stream& s = scene.stream();
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

// -- wait edges ------------------------------------------------------------------------------------------------------

STREAMPOOL_TEST("a stream is made to wait only on the fence that the freeing call itself recorded") {
  OrderScene scene;
  Stream& s = scene.stream();
  Stream& t = scene.stream();
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
  Stream& s = scene.stream();
  Stream& t = scene.stream();
  const Mark mine = scene.free(s);
  const Mark others = scene.free(s);  // another thread's, before this call comes to its record
  CHECK(scene.record(s, mine.ticket));
  CHECK(!scene.fences.can_wait(t.state, mine));
  CHECK(!scene.fences.can_wait(t.state, others));
  scene.finish();
}

STREAMPOOL_TEST("a wait is published only after the call returned, and not when it failed") {
  OrderScene scene;
  Stream& s = scene.stream();
  Stream& t = scene.stream();
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
  Stream& s = scene.stream();
  Stream& t = scene.stream();
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
  Stream& u = scene.stream();
  CHECK(scene.fences.wait(u.state, u.handle, second));
  CHECK(scene.events.waits().empty());
  scene.finish();
}

STREAMPOOL_TEST("a wait holds its fence: it is neither recycled nor recorded again under the call") {
  OrderScene scene;
  Stream& s = scene.stream();
  Stream& t = scene.stream();
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
  Stream& gone = scene.stream();
  Stream& other = scene.stream();
  Stream& idle = scene.stream();
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
  Stream& s = scene.stream();
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
  Stream& s = scene.stream();
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
  Stream& s = scene.stream();
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
        Stream& s = scene.streams[at];
        Stream& other = scene.streams[(at + 1) % kStreams];
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
  for (Stream& s : scene.streams) {
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
  Stream& s = scene.stream();
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
