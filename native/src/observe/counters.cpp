#include "counters.hpp"

#include <algorithm>
#include <limits>

namespace streampool::observe {
namespace {

constexpr std::int64_t kLook = std::numeric_limits<std::int64_t>::min();  // a ceiling that the next allocation passes

}  // namespace

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
  left_.gross += c->gross.exchange(0);
  left_.guards += c->guards.exchange(0);
  left_.allocations += c->allocations.exchange(0);
  left_.frees += c->frees.exchange(0);
  left_.lookups += c->lookups.exchange(0);
  left_.allocated_bytes += c->allocated_bytes.exchange(0);
  for (std::size_t i = 0; i < kSizeBuckets; ++i) left_.sizes.counts[i] += c->sizes[i].exchange(0);
  left_.sizes.sum += c->sized_bytes.exchange(0);
  left_.peak = std::max(left_.peak, c->peak.exchange(0));
  left_.recent = std::max(left_.recent, c->recent.exchange(0));
  published_.fetch_add(c->net.exchange(0));
  c->used = false;
  // What it published counts for the others now: they look at their next allocation.
  for (const auto& other : all_) other->ceiling.store(kLook, std::memory_order_relaxed);
}

void CounterBank::raise(ThreadCounters& c) {
  std::int64_t net = c.net.load(std::memory_order_relaxed);
  std::int64_t published = 0;
  if (net >= kQuantum || net <= -kQuantum) {
    published = published_.fetch_add(net, std::memory_order_relaxed) + net;
    c.net.store(net = 0, std::memory_order_relaxed);
  } else {
    published = published_.load(std::memory_order_relaxed);
  }
  const std::int64_t seen = published + net;
  std::int64_t recent = c.recent.load(std::memory_order_relaxed);
  if (seen > recent) c.recent.store(recent = seen, std::memory_order_relaxed);
  if (seen > c.peak.load(std::memory_order_relaxed)) c.peak.store(seen, std::memory_order_relaxed);
  c.ceiling.store(std::min(kQuantum - 1, recent - published), std::memory_order_relaxed);
}

Totals CounterBank::totals() const {
  std::lock_guard lock(mutex_);
  Totals t = left_;
  t.in_use = published_.load(std::memory_order_relaxed);
  for (const auto& c : all_) {
    t.in_use += c->net.load(std::memory_order_relaxed);
    t.gross += c->gross.load(std::memory_order_relaxed);
    t.guards += c->guards.load(std::memory_order_relaxed);
    t.allocations += c->allocations.load(std::memory_order_relaxed);
    t.frees += c->frees.load(std::memory_order_relaxed);
    t.lookups += c->lookups.load(std::memory_order_relaxed);
    t.allocated_bytes += c->allocated_bytes.load(std::memory_order_relaxed);
    for (std::size_t i = 0; i < kSizeBuckets; ++i) t.sizes.counts[i] += c->sizes[i].load(std::memory_order_relaxed);
    t.sizes.sum += c->sized_bytes.load(std::memory_order_relaxed);
    t.peak = std::max(t.peak, c->peak.load(std::memory_order_relaxed));
    t.recent = std::max(t.recent, c->recent.load(std::memory_order_relaxed));
  }
  // A reader may see a block's free before its alloc, counted by another thread.
  t.in_use = std::max<std::int64_t>(t.in_use, 0);
  t.gross = std::max(t.gross, t.in_use);
  t.guards = std::max<std::int64_t>(t.guards, 0);
  t.recent = std::max(t.recent, t.in_use);
  t.peak = std::max(t.peak, t.recent);
  return t;
}

void CounterBank::reset_peak() {
  std::lock_guard lock(mutex_);
  // From here on the highest is what there is now.
  left_.peak = published_.load(std::memory_order_relaxed);
  for (const auto& c : all_) left_.peak += c->net.load(std::memory_order_relaxed);
  left_.recent = left_.peak;
  for (auto& c : all_) {
    c->peak.store(0, std::memory_order_relaxed);
    c->recent.store(0, std::memory_order_relaxed);
    c->ceiling.store(kLook, std::memory_order_relaxed);
  }
}

std::int64_t CounterBank::end_window() {
  std::lock_guard lock(mutex_);
  std::int64_t now = published_.load(std::memory_order_relaxed);
  std::int64_t recent = left_.recent;
  for (const auto& c : all_) {
    now += c->net.load(std::memory_order_relaxed);
    // As in reset_peak(): whoever is inside raise() may keep its old ceiling until the next quantum.
    recent = std::max(recent, c->recent.exchange(0, std::memory_order_relaxed));
    c->ceiling.store(kLook, std::memory_order_relaxed);
  }
  left_.recent = now;
  return std::max(recent, now);
}

}  // namespace streampool::observe
