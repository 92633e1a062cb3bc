// A heap: a pool's free extents and slabs that belong to one stream.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "../order/stream_state.hpp"
#include "../placement/extent_map.hpp"
#include "../placement/size_class.hpp"
#include "record.hpp"

namespace streampool::pool {

// A slot freed on a foreign stream, with recorded streams, or of memory that the host can touch: it waits for its
// marks.
struct WaitingSlot {
  Slab* slab = nullptr;
  unsigned slot = 0;
  order::MarkSet marks;
};

// Blocks of no bytes have a class of their own: addresses without memory behind them.
inline constexpr unsigned kZeroClass = placement::kClassCount;
inline constexpr unsigned kClassLists = placement::kClassCount + 1;

struct ClassList {
  Slab* head = nullptr;  // slabs with free slots; the head is allocated from
  std::vector<WaitingSlot> waiting;
};

// Freed large blocks, kept whole for the next one of exactly their size on the same stream: their extents stay taken,
// they merge with nothing, and they need no lock but the heap's. Who finds no memory otherwise takes them back first
// (retire_idle), so they never make a pool grow. Linked by BlockRecord::link; each counts as a user of its heap, as
// when it was live.
struct QuickLists {
  static constexpr Bytes kMaxBlock = kMiB;
  static constexpr Bytes kMaxBytes = 8 * kMiB;  // of one heap; what does not merge costs memory elsewhere
  static constexpr unsigned kListBits = 6;
  struct List {
    Bytes bytes = 0;  // of each; another size that falls here waits until the list is empty
    BlockRecord* head = nullptr;
  };
  std::array<List, std::size_t{1} << kListBits> lists;
  Bytes bytes = 0;

  // A record that was overwritten is not followed: what is behind it is lost (R8).
  static bool good(const BlockRecord* record) {
    return record != nullptr && is_free_magic(BlockRecord::magic_of(record->word.load(std::memory_order_acquire)));
  }
  // All of one list, or of all: a chain.
  BlockRecord* take(List& list, BlockRecord* rest = nullptr) {
    for (BlockRecord* record = std::exchange(list.head, nullptr); good(record); bytes -= list.bytes)
      record = std::exchange(record->link, std::exchange(rest, record));
    return rest;
  }
  BlockRecord* take_all() {
    BlockRecord* all = nullptr;
    if (bytes != 0)
      for (List& list : lists) all = take(list, all);
    bytes = 0;
    return all;
  }
  List& of(Bytes size) {
    return lists[static_cast<std::uint32_t>(size / placement::kExtentAlign) * 2654435769u >> (32 - kListBits)];
  }
};

// The life of what was captured: `ended` once no launch of it can come any more, and none is under way.
struct GraphLife {
  std::uint64_t capture = 0;
  std::atomic<bool> ended{false};
};

// `stream.lock` guards the slabs, the waiting slots and the quick lists; the core's extent lock guards `extents`.
// Aligned so that threads on different streams share no cache line, nor a pair of lines that is fetched together.
struct alignas(128) Heap {
  order::StreamState stream;
  placement::FreeIndex extents;
  std::array<ClassList, kClassLists> classes;
  QuickLists quick;
  std::uint32_t slab_count = 0;
  // Of its slabs; of slots that wait for marks. Written under the lock, read without it (observe.cpp).
  std::atomic<Bytes> slab_bytes{0};
  std::atomic<Bytes> waiting_bytes{0};
  std::size_t look_from = 0;  // where the next bounded look through a long list of waiting slots starts
  // Calls and live blocks that hold a pointer to this heap beyond its own slabs: it must not become another stream's.
  std::atomic<std::uint32_t> users{0};
  // The same, written under the heap's lock alone. Who counted in one may count out in the other: the sum is what
  // counts.
  std::atomic<std::uint32_t> users_inside{0};
  std::atomic<order::Ticket> check_ticket{0};  // taken by the last check()
  // With page guards: tickets issued when a call last named the stream, after which work may have been queued.
  std::atomic<order::Ticket> named_ticket{0};
  std::atomic<bool> known{false};  // in the stream table; else spare
  std::atomic<bool> own{false};    // a relay stream of the pool itself
  // Of what a stream captures (`stream.captured`): its graph, and the stream's key while it captures.
  std::shared_ptr<const GraphLife> graph;
  std::uint64_t captured_on = 0;
  Heap* made_before = nullptr;  // every heap of the table that was ever made, newest first

  // Whether it is that of this stream, which is not lasting. Stays so while its lock is held, or it is in use.
  bool is(std::uint64_t id) const {
    return known.load(std::memory_order_seq_cst) && stream.id.load(std::memory_order_relaxed) == id && !stream.lasting;
  }
  void count_inside(std::uint32_t by) {
    users_inside.store(users_inside.load(std::memory_order_relaxed) + by, std::memory_order_relaxed);
  }
  bool used() const {
    return users.load(std::memory_order_seq_cst) + users_inside.load(std::memory_order_relaxed) != 0;
  }

  // What was queued on the stream before the last check() is done.
  bool checked() const {
    return stream.completed.load(std::memory_order_acquire) >= check_ticket.load(std::memory_order_relaxed);
  }

  // As far as is known no work is under way: everything before a ticket that is younger than the last call is done.
  bool drained() const {
    return stream.idle() &&
           stream.completed.load(std::memory_order_acquire) > named_ticket.load(std::memory_order_relaxed);
  }

  static Heap* of(order::StreamState* stream) { return reinterpret_cast<Heap*>(stream); }

  // All under the heap's lock: its slabs with free slots, class by class.
  void list(Slab* slab) {
    ClassList& list = classes[slab->cls];
    slab->prev = nullptr;
    slab->next = list.head;
    if (list.head != nullptr) list.head->prev = slab;
    list.head = slab;
    slab->listed = true;
  }
  void unlist(Slab* slab) {
    (slab->prev != nullptr ? slab->prev->next : classes[slab->cls].head) = slab->next;
    if (slab->next != nullptr) slab->next->prev = slab->prev;
    slab->prev = slab->next = nullptr;
    slab->listed = false;
  }
  // One more (1) or one less (-1).
  void count_slab(int by, Bytes bytes) {
    slab_count += static_cast<std::uint32_t>(by);
    bytes = by > 0 ? bytes : Bytes{0} - bytes;
    slab_bytes.store(slab_bytes.load(std::memory_order_relaxed) + bytes, std::memory_order_relaxed);
  }
  void count_waiting(int by, Bytes bytes) {
    bytes = by > 0 ? bytes : Bytes{0} - bytes;
    waiting_bytes.store(waiting_bytes.load(std::memory_order_relaxed) + bytes, std::memory_order_relaxed);
  }
  // A slot comes back, with the mark of the heap's own stream.
  void push(Slab* slab, unsigned slot, order::Ticket ticket) { push(slab, slot, slab->records[slot], ticket); }
  void push(Slab* slab, unsigned slot, BlockRecord& record, order::Ticket ticket) {
    record.ticket = ticket;
    slab->stack.push(slot);
    if (!slab->listed) list(slab);
  }
  // Slabs without a live block: a few a class stay, so that a program whose need goes up and down does not cut and give
  // back each time. Looks at the first few only.
  static constexpr unsigned kIdleKept = 1;
  unsigned idle_slabs(unsigned cls) const {
    unsigned idle = 0, looks = 8;
    for (const Slab* slab = classes[cls].head; slab != nullptr && looks-- > 0; slab = slab->next)
      idle += slab->stack.all_free() && slab->waiting == 0;
    return idle;
  }
  // Takes an idle one out that is too many, to be retired once the lock is free.
  bool take_if_surplus(Slab* slab) {
    if (!slab->stack.all_free() || slab->waiting != 0 || slab->cls == kZeroClass || idle_slabs(slab->cls) <= kIdleKept)
      return false;
    unlist(slab);
    count_slab(-1, slab->bytes);
    return true;
  }
};

}  // namespace streampool::pool
