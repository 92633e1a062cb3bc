// Making and ending a pool, and the small parts that the others share.
#include "core.hpp"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include <thread>

#include "thread_cache.hpp"

namespace streampool::pool {

using placement::Extent;
using placement::PageMap;

thread_local ThreadCache g_thread_cache __attribute__((tls_model("initial-exec")));

std::uint64_t thread_id() {
  thread_local const std::uint64_t id = static_cast<std::uint64_t>(syscall(SYS_gettid));
  return id;
}

namespace {

// Every live pool of the process. Leaked on purpose: statics of the user's may outlive ours (R22).
struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<Core>> pools;
  std::vector<Core*> buried;  // nobody's, but work may still touch their memory
};
Registry& registry() {
  static Registry* r = new Registry;
  return *r;
}

std::atomic<std::uint64_t> g_next_uid{1};

// The counters that this thread writes, by pool; folded into their banks when the thread ends.
struct ThreadBanks {
  struct Entry {
    std::uint64_t uid;
    std::shared_ptr<observe::CounterBank> bank;
    observe::ThreadCounters* counters;
  };
  std::vector<Entry> entries;
  ~ThreadBanks() {
    for (Entry& e : entries) e.bank->leave(e.counters);
    thread_cache() = ThreadCache{};
  }
};
thread_local ThreadBanks g_thread_banks;

void on_fork() {
  driver::set_ending(driver::Ending::forked);
}

}  // namespace

std::span<const char* const> path_words() {
  static constexpr const char* kWords[] = {
#define STREAMPOOL_ROW(name, text) #name,
      STREAMPOOL_PATHS(STREAMPOOL_ROW)
#undef STREAMPOOL_ROW
  };
  return kWords;
}

observe::ThreadCounters& Core::counters() {
  ThreadCache& cache = thread_cache();
  if (cache.uid == uid_) return *cache.counters;
  auto& entries = g_thread_banks.entries;
  auto it = std::find_if(entries.begin(), entries.end(), [this](const auto& e) { return e.uid == uid_; });
  if (it == entries.end()) {
    // Banks of pools that are gone have this thread as their only holder.
    std::erase_if(entries, [](const auto& e) { return e.bank.use_count() == 1; });
    entries.push_back({uid_, bank_, bank_->join()});
    it = entries.end() - 1;
  }
  cache = ThreadCache{};
  cache.uid = uid_;
  cache.counters = it->counters;
  return *it->counters;
}

Core::Core(std::shared_ptr<driver::Driver> driver, Kind kind, std::string name, const Options& options)
    : driver_(std::move(driver)),
      kind_(kind),
      name_(std::move(name)),
      options_(options),
      uid_(g_next_uid.fetch_add(1)),
      streams_(*driver_),
      fences_(*this) {
  debug::Host& host = *this;
  if (options_.debug.enabled()) debugger_ = std::make_unique<debug::Debugger>(*driver_, kind_, options_.debug, host);
}

std::shared_ptr<Core> Core::create(std::shared_ptr<driver::Driver> driver, Kind kind, std::string name, const Options& options,
                                   Failure* failure) {
  if (driver::ending() != driver::Ending::no) {
    failure->set(driver::ending() == driver::Ending::forked ? Errc::forked : Errc::exiting,
                 driver::ending() == driver::Ending::forked
                     ? "no pool can be made in a forked child: CUDA does not survive a fork. Start processes with "
                       "multiprocessing.get_context('spawn')"
                     : "the process is exiting: no pool can be made");
    return nullptr;
  }
  if (kind == Kind::managed && !driver->capabilities().managed_memory) {
    failure->set(Errc::driver, "device " + std::string(driver->name()) + " has no managed memory; use kind='device' or 'pinned'");
    return nullptr;
  }
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, on_fork); });
  reap();
  std::shared_ptr<Core> core(new Core(std::move(driver), kind, std::move(name), options), bury);
  {
    std::lock_guard lock(registry().mutex);
    std::erase_if(registry().pools, [](const auto& p) { return p.expired(); });
    registry().pools.push_back(core);
  }
  Bytes reserved = 0;
  if (options.initial != 0 && core->reserve(options.initial, &reserved, failure) != Errc::ok) return nullptr;
  return core;
}

std::vector<std::shared_ptr<Core>> Core::all() {
  std::vector<std::shared_ptr<Core>> alive;
  std::lock_guard lock(registry().mutex);
  for (const auto& p : registry().pools)
    if (auto core = p.lock()) alive.push_back(std::move(core));
  return alive;
}

// Everything freed is complete, or nothing can be done about it any more.
bool Core::settled() {
  drain();
  poll_all(true);
  if (debugger_ != nullptr) debugger_->give_up(debug::Debugger::kEverything);
  retire_idle_slabs();
  promote();
  return pending_bytes() == 0 && (debugger_ == nullptr || debugger_->totals().quarantined_blocks == 0);
}

// The last holder is gone. Memory that work may still touch is not pulled away under it (R1), and nobody waits in a
// destructor: such a pool is kept until its work is done, which the next pool's slow path finds out.
void Core::bury(Core* core) {
  core->buried_ = true;
  core->hooks_ = Hooks{};
  if (driver::ending() != driver::Ending::no || core->settled()) {
    delete core;
    return;
  }
  // Streams that are gone fence nothing any more; often their work is done all the same.
  if (core->options_.recover_stranded && !core->streams_.capture_known()) core->fences_.record_context(core->streams_.states());
  constexpr int kLooks = 4;
  for (int i = 0; i < kLooks; ++i)
    if (core->settled()) {
      delete core;
      return;
    }
  std::lock_guard lock(registry().mutex);
  registry().buried.push_back(core);
}

void Core::reap() {
  std::vector<Core*> candidates;
  {
    std::lock_guard lock(registry().mutex);
    candidates.swap(registry().buried);
  }
  for (Core* core : candidates) {
    if (driver::ending() == driver::Ending::no && core->settled()) {
      delete core;
      continue;
    }
    std::lock_guard lock(registry().mutex);
    registry().buried.push_back(core);
  }
}

Core::~Core() {
  const bool ending = driver::ending() != driver::Ending::no;
  if (!ending) {
    give_back_mapped(0);
    for (const auto& segment : segments_) {
      if (segment->mapped) continue;
      Extent* e = segment->range->first;
      // Freeing a piece blocks until the device is idle; a destructor does not wait for that.
      if (e->index == &common_ && e->size == segment->range->size)
        std::thread([driver = driver_, kind = kind_, at = segment->range->begin] { driver->mem_free(kind, at); }).detach();
    }
    std::vector<order::StreamState*> states = streams_.states();
    fences_.clear(states);
    for (Heap* relay : relays_) driver_->stream_destroy(relay->stream.handle);
    for (const auto& segment : segments_)
      if (segment->mapped && segment->range->first->size == segment->range->size &&
          segment->range->first->state == placement::ExtentState::unmapped)
        driver_->address_free(segment->range->begin, segment->range->size);
  } else {
    std::vector<order::StreamState*> states = streams_.states();
    fences_.clear(states);
  }
  for (const auto& slab : slabs_)
    if (slab->base != 0) PageMap::clear(slab->base, slab->bytes, slab.get());
  for (const auto& block : large_) PageMap::clear(block->page, 1, block.get());
  for (const auto& [area, size] : zero_areas_) munmap(area, size);
  mixed_.for_each([](const Extent* e) { delete static_cast<order::MarkSet*>(e->note); });
}

// -- order::Events, through the driver ---------------------------------------------------------------------------------

bool Core::create(std::uintptr_t* event) { return driver_->event_create(event).ok(); }
void Core::destroy(std::uintptr_t event) { driver_->event_destroy(event); }

bool Core::record(std::uintptr_t event, std::uintptr_t stream) {
  if (!driver_->event_record(event, stream).ok()) return false;
  // A record that a capture swallowed would query as done: only what was surely not capturing counts (R3).
  driver::CaptureState capture;
  return driver_->stream_is_capturing(stream, &capture).ok() && !capture.capturing;
}

bool Core::record_context(std::uintptr_t event) {
  return driver_->capabilities().context_events && driver_->context_event_record(event).ok();
}

bool Core::done(std::uintptr_t event) {
  const driver::Status status = driver_->event_query(event);
  // Nothing on a lost device will ever be done: waits end at once.
  if (status.code == driver::Code::lost) lost_.store(true, std::memory_order_release);
  return status.ok();
}
bool Core::wait(std::uintptr_t stream, std::uintptr_t event) { return driver_->stream_wait_event(stream, event).ok(); }

// -- streams -----------------------------------------------------------------------------------------------------------

Errc Core::register_stream(driver::StreamHandle stream, Failure* failure) {
  Errc errc = enter(failure);
  if (errc != Errc::ok) return errc;
  Named named;
  errc = streams_.register_stream(stream, &named, failure);
  if (errc == Errc::ok) fence_owed(named);
  return errc;
}

Errc Core::forget_stream(driver::StreamHandle stream, Failure* failure) {
  if (driver::ending() != driver::Ending::no) return Errc::ok;
  drain();
  Named named;
  Errc errc = streams_.name(stream, &named, failure);
  if (errc != Errc::ok) return errc;
  // The last call that names it: what is outstanding gets its fence while the stream still lives.
  fences_.record(named.stream(), named.handle());
  return named.stream().lasting ? streams_.forget_stream(stream, failure) : Errc::ok;
}

void Core::begin_capture() { streams_.begin_capture(); }
void Core::end_capture() { streams_.end_capture(); }

// -- growing, shrinking, ending ---------------------------------------------------------------------------------------------

Errc Core::reserve(Bytes bytes, Bytes* reserved, Failure* failure) {
  const Errc errc = enter(failure);
  if (errc != Errc::ok) return errc;
  driver::Status status;
  const Bytes before = reserved_.load();
  Grown grown = Grown::yes;
  // One piece where it can be had, so that it serves a large block too.
  if (bytes > before) grown = grow(nullptr, bytes - before, placement::kExtentAlign, false, false, &status);
  *reserved = reserved_.load();
  if (grown == Grown::yes) return Errc::ok;
  if (grown == Grown::failed && status.code != driver::Code::out_of_memory)
    return failure->set(Errc::driver, "reserve: the driver gave no memory: " + driver::describe(status));
  AllocRequest request;
  request.size = bytes - before;
  return out_of_memory(0, bytes - before, request, grown == Grown::limit ? OomReason::limit : OomReason::driver, status, failure);
}

TrimResult Core::trim(Bytes keep) {
  TrimResult result;
  if (driver::ending() != driver::Ending::no) return result;
  settled();  // takes in all that is complete, the quarantine too
  result.released = give_back_idle(keep, options_.wait_timeout);
  const Stats now = stats();
  result.reserved = now.reserved;
  result.pending = now.pending + now.quarantined;
  result.pinned_by_live = now.reserved - std::min(now.reserved, result.pending + std::min(keep, now.cached));
  return result;
}

void Core::close() {
  const bool again = closed_.exchange(true, std::memory_order_acq_rel);
  if (driver::ending() != driver::Ending::no) return;
  drain(again);
  if (again) return;
  if (debugger_ != nullptr) debugger_->give_up(debug::Debugger::kEverything);
  reap();
  if (bank_->totals().gross == 0) let_go();
  else give_back_idle(0, 0);
}

// Nothing is live: the driver has everything back as soon as all work is done, for which we wait a bounded time.
void Core::let_go() {
  const double deadline = driver_->now() + options_.wait_timeout;
  double pause = 20e-6;
  for (;;) {
    poll_all(true);
    retire_idle_slabs();
    promote();
    if (debugger_ != nullptr) debugger_->give_up(debug::Debugger::kEverything);
    if (pending_bytes() == 0 && (debugger_ == nullptr || debugger_->totals().quarantined_blocks == 0)) break;
    if (lost_.load() || driver_->now() >= deadline || (hooks_.interrupted && hooks_.interrupted())) break;
    if (options_.recover_stranded && !streams_.capture_known() && !fences_.context_pending()) fences_.record_context(streams_.states());
    driver_->pause(pause);
    pause = std::min(pause * 2, 2e-3);
  }
  retire_idle_slabs();
  promote();
  give_back_idle(0, std::max(0.0, deadline - driver_->now()));
  if (pending_bytes() != 0 || bank_->totals().gross != 0) return;
  // Nothing can ask for an event any more.
  fences_.clear(streams_.states());
  std::vector<Heap*> relays;
  {
    std::lock_guard lock(relay_mutex_);
    relays.swap(relays_);
  }
  for (Heap* relay : relays) {
    Failure ignored;
    const driver::StreamHandle handle = relay->stream.handle;
    streams_.forget_stream(handle, &ignored);
    relay->own = false;
    driver_->stream_destroy(handle);
  }
}

// -- facts --------------------------------------------------------------------------------------------------------------

Address Core::address_of(const BlockRecord& record) const {
  const PageMap::Entry container{record.container};
  if (container.tag() == PageMap::Tag::large) return static_cast<LargeBlock*>(container.pointer())->begin + record.front;
  const Slab* slab = static_cast<Slab*>(container.pointer());
  return slab->slot_begin(slab->number_of(&record)) + record.front;
}

Bytes Core::gross_of(const BlockRecord& record) const {
  const PageMap::Entry container{record.container};
  if (container.tag() == PageMap::Tag::large) return static_cast<LargeBlock*>(container.pointer())->bytes;
  const Slab* slab = static_cast<Slab*>(container.pointer());
  return slab->cls == kZeroClass ? 0 : slab->slot_bytes;
}

Bytes Core::guards_of(const BlockRecord& record) const {
  return debugger_ == nullptr ? 0 : record.front + debugger_->back_bytes();
}

debug::BlockFacts Core::facts_of(const BlockRecord& record, Address address) {
  debug::BlockFacts f;
  const std::uint32_t magic = BlockRecord::magic_of(record.word.load(std::memory_order_acquire));
  f.state = magic == static_cast<std::uint32_t>(Magic::live)          ? debug::BlockState::live
            : magic == static_cast<std::uint32_t>(Magic::released)    ? debug::BlockState::released
            : magic == static_cast<std::uint32_t>(Magic::quarantined) ? debug::BlockState::quarantined
                                                                      : debug::BlockState::freed;
  f.address = address;
  f.size = record.size;
  f.begin = address - record.front;
  f.reserved = gross_of(record);
  f.stream = record.home != nullptr ? record.home->stream.id : 0;
  f.allocated_at = record.stack;
  f.raw = (record.flags & kRawBlock) != 0;
  std::lock_guard lock(extra_lock(&record));
  if (record.extra) {
    const BlockExtra& e = *record.extra;
    f.serial = e.serial;
    f.allocated_thread = e.allocated_thread;
    f.freed_thread = e.freed_thread;
    f.allocated_time = e.allocated_time;
    f.freed_time = e.freed_time;
    f.freed_at = e.freed_at;
    f.tag = e.tag;
  }
  return f;
}

// Blocks as they are now; those that come or go meanwhile may be missing or seen.
void Core::for_each_live(const std::function<void(BlockRecord&)>& function) {
  std::vector<Slab*> slabs;
  std::vector<LargeBlock*> large;
  {
    std::lock_guard lock(extent_lock_);
    for (const auto& s : slabs_)
      if (s->base != 0 && !s->retired) slabs.push_back(s.get());
    for (const auto& b : large_) large.push_back(b.get());
  }
  for (Slab* slab : slabs)
    for (unsigned i = 0; i < slab->stack.slots; ++i)
      if (slab->records[i].is(Magic::live)) function(slab->records[i]);
  for (LargeBlock* block : large)
    if (block->record.is(Magic::live)) function(block->record);
}

std::vector<debug::BlockFacts> Core::live_blocks() {
  drain();
  std::vector<debug::BlockFacts> blocks;
  for_each_live([&](BlockRecord& record) { blocks.push_back(facts_of(record, address_of(record))); });
  return blocks;
}

std::optional<debug::BlockFacts> Core::facts(const BlockRef& block) {
  const std::uint64_t word = block.record->word.load(std::memory_order_acquire);
  if (BlockRecord::generation_of(word) != block.generation) return std::nullopt;
  return facts_of(*block.record, block.address);
}

// Puts a mark on every stream that has live blocks, and waits a bounded time for them: live blocks on a stream whose mark is
// still open may have pending work, so their guards are not judged.
void Core::mark_streams(double deadline) {
  bool stranded = false;
  streams_.for_each([&](Heap& heap) {
    heap.stream.lock.lock();
    heap.check_ticket = heap.stream.take_ticket();
    heap.stream.lock.unlock();
    stranded = stranded || !heap.stream.lasting || (heap.stream.legacy && !options_.legacy_fences);
  });
  if (stranded && options_.recover_stranded && !streams_.capture_known()) fences_.record_context(streams_.states());
  double pause = 20e-6;
  for (;;) {
    poll_all(true);
    bool open = false;
    streams_.for_each([&](Heap& heap) { open = open || !heap.stream.idle(); });
    if (!open || lost_.load() || driver_->now() >= deadline || (hooks_.interrupted && hooks_.interrupted())) return;
    driver_->pause(std::min(pause, std::max(0.0, deadline - driver_->now())));
    pause = std::min(pause * 2, 2e-3);
  }
}

std::vector<debug::Fault> Core::take_faults() { return debugger_ != nullptr ? debugger_->take_faults() : std::vector<debug::Fault>{}; }
debug::Totals Core::debug_totals() const { return debugger_ != nullptr ? debugger_->totals() : debug::Totals{}; }

CheckReport Core::check(double timeout) {
  CheckReport report;
  if (driver::ending() != driver::Ending::no) {
    report.errc = Errc::exiting;
    return report;
  }
  // A fault on the device or a reset of its context is noticed here at the latest (R22).
  Bytes free_bytes = 0, total_bytes = 0;
  const driver::Status alive = driver_->mem_info(&free_bytes, &total_bytes);
  if (alive.code == driver::Code::lost) {
    lost_.store(true, std::memory_order_release);
    report.errc = Errc::driver;
    report.text = "device " + std::string(driver_->name()) + " is lost (" + driver::describe(alive) + "): the memory of pool '" + name_ +
                  "' is gone with its context, and nothing of it could be checked. Freeing its blocks is harmless; start a new "
                  "process, or make a new context and a new pool";
    return report;
  }
  drain();
  const double deadline = driver_->now() + timeout;
  deep_check_.store(true);
  if (debugger_ != nullptr) {
    mark_streams(deadline);
    report.result = debugger_->check(std::max(0.0, deadline - driver_->now()), hooks_.interrupted);
  }
  deep_check_.store(false);
  if (options_.release_threshold != 0) {
    poll_all(true);
    retire_idle_slabs();
    promote();
    apply_release_threshold(std::max(0.0, deadline - driver_->now()));
  }
  return report;
}

// -- statistics -----------------------------------------------------------------------------------------------------------

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
  s.limit = options_.limit;
  s.reserved = reserved_.load(std::memory_order_acquire);
  s.reserved_peak = reserved_peak_.load(std::memory_order_acquire);
  if (debugger_ != nullptr) s.quarantined = debugger_->totals().quarantined_bytes;
  s.pending = pending_bytes();
  const Bytes taken = std::min(s.reserved, gross + s.quarantined);
  s.pending = std::min(s.pending, s.reserved - taken);
  s.cached = s.reserved - taken - s.pending;
  streams_.for_each([&](Heap& heap) {
    {
      std::lock_guard lock(heap.stream.lock);
      s.slabs += heap.slab_count;
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
  }
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
  s.stream_lookups = streams_.lookups();
  s.host_waits = host_waits_.load();
  s.out_of_memory = oom_.load();
  s.trampled = trampled_.load();
  s.legacy_fences = legacy_fences_.load();
  return s;
}

void Core::reset_peaks() {
  bank_->reset_peak();
  reserved_peak_.store(reserved_.load());
}

std::string Core::audit() {
  drain();
  const Stats s = stats();
  Bytes mapped = 0, free = 0, taken = 0, in_use = 0, gross = 0;
  std::uint64_t live = 0;
  for_each_live([&](BlockRecord& record) {
    in_use += record.size;
    gross += gross_of(record);
    ++live;
  });
  {
    std::lock_guard lock(extent_lock_);
    const std::string broken = extents_.validate();
    if (!broken.empty()) return "not so: " + broken;
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
  if (mapped != s.reserved) return differ("reserved is what is mapped", s.reserved, mapped);
  if (free + taken != mapped) return differ("mapped memory is free or taken", mapped, free + taken);
  if (in_use != s.in_use) return differ("in_use is the sum of live blocks", s.in_use, in_use);
  if (live != s.live_blocks) return differ("live_blocks counts them", s.live_blocks, live);
  if (s.in_use + s.rounding + s.guards + s.quarantined + s.pending + s.cached != s.reserved)
    return differ("the parts add up to reserved", s.in_use + s.rounding + s.guards + s.quarantined + s.pending + s.cached, s.reserved);
  if (gross > taken) return differ("live blocks lie in taken memory", gross, taken);
  if (s.in_use_peak < s.in_use || s.reserved_peak < s.reserved) return "not so: peaks are never below current";
  return {};
}

// -- debug::Host ---------------------------------------------------------------------------------------------------------

bool Core::work_done(void* cookie) {
  const BlockRecord& record = *static_cast<BlockRecord*>(cookie);
  bool done = true;
  for (const order::Mark& mark : record.extra->marks) {
    if (order::complete(mark)) continue;
    // The debugger asks: a lasting stream may be fenced for it, the legacy one only when somebody waits for the answer.
    poll_stream(*Heap::of(mark.stream), deep_check_.load(std::memory_order_relaxed));
    done = done && order::complete(mark);
  }
  if (!done && fences_.context_pending()) {
    fences_.poll_context();
    done = record.extra->marks.all_complete();
  }
  return done;
}

void Core::give_back(void* cookie) {
  BlockRecord& record = *static_cast<BlockRecord*>(cookie);
  {
    std::lock_guard lock(extra_lock(&record));
    record.extra->marks = {};
  }
  const std::uint32_t generation = BlockRecord::generation_of(record.word.load(std::memory_order_acquire));
  record.move(generation, Magic::quarantined, Magic::freed);
  settle(&record, {});
}

void Core::neighbours(Address begin, Bytes size, std::optional<debug::BlockFacts>* below, std::optional<debug::BlockFacts>* above) {
  const PageMap::Entry entry = PageMap::find(begin);
  if (entry && entry.tag() == PageMap::Tag::slab) {
    const Slab* slab = static_cast<Slab*>(entry.pointer());
    const unsigned slot = slab->slot_of(begin);
    const auto at = [&](unsigned n) -> std::optional<debug::BlockFacts> {
      const BlockRecord& r = slab->records[n];
      if (r.is(Magic::fresh)) return std::nullopt;
      return facts_of(r, slab->slot_begin(n) + r.front);
    };
    if (slot > 0) *below = at(slot - 1);
    if (slot + 1 < slab->stack.slots) *above = at(slot + 1);
    return;
  }
  std::lock_guard lock(extent_lock_);
  const placement::Range* range = extents_.range_of(begin);
  if (range == nullptr) return;
  const Extent* e = range->first;
  while (e != nullptr && e->end() <= begin) e = e->next;
  const auto at = [&](const Extent* x) -> std::optional<debug::BlockFacts> {
    if (x == nullptr || x->state != placement::ExtentState::taken || x->note == nullptr) return std::nullopt;
    const PageMap::Entry holder{reinterpret_cast<std::uintptr_t>(x->note)};
    if (holder.tag() != PageMap::Tag::large) return std::nullopt;
    const LargeBlock* block = static_cast<LargeBlock*>(holder.pointer());
    return facts_of(block->record, block->begin + block->record.front);
  };
  if (e == nullptr) return;
  *below = at(e->prev);
  while (e != nullptr && e->begin < begin + size) e = e->next;
  *above = at(e);
}

void Core::pin_live(std::vector<debug::BlockFacts>* ready, std::vector<debug::BlockFacts>* busy) {
  live_gate_.lock();
  for_each_live([&](BlockRecord& record) {
    const order::StreamState& home = record.home->stream;
    bool done = home.completed.load(std::memory_order_acquire) >= record.home->check_ticket;
    {
      std::lock_guard extra(extra_lock(&record));
      if (record.extra)
        for (const order::StreamState* s : record.extra->recorded)
          done = done && s->completed.load(std::memory_order_acquire) >= Heap::of(const_cast<order::StreamState*>(s))->check_ticket;
    }
    (done ? ready : busy)->push_back(facts_of(record, address_of(record)));
  });
}

void Core::unpin_live() { live_gate_.unlock(); }

}  // namespace streampool::pool
