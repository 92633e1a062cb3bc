// The pool's side of debug mode: checks on demand, and what the debugger asks of its Host.
#include <algorithm>

#include "core.hpp"

namespace streampool::pool {

using placement::Extent;
using placement::PageMap;

// Puts a mark on every stream that has live blocks, and waits a bounded time for them: live blocks on a stream whose
// mark is still open may have pending work, so their guards are not judged.
void Core::mark_streams(double deadline) {
  bool stranded = false;
  streams_.for_each([&](Heap& heap) {
    {
      std::lock_guard lock(heap.stream.lock);
      heap.check_ticket.store(heap.stream.take_ticket(), std::memory_order_relaxed);
    }
    stranded = stranded || !heap.stream.lasting || (heap.stream.legacy && !options_.legacy_fences);
  });
  Patience patience{.deadline = deadline};
  for (;;) {
    // Again when an older one, which covers less, was still pending.
    if (stranded) recover();
    poll_all(true);
    bool open = false;
    streams_.for_each([&](Heap& heap) { open = open || !heap.stream.idle(); });
    if (!open || rest(patience) != Rest::waited) return;
  }
}

std::vector<debug::Fault> Core::take_faults() {
  return debugger_ != nullptr ? debugger_->take_faults() : std::vector<debug::Fault>{};
}
std::vector<std::pair<debug::StackId, debug::SiteUsage>> Core::usage() const {
  if (debugger_ == nullptr) return {};
  return debugger_->usage();
}
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
    dissect(alive);
    report.errc = Errc::driver;
    report.text =
        "device " + std::string(driver_->name()) + " is lost (" + driver::describe(alive) + "): the memory of pool '" +
        name_ +
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
  record_idle();
  if (options_.release_threshold != 0) {
    poll_all(true);
    retire_idle();
    promote();
    apply_release_threshold(std::max(0.0, deadline - driver_->now()));
  }
  return report;
}

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

// Nothing that was allowed to touch the block still does: from here on an access is reported.
void Core::at_rest(void* cookie) {
  const BlockRecord& record = *static_cast<BlockRecord*>(cookie);
  if (regions_ != nullptr && record.size != 0) regions_->remove_region(address_of(record));
}

void Core::found(const debug::Fault& fault) {
  tell(observe::EventKind::fault_found, fault.address, fault.bad_bytes, debug::fault_word(fault.kind));
}

void Core::give_back(void* cookie) {
  BlockRecord& record = *static_cast<BlockRecord*>(cookie);
  {
    std::lock_guard lock(extra_lock(&record));
    record.extra->marks = {};
  }
  const std::uint32_t generation = BlockRecord::generation_of(record.word.load(std::memory_order_acquire));
  record.move(generation, Magic::quarantined, Magic::freed);
  if (PageMap::Entry{record.container}.tag() == PageMap::Tag::large &&
      LargeBlock::of(record)->side.load(std::memory_order_relaxed) != debug::PageGuard::none)
    revoke(LargeBlock::of(record));
  else
    settle(&record, {});
}

void Core::neighbours(Address begin, Bytes size, std::optional<debug::BlockFacts>* below,
                      std::optional<debug::BlockFacts>* above) {
  const PageMap::Entry entry = PageMap::find(begin);
  if (entry && entry.tag() == PageMap::Tag::slab) {
    const Slab* slab = static_cast<Slab*>(entry.pointer());
    const unsigned slot = slab->slot_of(begin);
    const auto at = [&](unsigned n) -> std::optional<debug::BlockFacts> {
      const BlockRecord& r = slab->records[n];
      if (r.is(Magic::fresh)) return std::nullopt;
      return facts_of(r, slab->slot_begin(n) + r.front());
    };
    if (slot > 0) *below = at(slot - 1);
    if (slot + 1 < slab->stack.slots) *above = at(slot + 1);
    return;
  }
  // Facts take a lock of their own, so they are looked up when the extents are free again.
  const auto at = [](const Extent* x) -> const LargeBlock* {
    if (x == nullptr || x->state != placement::ExtentState::taken || x->note == nullptr) return nullptr;
    const PageMap::Entry holder{reinterpret_cast<std::uintptr_t>(x->note)};
    return holder.tag() == PageMap::Tag::large ? static_cast<LargeBlock*>(holder.pointer()) : nullptr;
  };
  const LargeBlock *before = nullptr, *behind = nullptr;
  {
    std::lock_guard lock(extent_lock_);
    const placement::Range* range = extents_.range_of(begin);
    if (range == nullptr) return;
    const Extent* e = range->first;
    while (e != nullptr && e->end() <= begin) e = e->next;
    if (e == nullptr) return;
    before = at(e->prev);
    while (e != nullptr && e->begin < begin + size) e = e->next;
    behind = at(e);
  }
  if (before != nullptr) *below = facts_of(before->record, before->begin + before->record.front());
  if (behind != nullptr) *above = facts_of(behind->record, behind->begin + behind->record.front());
}

// A record that is live keeps what it says as long as the debugger looks: what is freed meanwhile is not handed out.
void Core::live_blocks(std::vector<debug::BlockFacts>* ready, std::vector<debug::BlockFacts>* busy) {
  for_each_live([&](BlockRecord& record) {
    Heap& heap = *record.home.load(std::memory_order_relaxed);
    bool done = heap.checked();
    {
      std::lock_guard extra(extra_lock(&record));
      if (record.extra)
        for (order::StreamState* s : record.extra->recorded) done = done && Heap::of(s)->checked();
    }
    (done ? ready : busy)->push_back(facts_of(record, address_of(record)));
  });
}

}  // namespace streampool::pool
