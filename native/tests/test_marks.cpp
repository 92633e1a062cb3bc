// Tickets and marks, rule by rule (R1 of docs/design.md), without any driver.
#include <functional>
#include <thread>
#include <vector>

#include "order_scene.hpp"

namespace {

using namespace streampool;
using namespace streampool::order;
using testing::EventId;
using testing::OrderScene;
using testing::OrderStream;

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
  OrderStream& s = scene.stream();
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

}  // namespace
