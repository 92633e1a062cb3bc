// What the tests of marks and fences share: `FakeEvents` knows which work has run and complains about every event that
// is used wrongly, `OrderScene` is the fences over it. May import order/ only.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "order/fences.hpp"
#include "test.hpp"

namespace streampool::testing {

using order::Events;
using order::Fences;
using order::Mark;
using order::StreamState;
using order::Ticket;

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
struct OrderStream {
  StreamState state;
  std::uintptr_t handle = 0;
};

// A fake, the fences over it, and streams. Ends with the question whether all events were used well and are gone.
struct OrderScene {
  FakeEvents events;
  Fences fences{events};
  std::deque<OrderStream> streams;

  OrderStream& stream() {
    OrderStream& s = streams.emplace_back();
    s.handle = 100 + streams.size();
    return s;
  }
  // Work, and a free behind it.
  Mark free(OrderStream& s) {
    events.queue(s.handle);
    s.state.lock.lock();
    const Ticket ticket = s.state.take_ticket();
    s.state.lock.unlock();
    return {&s.state, ticket};
  }
  bool record(OrderStream& s, Ticket exact = 0) { return fences.record(s.state, s.handle, exact); }
  void poll(OrderStream& s) { fences.poll(s.state); }
  std::vector<StreamState*> states() {
    std::vector<StreamState*> all;
    for (OrderStream& s : streams) all.push_back(&s.state);
    return all;
  }
  void finish() {
    fences.clear(states());
    CHECK_EQ(events.misuse(), std::string());
    CHECK_EQ(events.created() - events.destroyed(), std::uint64_t{0});
    CHECK_EQ(events.live(), std::size_t{0});
  }
};

}  // namespace streampool::testing
