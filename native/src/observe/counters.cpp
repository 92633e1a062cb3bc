#include "counters.hpp"

#include <algorithm>

namespace streampool::observe {

ThreadCounters* CounterBank::join() {
  std::lock_guard lock(mutex_);
  for (auto& c : all_)
    if (!c->used) {
      c->used = true;
      return c.get();
    }
  all_.push_back(std::make_unique<ThreadCounters>());
  all_.back()->used = true;
  return all_.back().get();
}

void CounterBank::leave(ThreadCounters* c) {
  std::lock_guard lock(mutex_);
  left_.in_use += c->in_use.exchange(0);
  left_.gross += c->gross.exchange(0);
  left_.guards += c->guards.exchange(0);
  left_.allocations += c->allocations.exchange(0);
  left_.frees += c->frees.exchange(0);
  left_.allocated_bytes += c->allocated_bytes.exchange(0);
  left_.peak = std::max(left_.peak, c->peak.exchange(0));
  published_.fetch_add(c->unpublished.exchange(0));
  c->used = false;
}

Totals CounterBank::totals() const {
  std::lock_guard lock(mutex_);
  Totals t = left_;
  for (const auto& c : all_) {
    t.in_use += c->in_use.load(std::memory_order_relaxed);
    t.gross += c->gross.load(std::memory_order_relaxed);
    t.guards += c->guards.load(std::memory_order_relaxed);
    t.allocations += c->allocations.load(std::memory_order_relaxed);
    t.frees += c->frees.load(std::memory_order_relaxed);
    t.allocated_bytes += c->allocated_bytes.load(std::memory_order_relaxed);
    t.peak = std::max(t.peak, c->peak.load(std::memory_order_relaxed));
  }
  // A reader may see a block's free before its alloc, counted by another thread.
  t.in_use = std::max<std::int64_t>(t.in_use, 0);
  t.gross = std::max(t.gross, t.in_use);
  t.guards = std::max<std::int64_t>(t.guards, 0);
  t.peak = std::max(t.peak, t.in_use);
  return t;
}

void CounterBank::reset_peak() {
  std::lock_guard lock(mutex_);
  left_.peak = 0;
  for (auto& c : all_) c->peak.store(0, std::memory_order_relaxed);
}

}  // namespace streampool::observe
