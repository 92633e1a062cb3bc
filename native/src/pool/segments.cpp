// Taking memory from the driver and giving it back. Plans under the extent lock, calls the driver without any lock,
// then commits; a failing call leaves everything as it was (R14).
#include <algorithm>
#include <bit>
#include <chrono>
#include <condition_variable>
#include <thread>

#include "core.hpp"

namespace streampool::pool {

using driver::Code;
using driver::Status;
using placement::Extent;
using placement::ExtentState;
using placement::Range;

// `reserved` and its peak are exact at every step, and never above the limit (R19).
bool Core::charge(Bytes bytes) {
  Bytes now = reserved_.load(std::memory_order_relaxed);
  do {
    if (options_.limit != 0 && (now > options_.limit || bytes > options_.limit - now)) return false;
  } while (!reserved_.compare_exchange_weak(now, now + bytes, std::memory_order_acq_rel));
  Bytes peak = reserved_peak_.load(std::memory_order_relaxed);
  while (peak < now + bytes && !reserved_peak_.compare_exchange_weak(peak, now + bytes)) {
  }
  return true;
}

void Core::uncharge(Bytes bytes) { reserved_.fetch_sub(bytes, std::memory_order_acq_rel); }

Core::Grown Core::grow(Heap* t, Bytes bytes, Bytes alignment, bool strict, bool beside, Status* status) {
  if (bytes == 0) return Grown::failed;
  if (kind_ == Kind::device && options_.use_virtual_memory && driver_->capabilities().virtual_memory)
    return grow_mapped(t, bytes, alignment, strict, beside, status);
  return grow_piece(bytes, alignment, status);
}

// Maps memory at the best place: where the least new memory completes a run of `bytes`. `beside`: count what is free
// and usable next to it.
Core::Grown Core::grow_mapped(Heap* t, Bytes bytes, Bytes alignment, bool strict, bool beside, Status* status) {
  const Bytes granularity = driver_->capabilities().granularity;
  // Below the granularity a run may start anywhere; above extents' own alignment it may lose up to that much.
  const Bytes slack = alignment > placement::kExtentAlign && beside ? alignment : 0;
  const auto usable = [&](const Extent* e) {
    return beside && e != nullptr && (e->index == &common_ || (t != nullptr && !strict && e->index == &t->extents));
  };
  Extent* piece = nullptr;
  Segment* segment = nullptr;
  for (int tries = 0; piece == nullptr; ++tries) {
    Bytes whole = 0;
    if (!round_up_checked(bytes, granularity, &whole))
      return *status = {Code::out_of_memory, 2, "mem_create"}, Grown::refused;
    {
      std::lock_guard lock(extent_lock_);
      Extent* best = nullptr;
      Bytes best_cost = ~Bytes{0};
      extents_.unmapped().for_each([&](Extent* u) {
        Bytes before = 0;
        for (const Extent* e = u->prev; usable(e); e = e->prev) before += e->size;
        Bytes cost = round_up(bytes + slack - std::min(before, bytes + slack), granularity);
        if (cost == 0) cost = whole;
        if (cost > u->size) {
          Bytes after = 0;
          for (const Extent* e = u->next; usable(e); e = e->next) after += e->size;
          if (before + u->size + after < bytes + slack) return;
          cost = u->size;
        }
        if (cost < best_cost || (cost == best_cost && u->begin < best->begin)) {
          best_cost = cost;
          best = u;
        }
      });
      if (best != nullptr) {
        piece = extents_.carve(best, best->begin, best_cost, ExtentState::busy);
        segment = static_cast<Segment*>(piece->range->note);
      }
    }
    if (piece == nullptr && (tries > 2 || !add_address_range(whole, status))) return Grown::refused;
  }

  const auto undo = [&] {
    std::lock_guard lock(extent_lock_);
    extents_.put_unmapped(piece);
  };
  const Address begin = piece->begin;
  const Bytes size = piece->size;
  // Memory that lies idle in pieces moves here rather than staying idle there: above a slack, growth gives back as much
  // as it takes. (R11 asks the driver before it gives idle memory back; this is what it asks for.)
  const Bytes reserved = reserved_.load(std::memory_order_acquire);
  const Bytes gross = static_cast<Bytes>(bank_->totals().gross);
  if (reserved > gross + gross / kIdleSlack)
    give_back_mapped(reserved - std::min(reserved, std::min(size, reserved - gross - gross / kIdleSlack)));
  if (!charge(size)) {
    undo();
    *status = {};
    return Grown::limit;
  }
  std::vector<Segment::Handle> handles;
  *status = map_memory(begin, size, &handles);
  if (status->ok() && debugger_ != nullptr) {
    *status = debugger_->on_new_memory(begin, size);
    if (!status->ok()) {
      for (const Segment::Handle& h : handles) {
        driver_->mem_unmap(h.begin, h.bytes);
        driver_->mem_release(h.handle);
      }
      handles.clear();
    }
  }
  if (!events_.noted(*status)) {
    undo();
    uncharge(size);
    return status->code == Code::out_of_memory ? Grown::refused : Grown::failed;
  }
  std::lock_guard lock(extent_lock_);
  for (const Segment::Handle& h : handles) segment->handles.emplace(h.begin, h);
  extents_.put_free(piece, common_, 0);
  return Grown::yes;
}

// One handle for what is small, several for what is large: the cost goes by handle, and a handle goes back only whole.
Status Core::map_memory(Address begin, Bytes bytes, std::vector<Segment::Handle>* handles) {
  Status status;
  const auto undo = [&] {
    for (const Segment::Handle& h : *handles) {
      driver_->mem_unmap(h.begin, h.bytes);
      driver_->mem_release(h.handle);
    }
    handles->clear();
  };
  const Bytes share = std::bit_floor(
      std::max<Bytes>({reserved_.load(std::memory_order_relaxed) / kHandleShare, bytes / kHandleCount, 1}));
  const Bytes handle_size = std::clamp(share, driver_->capabilities().granularity,
                                       std::max(kLargestHandle, driver_->capabilities().granularity));
  for (Bytes done = 0; done < bytes;) {
    Segment::Handle h;
    h.begin = begin + done;
    h.bytes = std::min(bytes - done, handle_size);
    status = driver_->mem_create(h.bytes, &h.handle);
    if (!status.ok()) return undo(), status;
    status = driver_->mem_map(h.begin, h.bytes, h.handle);
    if (!status.ok()) {
      driver_->mem_release(h.handle);
      return undo(), status;
    }
    handles->push_back(h);
    done += h.bytes;
  }
  status = driver_->mem_set_access(begin, bytes);
  if (!status.ok()) undo();
  return status;
}

// Addresses cost nothing but addresses: one large range, so that neighbours can merge and growth continues where it
// ended.
bool Core::add_address_range(Bytes bytes, Status* status) {
  // Where addresses are scarce a chunk is small: each range is then as large as all before it.
  Bytes before = 0;
  {
    std::lock_guard lock(extent_lock_);
    for (const auto& segment : segments_) before += segment->mapped ? segment->range->size : 0;
  }
  Bytes want = std::max({round_up(bytes, kPieceSize), driver_->capabilities().address_chunk, before});
  for (;;) {
    Address begin = 0;
    *status = driver_->address_reserve(want, kMaxAlignment, &begin);
    if (status->ok() && begin + want > placement::PageMap::kAddressLimit) {
      driver_->address_free(begin, want);
      *status = {Code::out_of_memory, 2, "address_reserve"};
      return false;
    }
    if (status->ok()) {
      auto segment = std::make_unique<Segment>();
      segment->mapped = true;
      std::lock_guard lock(extent_lock_);
      segment->range = extents_.add_range(begin, want);
      segment->range->note = segment.get();
      segments_.push_back(std::move(segment));
      return true;
    }
    if (want / 2 < bytes) return false;
    want = round_up(want / 2, kPieceSize);
  }
}

Core::Grown Core::grow_piece(Bytes bytes, Bytes alignment, Status* status) {
  Bytes size = 0;
  // Driver pieces start at extents' own alignment at least (checked below); for more the run may lose up to that much.
  const Bytes slack = alignment > placement::kExtentAlign ? alignment : 0;
  if (bytes > ~Bytes{0} - slack || !round_up_checked(bytes + slack, kPieceSize, &size))
    return *status = {Code::out_of_memory, 2, "mem_alloc"}, Grown::refused;
  if (!charge(size)) return *status = {}, Grown::limit;
  Address begin = 0;
  *status = driver_->mem_alloc(kind_, size, &begin);
  if (status->ok() && (begin + size > placement::PageMap::kAddressLimit || begin % placement::kExtentAlign != 0)) {
    driver_->mem_free(kind_, begin);
    *status = {Code::not_supported, 801, "mem_alloc"};
  }
  if (status->ok() && debugger_ != nullptr) {
    *status = debugger_->on_new_memory(begin, size);
    if (!status->ok()) driver_->mem_free(kind_, begin);
  }
  if (!events_.noted(*status)) {
    uncharge(size);
    return status->code == Code::out_of_memory ? Grown::refused : Grown::failed;
  }
  add_piece(begin, size);
  return Grown::yes;
}

void Core::add_piece(Address begin, Bytes size) {
  auto segment = std::make_unique<Segment>();
  std::lock_guard lock(extent_lock_);
  segment->range = extents_.add_range(begin, size);
  segment->range->note = segment.get();
  segments_.push_back(std::move(segment));
  Extent* extent = extents_.carve(segments_.back()->range->first, begin, size, ExtentState::busy);
  extents_.put_free(extent, common_, 0);
}

// Handles that lie wholly in memory that is free and complete go back, the highest addresses first, down to `keep`
// reserved bytes. Unmapping stalls nobody.
Bytes Core::give_back_mapped(Bytes keep) {
  struct Plan {
    Extent* extent;
    Segment* segment;
    Segment::Handle handle;
  };
  std::vector<Plan> plans;
  std::vector<Segment::Handle> orphans;
  {
    std::lock_guard lock(extent_lock_);
    orphans.swap(orphans_);
    std::vector<Extent*> free;
    common_.for_each([&](Extent* e) { free.push_back(e); });
    std::sort(free.begin(), free.end(), [](const Extent* a, const Extent* b) { return a->begin > b->begin; });
    Bytes left = reserved_.load(std::memory_order_acquire);
    for (Extent* e : free) {
      Segment* segment = static_cast<Segment*>(e->range->note);
      if (!segment->mapped) continue;
      while (e != nullptr) {
        auto it = segment->handles.lower_bound(e->end());
        bool carved = false;
        while (it != segment->handles.begin()) {
          --it;
          const Segment::Handle h = it->second;
          if (h.begin < e->begin) break;
          if (h.begin + h.bytes > e->end() || left < h.bytes || left - h.bytes < keep) continue;
          Extent* busy = extents_.carve(e, h.begin, h.bytes, ExtentState::busy);
          plans.push_back({busy, segment, h});
          left -= h.bytes;
          e = busy->prev != nullptr && busy->prev->index == &common_ ? busy->prev : nullptr;
          carved = true;
          break;
        }
        if (!carved) break;
      }
    }
  }
  Bytes released = 0;
  // Still the pool's until the driver takes them.
  for (const Segment::Handle& orphan : orphans) {
    if (driver_->mem_release(orphan.handle).ok()) {
      uncharge(orphan.bytes);
      released += orphan.bytes;
      continue;
    }
    std::lock_guard lock(extent_lock_);
    orphans_.push_back(orphan);
  }
  for (const Plan& plan : plans) {
    const Status unmapped = driver_->mem_unmap(plan.handle.begin, plan.handle.bytes);
    const bool freed = unmapped.ok() && driver_->mem_release(plan.handle.handle).ok();
    std::lock_guard lock(extent_lock_);
    if (!unmapped.ok()) {
      extents_.put_free(plan.extent, common_, 0);
      continue;
    }
    plan.segment->handles.erase(plan.handle.begin);
    extents_.put_unmapped(plan.extent);
    if (!freed) {
      orphans_.push_back(plan.handle);
      continue;
    }
    uncharge(plan.handle.bytes);
    released += plan.handle.bytes;
  }
  return released;
}

// Under the extent lock: the range leaves the pool, and with it what the page map says of it: the driver may give the
// same addresses to anybody.
void Core::forget_pages(const Range& range) {
  const auto inside = [&range](Address address) { return address >= range.begin && address < range.end(); };
  for (const auto& slab : slabs_) {
    if (slab->pages == 0 || !inside(slab->base)) continue;
    placement::PageMap::clear(slab->base, slab->bytes, slab.get());
    slab->pages = 0;
    spare_slabs_[slab->cls].push_back(slab.get());
  }
  for (const auto& block : large_) {
    if (!inside(block->page) || placement::PageMap::find(block->page).pointer() != block.get()) continue;
    placement::PageMap::clear(block->page, 1, block.get());
    spare_large_.push_back(block.get());
  }
}

namespace {

// A driver call that may block for the device's work, in a thread of its own. Who waits for it waits a bounded time;
// the thread finishes the book-keeping by itself.
struct Errand {
  std::mutex mutex;
  std::condition_variable done;
  std::size_t open = 0;
};

}  // namespace

// Whole driver pieces that are free and complete. mem_free blocks until the device is idle. A piece leaves the books
// before the call: once the driver has it, its addresses may come back to us as a new piece at any moment.
Bytes Core::give_back_pieces(Bytes keep, double timeout, bool* interrupted) {
  struct Plan {
    Address begin;
    Bytes bytes;
  };
  std::vector<Plan> plans;
  {
    std::lock_guard lock(extent_lock_);
    Bytes left = reserved_.load(std::memory_order_acquire);
    for (std::size_t i = 0; i < segments_.size();) {
      Segment* segment = segments_[i].get();
      Range* range = segment->range;
      Extent* e = range->first;
      if (segment->mapped || e->index != &common_ || e->size != range->size || left < e->size ||
          left - e->size < keep) {
        ++i;
        continue;
      }
      extents_.hold(e);
      forget_pages(*range);
      plans.push_back({range->begin, range->size});
      left -= range->size;
      leaving_.fetch_add(range->size);
      extents_.remove_range(range);
      segments_.erase(segments_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  if (plans.empty()) return 0;
  auto released = std::make_shared<std::atomic<Bytes>>(0);
  auto errand = std::make_shared<Errand>();
  errand->open = 1;
  std::thread([self = shared_from_this(), plans, released, errand] {
    for (const Plan& plan : plans) {
      const Status status = self->driver_->mem_free(self->kind_, plan.begin);
      if (status.ok()) {
        self->leaving_.fetch_sub(plan.bytes);
        self->uncharge(plan.bytes);
        released->fetch_add(plan.bytes);
      } else {
        self->add_piece(plan.begin, plan.bytes);
        self->leaving_.fetch_sub(plan.bytes);
      }
    }
    std::lock_guard lock(errand->mutex);
    errand->open = 0;
    errand->done.notify_all();
  }).detach();
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout);
  std::unique_lock lock(errand->mutex);
  while (errand->open != 0 && std::chrono::steady_clock::now() < end) {
    errand->done.wait_for(lock, std::chrono::milliseconds(20));
    if (errand->open != 0 && hooks_.interrupted) {
      lock.unlock();
      const bool stop = hooks_.interrupted();
      lock.lock();
      if (stop) {
        if (interrupted != nullptr) *interrupted = true;
        break;
      }
    }
  }
  return released->load();
}

Bytes Core::give_back_idle(Bytes keep, double piece_timeout) {
  const Bytes mapped = give_back_mapped(keep);
  return mapped + give_back_pieces(keep, piece_timeout);
}

// Pieces go back only where a wait of `piece_timeout` seconds is all right.
void Core::apply_release_threshold(double piece_timeout) {
  if (options_.release_threshold == 0) return;
  const Bytes busy = static_cast<Bytes>(bank_->totals().gross);
  const Bytes keep = busy + options_.release_threshold;
  if (reserved_.load() <= keep) return;
  give_back_mapped(keep);
  if (piece_timeout > 0 && reserved_.load() > keep) give_back_pieces(keep, piece_timeout);
}

}  // namespace streampool::pool
