// What the pool writes down about one block, in host memory (R7). Imports base/, order/, placement/.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../base/types.hpp"
#include "../debug/fault.hpp"
#include "../debug/scopes.hpp"
#include "../order/stream_state.hpp"
#include "../placement/extent_map.hpp"
#include "../placement/page_map.hpp"
#include "../placement/slab.hpp"

namespace streampool::pool {

class Core;
struct Heap;

// The state of a record, as a magic number: anything else in its place means that the record was overwritten (R8).
enum class Magic : std::uint32_t {
  fresh = 0x5EED0B1Cu,        // never handed out
  live = 0xA11FEB10u,         // the user's
  released = 0x4E1EA5EDu,     // released without naming a stream; waits for the next explicit call
  quarantined = 0x9A4A971Eu,  // freed, in the debugger's hands
  freed = 0xF4EED0B1u
};
constexpr bool is_magic(std::uint32_t value) {
  switch (static_cast<Magic>(value)) {
    case Magic::fresh:
    case Magic::live:
    case Magic::released:
    case Magic::quarantined:
    case Magic::freed: return true;
  }
  return false;
}

constexpr bool is_free_magic(std::uint32_t value) {
  return value == static_cast<std::uint32_t>(Magic::freed) || value == static_cast<std::uint32_t>(Magic::fresh);
}

// Kept for blocks that need more than the fast path writes: recorded streams, debug facts.
struct BlockExtra {
  std::vector<order::StreamState*> recorded;  // may use the block until it is freed
  order::MarkSet inherited;                   // of the memory's former life: not complete when it was handed out (R1)
  order::MarkSet marks;                       // while quarantined: what the free put on it
  std::uint64_t serial = 0;
  std::uint64_t allocated_thread = 0, freed_thread = 0;
  double allocated_time = 0, freed_time = 0;
  debug::Moment allocated_moment = 0;
  debug::StackId freed_at = 0;
  std::string tag;

  // What is known of a block's life is not known of the next one in its place.
  void forget() {
    serial = allocated_thread = freed_thread = 0;
    allocated_time = freed_time = 0;
    allocated_moment = 0;
    freed_at = 0;
    tag.clear();
  }
};

// BlockRecord::flags
inline constexpr std::uint32_t kRawBlock = 1;   // nobody's object owns it
inline constexpr std::uint32_t kOwned = 32;     // raw, but an object of another library's owns it
inline constexpr std::uint32_t kSampled = 8;    // keeps its call stack for many that do not
inline constexpr std::uint32_t kAway = 2;       // a slot that lives on another stream than its slab's
inline constexpr std::uint32_t kExported = 16;  // somebody outside holds it, and is to give it back
inline constexpr std::uint32_t kHasExtra = 4;   // something is written down in `extra` that a free must take

// One cache line. Memory of this type is never given back while its pool lives, so a stale pointer reads a record, and
// the generation tells whose.
// Who lists live blocks reads it while it may be handed out: so every field they read is atomic, and relaxed.
// Invariant: `word` is generation << 32 | magic; the generation grows by one each time the memory is handed out.
struct alignas(64) BlockRecord {
  std::atomic<std::uint64_t> word{static_cast<std::uint64_t>(Magic::fresh)};
  std::atomic<Bytes> size{0};        // requested
  std::atomic<Heap*> home{nullptr};  // of the stream that it was allocated on
  // Of the memory's last free on the stream it belongs to now: a slot's slab's, a large block's home. 0: none.
  order::Ticket ticket = 0;
  std::uintptr_t container = 0;          // Slab* or LargeBlock*, tagged like a page map entry
  std::atomic<std::uint64_t> origin{0};  // bytes before the user's pointer (24 bits), flags (8), stack of allocation
  std::unique_ptr<BlockExtra> extra;
  BlockRecord* link = nullptr;  // in the queue of implicit releases, or in a quick list
  // 64 bytes: word, size, home, ticket, container, origin, extra, link

  static constexpr std::uint64_t pack(std::uint32_t generation, Magic magic) {
    return std::uint64_t{generation} << 32 | static_cast<std::uint32_t>(magic);
  }
  static constexpr std::uint32_t generation_of(std::uint64_t word) { return static_cast<std::uint32_t>(word >> 32); }
  static constexpr std::uint32_t magic_of(std::uint64_t word) { return static_cast<std::uint32_t>(word); }
  static constexpr unsigned kFrontBits = 24;
  static constexpr std::uint64_t pack_origin(std::uint32_t front, std::uint32_t flags, debug::StackId stack) {
    return std::uint64_t{stack} << 32 | flags << kFrontBits | front;
  }
  std::uint32_t layout() const { return static_cast<std::uint32_t>(origin.load(std::memory_order_relaxed)); }
  std::uint32_t front() const { return layout() & ((1u << kFrontBits) - 1); }
  std::uint32_t flags() const { return layout() >> kFrontBits; }
  debug::StackId stack() const { return static_cast<debug::StackId>(origin.load(std::memory_order_relaxed) >> 32); }
  bool is(Magic magic) const {
    return magic_of(word.load(std::memory_order_acquire)) == static_cast<std::uint32_t>(magic);
  }
  // From one state to another, once: of two racing callers one wins.
  bool move(std::uint32_t generation, Magic from, Magic to) {
    std::uint64_t expected = pack(generation, from);
    return word.compare_exchange_strong(expected, pack(generation, to), std::memory_order_acq_rel);
  }
  BlockExtra& more() {
    if (!extra) extra = std::make_unique<BlockExtra>();
    return *extra;
  }
};
static_assert(sizeof(BlockRecord) == 64);

// An extent cut into slots, in the heap of the stream it was cut for. Guarded by that heap's lock. Frees look at `heap`
// and `base` before they know whether the slab is still theirs.
struct alignas(128) Slab {
  Core* core = nullptr;
  std::atomic<Heap*> heap{nullptr};
  std::atomic<Address> base{0};
  Bytes bytes = 0;
  Bytes slot_bytes = 0;
  Bytes gross = 0;  // of one slot: 0 where no memory is behind the addresses
  std::uint64_t reciprocal = 0;
  std::uint32_t cls = 0;
  bool listed = false;               // in its class's list of slabs with free slots
  std::atomic<bool> retired{false};  // its memory went back to the extents; the records stay for late frees
  std::uint32_t waiting = 0;         // slots that wait for marks
  std::uint32_t pages = 0;           // page map entries that still point here
  Slab* prev = nullptr;
  Slab* next = nullptr;
  placement::Extent* extent = nullptr;
  placement::SlotStack stack;
  std::unique_ptr<BlockRecord[]> records;

  unsigned slot_at(Bytes offset) const { return static_cast<unsigned>((offset / kMinAlignment * reciprocal) >> 32); }
  unsigned slot_of(Address address) const { return slot_at(address - base.load(std::memory_order_relaxed)); }
  Address slot_begin(unsigned slot) const { return base.load(std::memory_order_relaxed) + slot * slot_bytes; }
  unsigned number_of(const BlockRecord* record) const { return static_cast<unsigned>(record - records.get()); }
};

// A stream that a block was used on, by the id it had then.
struct UsedStream {
  order::StreamState* stream = nullptr;
  std::uint64_t id = 0;
};

// Pages of one block's own, in a range of addresses that begins and ends with an unmapped one (guarded.cpp). What is
// not the block's alone is guarded by the core's extent lock.
struct GuardedPages {
  debug::PageGuard side = debug::PageGuard::none;
  Address range = 0;
  Bytes range_bytes = 0;
  driver::MemoryHandle handle = 0;
  Bytes mapped = 0;              // 0: revoked
  debug::BlockFacts last;        // once it was freed
  std::vector<UsedStream> used;  // by then
};

// A block above the largest class, one extent; or one with pages of its own, of any size, and no extent. Late frees
// look at what is atomic before they know whether it is still theirs.
struct alignas(128) LargeBlock {  // as Heap: blocks of two threads share no pair of cache lines
  BlockRecord record;
  Core* core = nullptr;
  placement::Extent* extent = nullptr;  // while taken
  std::atomic<Address> begin{0};
  std::atomic<Bytes> bytes{0};
  std::atomic<Address> page{0};  // the address whose page map entry points here
  std::atomic<debug::PageGuard> side{debug::PageGuard::none};
  std::unique_ptr<GuardedPages> pages;  // where side is one

  static LargeBlock* of(const BlockRecord& record) {
    return static_cast<LargeBlock*>(placement::PageMap::Entry{record.container}.pointer());
  }
};

}  // namespace streampool::pool
