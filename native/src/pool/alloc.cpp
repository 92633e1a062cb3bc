// Allocation: what is needed, which stream, and handing out what was found.
#include <algorithm>

#include "fast.hpp"

namespace streampool::pool {

using placement::PageMap;

namespace {

// Needs no thought about where it lies, and nothing written down but what every block has.
bool is_plain(const AllocRequest& request) {
  return request.alignment <= kMinAlignment && is_power_of_two(request.alignment) && request.tag.empty() &&
         !request.settled;
}

std::uint32_t owner_of(const AllocRequest& request) {
  return (request.raw ? kRawBlock : 0u) | (request.owned ? kOwned : 0u);
}

std::uint32_t flags_of(const AllocRequest& request) {
  return owner_of(request) | (request.sample == AllocRequest::Sample::yes ? kSampled : 0u);
}

std::uint64_t origin_of(const AllocRequest& request) {
  return BlockRecord::pack_origin(0, flags_of(request), request.stack);
}

}  // namespace

Errc Core::enter(Failure* failure) const {
  if (closed())
    return failure->set(Errc::closed, "pool '" + name_ + "' on " + std::string(driver_->name()) + " is closed");
  return refuse_when_ending(failure);
}

Errc Core::plan(const AllocRequest& request, Need* need, Failure* failure) const {
  if (!is_power_of_two(request.alignment) || request.alignment > kMaxAlignment)
    return failure->set(Errc::invalid_alignment, "alignment " + std::to_string(request.alignment) +
                                                     " is not a power of two from 1 to 2097152 (2 MiB)");
  const Bytes alignment = std::max(request.alignment, kMinAlignment);
  need->size = request.size;
  need->strict = request.settled || (host_visible(kind_) && !request.stream_ordered && !options_.stream_ordered);
  if (request.size == 0 && debugger_ == nullptr) {
    need->cls = kZeroClass;
    need->bytes = 0;
    // Addresses without memory are aligned as asked only up to their spacing; more is served from memory.
    if (alignment == kMinAlignment) return Errc::ok;
  }
  need->front = debugger_ != nullptr ? debugger_->front_bytes(alignment) : 0;
  const Bytes extra = need->front + (debugger_ != nullptr ? debugger_->back_bytes() : 0);
  Bytes total = 0, rounded = 0;
  if (request.size > ~Bytes{0} - extra || !round_up_checked(total = request.size + extra, kExtentAlignment, &rounded) ||
      rounded >= PageMap::kAddressLimit) {
    failure->oom = std::make_unique<OomReport>();
    OomReport& r = *failure->oom;
    r.request = request.size;
    r.alignment = request.alignment;
    r.device = driver_->name();
    r.pool = name_;
    r.kind = kind_name(kind_);
    r.limit = limit();
    r.reserved = reserved_.load();
    r.in_use = static_cast<Bytes>(bank_->totals().in_use);
    r.device_known = driver_->mem_info(&r.device_free, &r.device_total).ok();
    r.reason = OomReason::driver;
    r.driver_error = "no device has that many addresses";
    return failure->set(Errc::out_of_memory, describe(r));
  }
  if (total <= placement::kMaxSlotSize) {
    Bytes fit = std::max(total, alignment);
    unsigned cls = fit <= placement::kMaxSlotSize ? placement::class_of(fit) : kNoClass;
    // Slots lie at multiples of their size from a 64 KiB boundary: a power of two keeps any alignment up to there.
    if (cls != kNoClass && alignment > kMinAlignment && placement::class_size(cls) % alignment != 0) {
      fit = std::bit_ceil(fit);
      cls = fit <= placement::kMaxSlotSize ? placement::class_of(fit) : kNoClass;
    }
    if (cls != kNoClass) {
      need->cls = cls;
      need->bytes = placement::class_size(cls);
      return Errc::ok;
    }
  }
  need->cls = kNoClass;
  // At most one user's pointer may lie in a page of the page map: behind it the block reaches a whole page further.
  need->bytes = std::max(rounded, round_up(need->front + placement::kSlabUnit, kExtentAlignment));
  need->alignment = std::max(alignment, kExtentAlignment);
  return Errc::ok;
}

Errc Core::check_device(const Named& named, Failure* failure) const {
  if (named.stream().events == nullptr) return Errc::ok;
  return failure->set(Errc::stream, "stream " + hex(named.handle()) + " belongs to another device than the pool's, " +
                                        std::string(driver_->name()) +
                                        ": memory is allocated and freed on streams of its own device. A peer's "
                                        "stream that uses a block is declared with record_stream");
}

Errc Core::name_stream(driver::StreamHandle handle, Named* out, Failure* failure) {
  // Before: what is found may be forgotten meanwhile.
  const std::uint64_t epoch = door_.epoch.load(std::memory_order_acquire) & ~kShut;
  if (const ThreadCache& cache = thread_cache(); cache.handle == handle && cache.epoch == epoch) {
    *out = Named::remembered(cache.heap, canonical(handle), epoch);
    if (debugger_ != nullptr) fence_dropped(*out);
    return Errc::ok;
  }
  Errc errc = name_any(handle, out, failure);
  if (errc == Errc::ok) errc = check_device(*out, failure);
  if (errc != Errc::ok) return errc;
  if (debugger_ != nullptr) fence_dropped(*out);
  if (out->stream().lasting && !streams_.capture_known()) {
    counters();  // makes the cache this pool's
    ThreadCache& cache = thread_cache();
    cache.handle = handle;
    cache.epoch = epoch;
    cache.heap = out->heap();
    cache.key = ordinary_ && !closed() ? epoch : kShut;
  }
  return Errc::ok;
}

bool Core::keep(Named* named) const {
  if (named->epoch() == 0) return true;
  // Counted first, looked at then: whoever takes a heap away changes the epoch, or what the heap is, first, and counts
  // then.
  named->count();
  if (!stands(*named)) return false;
  named->stand();
  return true;
}

Errc Core::hold_any(Named* named, Failure* failure) {
  if (keep(named)) return Errc::ok;
  const driver::StreamHandle handle = named->handle();
  *named = Named();
  return name_anew(handle, named, failure);
}

Errc Core::hold(Named* named, Failure* failure) {
  const Errc errc = hold_any(named, failure);
  return errc == Errc::ok && named->heap() != nullptr ? check_device(*named, failure) : errc;
}

Errc Core::name_any(driver::StreamHandle handle, Named* out, Failure* failure) {
  const ThreadCache& cache = thread_cache();
  const std::uint64_t epoch = door_.epoch.load(std::memory_order_acquire) & ~kShut;
  if (cache.raw_handle != handle || cache.raw_epoch != epoch) return name_anew(handle, out, failure);
  observe::CounterBank::on_lookup(counters());
  if (!streams_.is_still(handle, cache.raw_id)) return name_anew(handle, out, failure);
  *out = Named::remembered(cache.raw_heap, handle, epoch, cache.raw_id);
  fence_owed(*out);
  return Errc::ok;
}

Errc Core::name_anew(driver::StreamHandle handle, Named* out, Failure* failure) {
  const std::uint64_t epoch = door_.epoch.load(std::memory_order_acquire) & ~kShut;
  const Errc errc = streams_.name(handle, out, failure);
  if (errc != Errc::ok) return errc;
  if (out->stream().lasting) {
    // Others may not fence it now, so its owner's calls do.
    if (streams_.capture_declared() && !out->stream().legacy) fence_owed(*out);
    return Errc::ok;
  }
  if (handle != driver::kPerThreadStream) {
    counters();  // makes the cache this pool's
    ThreadCache& cache = thread_cache();
    cache.raw_handle = handle;
    cache.raw_epoch = epoch;
    cache.raw_id = out->stream().id.load(std::memory_order_relaxed);
    cache.raw_heap = out->heap();
  }
  fence_owed(*out);
  // Streams that come and go leave their entries behind until somebody looks.
  if (sweep_is_due()) sweep_streams();
  return Errc::ok;
}

Errc Core::allocate(const AllocRequest& given, BlockRef* out, Failure* failure) {
  AllocRequest request = given;
  const bool plain = is_plain(request);
  if (plain && at_home(thread_cache(), request.stream)) {
    ask_for_sample(&request);
    if (allocate_at_home(request, out)) {
      if (request.sample == AllocRequest::Sample::yes) count_site(request);
      return Errc::ok;
    }
  }
  Errc errc = enter(failure);
  if (errc != Errc::ok) return errc;
  ask_for_sample(&request);
  const bool simple = ordinary_ && plain;
  Need need;
  if (!simple) errc = plan(request, &need, failure);
  if (errc != Errc::ok) return errc;
  Named named;
  errc = name_stream(request.stream, &named, failure);
  if (errc != Errc::ok) return errc;
  if (work_to_do()) drain();
  if (simple) {
    Bytes gross = 0;
    bool served = false;
    {
      std::lock_guard lock(named.stream().lock);
      served = stands(named) && serve_large_too(*named.heap(), request, out, &gross);
    }
    if (served) {
      count_allocation(request.size, gross, 0);
      if (request.sample == AllocRequest::Sample::yes) count_site(request);
      return Errc::ok;
    }
    errc = plan(request, &need, failure);
    if (errc != Errc::ok) return errc;
  }
  errc = hold(&named, failure);
  if (errc != Errc::ok) return errc;
  Found found;
  if (page_guards_ != nullptr) note_named(*named.heap());
  if (take_guarded(named, request, &need, &found)) {
    count_path(found.path);
  } else if (!find_own(named, need, &found)) {
    errc = climb(named, need, request, &found, failure);
    if (errc != Errc::ok) {
      // The next sample was counted from behind a block that there is not.
      draw_sample(counters().allocated_bytes.load(std::memory_order_relaxed));
      if (failure->lost || lost_.load()) dissect(failure->cause);
      return errc;
    }
  } else if (found.path != Path::own) {
    count_path(found.path);
  }
  if (request.sample == AllocRequest::Sample::yes) count_site(request);
  if (!ordinary_) observe::CounterBank::on_size(counters(), request.size, request.size);  // each comes here
  if (debugger_ == nullptr) {
    *out = hand_out(request, need, named, found, request.tag.empty() && !options_.debug.track ? 0 : driver_->now());
    return Errc::ok;
  }
  // The memory is complete; guards and edges are written where the pattern is not in place already, before anybody who
  // checks can see the block.
  debug::BlockFacts place;
  place.begin = found.begin;
  place.reserved = found.bytes;
  place.address = found.begin + need.front;
  place.size = request.size;
  place.pages = found.pages;
  const driver::Status status = debugger_->on_allocate(place);
  const double now = driver_->now();
  *out = hand_out(request, need, named, found, now);
  if (found.pages != debug::PageGuard::none && guard_records_.is_open())
    guard_records_.allocated(facts_of(*out->record, out->address), hooks_.resolve_stack);
  if (regions_ != nullptr && request.size != 0) {
    const std::uint64_t serial = facts_of(*out->record, out->address).serial;
    regions_->add_region(
        out->address, request.size,
        "streampool block #" + std::to_string(serial) + (request.tag.empty() ? "" : " " + std::string(request.tag)));
  }
  if (!status.ok()) {
    Failure ignored;
    free(*out, FreeRequest{}, &ignored);
    return failure->set(Errc::driver, "the guards of a new block could not be written: " + driver::describe(status));
  }
  debugger_->poll(now);
  return Errc::ok;
}

// On the stream that this thread used last, which has no reason to be looked at: its lock is waited for here.
bool Core::allocate_at_home(const AllocRequest& request, BlockRef* out) {
  ThreadCache& cache = thread_cache();
  Bytes gross = 0;
  {
    std::lock_guard lock(cache.heap->stream.lock);
    // Again: the stream may have been forgotten, and its heap be another's, before the lock was ours.
    if (!at_home(cache, request.stream) || !serve_large_too(*cache.heap, request, out, &gross)) return false;
  }
  if (bank_->on_allocate(*cache.counters, request.size, gross, 0)) bank_->raise(*cache.counters);
  return true;
}

bool Core::serve_large_too(Heap& heap, const AllocRequest& request, BlockRef* out, Bytes* gross) {
  const std::uint64_t origin = origin_of(request);
  return serve(heap, request.size, origin, out, gross) || serve_extent(heap, request.size, origin, out, gross);
}

void Core::ask_for_sample(AllocRequest* request) {
  if (request->sample == AllocRequest::Sample::ask)
    request->sample = sample_is_due(request->size) ? AllocRequest::Sample::yes : AllocRequest::Sample::no;
}

bool Core::sample_is_due(Bytes size) {
  observe::ThreadCounters& mine = counters();
  const Bytes allocated = mine.allocated_bytes.load(std::memory_order_relaxed);
  ThreadCache& cache = thread_cache();
  // The sum, as on the fast path: others may have allocated meanwhile, in a callback, so that it is past already.
  if (size < ~Bytes{0} - allocated && allocated + size < cache.next_sample) return false;
  // What lies behind the sampled byte counts as it is, what lies before it by the mean: as good as Sampler::weight on
  // average, without an exponential function here.
  const Bytes before = cache.next_sample - std::min(allocated, cache.next_sample);
  if (ordinary_ && sampler_.mean() != 0)
    observe::CounterBank::on_size(mine, size, sampler_.mean() + size - std::min(before, size));
  // From behind this block on.
  draw_sample(allocated + size);
  return sampler_.mean() != 0;
}

bool Core::try_allocate(const AllocRequest& request, BlockRef* out) {
  return is_plain(request) &&
         finished(fast_allocate(request.size, request.stream, owner_of(request), request.stack, out));
}

// What every block needs written down; nobody else has the record: its state is `freed` or `fresh`.
BlockRef Core::hand_out(const AllocRequest& request, const Need& need, Named& named, const Found& found, double now) {
  BlockRecord& record = *found.record;
  Heap* home = named.heap();
  const bool slot = PageMap::Entry{record.container}.tag() == PageMap::Tag::slab;
  const bool away = !slot || static_cast<Slab*>(PageMap::Entry{record.container}.pointer())->heap != home;
  if (away && !found.counted) home->users.fetch_add(1, std::memory_order_relaxed);
  const bool described = options_.debug.track || page_guards_ != nullptr || !request.tag.empty();
  if (described) {
    std::lock_guard lock(extra_lock(&record));
    BlockExtra& extra = record.more();
    extra.forget();
    extra.serial = serial_.fetch_add(1, std::memory_order_relaxed) + 1;
    extra.allocated_thread = thread_id();
    extra.allocated_time = now;
    extra.allocated_moment = debug::now_moment();
    extra.tag = request.tag;
  } else if (debugger_ != nullptr || found.has_extra) {
    std::lock_guard lock(extra_lock(&record));
    if (record.extra) record.extra->forget();
  }
  std::uint32_t flags = flags_of(request);
  if (slot && away) flags |= kAway;
  if (described || found.has_extra) flags |= kHasExtra;
  const std::uint64_t origin = BlockRecord::pack_origin(static_cast<std::uint32_t>(need.front), flags, request.stack);
  record.home.store(home, std::memory_order_relaxed);
  const std::uint32_t generation =
      write_record(record, record.word.load(std::memory_order_relaxed), request.size, origin);
  count_allocation(request.size, found.bytes, guards_of(record));
  return BlockRef{found.begin + need.front, &record, generation};
}

bool Core::find_own(Named& t, const Need& need, Found* found) {
  Heap& heap = *t.heap();
  if (need.slot() ? take_slot(heap, need, found) || take_waiting(heap, need, found) : take_quick(heap, need, found))
    return true;
  for (;;) {
    if (!need.slot()) {
      if (take_extent(heap, need, found)) return true;
    } else {
      Path path = Path::own;
      while (cut_slab(heap, need, &path)) {
        if (!take_slot(heap, need, found)) continue;
        found->path = path;
        return true;
      }
    }
    // What the stream keeps whole for its next blocks may make a place in one piece.
    if (!retire_idle(heap)) return false;
  }
}

}  // namespace streampool::pool
