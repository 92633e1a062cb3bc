#include "fences.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace streampool::order {
namespace {

// More pooled events than this go back to the driver.
constexpr std::size_t kMaxPooledEvents = 256;
// More context events than this in one context are not useful: each covers all that came before it.
constexpr std::size_t kMaxContextFences = 4;

}  // namespace

#ifdef STREAMPOOL_TEST_SWITCHES
namespace {
std::atomic<bool> g_broken{false};
}  // namespace
bool broken() { return g_broken.load(std::memory_order_relaxed); }
void break_r1(bool on) { g_broken.store(on); }
#endif

Fences::~Fences() {
  for (std::uintptr_t event : pooled_) own_.destroy(event);
}

bool Fences::take_event(Events& events, std::uintptr_t* event) {
  if (&events == &own_) {
    const std::lock_guard lock(pool_lock_);
    if (!pooled_.empty()) {
      *event = pooled_.back();
      pooled_.pop_back();
      return true;
    }
  }
  return events.create(event);
}

void Fences::recycle(Events& events, std::uintptr_t event) {
  if (&events == &own_) {
    const std::lock_guard lock(pool_lock_);
    if (pooled_.size() < kMaxPooledEvents) {
      pooled_.push_back(event);
      return;
    }
  }
  events.destroy(event);
}

bool Fences::record(StreamState& s, std::uintptr_t handle, Ticket exact) {
  if (s.captured.load(std::memory_order_acquire)) return false;
  // Cleared first: a mark that is put on the stream from here on is owed again.
  s.owed.store(false, std::memory_order_seq_cst);
  // Read before recording: work that is queued while we record may or may not be covered, so it is not claimed.
  const Ticket covers = s.issued.load(std::memory_order_acquire);
  if (covers <= s.fenced.load(std::memory_order_acquire)) return true;
  const std::uint32_t frees = s.unfenced_frees.load(std::memory_order_relaxed);
  const std::uint64_t bytes = s.unfenced_bytes.load(std::memory_order_relaxed);

  Events& events = events_of(s);
  std::uintptr_t event = 0;
  if (!take_event(events, &event) || !events.record(event, handle)) {
    // An event that was never recorded, or only in a capture, queries as done: it must not come back.
    if (event != 0) events.destroy(event);
    counts_.record_failed.fetch_add(1, std::memory_order_relaxed);
    s.owed.store(true, std::memory_order_relaxed);
    return false;
  }
  counts_.recorded.fetch_add(1, std::memory_order_relaxed);
  s.unfenced_frees.fetch_sub(std::min(frees, s.unfenced_frees.load(std::memory_order_relaxed)),
                             std::memory_order_relaxed);
  s.unfenced_bytes.fetch_sub(std::min(bytes, s.unfenced_bytes.load(std::memory_order_relaxed)),
                             std::memory_order_relaxed);

  std::uintptr_t dropped = 0;
  s.fence_lock.lock();
  auto at = std::upper_bound(s.fences.begin(), s.fences.end(), covers,
                             [](Ticket value, const Fence& fence) { return value < fence.covers; });
  s.fences.insert(at, Fence{event, covers, exact != 0 && exact == covers, false});
  Ticket fenced = s.fenced.load(std::memory_order_relaxed);
  if (fenced < covers) s.fenced.store(covers, std::memory_order_release);
  if (s.fences.size() > kMaxFences) {
    auto second_newest = s.fences.end() - 2;
    if (!second_newest->polled) {
      dropped = second_newest->event;
      s.fences.erase(second_newest);
    }
  }
  s.fence_lock.unlock();
  if (dropped != 0) {
    counts_.thinned.fetch_add(1, std::memory_order_relaxed);
    recycle(events, dropped);
  }
  return true;
}

void Fences::poll(StreamState& s) {
  Events& events = events_of(s);
  for (;;) {
    s.fence_lock.lock();
    if (s.fences.empty() || s.fences.front().polled) {
      s.fence_lock.unlock();
      return;
    }
    s.fences.front().polled = true;
    const std::uintptr_t event = s.fences.front().event;
    s.fence_lock.unlock();

    counts_.polled.fetch_add(1, std::memory_order_relaxed);
    const bool done = events.done(event) || broken();

    s.fence_lock.lock();
    // The polled fence is never removed by others, but an older one may have been put in front of it meanwhile.
    auto it = std::find_if(s.fences.begin(), s.fences.end(), [event](const Fence& f) { return f.event == event; });
    if (!done) {
      it->polled = false;
      s.fence_lock.unlock();
      return;
    }
    s.raise_completed(it->covers);
    s.fences.erase(it);
    s.fence_lock.unlock();
    recycle(events, event);
  }
}

bool Fences::ask_idle(StreamState& s, std::uintptr_t handle) {
  // Read before asking: what is issued meanwhile may have work behind it that is queued afterwards.
  const Ticket covers = s.issued.load(std::memory_order_acquire);
  counts_.polled.fetch_add(1, std::memory_order_relaxed);
  if (!events_of(s).idle(handle)) return false;
  s.raise_completed(covers);
  s.fence_lock.lock();
  if (s.fenced.load(std::memory_order_relaxed) < covers) s.fenced.store(covers, std::memory_order_release);
  s.fence_lock.unlock();
  retire(s);
  return true;
}

void Fences::retire(StreamState& s) {
  std::vector<std::uintptr_t> done;
  s.fence_lock.lock();
  const Ticket completed = s.completed.load(std::memory_order_acquire);
  std::erase_if(s.fences, [&](const Fence& f) {
    if (f.polled || f.covers > completed) return false;
    done.push_back(f.event);
    return true;
  });
  s.fence_lock.unlock();
  for (std::uintptr_t event : done) recycle(events_of(s), event);
}

bool Fences::can_wait(StreamState& t, const Mark& mark) {
  if (may_use(t, mark)) return true;
  if (t.captured.load(std::memory_order_acquire)) return false;
  StreamState& s = *mark.stream;
  s.fence_lock.lock();
  bool found = false;
  for (const Fence& f : s.fences) found = found || (f.exact && f.covers == mark.ticket && !f.polled);
  s.fence_lock.unlock();
  return found;
}

bool Fences::wait(StreamState& t, std::uintptr_t t_handle, const Mark& mark) {
  if (may_use(t, mark)) return true;
  StreamState& s = *mark.stream;
  std::uintptr_t event = 0;
  s.fence_lock.lock();
  for (Fence& f : s.fences)
    if (f.exact && f.covers == mark.ticket && !f.polled) {
      f.polled = true;  // held: nobody records it again under the wait call
      event = f.event;
      break;
    }
  s.fence_lock.unlock();
  if (event == 0) return complete(mark);

  const bool ok = events_of(t).wait(t_handle, event);

  s.fence_lock.lock();
  for (Fence& f : s.fences)
    if (f.event == event) f.polled = false;
  s.fence_lock.unlock();
  if (ok) {
    counts_.waits.fetch_add(1, std::memory_order_relaxed);
    publish_wait(t, mark);
  }
  return ok;
}

bool Fences::record_context(const std::vector<StreamState*>& streams) {
  std::vector<std::pair<Events*, std::vector<Mark>>> contexts;
  for (StreamState* s : streams) {
    // Read first: an entry that becomes a capture's meanwhile takes its tickets behind this one.
    const Ticket issued = s->issued.load(std::memory_order_acquire);
    if (s->captured.load(std::memory_order_acquire)) continue;
    if (issued <= s->completed.load(std::memory_order_acquire)) continue;
    Events* events = &events_of(*s);
    auto at = std::find_if(contexts.begin(), contexts.end(), [&](const auto& c) { return c.first == events; });
    if (at == contexts.end()) at = contexts.insert(at, {events, {}});
    at->second.push_back({s, issued});
  }
  bool all = true;
  for (auto& [events, covers] : contexts) all = record_context(*events, std::move(covers)) && all;
  return all;
}

bool Fences::record_context(Events& events, std::vector<Mark> covers) {
  ContextFence fence{&events, 0, std::move(covers)};
  if (!take_event(events, &fence.event) || !events.record_context(fence.event)) {
    if (fence.event != 0) events.destroy(fence.event);
    counts_.record_failed.fetch_add(1, std::memory_order_relaxed);
    return false;
  }
  counts_.context_events.fetch_add(1, std::memory_order_relaxed);
  std::uintptr_t dropped = 0;
  context_lock_.lock();
  const auto of_this = [&events](const ContextFence& f) { return f.events == &events; };
  if (static_cast<std::size_t>(std::count_if(context_.begin(), context_.end(), of_this)) >= kMaxContextFences) {
    const auto newest = std::find_if(context_.rbegin(), context_.rend(), of_this);
    if (!newest->polled) {
      dropped = newest->event;
      context_.erase(std::next(newest).base());
    }
  }
  context_.push_back(std::move(fence));
  context_lock_.unlock();
  if (dropped != 0) recycle(events, dropped);
  return true;
}

void Fences::poll_context() {
  // Each context's oldest first, and none behind a stuck one of another context.
  std::vector<Events*> stuck;
  for (;;) {
    context_lock_.lock();
    const auto next = std::find_if(context_.begin(), context_.end(), [&stuck](const ContextFence& f) {
      return std::find(stuck.begin(), stuck.end(), f.events) == stuck.end();
    });
    if (next == context_.end()) {
      context_lock_.unlock();
      return;
    }
    Events& events = *next->events;
    if (next->polled) {
      context_lock_.unlock();
      stuck.push_back(&events);
      continue;
    }
    next->polled = true;
    const std::uintptr_t event = next->event;
    context_lock_.unlock();

    counts_.polled.fetch_add(1, std::memory_order_relaxed);
    const bool done = events.done(event);

    context_lock_.lock();
    // A polled fence is never removed by others.
    const auto it = std::find_if(context_.begin(), context_.end(),
                                 [&](const ContextFence& f) { return f.events == &events && f.event == event; });
    if (!done) {
      it->polled = false;
      context_lock_.unlock();
      stuck.push_back(&events);
      continue;
    }
    const std::vector<Mark> covers = std::move(it->covers);
    context_.erase(it);
    context_lock_.unlock();
    for (const Mark& mark : covers) mark.stream->raise_completed(mark.ticket);
    recycle(events, event);
  }
}

bool Fences::context_pending() {
  context_lock_.lock();
  const bool pending = !context_.empty();
  context_lock_.unlock();
  return pending;
}

void Fences::clear(const std::vector<StreamState*>& streams) {
  std::vector<std::pair<Events*, std::uintptr_t>> all;
  // One that is being polled stays with its poller.
  for (StreamState* s : streams) {
    const std::lock_guard lock(s->fence_lock);
    std::erase_if(s->fences, [&](const Fence& f) {
      if (!f.polled) all.emplace_back(&events_of(*s), f.event);
      return !f.polled;
    });
  }
  {
    const std::lock_guard lock(context_lock_);
    std::erase_if(context_, [&all](const ContextFence& f) {
      if (!f.polled) all.emplace_back(f.events, f.event);
      return !f.polled;
    });
  }
  {
    const std::lock_guard lock(pool_lock_);
    for (std::uintptr_t event : pooled_) all.emplace_back(&own_, event);
    pooled_.clear();
  }
  for (const auto& [events, event] : all) events->destroy(event);
}

}  // namespace streampool::order
