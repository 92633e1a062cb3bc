// Counters, added up when somebody asks; and the audit that recomputes them from the ground.
#include <algorithm>

#include "core.hpp"

namespace streampool::pool {

using placement::Extent;

Stats Core::stats() {
  drain();
  Stats s;
  const observe::Totals t = bank_->totals();
  s.in_use = static_cast<Bytes>(t.in_use);
  s.guards = static_cast<Bytes>(t.guards);
  const Bytes gross = static_cast<Bytes>(t.gross);
  s.rounding = gross - std::min(gross, s.in_use + s.guards);
  s.in_use_peak = static_cast<Bytes>(t.peak);
  s.allocations = t.allocations;
  s.frees = t.frees;
  s.live_blocks = t.allocations - std::min(t.allocations, t.frees);
  s.allocated_bytes = t.allocated_bytes;
  s.limit = limit();
  s.reserved = reserved_.load(std::memory_order_acquire);
  // A growth under way is charged before it is there, and is a peak only then.
  s.reserved_peak = std::max(s.reserved, reserved_peak_.load(std::memory_order_acquire));
  if (debugger_ != nullptr) s.quarantined = debugger_->totals().quarantined_bytes;
  s.pending = pending_bytes();
  const Bytes taken = std::min(s.reserved, gross + s.quarantined);
  s.pending = std::min(s.pending, s.reserved - taken);
  s.cached = s.reserved - taken - s.pending;
  streams_.for_each([&](Heap& heap) {
    {
      std::lock_guard lock(heap.stream.lock);
      s.slabs += heap.slab_count;
      for (const QuickLists::List& list : heap.quick.lists)
        if (list.head != nullptr) s.largest_free = std::max(s.largest_free, list.bytes);
    }
    std::lock_guard lock(extent_lock_);
    s.largest_free = std::max(s.largest_free, heap.extents.largest());
  });
  {
    std::lock_guard lock(extent_lock_);
    s.largest_free = std::max({s.largest_free, common_.largest(), mixed_.largest()});
    s.segments = segments_.size();
    s.extents = extents_.extent_count();
    for (const auto& segment : segments_) s.handles += segment->mapped ? segment->handles.size() : 1;
    s.handles += guarded_.size() - revoked_.size();
  }
  s.source = source_;
  s.handles_moved = handles_moved_.load(std::memory_order_relaxed);
  s.streams = streams_.known();
  std::uint64_t others = 0;
  for (std::size_t i = 1; i < kPathCount; ++i) others += s.paths[i] = paths_[i].load(std::memory_order_relaxed);
  s.paths[0] = s.allocations - std::min(s.allocations, others);
  const order::FenceCounts& f = fences_.counts();
  s.fences = f.recorded.load();
  s.fences_failed = f.record_failed.load();
  s.polls = f.polled.load();
  s.wait_edges = f.waits.load();
  s.context_events = f.context_events.load();
  s.stream_lookups = streams_.lookups() + t.lookups;
  s.host_waits = host_waits_.load();
  s.out_of_memory = oom_.load();
  s.trampled = trampled_.load();
  s.legacy_fences = legacy_fences_.load();
  return s;
}

void Core::reset_peaks() {
  bank_->reset_peak();
  reserved_peak_.store(0);
  note_peak();
}

std::string Core::audit() {
  drain();
  const Stats s = stats();
  Bytes orphaned = 0, mapped = 0, free = 0, taken = 0, in_use = 0, gross = 0;
  std::uint64_t live = 0;
  const auto count = [&](BlockRecord& record) {
    in_use += record.size;
    gross += gross_of(record);
    ++live;
  };
  for_each_live(count, true);
  {
    std::lock_guard lock(extent_lock_);
    const std::string broken = extents_.validate();
    if (!broken.empty()) return "not so: " + broken;
    for (const Segment::Handle& orphan : orphans_) orphaned += orphan.bytes;
    for (const auto& [begin, block] : guarded_) {
      mapped += block->pages->mapped;
      taken += block->pages->mapped;
    }
    for (const auto& segment : segments_) {
      if (!segment->mapped) mapped += segment->range->size;
      for (const auto& [begin, handle] : segment->handles) mapped += handle.bytes;
      for (const Extent* e = segment->range->first; e != nullptr; e = e->next) {
        // Busy: on its way back to the driver, in a call that has not returned yet.
        if (e->state == placement::ExtentState::free || e->state == placement::ExtentState::busy) free += e->size;
        if (e->state == placement::ExtentState::taken) taken += e->size;
      }
    }
  }
  const auto differ = [](const char* what, Bytes a, Bytes b) {
    return std::string("not so: ") + what + " (" + std::to_string(a) + " and " + std::to_string(b) + ")";
  };
  mapped += leaving_.load();
  free += leaving_.load();
  if (mapped + orphaned != s.reserved) return differ("reserved is what is mapped", s.reserved, mapped);
  if (free + taken != mapped) return differ("mapped memory is free or taken", mapped, free + taken);
  if (in_use != s.in_use) return differ("in_use is the sum of live blocks", s.in_use, in_use);
  if (live != s.live_blocks) return differ("live_blocks counts them", s.live_blocks, live);
  if (s.in_use + s.rounding + s.guards + s.quarantined + s.pending + s.cached != s.reserved)
    return differ("the parts add up to reserved",
                  s.in_use + s.rounding + s.guards + s.quarantined + s.pending + s.cached, s.reserved);
  if (const Bytes counted = static_cast<Bytes>(bank_->totals().gross); gross != counted)
    return differ("whole slots and extents of live blocks are counted", gross, counted);
  if (gross > taken) return differ("live blocks lie in taken memory", gross, taken);
  if (s.in_use_peak < s.in_use || s.reserved_peak < s.reserved) return "not so: peaks are never below current";
  return {};
}

std::vector<FreePiece> Core::free_pieces(std::size_t most) {
  drain();
  std::vector<FreePiece> all;
  const auto larger = [](const FreePiece& a, const FreePiece& b) { return a.bytes > b.bytes; };
  const auto add = [&](const placement::FreeIndex& index, const char* reuse) {
    index.for_each([&](const placement::Extent* extent) {
      all.push_back({extent->size, reuse});
      // A heap whose root is the smallest of the largest so far.
      std::push_heap(all.begin(), all.end(), larger);
      if (all.size() <= most) return;
      std::pop_heap(all.begin(), all.end(), larger);
      all.pop_back();
    });
  };
  {
    std::lock_guard lock(extent_lock_);
    add(common_, "any_stream");
    add(mixed_, "waiting");
  }
  const bool strict = host_visible(kind_) && !options_.stream_ordered;  // then nobody may take what is not complete
  streams_.for_each([&](Heap& heap) {
    std::lock_guard lock(extent_lock_);
    add(heap.extents, heap.stream.idle() ? "any_stream" : strict ? "waiting" : "own_stream");
  });
  std::sort_heap(all.begin(), all.end(), larger);
  return all;
}

}  // namespace streampool::pool
