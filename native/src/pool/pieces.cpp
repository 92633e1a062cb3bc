// Segments that are one piece of a driver allocation each: of cuMemAlloc and its kin, whose frees wait until the device
// is idle, or of the driver's own stream-ordered pool, whose frees do not. Pieces of different segments never merge.
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

namespace {

// How long growth, or giving back, looks for the end of its own work on the pool's private stream, which waits for
// nobody. After that the memory counts as pending, like any that is not done.
constexpr double kOwnWork = 0.1;  // seconds

// A driver call that may block for the device's work, in a thread of its own. Who waits for it waits a bounded time;
// the thread finishes the book-keeping by itself.
struct Errand {
  std::mutex mutex;
  std::condition_variable done;
  std::size_t open = 0;
};

}  // namespace

// The size of a piece follows the request; a small one gets a share of what the pool holds, so that pieces stay few.
// Where that is not to be had it is the exact need.
Core::Grown Core::grow_piece(const Growth& growth, Status* status) {
  // Driver pieces start at extents' own alignment at least (checked below); for more the run may lose up to that much.
  const Bytes slack = growth.alignment > placement::kExtentAlign ? growth.alignment : 0;
  const Bytes share = std::min(reserved_.load(std::memory_order_relaxed) / kPieceShare, kLargestSharedPiece);
  Bytes size = 0, exact = 0;
  if (growth.bytes > ~Bytes{0} - slack || !round_up_checked(std::max(growth.bytes + slack, share), kPieceSize, &size) ||
      !round_up_checked(growth.bytes + slack, host_visible(kind_) ? kSmallPieceUnit : kPieceSize, &exact))
    return *status = {Code::out_of_memory, 2, "mem_alloc"}, Grown::refused;
  if (source_ == SegmentSource::driver) {
    // Freeing these stalls nobody: idle pieces make way for this one.
    if (growth.moving == Moving::all && movable_bytes() == 0) return Grown::nothing_idle;
    const Bytes reserved = reserved_.load(std::memory_order_acquire);
    const Bytes most = growth.moving == Moving::all     ? reserved
                       : growth.moving == Moving::slack ? std::min(size, idle_above_slack())
                                                        : 0;
    if (growth.moving == Moving::all) size = exact;
    if (most != 0) {
      const Bytes freed = give_back_pooled(reserved - most, size);
      Grown grown = take_piece(size, status);
      if (exact < size && (grown == Grown::limit || grown == Grown::refused)) grown = take_piece(exact, status);
      // What the driver's pool did not need for it.
      if (freed != 0) trim_driver_pool();
      return grown;
    }
  } else if (growth.moving == Moving::all) {
    return Grown::nothing_idle;  // their turn comes later: freeing them blocks
  }
  Grown grown = take_piece(growth.moving == Moving::none ? exact : size, status);
  if (exact < size && (grown == Grown::limit || grown == Grown::refused)) grown = take_piece(exact, status);
  return grown;
}

Core::Grown Core::take_piece(Bytes size, Status* status) {
  if (!charge(size)) return *status = {}, Grown::limit;
  const std::shared_lock gate(private_gate_);
  Address begin = 0;
  order::Ticket ticket = 0;
  *status =
      source_ == SegmentSource::driver ? alloc_pooled(size, &begin, &ticket) : driver_->mem_alloc(kind_, size, &begin);
  if (status->ok()) {
    const bool misplaced = begin + size > placement::PageMap::kAddressLimit || begin % placement::kExtentAlign != 0;
    if (misplaced) *status = {Code::not_supported, 801, source_ == SegmentSource::driver ? "pool_alloc" : "mem_alloc"};
    if (status->ok() && debugger_ != nullptr)
      *status = ticket == 0 ? debugger_->on_new_memory(begin, size)  // which touches it at once
                            : Status{Code::not_ready, 600, events_.failed_call()};
    if (!status->ok()) free_piece(begin);
  }
  if (!events_.noted(*status)) {
    uncharge(size);
    return status->code == Code::out_of_memory ? Grown::refused : Grown::failed;
  }
  note_peak();
  add_piece(begin, size, ticket);
  return Grown::yes;
}

// `ticket`: of the pool's private stream, which has not come to the piece's allocation yet; 0: it has.
void Core::add_piece(Address begin, Bytes size, order::Ticket ticket) {
  if (regions_ != nullptr) regions_->add_heap(begin, size);
  auto segment = std::make_unique<Segment>();
  std::lock_guard lock(extent_lock_);
  segment->range = extents_.add_range(begin, size);
  segment->range->note = segment.get();
  segments_.push_back(std::move(segment));
  Extent* extent = extents_.carve(segments_.back()->range->first, begin, size, ExtentState::busy);
  if (ticket == 0)
    extents_.put_free(extent, common_, 0);
  else
    extents_.put_free(extent, piece_heap_.load()->extents, ticket);
}

Status Core::free_piece(Address begin) {
  if (regions_ != nullptr) regions_->remove_heap(begin);
  if (source_ != SegmentSource::driver) return driver_->mem_free(kind_, begin);
  return driver_->pool_free(piece_heap_.load()->stream.handle, begin);
}

// -- the driver's own pool ------------------------------------------------------------------------------------------

// The driver's pool and a private stream for its allocations and frees, both made when they are first needed. Who finds
// that another thread was quicker gives its own up: no lock is held over these calls.
Status Core::open_driver_pool() {
  Status status;
  if (driver_pool_.load() == 0) {
    driver::PoolHandle pool = 0, none = 0;
    status = driver_->pool_create(&pool);
    if (!status.ok()) return status;
    if (!driver_pool_.compare_exchange_strong(none, pool)) driver_->pool_destroy(pool);
  }
  if (piece_heap_.load() == nullptr) {
    driver::StreamHandle handle = 0;
    status = driver_->stream_create(&handle);
    if (!status.ok()) return status;
    Failure failure;
    Heap* heap = streams_.adopt(handle, &failure);
    if (heap == nullptr) {
      driver_->stream_destroy(handle);
      return failure.cause;
    }
    Heap* none = nullptr;
    if (!piece_heap_.compare_exchange_strong(none, heap)) drop_own_stream(heap);
  }
  return status;
}

// Stream-ordered on the private stream, which is fenced at once: normally the stream comes there within microseconds,
// and the memory is everybody's. Else `ticket` says what it waits for.
Status Core::alloc_pooled(Bytes size, Address* begin, order::Ticket* ticket) {
  const Status opened = open_driver_pool();
  if (!opened.ok()) return opened;
  order::StreamState& s = piece_heap_.load()->stream;
  const Status status = driver_->pool_alloc(driver_pool_.load(), s.handle, size, begin);
  if (!status.ok()) return status;
  const order::Ticket taken = own_work();
  if (taken > s.completed.load(std::memory_order_acquire)) *ticket = taken;
  return status;
}

// A mark behind what was queued on the private stream just now, and a bounded wait for it.
order::Ticket Core::own_work() {
  order::StreamState& s = piece_heap_.load()->stream;
  s.lock.lock();
  const order::Ticket ticket = s.take_ticket();
  s.lock.unlock();
  const double end = driver_->now() + kOwnWork;
  constexpr int kMaxLooks = 10000;  // time may stand still on a simulated device
  for (int look = 0; look < kMaxLooks; ++look) {
    // Does nothing once there is a fence. Not an exact one: no stream is made to wait for it, since other streams that
    // the program lets touch the block would have to wait as well.
    fences_.record(s, s.handle);
    fences_.poll(s);
    if (s.completed.load(std::memory_order_acquire) >= ticket || lost_.load()) break;
    if (driver_->now() > end) break;
    driver_->pause(look < 64 ? 0 : 20e-6);
  }
  driver_->pool_observe(s.handle);  // while it is not done there is nothing to give back
  return ticket;
}

// Idle pieces go into the driver's pool and out of it again, as few as make room for `size` more above `keep`.
Bytes Core::give_back_pooled(Bytes keep, Bytes size) {
  std::vector<Piece> plans;
  {
    std::lock_guard lock(extent_lock_);
    std::vector<Segment*> idle = idle_pieces();
    Bytes left = reserved_.load(std::memory_order_acquire);
    Bytes wanted = size;
    while (!idle.empty() && wanted != 0) {
      // The smallest that is enough, else the largest.
      auto at = std::find_if(idle.begin(), idle.end(), [&](const Segment* s) { return s->range->size >= wanted; });
      if (at == idle.end()) at = std::prev(idle.end());
      const Bytes bytes = (*at)->range->size;
      if (left >= bytes && left - bytes >= keep) {
        left -= bytes;
        wanted -= std::min(wanted, bytes);
        plans.push_back(take_out(*at));
      }
      idle.erase(at);
    }
  }
  return plans.empty() ? 0 : free_pooled(plans);
}

// What the driver's pool keeps is memory that we hold, and count no more: it goes back, but for what our pieces need.
void Core::trim_driver_pool() {
  const std::shared_lock gate(private_gate_);
  const driver::PoolHandle pool = driver_pool_.load();
  Heap* heap = piece_heap_.load();
  if (pool == 0 || heap == nullptr) return;    // nothing was ever taken from it
  driver_->pool_observe(heap->stream.handle);  // again: it may have failed behind the last free
  const Bytes reserved = reserved_.load(std::memory_order_acquire);
  driver_->pool_trim(pool, reserved - std::min(reserved, leaving_.load()));
}

// Stream-ordered, on the private stream, and normally done when this returns.
Bytes Core::free_pooled(const std::vector<Piece>& pieces) {
  const std::shared_lock gate(private_gate_);
  Bytes freed = 0;
  for (const Piece& piece : pieces) {
    if (free_piece(piece.begin).ok())
      freed += piece.bytes;
    else
      add_piece(piece.begin, piece.bytes, 0);
  }
  if (freed != 0) {
    own_work();
    gave_back(freed);
  }
  for (const Piece& piece : pieces) leaving_.fetch_sub(piece.bytes);
  return freed;
}

void Core::close_driver_pool() {
  if (const driver::PoolHandle pool = driver_pool_.exchange(0); pool != 0) driver_->pool_destroy(pool);
  if (Heap* heap = piece_heap_.exchange(nullptr); heap != nullptr) drop_own_stream(heap);
}

// -- giving pieces back ---------------------------------------------------------------------------------------------

// Under the extent lock.
bool Core::idle_piece(const Segment& segment) const {
  const Extent* e = segment.range->first;
  return !segment.mapped && e->index == &common_ && e->size == segment.range->size;
}

// Under the extent lock: the idle ones, the smallest first.
std::vector<Segment*> Core::idle_pieces() const {
  std::vector<Segment*> idle;
  for (const auto& segment : segments_)
    if (idle_piece(*segment)) idle.push_back(segment.get());
  std::sort(idle.begin(), idle.end(),
            [](const Segment* a, const Segment* b) { return a->range->size < b->range->size; });
  return idle;
}

// Under the extent lock: an idle piece leaves the books. Once the driver has it, its addresses may come back to us as a
// new piece at any moment; its bytes stay charged until the call returns.
Core::Piece Core::take_out(Segment* segment) {
  Range* range = segment->range;
  const Piece piece{range->begin, range->size};
  extents_.hold(range->first);
  forget_pages(*range);
  leaving_.fetch_add(range->size);
  extents_.remove_range(range);
  std::erase_if(segments_, [segment](const auto& s) { return s.get() == segment; });
  return piece;
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
  for_each_large([&](LargeBlock& block) {
    if (!inside(block.page) || placement::PageMap::find(block.page).pointer() != &block) return;
    placement::PageMap::clear(block.page, 1, &block);
    spare_large_.push_back(&block);
  });
}

// Whole driver pieces that are free and complete, the largest first, as long as `keep` bytes stay.
Bytes Core::give_back_pieces(Bytes keep, double timeout, bool* interrupted) {
  std::vector<Piece> plans;
  {
    std::lock_guard lock(extent_lock_);
    const std::vector<Segment*> idle = idle_pieces();
    Bytes left = reserved_.load(std::memory_order_acquire);
    for (auto segment = idle.rbegin(); segment != idle.rend(); ++segment) {
      const Bytes bytes = (*segment)->range->size;
      if (left < bytes || left - bytes < keep) continue;
      left -= bytes;
      plans.push_back(take_out(*segment));
    }
  }
  // What an earlier call gave back may be kept by the driver's pool still, if a call failed then.
  if (plans.empty() && source_ == SegmentSource::driver) return trim_driver_pool(), Bytes{0};
  if (plans.empty()) return wait_for_leaving(timeout, interrupted);
  if (source_ != SegmentSource::driver) return free_on_errand(plans, timeout, interrupted);
  const Bytes freed = free_pooled(plans);
  trim_driver_pool();
  return freed;
}

// Pieces that an earlier call gave to a thread of theirs, and did not wait for to the end. Gives the bytes that went.
Bytes Core::wait_for_leaving(double timeout, bool* interrupted) {
  const Bytes before = leaving_.load();
  Patience patience{.deadline = driver_->now() + timeout};
  while (before != 0 && leaving_.load() >= before) {
    const Rest rested = rest(patience);
    if (rested == Rest::interrupted && interrupted != nullptr) *interrupted = true;
    if (rested != Rest::waited) break;
  }
  return before - std::min(before, leaving_.load());
}

// mem_free blocks until the device is idle, so a thread of its own does it.
Bytes Core::free_on_errand(const std::vector<Piece>& plans, double timeout, bool* interrupted) {
  auto released = std::make_shared<std::atomic<Bytes>>(0);
  auto errand = std::make_shared<Errand>();
  errand->open = 1;
  std::thread([self = shared_from_this(), plans, released, errand] {
    for (const Piece& plan : plans) {
      if (self->free_piece(plan.begin).ok()) {
        self->leaving_.fetch_sub(plan.bytes);
        self->gave_back(plan.bytes);
        released->fetch_add(plan.bytes);
      } else {
        self->add_piece(plan.begin, plan.bytes, 0);
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

}  // namespace streampool::pool
