// The pool. One Core owns memory of one kind on one device and hands it out; everything else in this folder is a part
// of it.
//
// Locks, none of which is held over a driver call, a wait or a callback, and none taken while another of them is held,
// except as noted:
//   Heap::stream.lock     one heap's slabs, quick lists, waiting slots, tickets (the fast path takes this one only)
//   extent_lock_          the extent map, every FreeIndex, segments, page map entries, spare records
//   StreamTable's mutex   the maps from stream to heap (sweep takes heap locks under it)
//   extra_locks_          BlockRecord::extra of live blocks, by record (hold_on takes a heap lock under it)
// Where two are held they are taken in this order: table, extra, heap, extents.
// Life of the memory of a block: `live` -> (free) marks -> heap | waiting slot | mixed extents | debugger -> usable
// again.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <shared_mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "../debug/debugger.hpp"
#include "../debug/guard_records.hpp"
#include "../debug/memory_regions.hpp"
#include "../debug/page_guards.hpp"
#include "../driver/driver.hpp"
#include "../observe/counters.hpp"
#include "../observe/sampler.hpp"
#include "../order/fences.hpp"
#include "../placement/page_map.hpp"
#include "errors.hpp"
#include "events.hpp"
#include "heap.hpp"
#include "options.hpp"
#include "pulse.hpp"
#include "record.hpp"
#include "segments.hpp"
#include "streams.hpp"

namespace streampool::pool {

struct AllocRequest {
  Bytes size = 0;
  Bytes alignment = kMinAlignment;
  driver::StreamHandle stream = driver::kLegacyStream;
  bool stream_ordered = false;
  bool raw = false;      // nobody's object owns it
  bool owned = false;    // raw, but an object of another library's owns it
  bool settled = false;  // only memory that no queued work touches any more: for use on any stream at once
  debug::StackId stack = 0;
  // Whether this allocation keeps its stack for many: what sample_is_due() said, if it was asked.
  enum class Sample : std::uint8_t { ask, no, yes };
  Sample sample = Sample::ask;
  std::string_view tag;
};

// A block, named so that a stale name never harms its successor: the generation tells.
struct BlockRef {
  Address address = 0;
  BlockRecord* record = nullptr;
  std::uint32_t generation = 0;
};

struct FreeRequest {
  std::optional<driver::StreamHandle> stream;  // none: the block's own, without a driver call
  std::optional<Bytes> size;                   // what the caller takes the block's size for, where it says so
  debug::StackId stack = 0;
  // Streams recorded on the block whose handles the caller keeps alive and vouches for: fenced in this call.
  std::span<const driver::StreamHandle> fence_too;
};

// How memory was found; one counter each (R4).
#define STREAMPOOL_PATHS(X)                                                         \
  X(own, "memory of the same stream, reused at once")                               \
  X(completed, "memory of another stream whose work was done")                      \
  X(fresh, "memory that no stream had a claim on")                                  \
  X(waited, "the stream was made to wait for another one")                          \
  X(host_waited, "found after a bounded wait on the host")                          \
  X(grown, "new memory from the driver")                                            \
  X(moved, "idle memory given back to the driver and asked for again in one piece") \
  X(quarantine, "taken back from the debugger's quarantine")                        \
  X(called_back, "found after a garbage collection or the out-of-memory callback")
enum class Path : std::uint8_t {
#define STREAMPOOL_ROW(name, text) name,
  STREAMPOOL_PATHS(STREAMPOOL_ROW)
#undef STREAMPOOL_ROW
      count_
};
inline constexpr std::size_t kPathCount = static_cast<std::size_t>(Path::count_);
std::span<const char* const> path_words();

// One piece of free memory: anybody's, its own stream's at once, or nobody's before queued work is done.
struct FreePiece {
  Bytes bytes = 0;
  const char* reuse = "";  // "any_stream", "own_stream", "waiting"
};

struct Stats {
  // in_use + rounding + guards + quarantined + pending + cached = reserved whenever the pool is quiet (R19)
  Bytes in_use = 0, rounding = 0, guards = 0, quarantined = 0, pending = 0, cached = 0, reserved = 0;
  Bytes in_use_peak = 0, reserved_peak = 0, limit = 0, largest_free = 0;
  std::uint64_t allocations = 0, frees = 0, live_blocks = 0, allocated_bytes = 0;
  std::uint64_t segments = 0, handles = 0, streams = 0, slabs = 0, extents = 0;
  std::array<std::uint64_t, kPathCount> paths{};
  std::uint64_t fences = 0, fences_failed = 0, polls = 0, wait_edges = 0, context_events = 0, stream_lookups = 0;
  std::uint64_t host_waits = 0, out_of_memory = 0, trampled = 0, legacy_fences = 0;
  std::uint64_t handles_moved = 0;  // to where a run was needed
  SegmentSource source = SegmentSource::vmm;
};

// The process ends, or this is a forked child: from here on nothing but frees, which are ignored (R22). Told on the
// thread that does it, whose next calls all look; what others do on the fast path meanwhile asks no driver.
void end_of(driver::Ending ending) noexcept;

struct TrimResult {
  Bytes released = 0, pinned_by_live = 0, pending = 0, reserved = 0;
};

struct CheckReport {
  debug::CheckResult result;
  Errc errc = Errc::ok;
  std::string text;
};

// What the outside world lends the pool; all may be empty. None is called under a lock.
struct Hooks {
  std::function<bool()> interrupted;         // polled in waits: true ends the wait (Ctrl-C)
  std::function<void()> collect_garbage;     // before an out-of-memory error
  std::function<bool(Bytes)> out_of_memory;  // true: something was freed, try again
  debug::ResolveStack resolve_stack;         // in words; empty where nothing is known
};

struct ThreadCache;

class Core final : public std::enable_shared_from_this<Core>, private debug::Host {
 public:
  static std::shared_ptr<Core> create(std::shared_ptr<driver::Driver> driver, Kind kind, std::string name,
                                      const Options& options, Failure* failure);
  ~Core() override;
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  Errc allocate(const AllocRequest& request, BlockRef* out, Failure* failure);
  // By raw address, or by a block's own name (then a stale name is an error that harms nobody).
  Errc free(Address address, const FreeRequest& request, Failure* failure);
  Errc free(const BlockRef& block, const FreeRequest& request, Failure* failure);
  // What can be done without a wait, a driver call or a second look: a slot on a cached lasting stream, its lock free
  // right now. False: nothing was done, take the full call. For callers that hold a lock of their own, like the GIL.
  bool try_allocate(const AllocRequest& request, BlockRef* out);
  // fast.hpp
  enum class Fast : std::uint8_t { no, done, raise };  // raise: done, and finish() is due
  Fast fast_allocate(Bytes size, driver::StreamHandle stream, std::uint32_t flags, debug::StackId stack, BlockRef* out);
  template <typename Name>
  Fast fast_free(const Name& name, driver::StreamHandle stream);
  void finish();
  // Whether the next allocation of this thread is to keep its call stack, which the caller takes outside of all locks.
  // Yes once for each time.
  bool sample_is_due(Bytes size);
  const observe::Sampler& sampler() const { return sampler_; }
  bool try_free(const BlockRef& block, const FreeRequest& request);
  bool try_free(Address address, const FreeRequest& request);
  // Implicit release: no lock that waits, no driver call, no allocation; any thread, any time. Twice is harmless.
  void release(const BlockRef& block) noexcept;

  // The caller is done with the block, but it cannot be freed: nobody gets its memory, another free is a double free,
  // and no report calls it a leak. `revive` takes that back, for a free.
  Errc retire(Address address, debug::StackId stack, BlockRef* out, Failure* failure);
  static void revive(const BlockRef& block) { block.record->move(block.generation, Magic::released, Magic::live); }

  // `address` may lie anywhere inside a block (R1, section 3). Null with size 0 is a no-op.
  Errc record_stream(Address address, driver::StreamHandle stream, Failure* failure);
  Errc record_stream(const BlockRef& block, driver::StreamHandle stream, Failure* failure);
  Errc record_event(Address address, driver::EventHandle event, Failure* failure);
  Errc record_event(const BlockRef& block, driver::EventHandle event, Failure* failure);
  // All that is queued in the device's context by now, whatever its stream. Not while a capture is known.
  Errc record_everything(Address address, Failure* failure);
  Errc register_stream(driver::StreamHandle stream, Failure* failure);
  Errc forget_stream(driver::StreamHandle stream, Failure* failure);
  void begin_capture();
  // The same for a stream that is known, which must be one that can capture.
  Errc begin_capture(driver::StreamHandle stream, Failure* failure);
  Errc end_capture(driver::StreamHandle stream, Failure* failure);  // 0: not known any more
  bool capture_known() const { return streams_.capture_known(); }

  Errc reserve(Bytes bytes, Bytes* reserved, Failure* failure);
  TrimResult trim(Bytes keep);
  Stats stats();
  void reset_peaks();
  // pulse.cpp: the numbers for metrics, without a lock of the fast path and without a driver call; and a look at fences
  // that exist, with driver calls.
  PulseRow pulse();
  void look();
  // By call stack, or by call stack and tag.
  std::vector<Holder> holders(bool by_tag = false);
  // The largest pieces of free memory, largest first; without the slots of slabs and what quick lists keep.
  std::vector<FreePiece> free_pieces(std::size_t most);
  CheckReport check(double timeout);
  std::vector<debug::BlockFacts> live_blocks();
  static bool live(const BlockRef& block) {
    return block.record->word.load(std::memory_order_acquire) == BlockRecord::pack(block.generation, Magic::live);
  }
  std::optional<debug::BlockFacts> facts(const BlockRef& block);
  // Somebody outside holds the block: so it is nobody's leak (R18). Any thread, no lock.
  static void set_exported(const BlockRef& block, bool on) noexcept;
  // The segment that an address lies in: what an IPC handle names. False: in none of this pool.
  bool segment_of(Address address, Address* begin, Bytes* size);
  std::vector<debug::Fault> take_faults();
  // Whether a call has to tell of faults (option on_fault).
  bool must_tell() const {
    return options_.on_fault != Options::OnFault::report && debugger_ != nullptr && debugger_->has_faults();
  }
  debug::Totals debug_totals() const;
  debug::PageGuardTotals page_guard_totals() const {
    return page_guards_ != nullptr ? page_guards_->totals() : debug::PageGuardTotals{};
  }
  std::vector<std::pair<debug::StackId, debug::SiteUsage>> usage() const;
  // Recomputes everything from the ground and compares: empty, or what does not hold. For tests.
  std::string audit();

  void close();
  bool closed() const { return door_.closed.load(std::memory_order_acquire); }

  driver::Driver& driver() { return *driver_; }
  std::shared_ptr<driver::Driver> shared_driver() { return driver_; }
  Kind kind() const { return kind_; }
  const std::string& name() const { return name_; }
  const Options& options() const { return options_; }
  SegmentSource source() const { return source_; }
  // Of `reserved`; 0: none. A lower one takes nothing back, and refuses growth.
  Bytes limit() const { return limit_.load(std::memory_order_relaxed); }
  void set_limit(Bytes bytes) { limit_.store(bytes, std::memory_order_relaxed); }
  Hooks& hooks() { return hooks_; }
  bool debugging() const { return debugger_ != nullptr; }

  static std::vector<std::shared_ptr<Core>> all();
  // Lets go of a pool where no driver call may be made. Where that was its last holder, the next slow path of any pool
  // ends it.
  static void leave(std::shared_ptr<Core> core) noexcept;

 private:
  Core(std::shared_ptr<driver::Driver> driver, Kind kind, std::string name, const Options& options);

  // What an allocation needs of memory.
  struct Need {
    Bytes size = 0;                      // requested
    Bytes bytes = 0;                     // of slot or extent
    Bytes alignment = kExtentAlignment;  // of the extent's start
    Bytes front = 0;
    unsigned cls = kNoClass;
    bool strict = false;  // only memory whose marks are all complete (R2)
    bool slot() const { return cls != kNoClass; }
  };
  static constexpr unsigned kNoClass = ~0u;
  static constexpr std::size_t kLargeChunk = 32;  // records made together: a page of host memory
  static constexpr Bytes kExtentAlignment = placement::kExtentAlign;
  // Memory that was found for a Need: a slot or an extent.
  struct Found {
    BlockRecord* record = nullptr;
    Address begin = 0;
    Bytes bytes = 0;
    Path path = Path::own;
    bool counted = false;    // its home counts it as a user already
    bool has_extra = false;  // something is written down in its record's extra
    debug::PageGuard pages = debug::PageGuard::none;
  };

  // What an allocation, or a reservation, needs of new memory.
  struct Growth {
    Bytes bytes = 0;
    Bytes alignment = kExtentAlignment;
    bool strict = false;  // only memory whose marks are all complete counts
    bool beside = false;  // what is free and usable next to it counts
    Moving moving = Moving::slack;
  };

  void draw_sample(Bytes from);
  void ask_for_sample(AllocRequest* request);

  // fast.hpp
  bool finished(Fast fast) {
    if (fast == Fast::raise) finish();
    return fast != Fast::no;
  }
  bool work_to_do() const { return (door_.epoch.load(std::memory_order_relaxed) & kShut) != 0; }
  bool at_home(const ThreadCache& cache, driver::StreamHandle stream) const;
  bool enter_home(Heap& heap, const ThreadCache& cache, LockSeat& seat) const;
  static std::uint32_t write_record(BlockRecord& record, std::uint64_t word, Bytes size, std::uint64_t origin);
  // What a free gave back.
  struct Freed {
    Bytes size = 0, gross = 0;
    order::Ticket ticket = 0;
    // Where it was not: a block that is fit for put_whole, and its word.
    LargeBlock* whole = nullptr;
    std::uint64_t word = 0;
  };
  static bool serve(Heap& heap, Bytes size, std::uint64_t origin, BlockRef* out, Bytes* gross);
  static bool serve_slot(Heap& heap, Bytes size, std::uint64_t origin, BlockRef* out, Bytes* gross);
  static bool serve_quick(Heap& heap, Bytes size, std::uint64_t origin, BlockRef* out, Bytes* gross);
  static bool put_large(Heap& heap, LargeBlock& block, std::uint64_t word, Freed* freed);
  static bool take_back(Address address, Heap& heap, ThreadCache& cache, Freed* freed);
  static bool take_back(const BlockRef& ref, Heap& heap, ThreadCache& cache, Freed* freed);
  static bool put_slot(Heap& heap, Slab* slab, unsigned slot, std::uint64_t word, Freed* freed);
  static bool put_quick(Heap& heap, LargeBlock& block, std::uint64_t word, Freed* freed);
  static bool list_quick(Heap& heap, LargeBlock& block, order::Ticket* ticket);
  // The same with the lock taken.
  template <typename Name>
  bool lock_and_take_back(const Name& name, const Named& named, Heap& heap, Freed* freed);
  // On the stream that this thread used last, with its lock waited for.
  bool allocate_at_home(const AllocRequest& request, BlockRef* out);
  bool serve_large_too(Heap& heap, const AllocRequest& request, BlockRef* out, Bytes* gross);
  template <typename Name>
  bool take_large_too(const Name& name, Heap& heap, Freed* freed);
  template <typename Name>
  bool free_at_home(const Name& name, const FreeRequest& request);
  bool serve_extent(Heap& heap, Bytes size, std::uint64_t origin, BlockRef* out, Bytes* gross);
  bool put_whole(Heap& heap, Freed* freed);

  // alloc.cpp
  Errc plan(const AllocRequest& request, Need* need, Failure* failure) const;
  Errc enter(Failure* failure) const;
  // The stream of an allocation or a free, which must be one of the pool's device; a declared use may be a peer's.
  Errc name_stream(driver::StreamHandle handle, Named* out, Failure* failure);
  Errc name_any(driver::StreamHandle handle, Named* out, Failure* failure);
  Errc name_anew(driver::StreamHandle handle, Named* out, Failure* failure);
  Errc check_device(const Named& named, Failure* failure) const;
  // Whether a remembered name is still good. It stays so as long as its heap's lock is held: the heap goes to another
  // stream only under that lock, after the epoch has changed.
  bool stands(const Named& named) const {
    return named.epoch() == 0 || ((door_.epoch.load(std::memory_order_seq_cst) & ~kShut) == named.epoch() &&
                                  (named.id() == 0 || named.heap()->is(named.id())));
  }
  // For all else: counts it. False: it does not stand any more.
  bool keep(Named* named) const;
  // The same, or names the stream anew.
  Errc hold_any(Named* named, Failure* failure);
  Errc hold(Named* named, Failure* failure);
  BlockRef hand_out(const AllocRequest& request, const Need& need, Named& named, const Found& found, double now);
  bool find_own(Named& t, const Need& need, Found* found);
  bool take_slot(Heap& t, const Need& need, Found* found);
  bool take_waiting(Heap& t, const Need& need, Found* found);
  bool take_foreign_slot(Heap& t, const Need& need, Found* found);
  bool take_quick(Heap& t, const Need& need, Found* found);
  bool take_extent(Heap& t, const Need& need, Found* found);
  bool take_waited(Named& t, const Need& need, Found* found);
  bool cut_slab(Heap& t, const Need& need, Path* path);
  bool cut_zero_slab(Heap& t);
  Slab* spare_slab(unsigned cls);
  bool pop_slot(Heap& heap, Slab* slab, bool complete_only, Found* found);
  void collect_waiting(Heap& heap, unsigned cls, bool complete_only);
  bool good_free(BlockRecord& record);
  placement::Extent* fit(Heap& t, Bytes bytes, Bytes alignment, bool strict, order::Ticket* own, Path* path);
  placement::Extent* grab(Heap& t, Bytes bytes, Bytes alignment, bool strict, order::Ticket* own, Path* path);
  placement::Extent* grab_run(Heap& t, Bytes bytes, Bytes alignment, bool strict, order::Ticket* own);
  LargeBlock* spare_large();
  template <typename Function>
  void for_each_large(Function function) const {
    for (const auto& chunk : large_)
      for (std::size_t i = 0; i < kLargeChunk; ++i) function(chunk[i]);
  }
  void fill_large(placement::Extent* extent, order::Ticket own, const Need& need, Path path, Found* found);

  // ladder.cpp
  enum class Grown : std::uint8_t { yes, limit, refused, failed, nothing_idle };
  Errc climb(Named& t, const Need& need, const AllocRequest& request, Found* found, Failure* failure);
  bool poll_stream(Heap& heap, bool fence_legacy);
  void recover_dropped();
  bool call_back(Bytes size);
  void poll_all(bool fence_legacy);
  bool recover();
  void sweep_streams();
  bool sweep_is_due() const { return streams_.known() >= sweep_at_.load(std::memory_order_relaxed); }
  bool collection_is_due() const;
  Bytes pending_bytes();
  bool find_again(Named& t, const Need& need, Path path, Found* found);
  void retire_idle();
  bool retire_idle(Heap& heap);
  bool promote();
  Errc out_of_memory(std::uint64_t stream, Bytes need, Bytes growth, const AllocRequest& request, OomReason reason,
                     const driver::Status& status, Failure* failure);
  enum class Waited : std::uint8_t { found, nothing, interrupted };
  // Between two looks of a bounded wait: lets time pass, more each time. Not without use once the device is lost.
  struct Patience {
    double deadline = 0;
    double pause = 20e-6;
    double next_interrupt_check = 0;
  };
  enum class Rest : std::uint8_t { waited, over, interrupted };
  Rest rest(Patience& patience);
  Growth growth_for(const Need& need, bool beside, Moving moving) const;
  Grown grow_for(Named& t, const Need& need, bool beside, Moving moving, driver::Status* status);
  bool grow_by_moving(Named& t, const Need& need, Path path, Found* found, Grown* grown, driver::Status* status);
  Waited wait_for_pending(Named& t, const Need& need, double deadline, bool quarantine, Found* found);

  // free.cpp
  // What a live block held on to, taken from its record when it is freed.
  struct Held {
    std::vector<order::StreamState*> recorded;
    order::MarkSet inherited;
    Heap* home = nullptr;  // where it counted as a user; null for slots in their own heap
  };
  Errc locate(Address address, BlockRef* out, Failure* failure, debug::StackId stack, bool is_free = true);
  Errc name_for_free(const FreeRequest& request, Named* out, Failure* failure);
  Errc free_found(const BlockRef& block, Named& named, bool owner, const FreeRequest& request, Failure* failure);
  void freed_now(Named& named, Heap& by, const Freed& freed, const FreeRequest& request);
  static LargeBlock* covering(Address address, bool* in_pool);
  Errc must_have_size(const BlockRef& block, const FreeRequest& request, Failure* failure);
  Errc declared(Address address, const char* verb, BlockRef* out, Failure* failure);
  Errc enclosing(Address address, BlockRef* out, Failure* failure);
  Errc take_relay(Heap** out, Failure* failure);
  Errc not_live(const BlockRef& block, std::uint64_t word, Failure* failure, debug::StackId stack, bool is_free = true);
  void finish_free(BlockRecord& record, Address address, Heap& by, Heap* also, debug::StackId stack,
                   order::Ticket* ticket, double now);
  order::MarkSet make_marks(const BlockRecord& record, const Held& held, Heap& by, order::Ticket* ticket);
  bool free_own(BlockRecord& record, Heap& by, order::Ticket* ticket);
  Errc hold_on(const BlockRef& block, order::StreamState* stream, order::Mark mark, Failure* failure);
  // The lock under which a record leaves the live state (fast.hpp): its slab's heap's, a large block's home's.
  template <typename Body>
  static bool with_record_lock(const BlockRecord& record, Body&& body) {
    const placement::PageMap::Entry container{record.container};
    const std::atomic<Heap*>& place = container.tag() == placement::PageMap::Tag::large
                                          ? record.home
                                          : static_cast<const Slab*>(container.pointer())->heap;
    for (;;) {
      Heap* heap = place.load(std::memory_order_acquire);
      if (heap == nullptr) return false;  // never handed out
      std::lock_guard lock(heap->stream.lock);
      if (place.load(std::memory_order_acquire) == heap) return body();
    }
  }
  static bool move_record(BlockRecord& record, std::uint32_t generation, Magic from, Magic to);
  void settle(BlockRecord* record, const order::MarkSet& marks);
  void settle_slot(Slab* slab, unsigned slot, order::MarkSet marks);
  void settle_extent(LargeBlock* block, order::MarkSet marks);
  void put_extent(placement::Extent* extent, order::MarkSet marks);
  void retire_slab(Slab* slab);
  void note_unfenced(Named& named, Bytes bytes, order::Ticket ticket);
  void fence_owed(Named& named);
  void fence_dropped(Named& named);
  bool is_due(const order::StreamState& s) const;
  bool is_old(order::StreamState& s) const;
  void drain(bool may_let_go = true);
  Held take_held(BlockRecord& record);
  static void let_go_of(const Held& held);
  Heap* any_stream_for(const Heap& home);
  void after_free(Named& named, Heap& by, Bytes gross, order::Ticket ticket, const FreeRequest& request,
                  double now = 0);
  void make_room(Heap& heap, Bytes bytes);
  bool file_quick(Heap& heap, BlockRecord* record);

  // segments.cpp
  Grown grow(Heap* t, const Growth& growth, driver::Status* status);
  bool charge(Bytes bytes);
  void uncharge(Bytes bytes);
  void count_misuse(Errc errc);
  Bytes recent_peak(Bytes running);
  void count_site(const AllocRequest& request);
  void tell(observe::EventKind kind, std::uint64_t number, std::uint64_t more, std::string_view reason = {}) const;
  void gave_back(Bytes bytes) {
    trimmed_.fetch_add(bytes, std::memory_order_relaxed);
    uncharge(bytes);
  }
  void note_peak();
  Bytes idle_above_slack() const;
  Bytes movable_bytes();
  Bytes give_back_idle(Bytes keep, double piece_timeout);
  void apply_release_threshold(double piece_timeout);

  // mapped.cpp
  // Growth under way, in the hands of one thread. `laid` is what the new place is made of, by address: the moved
  // handles first, then new ones.
  struct Mapping {
    placement::Extent* piece = nullptr;  // the new place, busy
    Segment* segment = nullptr;
    std::vector<IdleHandle> moved;   // held
    std::vector<IdleHandle> payers;  // held: given back where the limit or the driver has nothing left
    std::vector<Segment::Handle> laid;
    std::size_t unmapped = 0;  // so many of `moved` have left their places
    std::size_t mapped = 0;    // so many of `laid` are in theirs
    Bytes need = 0;            // of new handles, as planned
    Bytes fresh = 0;           // charged for them
  };
  Grown grow_mapped(Heap* t, const Growth& growth, driver::Status* status);
  bool plan_growth(Heap* t, const Growth& growth, Mapping* mapping, driver::Status* status);
  driver::Status fill_growth(Mapping* mapping, bool* within_limit);
  void abandon(Mapping* mapping);
  bool pay(Mapping* mapping);
  bool charge_or_pay(Mapping* mapping, Bytes bytes);
  void restore(const IdleHandle& idle);
  std::vector<IdleHandle> find_idle(Address skip_begin, Address skip_end) const;
  void hold_idle(std::vector<IdleHandle*> idle);
  Bytes give_back(const std::vector<IdleHandle>& idle);
  Bytes give_back_stuck();
  Bytes give_back_mapped(Bytes keep, bool exact);
  Bytes shrink(const IdleHandle& idle, Bytes bytes);
  Bytes handle_size_for(Bytes bytes) const;
  bool add_address_range(Bytes bytes, driver::Status* status);

  // pieces.cpp
  struct Piece {
    Address begin = 0;
    Bytes bytes = 0;
  };
  Grown grow_piece(const Growth& growth, driver::Status* status);
  Grown take_piece(Bytes size, driver::Status* status);
  void add_piece(Address begin, Bytes size, order::Ticket ticket);
  driver::Status free_piece(Address begin);
  bool idle_piece(const Segment& segment) const;
  std::vector<Segment*> idle_pieces() const;
  Piece take_out(Segment* segment);
  void forget_pages(const placement::Range& range);
  Bytes wait_for_leaving(double timeout, bool* interrupted);
  Bytes give_back_pieces(Bytes keep, double timeout, bool* interrupted = nullptr);
  Bytes free_on_errand(const std::vector<Piece>& pieces, double timeout, bool* interrupted);
  driver::Status open_driver_pool();
  driver::Status alloc_pooled(Bytes size, Address* begin, order::Ticket* ticket);
  order::Ticket own_work();
  Bytes give_back_pooled(Bytes keep, Bytes size);
  Bytes free_pooled(const std::vector<Piece>& pieces);
  void trim_driver_pool();
  void close_driver_pool();
  void drop_own_stream(Heap* heap);

  // guarded.cpp
  void make_page_guards();
  Errc open_guard_records(Failure* failure);
  bool take_guarded(Named& named, const AllocRequest& request, Need* need, Found* found);
  void revoke(LargeBlock* block);
  void revoke_again();
  void drop_revoked(std::size_t keep);
  void free_guarded();
  LargeBlock* guarded_at(Address address) const;
  void note_named(Heap& heap);
  void record_freed(LargeBlock& block, const debug::BlockFacts& facts, const Held& held);
  void record_idle();
  void dissect(driver::Status status);

  void let_go(double timeout);
  bool only_graphs_left();
  bool settled();
  static void bury(Core* core);
  static void reap();

  // helpers
  Address address_of(const BlockRecord& record) const;
  Bytes gross_of(const BlockRecord& record) const;
  Bytes guards_of(const BlockRecord& record) const;
  debug::BlockFacts facts_of(const BlockRecord& record, Address address);
  // With the record's extra lock held.
  debug::BlockFacts facts_under_lock(const BlockRecord& record, Address address) const;
  observe::ThreadCounters& counters();
  void count_allocation(Bytes size, Bytes gross, Bytes guards) {
    observe::ThreadCounters& c = counters();
    if (bank_->on_allocate(c, size, gross, guards)) bank_->raise(c);
  }
  void count_free(const BlockRecord& record) {
    observe::ThreadCounters& c = counters();
    if (bank_->on_free(c, record.size, gross_of(record), guards_of(record))) bank_->raise(c);
  }
  std::mutex& extra_lock(const BlockRecord* record) {
    return extra_locks_[(reinterpret_cast<std::uintptr_t>(record) >> 6) % extra_locks_.size()];
  }
  void count_path(Path path) { paths_[static_cast<std::size_t>(path)].fetch_add(1, std::memory_order_relaxed); }
  void claim_pages(Address begin, Bytes bytes, void* pointer, placement::PageMap::Tag tag);
  void mark_streams(double deadline);
  // `retired`: and those that nobody leaks, though their memory is in use.
  void for_each_live(const std::function<void(BlockRecord&)>& function, bool retired = false);

  // debug::Host
  bool work_done(void* cookie) override;
  void at_rest(void* cookie) override;
  void give_back(void* cookie) override;
  void neighbours(Address begin, Bytes size, std::optional<debug::BlockFacts>* below,
                  std::optional<debug::BlockFacts>* above) override;
  void live_blocks(std::vector<debug::BlockFacts>* ready, std::vector<debug::BlockFacts>* busy) override;
  void found(const debug::Fault& fault) override;

  // What every call looks at first.
  struct alignas(64) Door {
    std::uint64_t uid = 0;  // of the pool; never used twice
    // Changes when what a thread remembers of a stream may have become wrong; the same for no two pools. With kShut
    // something is to be done first.
    std::atomic<std::uint64_t> epoch{new_epoch()};
    std::atomic<BlockRecord*> released{nullptr};  // implicit releases that wait for an explicit call
    std::atomic<bool> closed{false};
  };
  Door door_;
  const std::shared_ptr<driver::Driver> driver_;
  const Kind kind_;
  const std::string name_;
  const Options options_;
  std::atomic<Bytes> limit_;
  const SegmentSource source_;
  const Bytes granularity_;  // of virtual memory
  bool ordinary_ = false;    // memory that no host reads and nobody watches: what the fast path is for
  Hooks hooks_;
  std::atomic<bool> lost_{false};  // the device's context is gone for good
  bool buried_ = false;            // nobody holds it any more: no wait, no callback, no thread of its own

  StreamTable streams_;
  DriverEvents events_;
  order::Fences fences_;
  const observe::Sampler sampler_;
  std::shared_ptr<observe::CounterBank> bank_ = std::make_shared<observe::CounterBank>();

  SpinLock extent_lock_;
  placement::ExtentMap extents_;
  placement::FreeIndex common_{true};  // complete: usable by anybody
  placement::FreeIndex mixed_{false};  // marks of several streams; Extent::note is a MarkSet
  std::vector<std::unique_ptr<Segment>> segments_;
  std::vector<std::unique_ptr<Slab>> slabs_;
  std::vector<std::unique_ptr<LargeBlock[]>> large_;  // kLargeChunk each
  std::vector<LargeBlock*> spare_large_;
  std::array<std::vector<Slab*>, kClassLists> spare_slabs_;
  std::vector<Segment::Handle> orphans_;  // unmapped, but the driver would not release them: tried again by trim
  std::vector<IdleHandle> stuck_;         // the driver would not unmap them: held by nobody, tried again by trim

  std::atomic<Bytes> reserved_{0}, reserved_peak_{0};
  std::atomic<std::uint64_t> serial_{0};
  std::array<std::mutex, 16> extra_locks_;
  std::array<std::atomic<std::uint64_t>, kPathCount> paths_{};
  std::atomic<std::size_t> sweep_at_{64};
  std::atomic<std::uint64_t> fruitless_at_{~std::uint64_t{0}};
  std::atomic<Bytes> leaving_{0};  // pieces on their way to the driver: charged, and in no range any more
  std::vector<std::pair<void*, Bytes>> zero_areas_;
  // For metrics: growth refused, out-of-memory errors by reason, misuse of free, bytes given back, sizes of requests.
  std::atomic<std::uint64_t> refused_limit_{0}, refused_driver_{0}, trimmed_{0};
  std::array<std::atomic<std::uint64_t>, kOomReasonCount> failures_{};
  std::array<std::atomic<std::uint64_t>, kMisuses> misuses_{};
  // What the sampled allocations of each call stack and tag stand for, so far. A program may make tags without end:
  // only the first kMostTags are told apart.
  struct Site {
    double bytes = 0, blocks = 0;
  };
  using SiteName = std::pair<debug::StackId, std::string>;
  static constexpr std::size_t kMostTags = 256;
  std::mutex sites_mutex_;
  std::map<SiteName, Site> sites_;
  using Tags = std::set<std::string, std::less<>>;
  Tags tags_;
  static std::string bounded_tag(std::string_view tag, Tags& known);
  // When a look first saw each live sampled block: those have no time of their own. One looks at a time.
  struct FirstSeen {
    std::uint32_t generation = 0;
    double at = 0;  // on the device's clock
  };
  std::mutex look_mutex_;
  std::unordered_map<const BlockRecord*, FirstSeen> first_seen_;
  double first_seen(const BlockRecord& record, double now, std::unordered_map<const BlockRecord*, FirstSeen>& next);
  static constexpr double kWindow = 60;  // seconds
  std::mutex window_mutex_;
  double window_began_ = 0;
  Bytes last_window_peak_ = 0;
  std::atomic<std::uint64_t> host_waits_{0}, oom_{0}, trampled_{0}, legacy_fences_{0}, slab_cuts_{0}, handles_moved_{0};

  std::unique_ptr<debug::Debugger> debugger_;
  std::atomic<bool> deep_check_{false};            // somebody waits for the debugger's answer
  std::shared_ptr<debug::MemoryRegions> regions_;  // of an attached tool
  std::unique_ptr<debug::PageGuards> page_guards_;
  debug::GuardRecords guard_records_;
  std::map<Address, LargeBlock*> guarded_;  // under the extent lock: blocks with pages of their own, by their range
  std::deque<LargeBlock*> revoked_;         // of them, oldest first
  std::vector<LargeBlock*> unrevoked_;      // freed, but the driver would not unmap them: tried again
  std::atomic<bool> dissected_{false};

  std::atomic<driver::PoolHandle> driver_pool_{0};
  std::atomic<Heap*> piece_heap_{nullptr};  // of the private stream in whose order the driver's pool works

  std::atomic<bool> any_dropped_{false};  // something of a graph waits for a context event
  // Held shared by calls that use a private stream or the driver's pool; who ends them takes it whole, or not at all.
  std::shared_mutex private_gate_;
  std::mutex relay_mutex_;
  std::vector<Heap*> relays_;  // private streams behind record_event
  std::size_t next_relay_ = 0;
};

}  // namespace streampool::pool
