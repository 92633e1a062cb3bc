// Segments of virtual memory: address ranges into which handles are mapped. Growth goes where the least new memory
// completes a run; idle handles move there from wherever they lie, so that a large block can be stitched out of small
// free ones; any of them goes back from the middle of a range. Nothing here waits for the device.
#include <algorithm>
#include <bit>

#include "core.hpp"

namespace streampool::pool {

using driver::Code;
using driver::Status;
using placement::Extent;
using placement::ExtentState;
using Handle = Segment::Handle;

namespace {

// Large handles first: the cost goes by their number. Among equals the highest address, so that what stays is dense.
bool by_size(const IdleHandle& a, const IdleHandle& b) {
  return a.handle.bytes != b.handle.bytes ? a.handle.bytes > b.handle.bytes : a.handle.begin > b.handle.begin;
}

// Takes handles out of `idle`, which is sorted, that come to as much of `most` as they can.
std::vector<IdleHandle> take_up_to(std::vector<IdleHandle>* idle, Bytes most, Bytes* sum) {
  std::vector<IdleHandle> taken, left;
  *sum = 0;
  for (const IdleHandle& one : *idle) {
    const bool fits = one.handle.bytes <= most - *sum;
    if (fits) *sum += one.handle.bytes;
    (fits ? taken : left).push_back(one);
  }
  *idle = std::move(left);
  return taken;
}

// Takes handles out of `idle`, which is sorted, that come to at least `least` if all of them do: the smallest one that
// is enough, else as few as will do.
std::vector<IdleHandle> take_at_least(std::vector<IdleHandle>* idle, Bytes least) {
  std::vector<IdleHandle> taken;
  Bytes sum = 0;
  while (sum < least && !idle->empty()) {
    auto one =
        std::find_if(idle->rbegin(), idle->rend(), [&](const IdleHandle& i) { return i.handle.bytes >= least - sum; });
    const auto at = one == idle->rend() ? idle->begin() : std::prev(one.base());
    sum += at->handle.bytes;
    taken.push_back(*at);
    idle->erase(at);
  }
  return taken;
}

}  // namespace

// Under the extent lock: every idle handle outside of [skip_begin, skip_end), in the order of `by_size`.
std::vector<IdleHandle> Core::find_idle(Address skip_begin, Address skip_end) const {
  std::vector<IdleHandle> idle;
  common_.for_each([&](Extent* e) {
    Segment* segment = static_cast<Segment*>(e->range->note);
    if (e->size < granularity_ || (e->begin < skip_end && skip_begin < e->end())) return;
    auto& handles = segment->handles;
    for (auto it = handles.lower_bound(e->begin); it != handles.end() && it->second.begin < e->end(); ++it)
      if (it->second.begin + it->second.bytes <= e->end()) idle.push_back({e, segment, it->second});
  });
  std::sort(idle.begin(), idle.end(), by_size);
  return idle;
}

// Under the extent lock: each of these handles gets an extent of its own, which nobody else can take.
void Core::hold_idle(std::vector<IdleHandle*> idle) {
  std::sort(idle.begin(), idle.end(),
            [](const IdleHandle* a, const IdleHandle* b) { return a->handle.begin > b->handle.begin; });
  const Extent* whole = nullptr;
  Extent* rest = nullptr;  // what is below the handles that were cut out of `whole`
  for (IdleHandle* one : idle) {
    if (one->extent != whole) whole = rest = one->extent;
    const Address from = rest->begin;
    one->extent = extents_.carve(rest, one->handle.begin, one->handle.bytes, ExtentState::busy);
    rest = one->extent->begin > from ? one->extent->prev : nullptr;
  }
}

// A large block, or a run for slabs: where the least new memory completes it. `beside`: what is free and usable next to
// it counts. Then which idle handles move there, and which ones pay for the rest if it cannot be had otherwise.
bool Core::plan_growth(Heap* t, const Growth& growth, Mapping* m, Status* status) {
  // Below the granularity a run may start anywhere; above extents' own alignment it may lose up to that much.
  const Bytes slack = growth.alignment > placement::kExtentAlign && growth.beside ? growth.alignment : 0;
  const auto usable = [&](const Extent* e) {
    return growth.beside && e != nullptr &&
           (e->index == &common_ || (t != nullptr && !growth.strict && e->index == &t->extents));
  };
  Bytes whole = 0;
  if (growth.bytes > ~Bytes{0} - slack || !round_up_checked(growth.bytes, granularity_, &whole))
    return *status = {Code::out_of_memory, 2, "mem_create"}, false;
  const Bytes above = growth.moving == Moving::slack ? idle_above_slack() : 0;
  constexpr int kMaxTries = 3;  // others may take a range that was added here
  for (int tries = 0; tries < kMaxTries; ++tries) {
    {
      std::lock_guard lock(extent_lock_);
      // Behind what is free before the hole, or before what is free behind it, or all of the hole between both.
      Extent* best = nullptr;
      Bytes best_cost = ~Bytes{0};
      Address best_begin = 0;
      extents_.unmapped().for_each([&](Extent* u) {
        const Bytes need = growth.bytes + slack;
        const auto consider = [&](Bytes beside, bool at_end) {
          const Bytes cost = beside >= need ? whole : round_up(need - beside, granularity_);
          if (cost > u->size || cost > best_cost) return;
          const Address begin = at_end ? u->end() - cost : u->begin;
          if (cost == best_cost && begin > best_begin) return;
          best = u;
          best_cost = cost;
          best_begin = begin;
        };
        Bytes before = 0, after = 0;
        for (const Extent* e = u->prev; usable(e) && before < need; e = e->prev) before += e->size;
        for (const Extent* e = u->next; usable(e) && after < need; e = e->next) after += e->size;
        consider(before, false);
        if (after != 0) consider(after, true);
        if (before != 0 && after != 0 && before + u->size + after >= need && u->size <= best_cost) {
          best = u;
          best_cost = u->size;
          best_begin = u->begin;
        }
      });
      if (best != nullptr) {
        // The run's own neighbours stay where they are.
        Address first = best_begin, last = best_begin + best_cost;
        for (const Extent* e = best->prev; best_begin == best->begin && usable(e); e = e->prev) first = e->begin;
        for (const Extent* e = best->next; last >= best->end() && usable(e); e = e->next) last = e->end();
        m->piece = extents_.carve(best, best_begin, best_cost, ExtentState::busy);
        m->segment = static_cast<Segment*>(m->piece->range->note);
        m->need = best_cost;
        const Bytes most = growth.moving == Moving::all ? best_cost : std::min(above, best_cost);
        if (most != 0) {
          std::vector<IdleHandle> idle = find_idle(first, last);
          Bytes moved = 0;
          m->moved = take_up_to(&idle, most, &moved);
          m->need -= moved;
          if (growth.moving == Moving::all) m->payers = take_at_least(&idle, m->need);
          std::vector<IdleHandle*> held;  // all at once: they may be parts of one extent
          for (IdleHandle& one : m->moved) held.push_back(&one);
          for (IdleHandle& one : m->payers) held.push_back(&one);
          hold_idle(std::move(held));
        }
        return true;
      }
    }
    if (!add_address_range(whole, status)) return false;
  }
  return *status = {Code::out_of_memory, 2, "address_reserve"}, false;
}

Core::Grown Core::grow_mapped(Heap* t, const Growth& growth, Status* status) {
  Mapping m;
  if (!plan_growth(t, growth, &m, status)) return Grown::refused;
  if (growth.moving == Moving::all && m.moved.empty() && m.payers.empty()) {
    abandon(&m);
    return Grown::nothing_idle;
  }
  if (!charge_or_pay(&m, m.need)) {
    abandon(&m);
    *status = {};
    return Grown::limit;
  }
  bool within_limit = true;
  *status = fill_growth(&m, &within_limit);
  if (!events_.noted(*status)) {
    abandon(&m);
    if (!within_limit) return *status = {}, Grown::limit;
    return status->code == Code::out_of_memory ? Grown::refused : Grown::failed;
  }
  note_peak();
  std::lock_guard lock(extent_lock_);
  for (const IdleHandle& one : m.moved) {
    one.segment->handles.erase(one.handle.begin);
    extents_.put_unmapped(one.extent);
  }
  for (const IdleHandle& one : m.payers) extents_.put_free(one.extent, common_, 0);
  for (const Handle& h : m.laid) m.segment->handles.emplace(h.begin, h);
  extents_.put_free(m.piece, common_, 0);
  handles_moved_.fetch_add(m.moved.size(), std::memory_order_relaxed);
  return Grown::yes;
}

// Idle handles that do not fit where memory is needed go back to the driver, so that others can be made. Once.
bool Core::pay(Mapping* m) {
  if (m->payers.empty()) return false;
  std::vector<IdleHandle> payers;
  payers.swap(m->payers);
  return give_back(payers) != 0;
}

bool Core::charge_or_pay(Mapping* m, Bytes bytes) {
  if (!charge(bytes) && !(pay(m) && charge(bytes))) return false;
  m->fresh += bytes;
  return true;
}

// The moved handles leave their old places first: memory is mapped in one place at a time. Then new ones for the rest,
// all of them mapped, and one call for access.
Status Core::fill_growth(Mapping* m, bool* within_limit) {
  for (std::size_t i = 0; i < m->moved.size();) {
    const IdleHandle one = m->moved[i];
    const Status status = driver_->mem_unmap(one.handle.begin, one.handle.bytes);
    if (status.ok()) {
      ++i;
      continue;
    }
    // It stays where it is, and a new one takes its part.
    m->moved.erase(m->moved.begin() + static_cast<std::ptrdiff_t>(i));
    const bool lost = !events_.noted(status) && lost_.load();
    {
      std::lock_guard lock(extent_lock_);
      extents_.put_free(one.extent, common_, 0);
    }
    // Those before it have left their places already.
    m->unmapped = i;
    if (lost) return status;
    if (!charge_or_pay(m, one.handle.bytes)) return *within_limit = false, status;
  }
  m->unmapped = m->moved.size();

  Address at = m->piece->begin;
  for (const IdleHandle& one : m->moved) {
    m->laid.push_back({at, one.handle.bytes, one.handle.handle});
    at += one.handle.bytes;
  }
  const Bytes handle_size = handle_size_for(m->fresh);
  while (at < m->piece->end()) {
    Handle h{at, std::min(m->piece->end() - at, handle_size), 0};
    const Status status = driver_->mem_create(h.bytes, options_.traits, &h.handle);
    if (status.code == Code::out_of_memory && pay(m)) continue;
    if (!status.ok()) return status;
    m->laid.push_back(h);
    at += h.bytes;
  }
  for (; m->mapped < m->laid.size(); ++m->mapped) {
    const Handle& h = m->laid[m->mapped];
    const Status status = driver_->mem_map(h.begin, h.bytes, h.handle);
    if (!status.ok()) return status;
  }
  const Status status = driver_->mem_set_access(m->piece->begin, m->piece->size, options_.traits);
  if (!status.ok() || debugger_ == nullptr) return status;
  return debugger_->on_new_memory(m->piece->begin, m->piece->size);
}

// One handle for what is small, several for what is large: the cost goes by handle, and a handle goes back only whole.
Bytes Core::handle_size_for(Bytes bytes) const {
  const Bytes share = std::bit_floor(
      std::max<Bytes>({reserved_.load(std::memory_order_relaxed) / kHandleShare, bytes / kHandleCount, 1}));
  Bytes most = std::max(kLargestHandle, granularity_);
  if (limit() != 0) most = std::clamp(std::bit_floor(limit() / kLimitShare), granularity_, most);
  const Bytes size = std::clamp(share, granularity_, most);
  return round_up(size, granularity_);
}

// Growth failed: moved handles go home, new ones back to the driver, and the place is empty again.
void Core::abandon(Mapping* m) {
  std::vector<Handle> stuck;  // of the new place, by address: the driver would not unmap them
  for (std::size_t i = 0; i < m->laid.size(); ++i) {
    const Handle& h = m->laid[i];
    const bool is_stuck = i < m->mapped && !driver_->mem_unmap(h.begin, h.bytes).ok();
    if (is_stuck) stuck.push_back(h);
    if (i < m->moved.size()) {
      if (is_stuck) {
        std::lock_guard lock(extent_lock_);
        m->moved[i].segment->handles.erase(m->moved[i].handle.begin);
        extents_.put_unmapped(m->moved[i].extent);
      } else {
        restore(m->moved[i]);
      }
      continue;
    }
    if (is_stuck) {
      m->fresh -= h.bytes;  // stays charged
    } else if (!driver_->mem_release(h.handle).ok()) {
      m->fresh -= h.bytes;
      std::lock_guard lock(extent_lock_);
      orphans_.push_back(h);
    }
  }
  // Before they were laid.
  for (std::size_t i = m->laid.empty() ? 0 : m->moved.size(); i < m->moved.size(); ++i) {
    if (i < m->unmapped) {
      restore(m->moved[i]);
      continue;
    }
    std::lock_guard lock(extent_lock_);
    extents_.put_free(m->moved[i].extent, common_, 0);
  }
  uncharge(m->fresh);
  std::lock_guard lock(extent_lock_);
  for (const IdleHandle& one : m->payers) extents_.put_free(one.extent, common_, 0);
  Extent* rest = m->piece;
  for (auto h = stuck.rbegin(); h != stuck.rend(); ++h) {
    const Address from = rest->begin, to = rest->end();
    Extent* busy = extents_.carve(rest, h->begin, h->bytes, ExtentState::busy);
    if (busy->end() < to) extents_.put_unmapped(busy->next);
    m->segment->handles.emplace(h->begin, *h);
    stuck_.push_back({busy, m->segment, *h});
    rest = busy->begin > from ? busy->prev : nullptr;
  }
  if (rest != nullptr) extents_.put_unmapped(rest);
}

// An idle handle that was unmapped comes back to its old place. Where the driver refuses, its memory goes.
void Core::restore(const IdleHandle& one) {
  const Handle& h = one.handle;
  const bool mapped = driver_->mem_map(h.begin, h.bytes, h.handle).ok();
  if (mapped && driver_->mem_set_access(h.begin, h.bytes, options_.traits).ok() &&
      (debugger_ == nullptr || debugger_->on_new_memory(h.begin, h.bytes).ok())) {
    std::lock_guard lock(extent_lock_);
    extents_.put_free(one.extent, common_, 0);
    return;
  }
  if (mapped) {
    give_back({one});
    return;
  }
  const bool released = driver_->mem_release(h.handle).ok();
  if (released) gave_back(h.bytes);
  std::lock_guard lock(extent_lock_);
  one.segment->handles.erase(h.begin);
  extents_.put_unmapped(one.extent);
  if (!released) orphans_.push_back(h);
}

// Handles whose extents are held go back to the driver, from wherever they lie. Gives the bytes that did.
Bytes Core::give_back(const std::vector<IdleHandle>& idle) {
  Bytes released = 0;
  for (const IdleHandle& one : idle) {
    const bool unmapped = driver_->mem_unmap(one.handle.begin, one.handle.bytes).ok();
    const bool freed = unmapped && driver_->mem_release(one.handle.handle).ok();
    if (freed) {
      gave_back(one.handle.bytes);
      released += one.handle.bytes;
    }
    std::lock_guard lock(extent_lock_);
    if (!unmapped) {
      stuck_.push_back(one);
      continue;
    }
    one.segment->handles.erase(one.handle.begin);
    extents_.put_unmapped(one.extent);
    if (!freed) orphans_.push_back(one.handle);
  }
  return released;
}

// What the driver would not take back before: tried again.
Bytes Core::give_back_stuck() {
  std::vector<IdleHandle> stuck;
  std::vector<Handle> orphans;
  {
    std::lock_guard lock(extent_lock_);
    orphans.swap(orphans_);
    stuck.swap(stuck_);
  }
  Bytes released = give_back(stuck);
  // Unmapped long since, still the pool's until the driver takes them.
  for (const Handle& orphan : orphans) {
    if (driver_->mem_release(orphan.handle).ok()) {
      gave_back(orphan.bytes);
      released += orphan.bytes;
      continue;
    }
    std::lock_guard lock(extent_lock_);
    orphans_.push_back(orphan);
  }
  return released;
}

// Idle handles go back until `keep` bytes are reserved: as few as will do, the largest first. `exact`: a handle that is
// too large to go gives way to a smaller one, so that what stays is within one granularity of `keep`.
Bytes Core::give_back_mapped(Bytes keep, bool exact) {
  Bytes released = give_back_stuck();
  std::vector<IdleHandle> going;
  std::optional<IdleHandle> larger;
  Bytes sum = 0, most = 0;
  {
    std::lock_guard lock(extent_lock_);
    const Bytes reserved = reserved_.load(std::memory_order_acquire);
    most = reserved - std::min(reserved, keep);
    if (most >= granularity_) {
      std::vector<IdleHandle> idle = find_idle(0, 0);
      going = take_up_to(&idle, most, &sum);
      if (exact && most - sum >= granularity_ && !idle.empty()) larger = idle.back();
      std::vector<IdleHandle*> held;
      for (IdleHandle& one : going) held.push_back(&one);
      if (larger) held.push_back(&*larger);
      hold_idle(std::move(held));
    }
  }
  released += give_back(going);
  if (larger) released += shrink(*larger, round_down(most - sum, granularity_));
  return released;
}

// A held handle gives way to a new one that is smaller by `bytes`. Gives what went back; 0 when it stayed.
Bytes Core::shrink(const IdleHandle& one, Bytes bytes) {
  const Handle& old = one.handle;
  Handle rest{old.begin, old.bytes - bytes, 0};
  const auto stay = [&] {
    std::lock_guard lock(extent_lock_);
    extents_.put_free(one.extent, common_, 0);
    return Bytes{0};
  };
  if (!charge(rest.bytes)) return stay();
  if (!driver_->mem_create(rest.bytes, options_.traits, &rest.handle).ok()) return uncharge(rest.bytes), stay();
  note_peak();
  const auto drop_rest = [&] {
    if (driver_->mem_release(rest.handle).ok()) return uncharge(rest.bytes);
    std::lock_guard lock(extent_lock_);
    orphans_.push_back(rest);
  };
  if (!driver_->mem_unmap(old.begin, old.bytes).ok()) return drop_rest(), stay();
  const bool mapped = driver_->mem_map(rest.begin, rest.bytes, rest.handle).ok();
  const bool usable = mapped && driver_->mem_set_access(rest.begin, rest.bytes, options_.traits).ok() &&
                      (debugger_ == nullptr || debugger_->on_new_memory(rest.begin, rest.bytes).ok());
  if (!usable && (!mapped || driver_->mem_unmap(rest.begin, rest.bytes).ok())) {
    drop_rest();
    restore(one);
    return 0;
  }
  // The new handle stands in the old one's place, though it may be of no use.
  const bool freed = driver_->mem_release(old.handle).ok();
  if (freed) gave_back(old.bytes);
  std::lock_guard lock(extent_lock_);
  one.segment->handles.erase(old.begin);
  one.segment->handles.emplace(rest.begin, rest);
  Extent* head = extents_.carve(one.extent, rest.begin, rest.bytes, ExtentState::busy);
  extents_.put_unmapped(head->next);
  if (usable)
    extents_.put_free(head, common_, 0);
  else
    stuck_.push_back({head, one.segment, rest});
  if (!freed) orphans_.push_back(old);
  return freed ? old.bytes - rest.bytes : 0;
}

// Addresses cost nothing but addresses: one large range, so that neighbours can merge and growth continues where it
// ended.
bool Core::add_address_range(Bytes bytes, Status* status) {
  // Where addresses are scarce a chunk is small: each range is then as large as all before it.
  Bytes before = 0;
  {
    std::lock_guard lock(extent_lock_);
    for (const auto& segment : segments_) before += segment->range->size;
  }
  const Bytes unit = std::max(kPieceSize, granularity_);
  Bytes want = std::max({round_up(bytes, unit), round_up(driver_->capabilities().address_chunk, unit), before});
  for (;;) {
    Address begin = 0;
    *status = driver_->address_reserve(want, std::max(kMaxAlignment, granularity_), &begin);
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
    const Bytes half = round_up(want / 2, unit);
    if (half < bytes || half == want) return false;
    want = half;
  }
}

}  // namespace streampool::pool
