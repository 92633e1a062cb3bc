#include "fences.hpp"

namespace streampool::order {
namespace {

// More pooled events than this go back to the driver.
constexpr std::size_t kMaxPooledEvents = 256;
// More context events than this are not useful: each covers all that came before it.
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
  for (std::uintptr_t event : pooled_) events_.destroy(event);
}

bool Fences::take_event(std::uintptr_t* event) {
  pool_lock_.lock();
  if (!pooled_.empty()) {
    *event = pooled_.back();
    pooled_.pop_back();
    pool_lock_.unlock();
    return true;
  }
  pool_lock_.unlock();
  return events_.create(event);
}

void Fences::recycle(std::uintptr_t event) {
  pool_lock_.lock();
  const bool keep = pooled_.size() < kMaxPooledEvents;
  if (keep) pooled_.push_back(event);
  pool_lock_.unlock();
  if (!keep) events_.destroy(event);
}

bool Fences::record(StreamState& s, std::uintptr_t handle, Ticket exact) {
  // Cleared first: a mark that is put on the stream from here on is owed again.
  s.owed.store(false, std::memory_order_seq_cst);
  // Read before recording: work that is queued while we record may or may not be covered, so it is not claimed.
  const Ticket covers = s.issued.load(std::memory_order_acquire);
  if (covers <= s.fenced.load(std::memory_order_acquire)) return true;
  const std::uint32_t frees = s.unfenced_frees.load(std::memory_order_relaxed);
  const std::uint64_t bytes = s.unfenced_bytes.load(std::memory_order_relaxed);

  std::uintptr_t event = 0;
  if (!take_event(&event) || !events_.record(event, handle)) {
    // An event that was never recorded, or only in a capture, queries as done: it must not come back.
    if (event != 0) events_.destroy(event);
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
    recycle(dropped);
  }
  return true;
}

void Fences::poll(StreamState& s) {
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
    const bool done = events_.done(event) || broken();

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
    recycle(event);
  }
}

void Fences::retire(StreamState& s) {
  std::vector<std::uintptr_t> events;
  s.fence_lock.lock();
  const Ticket completed = s.completed.load(std::memory_order_acquire);
  std::erase_if(s.fences, [&](const Fence& f) {
    if (f.polled || f.covers > completed) return false;
    events.push_back(f.event);
    return true;
  });
  s.fence_lock.unlock();
  for (std::uintptr_t event : events) recycle(event);
}

bool Fences::can_wait(StreamState& t, const Mark& mark) {
  if (may_use(t, mark)) return true;
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

  const bool ok = events_.wait(t_handle, event);

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
  ContextFence fence;
  fence.covers.reserve(streams.size());
  for (StreamState* s : streams) {
    const Ticket issued = s->issued.load(std::memory_order_acquire);
    if (issued > s->completed.load(std::memory_order_acquire)) fence.covers.push_back({s, issued});
  }
  if (fence.covers.empty()) return true;
  if (!take_event(&fence.event) || !events_.record_context(fence.event)) {
    if (fence.event != 0) events_.destroy(fence.event);
    counts_.record_failed.fetch_add(1, std::memory_order_relaxed);
    return false;
  }
  counts_.context_events.fetch_add(1, std::memory_order_relaxed);
  std::uintptr_t dropped = 0;
  context_lock_.lock();
  if (context_.size() >= kMaxContextFences && !context_.back().polled) {
    dropped = context_.back().event;
    context_.pop_back();
  }
  context_.push_back(std::move(fence));
  context_lock_.unlock();
  if (dropped != 0) recycle(dropped);
  return true;
}

void Fences::poll_context() {
  for (;;) {
    context_lock_.lock();
    if (context_.empty() || context_.front().polled) {
      context_lock_.unlock();
      return;
    }
    context_.front().polled = true;
    const std::uintptr_t event = context_.front().event;
    context_lock_.unlock();

    counts_.polled.fetch_add(1, std::memory_order_relaxed);
    const bool done = events_.done(event);

    context_lock_.lock();
    // A polled fence is never removed by others.
    const auto it =
        std::find_if(context_.begin(), context_.end(), [event](const ContextFence& f) { return f.event == event; });
    if (!done) {
      it->polled = false;
      context_lock_.unlock();
      return;
    }
    const std::vector<Mark> covers = std::move(it->covers);
    context_.erase(it);
    context_lock_.unlock();
    for (const Mark& mark : covers) mark.stream->raise_completed(mark.ticket);
    recycle(event);
  }
}

bool Fences::context_pending() {
  context_lock_.lock();
  const bool pending = !context_.empty();
  context_lock_.unlock();
  return pending;
}

void Fences::clear(const std::vector<StreamState*>& streams) {
  std::vector<std::uintptr_t> all;
  for (StreamState* s : streams) {
    s->fence_lock.lock();
    // One that is being polled stays with its poller.
    std::erase_if(s->fences, [&all](const Fence& f) {
      if (!f.polled) all.push_back(f.event);
      return !f.polled;
    });
    s->fence_lock.unlock();
  }
  context_lock_.lock();
  std::erase_if(context_, [&all](const ContextFence& f) {
    if (!f.polled) all.push_back(f.event);
    return !f.polled;
  });
  context_lock_.unlock();
  pool_lock_.lock();
  all.insert(all.end(), pooled_.begin(), pooled_.end());
  pooled_.clear();
  pool_lock_.unlock();
  for (std::uintptr_t event : all) events_.destroy(event);
}

}  // namespace streampool::order
