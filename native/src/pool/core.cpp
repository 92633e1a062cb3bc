// Making and ending a pool; its streams; taking and giving back memory on request.
#include "core.hpp"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include <thread>

#include "sources.hpp"
#include "thread_cache.hpp"

namespace streampool::pool {

using placement::Extent;
using placement::PageMap;

Slab g_no_slab;
constinit thread_local ThreadCache g_thread_cache __attribute__((tls_model("initial-exec")));

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
  std::vector<Core*> left;    // nobody's, and not looked at yet
};
Registry& registry() {
  static Registry* r = new Registry;
  return *r;
}

std::atomic<std::uint64_t> g_next_uid{1};

// This thread is inside leave().
thread_local bool g_leaving = false;

// How often the end of a pool looks for completed work before it waits, or gives up waiting.
constexpr int kFinalLooks = 64;

// The counters that this thread writes, by pool; folded into their banks when the thread ends.
struct ThreadBanks {
  struct Entry {
    std::uint64_t uid;
    std::shared_ptr<observe::CounterBank> bank;
    observe::ThreadCounters* counters;
  };
  std::vector<Entry> entries;
  ~ThreadBanks();
};
thread_local ThreadBanks g_thread_banks;
// Set when the thread's list is gone: a user's thread_local may still free blocks after it. Nothing to destroy itself.
thread_local bool g_thread_gone = false;

ThreadBanks::~ThreadBanks() {
  for (Entry& e : entries) e.bank->leave(e.counters);
  entries.clear();
  thread_cache() = ThreadCache{};
  g_thread_gone = true;
}

// An attached tool that takes memory regions does the checking: it sees every access, and would report ours.
std::shared_ptr<debug::MemoryRegions> settle_regions(Kind kind, Options* options) {
  using Regions = Options::Regions;
  if (kind != Kind::device || options->regions == Regions::off) return nullptr;
  const bool asked =
      options->regions == Regions::on || (options->debug.enabled() && debug::MemoryRegions::is_sanitizer());
  std::shared_ptr<debug::MemoryRegions> tool = asked ? debug::MemoryRegions::attached() : nullptr;
  if (tool == nullptr) return nullptr;
  constexpr Bytes kLeastGap = 256;  // between blocks
  options->segments = SegmentSource::malloc;
  options->debug.regions = options->debug.track = true;
  options->debug.fill = options->debug.count_untouched = false;
  options->debug.pages.which = debug::PageGuardOptions::Which::off;
  options->debug.guard_bytes = std::max(options->debug.guard_bytes, kLeastGap);
  return tool;
}

void on_fork() { end_of(driver::Ending::forked); }

}  // namespace

void end_of(driver::Ending ending) noexcept {
  driver::set_ending(ending);
  thread_cache() = ThreadCache{};
}

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
  if (cache.uid == door_.uid) return *cache.counters;
  if (g_thread_gone) {
    // Counters of their own for the last frees of a thread; nobody takes them over.
    cache = ThreadCache{.random = cache.random};
    cache.uid = door_.uid;
    cache.counters = bank_->join();
    draw_sample(cache.counters->allocated_bytes.load(std::memory_order_relaxed));
    return *cache.counters;
  }
  auto& entries = g_thread_banks.entries;
  auto it = std::find_if(entries.begin(), entries.end(), [this](const auto& e) { return e.uid == door_.uid; });
  if (it == entries.end()) {
    // Banks of pools that are gone have this thread as their only holder.
    std::erase_if(entries, [](const auto& e) { return e.bank.use_count() == 1; });
    entries.push_back({door_.uid, bank_, bank_->join()});
    it = entries.end() - 1;
  }
  cache = ThreadCache{.random = cache.random};
  cache.uid = door_.uid;
  cache.counters = it->counters;
  // As good as what was left: the distance has no memory.
  draw_sample(cache.counters->allocated_bytes.load(std::memory_order_relaxed));
  return *it->counters;
}

// The thread's next sample, counted from so many allocated bytes on.
void Core::draw_sample(Bytes from) {
  ThreadCache& cache = thread_cache();
  const Bytes distance = sampler_.draw(&cache.random);
  cache.next_sample = distance > ~Bytes{0} - from ? ~Bytes{0} : from + distance;
}

// After a fast call of this thread.
void Core::finish() { bank_->raise(counters()); }

Core::Core(std::shared_ptr<driver::Driver> driver, Kind kind, std::string name, const Options& options)
    : driver_(std::move(driver)),
      kind_(kind),
      name_(std::move(name)),
      options_(options),
      limit_(options.limit),
      source_(options.segments),
      granularity_(options.granularity),
      streams_(*driver_, door_.epoch),
      events_(*driver_, &lost_),
      fences_(events_),
      sampler_(options.sample_bytes) {
  door_.uid = g_next_uid.fetch_add(1);
  debug::Host& host = *this;
  ordinary_ = !options_.debug.enabled() && !options_.debug.track && !host_visible(kind_);
  make_page_guards();
  window_began_ = driver_->now();
  if (options_.debug.enabled()) debugger_ = std::make_unique<debug::Debugger>(*driver_, kind_, options_.debug, host);
}

std::shared_ptr<Core> Core::create(std::shared_ptr<driver::Driver> driver, Kind kind, std::string name,
                                   const Options& given, Failure* failure) {
  if (refuse_when_ending(failure) != Errc::ok) return nullptr;
  if (kind == Kind::managed && !driver->capabilities().managed_memory) {
    failure->set(Errc::driver,
                 "device " + std::string(driver->name()) + " has no managed memory; use kind='device' or 'pinned'");
    return nullptr;
  }
  Options options = given;
  const std::shared_ptr<debug::MemoryRegions> regions = settle_regions(kind, &options);
  if (settle_sources(*driver, kind, &options, failure) != Errc::ok) return nullptr;
  BiasedLock::prepare();
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, on_fork); });
  reap();
  std::shared_ptr<Core> core(new Core(std::move(driver), kind, std::move(name), options), bury);
  core->regions_ = regions;
  if (core->open_guard_records(failure) != Errc::ok) return nullptr;
  {
    std::lock_guard lock(registry().mutex);
    std::erase_if(registry().pools, [](const auto& p) { return p.expired(); });
    registry().pools.push_back(core);
  }
  pulse_begin(*core);
  core->tell(observe::EventKind::pool_created, options.limit, 0);
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
  drain(false);
  poll_all(true);
  if (debugger_ != nullptr) debugger_->give_up(debug::Debugger::kEverything);
  retire_idle();
  promote();
  return pending_bytes() == 0 && (debugger_ == nullptr || debugger_->totals().quarantined_blocks == 0);
}

// The last holder is gone. Memory that work may still touch is not pulled away under it (R1), and nobody waits in a
// destructor: such a pool is kept until its work is done, which the next pool's slow path finds out.
void Core::bury(Core* core) {
  core->buried_ = true;
  core->hooks_ = Hooks{};
  if (g_leaving) {
    std::lock_guard lock(registry().mutex);
    registry().left.push_back(core);
    return;
  }
  if (driver::ending() != driver::Ending::no || core->settled()) {
    delete core;
    return;
  }
  // Streams that are gone fence nothing any more; often their work is done all the same.
  core->recover();
  for (int i = 0; i < kFinalLooks; ++i)
    if (core->settled()) {
      delete core;
      return;
    }
  std::lock_guard lock(registry().mutex);
  registry().buried.push_back(core);
}

void Core::leave(std::shared_ptr<Core> core) noexcept {
  g_leaving = true;
  core.reset();
  g_leaving = false;
}

void Core::reap() {
  std::vector<Core*> candidates, left;
  {
    std::lock_guard lock(registry().mutex);
    candidates.swap(registry().buried);
    left.swap(registry().left);
  }
  for (Core* core : left) bury(core);
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
  pulse_end(*this);
  const bool ending = driver::ending() != driver::Ending::no;
  if (!ending) {
    free_guarded();
    if (source_ == SegmentSource::vmm) {
      give_back_mapped(0, false);
    } else {
      for (const auto& segment : segments_) {
        if (!idle_piece(*segment)) continue;
        if (source_ == SegmentSource::driver)
          free_piece(segment->range->begin);
        else {  // blocks until the device is idle; a destructor does not wait for that
          if (regions_ != nullptr) regions_->remove_heap(segment->range->begin);
          std::thread([driver = driver_, kind = kind_, at = segment->range->begin] {
            driver->mem_free(kind, at);
          }).detach();
        }
      }
      close_driver_pool();
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
  for_each_large([](LargeBlock& block) { PageMap::clear(block.page, 1, &block); });
  for (const auto& [area, size] : zero_areas_) munmap(area, size);
  mixed_.for_each([](const Extent* e) { delete static_cast<order::MarkSet*>(e->note); });
}

// -- streams
// -----------------------------------------------------------------------------------------------------------

Errc Core::register_stream(driver::StreamHandle stream, Failure* failure) {
  Errc errc = enter(failure);
  if (errc != Errc::ok) return errc;
  Named named;
  errc = streams_.register_stream(stream, &named, failure);
  if (errc != Errc::ok) return errc;
  fence_owed(named);
  // A program may register all its streams, and forget them.
  if (sweep_is_due()) sweep_streams();
  return Errc::ok;
}

Errc Core::forget_stream(driver::StreamHandle stream, Failure* failure) {
  if (driver::ending() != driver::Ending::no) return Errc::ok;
  drain();
  Named named;
  Errc errc = streams_.name(stream, &named, failure);
  if (failure->cause.code == driver::Code::gone) return *failure = {}, Errc::ok;
  if (errc != Errc::ok) return errc;
  if (named.stream().captured.load(std::memory_order_relaxed))
    return failure->set(Errc::capture, "forget_stream: stream " + hex(stream) +
                                           " is capturing a graph: end the capture first; it is still valid");
  // First nobody else may touch it any more; then what is outstanding gets its fence while the stream still lives.
  if (named.stream().lasting) errc = streams_.forget_stream(stream, failure);
  fences_.record(named.stream(), named.handle());
  return errc;
}

void Core::begin_capture() {
  recover_dropped();
  // Fences for what was freed, while every stream may still be touched.
  poll_all(true);
  streams_.begin_capture();
}
Errc Core::begin_capture(driver::StreamHandle stream, Failure* failure) {
  if (const Errc errc = refuse_when_ending(failure); errc != Errc::ok) return errc;
  if (const Errc errc = streams_.must_capture(stream, failure); errc != Errc::ok) return errc;
  begin_capture();
  return Errc::ok;
}

Errc Core::end_capture(driver::StreamHandle stream, Failure* failure) {
  if (streams_.end_capture(stream)) {
    recover_dropped();
    return Errc::ok;
  }
  return failure->set(Errc::capture,
                      "end_capturing: no capture was declared; begin_capturing comes before the capture");
}

// -- growing, shrinking, ending
// ---------------------------------------------------------------------------------------------

Errc Core::reserve(Bytes bytes, Bytes* reserved, Failure* failure) {
  const Errc errc = enter(failure);
  if (errc != Errc::ok) return errc;
  driver::Status status;
  const Bytes before = reserved_.load();
  Grown grown = Grown::yes;
  // One piece where it can be had, so that it serves a large block too; beside what there is, however idle that is.
  if (bytes > before) grown = grow(nullptr, {.bytes = bytes - before, .moving = Moving::none}, &status);
  *reserved = reserved_.load();
  if (grown == Grown::yes) return Errc::ok;
  if (grown == Grown::failed && status.code != driver::Code::out_of_memory)
    return failure->set(Errc::driver, "reserve: the driver gave no memory: " + driver::describe(status));
  AllocRequest request;
  request.size = bytes - before;
  return out_of_memory(0, bytes - before, bytes - before, request,
                       grown == Grown::limit ? OomReason::limit : OomReason::driver, status, failure);
}

TrimResult Core::trim(Bytes keep) {
  TrimResult result;
  if (driver::ending() != driver::Ending::no) return result;
  reap();
  drain(false);
  recover_dropped();
  settled();                 // takes in all that is complete, the quarantine too
  constexpr int kLooks = 8;  // most of what waits for a context event has nothing left to do
  for (int look = 0; look < kLooks && fences_.context_pending(); ++look) settled();
  revoke_again();
  result.released = give_back_idle(keep, options_.wait_timeout);
  if (result.released != 0) tell(observe::EventKind::pool_trimmed, result.released, reserved_.load());
  const Stats now = stats();
  result.reserved = now.reserved;
  result.pending = now.pending + now.quarantined;
  result.pinned_by_live = now.reserved - std::min(now.reserved, result.pending + std::min(keep, now.cached));
  return result;
}

void Core::close() {
  constexpr double kLastCheck = 0.5;  // seconds: what is in use by then is listed as not checked
  if (debugger_ != nullptr && !closed()) check(std::min(kLastCheck, options_.wait_timeout));
  const bool again = door_.closed.exchange(true, std::memory_order_acq_rel);
  streams_.change_epoch();
  if (driver::ending() != driver::Ending::no) return;
  drain(again);
  if (again) {
    if (bank_->totals().gross == 0) let_go(options_.wait_timeout);
    return;
  }
  if (debugger_ != nullptr) debugger_->give_up(debug::Debugger::kEverything);
  const observe::Totals now = bank_->totals();
  tell(observe::EventKind::pool_closed, now.allocations - std::min(now.allocations, now.frees), reserved_.load());
  reap();
  if (bank_->totals().gross == 0)
    let_go(options_.wait_timeout);
  else
    give_back_idle(0, 0);
  // Blocks may outlive their pool by far, and nobody thinks of forgetting streams of a closed one: it touches none by
  // itself any more. Last fences, while they still live.
  poll_all(true);
  streams_.forget_all();
}

// Nothing is live: the driver has everything back as soon as all work is done, for which close() waits a bounded time.
// The last free of a closed pool waits for nothing; what is not done then goes back when somebody looks again.
void Core::let_go(double timeout) {
  const double deadline = driver_->now() + timeout;
  Patience patience{.deadline = deadline};
  for (int look = 0; !settled(); ++look) {
    // A context event for what no stream fences any more, and a few looks at it before time passes.
    recover();
    if (look < kFinalLooks) continue;
    if (only_graphs_left() || rest(patience) != Rest::waited) break;
  }
  retire_idle();
  promote();
  give_back_idle(0, std::max(0.0, deadline - driver_->now()));
  const bool quarantined = debugger_ != nullptr && debugger_->totals().quarantined_blocks != 0;
  if (pending_bytes() != 0 || quarantined || bank_->totals().gross != 0) return;
  // Nothing can ask for an event any more.
  fences_.clear(streams_.states());
  // Another thread that is inside a call with a private stream leaves them to its own last free, or to the destructor.
  const std::unique_lock gate(private_gate_, std::try_to_lock);
  if (!gate.owns_lock()) return;
  std::vector<Heap*> relays;
  {
    std::lock_guard lock(relay_mutex_);
    relays.swap(relays_);
  }
  for (Heap* relay : relays) drop_own_stream(relay);
  if (reserved_.load(std::memory_order_acquire) == 0) close_driver_pool();
}

// All that is pending waits for graphs that live on, however long.
bool Core::only_graphs_left() {
  bool only = true;
  streams_.for_each(
      [&](Heap& heap) { only = only && (heap.stream.captured.load(std::memory_order_acquire) || heap.stream.idle()); });
  return only && (debugger_ == nullptr || debugger_->totals().quarantined_blocks == 0);
}

// A private stream of the pool ends. What it still has to do, it does.
void Core::drop_own_stream(Heap* heap) {
  Failure ignored;
  const driver::StreamHandle handle = heap->stream.handle;
  streams_.forget_stream(handle, &ignored);
  heap->own = false;
  driver_->stream_destroy(handle);
}

}  // namespace streampool::pool
