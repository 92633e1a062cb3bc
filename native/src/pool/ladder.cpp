// The slow path, rung by rung (R11). Every rung that may free memory ends in a new search; no lock is held in any wait
// or callback; the pool's own limit and the driver's refusal take the same way.
#include <algorithm>
#include <utility>

#include "core.hpp"

namespace streampool::pool {

using order::MarkSet;
using order::StreamState;
using order::Ticket;
using placement::Extent;
using placement::ExtentState;

// Asks whether one stream is idle, or fences and polls it, as far as R6 allows without its owner. True: a fence was
// recorded just now on what may have nothing to do.
bool Core::poll_stream(Heap& heap, bool fence_legacy) {
  StreamState& s = heap.stream;
  if (s.captured.load(std::memory_order_acquire)) {
    // No launch of the graph can come any more.
    if (heap.graph->ended.load(std::memory_order_acquire)) s.raise_completed(s.issued.load(std::memory_order_acquire));
    return false;
  }
  bool fenced = false;
  if (s.issued.load(std::memory_order_acquire) > s.fenced.load(std::memory_order_acquire)) {
    // The pool's own streams take no part in any capture. Asked before the gate, so that who declares one gets there.
    const auto kept_off = [&] { return !heap.own && streams_.capture_declared(); };
    std::shared_lock gate(streams_.capture_gate(), std::defer_lock);
    if (s.lasting && !kept_off()) gate.lock();
    // Inside the gate: whether it may be touched, and by which handle, does not change under it.
    const bool touchable = gate.owns_lock() && s.lasting && !kept_off();
    if (s.lasting && !touchable) s.owed.store(true, std::memory_order_release);  // its owner's next call fences it
    // A record on the legacy stream would kill the capture of any blocking stream.
    const bool allowed =
        touchable && (!s.legacy || (fence_legacy && options_.legacy_fences && !streams_.capture_known()));
    driver::CaptureState capture;
    if (allowed && driver_->stream_is_capturing(s.handle, &capture).ok() && !capture.capturing) {
      if (s.legacy) {
        // Asking whether it is idle would wait for nobody, but a fence is what its counter and option are about.
        legacy_fences_.fetch_add(1, std::memory_order_relaxed);
        fenced = fences_.record(s, s.handle);
      } else {
        // One call where a stream has nothing to do, as most have when memory is looked for; a fence takes three.
        if (fences_.ask_idle(s, s.handle)) return false;
        fences_.record(s, s.handle);
      }
    }
  }
  fences_.poll(s);
  return fenced;
}

// Around declared captures: what was dropped of graphs, and waits for a context event, gets it now. A program that
// captures again and again may run short inside captures only, where none is made.
void Core::recover_dropped() {
  if (!any_dropped_.exchange(false, std::memory_order_acq_rel)) return;
  if (!recover()) any_dropped_.store(true, std::memory_order_release);
}

// A context event for marks that no stream will ever fence: their stream is gone, or nobody names it again. True: made.
bool Core::recover() {
  if (!options_.recover_stranded || fences_.context_pending() || streams_.capture_known()) return false;
  std::shared_lock gate(streams_.capture_gate());
  return !streams_.capture_known() && fences_.record_context(streams_.states());
}

void Core::poll_all(bool fence_legacy) {
  bool fresh = false;
  streams_.for_each([&](Heap& heap) {
    if (heap.stream.idle()) return;
    fresh = poll_stream(heap, fence_legacy) || fresh;
  });
  fences_.poll_context();
  // A fence recorded just now on a stream with nothing to do is done within microseconds. Looking again for that long
  // is cheap beside growing, and it is asked once a fence, not once a miss.
  constexpr double kGrace = 10e-6;
  constexpr int kMaxLooks = 64;
  const double until = fresh ? driver_->now() + kGrace : 0;
  for (int look = 0; fresh && look < kMaxLooks; ++look) {
    fresh = false;
    streams_.for_each([&](Heap& heap) {
      if (heap.stream.idle()) return;
      fences_.poll(heap.stream);
      fresh = fresh || !heap.stream.idle();
    });
    if (driver_->now() > until) break;
  }
  promote();
}

// Extents whose marks are complete belong to nobody, and merge with their like.
bool Core::promote() {
  bool moved = false;
  streams_.for_each([&](Heap& heap) {
    const Ticket completed = heap.stream.completed.load(std::memory_order_acquire);
    std::lock_guard lock(extent_lock_);
    while (Extent* e = heap.extents.oldest()) {
      if (e->stamp > completed) break;
      extents_.hold(e);
      extents_.put_free(e, common_, 0);
      moved = true;
    }
  });
  std::lock_guard lock(extent_lock_);
  Extent* e = mixed_.oldest();
  while (e != nullptr) {
    Extent* next = e->newer;
    MarkSet& marks = *static_cast<MarkSet*>(e->note);
    marks.drop_complete();
    if (marks.size() <= 1) {
      MarkSet rest = std::move(marks);
      delete static_cast<MarkSet*>(e->note);
      e->note = nullptr;
      extents_.hold(e);
      put_extent(e, std::move(rest));
      moved = true;
    }
    e = next;
  }
  return moved;
}

// Slabs with no live slot and the quick lists give their memory back to the extents; it keeps its mark. True: there was
// some. The caller holds the heap's entry.
bool Core::retire_idle(Heap& heap) {
  std::vector<Slab*> idle;
  BlockRecord* quick = nullptr;
  {
    std::lock_guard lock(heap.stream.lock);
    for (unsigned cls = 0; cls < kClassLists; ++cls) {
      if (!heap.classes[cls].waiting.empty()) collect_waiting(heap, cls, true);
      for (Slab* slab = heap.classes[cls].head; slab != nullptr;) {
        Slab* next = slab->next;
        if (slab->stack.all_free() && slab->waiting == 0) {
          heap.unlist(slab);
          heap.count_slab(-1, cls == kZeroClass ? 0 : slab->bytes);
          idle.push_back(slab);
        }
        slab = next;
      }
    }
    quick = heap.quick.take_all();
  }
  for (Slab* slab : idle) retire_slab(slab);
  return file_quick(heap, quick) || !idle.empty();
}

void Core::retire_idle() {
  streams_.for_each([this](Heap& heap) { retire_idle(heap); });
}

// Forgets streams that left nothing behind (they may be gone for good); where many left marks that nobody will ever
// fence, one context event covers them all.
void Core::sweep_streams() {
  const auto empty = [this](Heap& heap) {
    heap.stream.fence_lock.lock();
    const bool fenced = !heap.stream.fences.empty();
    heap.stream.fence_lock.unlock();
    if (fenced || heap.slab_count != 0 || heap.quick.bytes != 0) return false;
    std::lock_guard lock(extent_lock_);
    return heap.extents.empty();
  };
  const auto sweep = [&] {
    poll_all(false);
    retire_idle();
    promote();
    streams_.for_each([&](Heap& heap) {
      if (heap.stream.idle()) fences_.retire(heap.stream);
    });
    streams_.sweep(empty);
  };
  sweep();
  if (streams_.known() >= sweep_at_.load() && recover()) {
    // Most streams that are gone have nothing left to do.
    constexpr int kLooks = 8;
    for (int look = 0; look < kLooks && fences_.context_pending(); ++look) fences_.poll_context();
    sweep();
  }
  constexpr std::size_t kFirstSweep = 64;
  const std::size_t known = streams_.known();
  sweep_at_.store(std::max(kFirstSweep, known + known / 2 + 16));
}

// Freed bytes that work may still touch.
Bytes Core::pending_bytes() {
  Bytes bytes = 0;
  streams_.for_each([&](Heap& heap) {
    const Ticket completed = heap.stream.completed.load(std::memory_order_acquire);
    {
      std::lock_guard lock(heap.stream.lock);
      for (unsigned cls = 0; cls < placement::kClassCount; ++cls) {
        ClassList& list = heap.classes[cls];
        for (const WaitingSlot& w : list.waiting)
          if (!w.marks.all_complete()) bytes += w.slab->slot_bytes;
        for (Slab* slab = list.head; slab != nullptr; slab = slab->next)
          for (unsigned i = 0; i < slab->stack.free_count; ++i)
            if (slab->records[slab->stack.free_slots[i]].ticket > completed) bytes += slab->slot_bytes;
      }
      for (const QuickLists::List& list : heap.quick.lists)
        for (const BlockRecord* record = list.head; QuickLists::good(record); record = record->link)
          if (record->ticket > completed) bytes += list.bytes;
    }
    std::lock_guard lock(extent_lock_);
    for (Extent* e = heap.extents.oldest(); e != nullptr; e = e->newer)
      if (e->stamp > completed) bytes += e->size;
  });
  std::lock_guard lock(extent_lock_);
  mixed_.for_each([&](const Extent* e) {
    if (!static_cast<const MarkSet*>(e->note)->all_complete()) bytes += e->size;
  });
  return bytes;
}

bool Core::find_again(Named& t, const Need& need, Path path, Found* found) {
  if (!find_own(t, need, found) &&
      !(options_.opportunistic && need.slot() && take_foreign_slot(*t.heap(), need, found)))
    return false;
  // Whatever list it came from, this rung is why it was there.
  found->path = path;
  return true;
}

// The stream is made to wait for another one's free: only on fences recorded inside the freeing call (section 3), so
// that it waits for what was queued before that free and for nothing later.
bool Core::take_waited(Named& t, const Need& need, Found* found) {
  if (need.slot() || need.strict) return false;
  StreamState& me = t.stream();
  std::vector<std::pair<Bytes, std::vector<order::Mark>>> candidates;
  {
    std::lock_guard lock(extent_lock_);
    const auto look = [&](const Extent* e, const MarkSet& marks) {
      if (e->size < need.bytes || round_up(e->begin, need.alignment) + need.bytes > e->end()) return;
      candidates.emplace_back(e->size, std::vector<order::Mark>(marks.begin(), marks.end()));
    };
    mixed_.for_each([&](const Extent* e) { look(e, *static_cast<const MarkSet*>(e->note)); });
  }
  streams_.for_each([&](Heap& heap) {
    if (&heap == t.heap()) return;
    std::lock_guard lock(extent_lock_);
    heap.extents.for_each([&](const Extent* e) {
      if (e->size < need.bytes || round_up(e->begin, need.alignment) + need.bytes > e->end()) return;
      candidates.emplace_back(e->size, std::vector<order::Mark>{{&heap.stream, e->stamp}});
    });
  });
  std::sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  constexpr std::size_t kMaxCandidates = 16;
  if (candidates.size() > kMaxCandidates) candidates.resize(kMaxCandidates);
  for (const auto& [size, marks] : candidates) {
    if (!std::all_of(marks.begin(), marks.end(), [&](const order::Mark& m) { return fences_.can_wait(me, m); }))
      continue;
    if (!std::all_of(marks.begin(), marks.end(), [&](const order::Mark& m) { return fences_.wait(me, t.handle(), m); }))
      continue;
    // Published: now any extent whose marks T may use will do.
    std::unique_lock lock(extent_lock_);
    Extent* best = nullptr;
    MarkSet best_marks;
    const auto consider = [&](Extent* e, const MarkSet& m) {
      if (e->size < need.bytes || round_up(e->begin, need.alignment) + need.bytes > e->end()) return;
      if ((best == nullptr || e->size < best->size) && m.may_use(me)) {
        best = e;
        best_marks = m;
      }
    };
    mixed_.for_each([&](Extent* e) { consider(e, *static_cast<MarkSet*>(e->note)); });
    for (const order::Mark& m : marks) {
      Heap* heap = Heap::of(m.stream);
      heap->extents.for_each([&](Extent* e) {
        MarkSet one;
        one.add({&heap->stream, e->stamp});
        consider(e, one);
      });
    }
    if (best == nullptr) continue;  // somebody was quicker
    if (best->index == &mixed_) delete static_cast<MarkSet*>(best->note);
    best->note = nullptr;
    const Address from = best->begin, to = best->end();
    extents_.hold(best);
    Extent* middle = extents_.carve(best, round_up(from, need.alignment), need.bytes, ExtentState::taken);
    if (middle->begin > from) put_extent(middle->prev, best_marks);
    if (middle->end() < to) put_extent(middle->next, best_marks);
    best_marks.drop_complete();
    fill_large(middle, best_marks.ticket_of(me), need, Path::waited, found);
    found->has_extra = true;
    lock.unlock();  // nobody else knows the record yet
    std::lock_guard extra(extra_lock(found->record));
    found->record->more().inherited = std::move(best_marks);
    return true;
  }
  return false;
}

Core::Growth Core::growth_for(const Need& need, bool beside, Moving moving) const {
  if (!need.slot()) return {need.bytes, need.alignment, need.strict, beside, moving};
  const Bytes bytes = need.cls == kZeroClass ? 0 : placement::slab_size(need.cls);  // that one needs addresses only
  return {bytes, placement::kSlabUnit, need.strict, beside, moving};
}

Core::Grown Core::grow_for(Named& t, const Need& need, bool beside, Moving moving, driver::Status* status) {
  return grow(t.heap(), growth_for(need, beside, moving), status);
}

// Memory that lies idle in pieces moves to where it makes one: only as much as the need. True: found.
bool Core::grow_by_moving(Named& t, const Need& need, Path path, Found* found, Grown* grown, driver::Status* status) {
  // Beside what is free, which then stays where it is; then the whole, of all that is free.
  for (const bool beside : {true, false}) {
    driver::Status refusal;
    const Grown moved = grow_for(t, need, beside, Moving::all, &refusal);
    if (moved == Grown::nothing_idle) return false;
    *grown = moved;
    *status = refusal;
    if (moved == Grown::yes && find_again(t, need, path, found)) return true;
    if (moved == Grown::failed) return false;
  }
  return false;
}

Core::Rest Core::rest(Patience& patience) {
  constexpr double kLongestPause = 2e-3, kInterruptCheck = 0.05;
  const double now = driver_->now();
  if (lost_.load() || now >= patience.deadline) return Rest::over;
  if (now >= patience.next_interrupt_check) {
    if (hooks_.interrupted && hooks_.interrupted()) return Rest::interrupted;
    patience.next_interrupt_check = now + kInterruptCheck;
  }
  driver_->pause(std::min(patience.pause, patience.deadline - now));
  patience.pause = std::min(patience.pause * 2, kLongestPause);
  return Rest::waited;
}

// The bounded wait on the host: polls, lets time pass, and searches after whatever became complete.
Core::Waited Core::wait_for_pending(Named& t, const Need& need, double deadline, bool quarantine, Found* found) {
  Patience patience{.deadline = deadline};
  bool waited = false;
  Bytes tried = 0;  // so much that lies idle did not help
  for (;;) {
    drain(false);  // what other threads released meanwhile
    poll_all(true);
    retire_idle();
    promote();
    if (quarantine && debugger_ != nullptr && debugger_->give_up(need.bytes) != 0) {
      retire_idle();
      promote();
    }
    if (find_again(t, need, quarantine ? Path::quarantine : Path::host_waited, found)) return Waited::found;
    // What became complete may be in pieces.
    if (const Bytes idle = movable_bytes(); idle > tried) {
      tried = idle;
      driver::Status status;
      Grown grown = Grown::failed;
      if (grow_by_moving(t, need, Path::host_waited, found, &grown, &status)) return Waited::found;
    }
    const bool more =
        pending_bytes() != 0 || (quarantine && debugger_ != nullptr && debugger_->totals().quarantined_blocks != 0);
    if (!more) return Waited::nothing;
    recover();
    switch (rest(patience)) {
      case Rest::over: return Waited::nothing;
      case Rest::interrupted: return Waited::interrupted;
      case Rest::waited: break;
    }
    if (!waited) host_waits_.fetch_add(1, std::memory_order_relaxed);
    waited = true;
  }
}

// A program that lives with refusals does not pay for a garbage collection at each: after one that freed nothing here,
// none is due until something was allocated.
bool Core::collection_is_due() const { return bank_->totals().allocations != fruitless_at_.load(); }

// The program's function for short memory. One that runs short itself is not called again inside.
bool Core::call_back(Bytes size) {
  thread_local bool inside = false;
  if (!hooks_.out_of_memory || inside) return false;
  inside = true;
  const bool again = hooks_.out_of_memory(size);
  inside = false;
  return again;
}

Errc Core::climb(Named& t, const Need& need, const AllocRequest& request, Found* found, Failure* failure) {
  const auto done = [&] {
    count_path(found->path);
    apply_release_threshold(0);
    return Errc::ok;
  };
  const double deadline = driver_->now() + options_.wait_timeout;
  reap();
  driver::Status refusal;
  Grown grown = Grown::failed;
  for (int attempt = 0;; ++attempt) {
    // Completed frees of other heaps. The stream at hand is named by its caller, so it may be fenced here.
    if (need.strict) {
      fences_.record(t.stream(), t.handle());
      fences_.poll(t.stream());
    }
    if (options_.opportunistic) {
      poll_all(false);
      if (find_again(t, need, Path::completed, found)) return done();
      retire_idle();
      if (find_again(t, need, Path::completed, found)) return done();
    } else {
      // Deterministic: nothing of other streams, but the own stream's completed memory is everybody's.
      if (need.strict) promote();
      if (find_own(t, need, found)) return done();
    }

    // The driver; first beside what is free already, then the whole. What came may be taken, or trimmed, by others
    // before it is found here: then they got on, and more is asked for. A piece of the driver's pool that is not found
    // may be there and not done.
    const int most = source_ == SegmentSource::driver ? 2 : 100;
    for (int growths = 0; growths < most; ++growths) {
      grown = grow_for(t, need, growths != 1, Moving::slack, &refusal);
      if (grown != Grown::yes) break;
      if (find_again(t, need, Path::grown, found)) return done();
    }

    // Idle memory back, in one piece again.
    retire_idle();
    promote();
    if (grow_by_moving(t, need, Path::moved, found, &grown, &refusal)) return done();

    if (options_.wait && take_waited(t, need, found)) return done();

    // Never in a capture: a wait there waits for work that may come after it.
    const bool may_wait = !t.stream().captured.load(std::memory_order_relaxed) && !streams_.capture_known();
    if (may_wait && pending_bytes() != 0) {
      switch (wait_for_pending(t, need, deadline, false, found)) {
        case Waited::found: return done();
        case Waited::interrupted: return failure->set(Errc::interrupted, "interrupted while waiting for pending frees");
        case Waited::nothing: break;
      }
    }

    if (may_wait && debugger_ != nullptr && debugger_->totals().quarantined_blocks != 0) {
      switch (wait_for_pending(t, need, deadline, true, found)) {
        case Waited::found: return done();
        case Waited::interrupted:
          return failure->set(Errc::interrupted, "interrupted while waiting for quarantined blocks");
        case Waited::nothing: break;
      }
    }

    // Pieces: freeing them blocks until the device is idle, so it happens on a helper thread, within the time-out.
    // First what the need comes to, then all.
    for (const bool all : {false, true}) {
      if (source_ != SegmentSource::malloc) break;
      bool interrupted = false;
      const Bytes reserved = reserved_.load(std::memory_order_acquire);
      const Bytes bytes = round_up(growth_for(need, true, Moving::all).bytes, kPieceSize);
      const Bytes keep = all ? 0 : reserved - std::min(reserved, bytes);
      // An idle device takes them at once, so they get that long even where the time is used up.
      constexpr double kGrace = 0.05;
      const double left = std::max(options_.wait_timeout > 0 ? kGrace : 0, deadline - driver_->now());
      const Bytes pieces = give_back_pieces(keep, left, &interrupted);
      if (interrupted) return failure->set(Errc::interrupted, "interrupted while driver memory was given back");
      if (pieces == 0) continue;
      grown = grow_for(t, need, true, Moving::slack, &refusal);
      if (find_again(t, need, Path::moved, found)) return done();
    }

    if (attempt == 0 && hooks_.collect_garbage && collection_is_due()) {
      const std::uint64_t frees_before = bank_->totals().frees;
      hooks_.collect_garbage();
      drain();
      if (find_again(t, need, Path::called_back, found)) return done();
      if (frees_before == bank_->totals().frees) fruitless_at_.store(bank_->totals().allocations);
      continue;
    }
    if (attempt <= options_.oom_retries && call_back(request.size)) {
      drain();
      if (find_again(t, need, Path::called_back, found)) return done();
      continue;
    }
    // Ctrl-C inside the callback.
    if (hooks_.interrupted && hooks_.interrupted())
      return failure->set(Errc::interrupted, "interrupted while out of memory");
    break;
  }
  if (grown == Grown::failed && refusal.code != driver::Code::out_of_memory && !refusal.ok())
    return failure->set(Errc::driver,
                        "pool '" + name_ + "' could not take memory from the driver: " + driver::describe(refusal));
  const Bytes growth = need.cls == kZeroClass ? need.bytes : growth_for(need, true, Moving::all).bytes;
  return out_of_memory(t.stream().id, need.bytes, growth, request,
                       grown == Grown::limit ? OomReason::limit : OomReason::driver, refusal, failure);
}

// `need` bytes were looked for, and `growth` would have held them.
Errc Core::out_of_memory(std::uint64_t stream, Bytes need, Bytes growth, const AllocRequest& request, OomReason reason,
                         const driver::Status& status, Failure* failure) {
  oom_.fetch_add(1, std::memory_order_relaxed);
  const Stats now = stats();
  auto report = std::make_unique<OomReport>();
  OomReport& r = *report;
  r.request = request.size;
  r.alignment = request.alignment;
  r.stream = stream;
  r.device = driver_->name();
  r.pool = name_;
  r.kind = kind_name(kind_);
  r.limit = limit();
  r.reserved = now.reserved;
  r.in_use = now.in_use;
  r.pending = now.pending;
  r.cached = now.cached;
  r.quarantined = now.quarantined;
  r.largest_free = now.largest_free;
  if (!status.ok()) r.driver_error = driver::describe(status);
  // May fail like everything else; the error does not depend on it.
  r.device_known = driver_->mem_info(&r.device_free, &r.device_total).ok();
  r.reason = reason;
  // What limit and device still give, and what is free and can move.
  const bool bounded = r.device_known && kind_ == Kind::device;
  Bytes more = bounded ? r.device_free : 0;
  if (r.limit != 0) more = std::min(bounded ? more : r.limit, r.limit - std::min(r.limit, r.reserved));
  more += movable_bytes();
  r.missing = growth - std::min(growth, more);
  if (now.cached >= need && now.cached != 0)
    r.reason = OomReason::fragmentation;
  else if (now.pending + now.quarantined != 0 && now.cached + now.pending + now.quarantined >= need)
    r.reason = (stream & kCapturedId) != 0 || streams_.capture_known() ? OomReason::capture : OomReason::pending;
  failures_[static_cast<std::size_t>(r.reason)].fetch_add(1, std::memory_order_relaxed);
  tell(observe::EventKind::alloc_failed, request.size, now.reserved, oom_reason_word(r.reason));
  r.sample_bytes = sampler_.mean();
  r.holders = holders();
  std::erase_if(r.holders, [](const Holder& holder) { return holder.bytes == 0; });  // allocated much, holds nothing
  constexpr std::size_t kTopHolders = 10;
  if (r.holders.size() > kTopHolders) r.holders.resize(kTopHolders);
  failure->set(Errc::out_of_memory, describe(r));
  failure->oom = std::move(report);
  return Errc::out_of_memory;
}

}  // namespace streampool::pool
