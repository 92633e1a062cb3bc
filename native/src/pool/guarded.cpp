// Blocks with pages of their own between unmapped ones (debug/page_guards.hpp): mapped when they are handed out,
// revoked when they are freed and every mark on them is complete, their addresses kept for a while. And what is left to
// say when an access hit such a gap: the device then answers nothing any more.
#include <algorithm>
#include <utility>

#include "core.hpp"

namespace streampool::pool {

using placement::PageMap;

namespace {

// Of the limit, or of the device's memory, whatever the cap says.
constexpr Bytes kMostOfMemory = 2;

// Blocks that a fault names at most.
constexpr std::size_t kMaxCandidates = 1000;

}  // namespace

void Core::make_page_guards() {
  debug::PageGuardOptions wanted = options_.debug.pages;
  // Only virtual memory can have gaps; other kinds of memory get guard bytes.
  if (!wanted.on() || kind_ != Kind::device || !driver_->capabilities().virtual_memory) return;
  // Whole pages for small blocks must not be what makes memory short.
  const Bytes most = limit() != 0 ? limit() : driver_->capabilities().total_memory;
  wanted.cap = std::min(wanted.cap, most / kMostOfMemory);
  page_guards_ = std::make_unique<debug::PageGuards>(wanted, door_.uid);
}

Errc Core::open_guard_records(Failure* failure) {
  const std::string& path = options_.debug.pages.records;
  if (page_guards_ == nullptr || path.empty()) return Errc::ok;
  std::string error;
  if (guard_records_.open(path, name_, std::string(driver_->name()), debug::PageGuards::seed_of(options_.debug.pages),
                          &error))
    return Errc::ok;
  return failure->set(Errc::invalid_value, "option 'page_guard_records': " + error);
}

// Maps pages for a block. False: it gets a place like any other, with guard bytes.
bool Core::take_guarded(Named& named, const AllocRequest& request, Need* need, Found* found) {
  if (page_guards_ == nullptr || need->size == 0) return false;
  const Bytes page = granularity_;
  const Bytes bytes = round_up(need->size, page);
  if (!page_guards_->take(need->size, bytes, request.stack, request.tag, hooks_.resolve_stack)) return false;
  auto pages = std::make_unique<GuardedPages>();
  pages->side = page_guards_->draw_side();
  pages->range_bytes = bytes + 2 * page;
  bool charged = false;
  const bool made = [&] {
    if (!(charged = charge(bytes))) return false;
    if (!driver_->address_reserve(pages->range_bytes, std::max(page, kMaxAlignment), &pages->range).ok()) return false;
    if (!driver_->mem_create(bytes, options_.traits, &pages->handle).ok()) return false;
    if (!driver_->mem_map(pages->range + page, bytes, pages->handle).ok()) return false;
    pages->mapped = bytes;
    return driver_->mem_set_access(pages->range + page, bytes, options_.traits).ok();
  }();
  if (!made) {
    // Of what there is, in the other order; what the driver does not take back then is lost with the device.
    if (pages->mapped != 0) driver_->mem_unmap(pages->range + page, bytes);
    if (pages->handle != 0) driver_->mem_release(pages->handle);
    if (pages->range != 0) driver_->address_free(pages->range, pages->range_bytes);
    if (charged) uncharge(bytes);
    page_guards_->refused(bytes, request.stack);
    return false;
  }
  note_peak();
  const Address begin = pages->range + page;
  const Bytes alignment = std::max(request.alignment, kMinAlignment);
  const Address user = debug::PageGuards::place(pages->side, begin, bytes, need->size, alignment);
  need->front = user - begin;
  need->bytes = bytes;
  {
    std::lock_guard lock(extent_lock_);
    LargeBlock* block = spare_large();
    block->extent = nullptr;
    block->begin.store(begin, std::memory_order_relaxed);
    block->bytes.store(bytes, std::memory_order_relaxed);
    block->page.store(user, std::memory_order_relaxed);
    block->side.store(pages->side, std::memory_order_relaxed);
    block->record.ticket = 0;
    claim_pages(user, 1, block, PageMap::Tag::large);
    guarded_.emplace(pages->range, block);
    block->pages = std::move(pages);
    *found = {&block->record, begin, bytes, Path::grown, false, false};
  }
  found->pages = LargeBlock::of(*found->record)->side.load(std::memory_order_relaxed);
  note_named(*named.heap());
  return true;
}

// Every mark of the freed block is complete: nothing that was allowed to touch it still does.
void Core::revoke(LargeBlock* block) {
  GuardedPages& pages = *block->pages;
  const Bytes bytes = pages.mapped;
  const std::uint64_t serial = pages.last.serial;
  if (!driver_->mem_unmap(pages.range + granularity_, bytes).ok()) {
    std::lock_guard lock(extent_lock_);
    unrevoked_.push_back(block);  // still charged
    return;
  }
  const driver::Status released = driver_->mem_release(pages.handle);
  {
    std::lock_guard lock(extent_lock_);
    pages.mapped = 0;
    pages.last.state = debug::BlockState::freed;
    if (!released.ok()) orphans_.push_back({pages.range + granularity_, bytes, pages.handle});
    revoked_.push_back(block);
  }
  if (released.ok()) uncharge(bytes);
  page_guards_->release(bytes, block->record.stack());
  guard_records_.revoked(serial);
  drop_revoked(options_.debug.pages.kept);
}

// What could not be unmapped before, once more.
void Core::revoke_again() {
  std::vector<LargeBlock*> again;
  {
    std::lock_guard lock(extent_lock_);
    again.swap(unrevoked_);
  }
  for (LargeBlock* block : again) revoke(block);
}

// Forgets the oldest revoked blocks, but the newest `keep`: their addresses may be others' from here on.
void Core::drop_revoked(std::size_t keep) {
  for (;;) {
    std::unique_ptr<GuardedPages> pages;
    {
      std::lock_guard lock(extent_lock_);
      if (revoked_.size() <= keep) return;
      LargeBlock* block = revoked_.front();
      revoked_.pop_front();
      pages = std::move(block->pages);
      guarded_.erase(pages->range);
      PageMap::clear(block->page, 1, block);
      block->side.store(debug::PageGuard::none, std::memory_order_relaxed);
      spare_large_.push_back(block);
    }
    guard_records_.dropped(pages->last.serial);
    driver_->address_free(pages->range, pages->range_bytes);
  }
}

// Under the extent lock: the block whose pages, or gaps beside them, hold an address.
LargeBlock* Core::guarded_at(Address address) const {
  auto at = guarded_.upper_bound(address);
  if (at == guarded_.begin()) return nullptr;
  --at;
  return address < at->first + at->second->pages->range_bytes ? at->second : nullptr;
}

// A call named the stream, so work on it may follow that no fence covers yet.
void Core::note_named(Heap& heap) {
  if (page_guards_ == nullptr) return;
  heap.named_ticket.store(heap.stream.issued.load(std::memory_order_relaxed), std::memory_order_relaxed);
  if (guard_records_.is_open()) guard_records_.named(heap.stream.id.load(std::memory_order_relaxed));
}

void Core::record_freed(LargeBlock& block, const debug::BlockFacts& facts, const Held& held) {
  GuardedPages& pages = *block.pages;
  pages.last = facts;
  pages.used.clear();
  const auto add = [&](order::StreamState* s) { pages.used.push_back({s, s->id.load(std::memory_order_relaxed)}); };
  if (held.home != nullptr) add(&held.home->stream);
  for (order::StreamState* s : held.recorded) add(s);
  if (guard_records_.is_open()) guard_records_.freed(facts, hooks_.resolve_stack);
}

void Core::record_idle() {
  if (!guard_records_.is_open()) return;
  streams_.for_each([&](Heap& heap) {
    if (heap.drained()) guard_records_.idle(heap.stream.id.load(std::memory_order_relaxed));
  });
}

// The device is lost: which blocks the access may have been meant for, as far as is known. Once a pool.
void Core::dissect(driver::Status status) {
  if (page_guards_ == nullptr || dissected_.exchange(true)) return;
  if (status.ok()) status.code = driver::Code::lost;  // the call that met it is not known
  guard_records_.lost(driver::describe(status));
  struct Looked {
    debug::Candidate candidate;
    bool drained = true;
  };
  std::vector<Looked> looked;
  const auto note = [&](const debug::BlockFacts& facts, bool revoked, const std::vector<UsedStream>& used) {
    Looked one;
    std::string streams;
    for (const UsedStream& use : used) {
      // Whose heap is another stream's by now was idle when it was swept.
      const bool same = use.stream->id.load(std::memory_order_relaxed) == use.id;
      const bool drained = !same || Heap::of(use.stream)->drained();
      one.drained = one.drained && drained;
      streams += (streams.empty() ? "" : ", ") + stream_text(use.id) + (drained ? " (idle)" : "");
    }
    const Bytes slack = facts.pages == debug::PageGuard::right
                            ? facts.begin + facts.reserved - facts.address - facts.size
                            : facts.address - facts.begin;
    const std::string side = facts.pages == debug::PageGuard::right ? "behind its end" : "before its start";
    one.candidate.block = facts;
    one.candidate.why = revoked
                            ? "freed, and its pages revoked: any access faults"
                            : std::string(facts.state == debug::BlockState::live ? "live" : "freed, not revoked yet") +
                                  ": an access " + std::to_string(slack) + " bytes or more " + side + " faults";
    one.candidate.why += "; used on " + streams;
    looked.push_back(std::move(one));
  };
  std::vector<LargeBlock*> blocks;
  {
    std::lock_guard lock(extent_lock_);
    for (const auto& [begin, block] : guarded_) blocks.push_back(block);
  }
  for (LargeBlock* block : blocks) {
    BlockRecord& record = block->record;
    if (record.is(Magic::live) || record.is(Magic::released)) {
      std::vector<UsedStream> used;
      const auto add = [&](order::StreamState* s) { used.push_back({s, s->id.load(std::memory_order_relaxed)}); };
      if (Heap* home = record.home.load(std::memory_order_relaxed)) add(&home->stream);
      {
        std::lock_guard lock(extra_lock(&record));
        if (record.extra)
          for (order::StreamState* s : record.extra->recorded) add(s);
      }
      note(facts_of(record, address_of(record)), false, used);
      continue;
    }
    debug::BlockFacts facts;
    std::vector<UsedStream> used;
    bool revoked = false;
    {
      std::lock_guard lock(extent_lock_);
      if (block->pages == nullptr) continue;
      facts = block->pages->last;
      used = block->pages->used;
      revoked = block->pages->mapped == 0;
    }
    if (facts.serial == 0) continue;  // being handed out just now
    note(facts, revoked, used);
  }
  const auto busy = std::partition(looked.begin(), looked.end(), [](const Looked& one) { return !one.drained; });
  const std::size_t left_out = busy == looked.begin() ? 0 : static_cast<std::size_t>(looked.end() - busy);
  if (busy != looked.begin()) looked.erase(busy, looked.end());
  const auto last_call = [](const Looked& one) {
    const debug::BlockFacts& block = one.candidate.block;
    return std::pair(std::max(block.freed_time, block.allocated_time), block.serial);
  };
  std::sort(looked.begin(), looked.end(),
            [&](const Looked& a, const Looked& b) { return last_call(a) > last_call(b); });
  debug::Fault fault;
  fault.kind = debug::FaultKind::illegal_access;
  const std::size_t found = looked.size();
  for (std::size_t i = 0; i < std::min(found, kMaxCandidates); ++i)
    fault.candidates.push_back(std::move(looked[i].candidate));
  if (!fault.candidates.empty()) {
    fault.block = fault.candidates.front().block;
    fault.address = fault.last = fault.block->address;
  }
  fault.note = "device " + std::string(driver_->name()) + " is lost (" + driver::describe(status) +
               "); the driver gives no address. " + std::to_string(found) + " block" + (found == 1 ? "" : "s") +
               " between unmapped pages may be meant, the one that was used last first";
  if (found > kMaxCandidates) fault.note += " (the first " + std::to_string(kMaxCandidates) + " are listed)";
  if (left_out != 0)
    fault.note += "; " + std::to_string(left_out) +
                  " more are left out, since all their streams were idle when they were looked at last";
  else if (found != 0 && std::all_of(looked.begin(), looked.end(), [](const Looked& one) { return one.drained; }))
    fault.note += "; all their streams were idle when they were looked at last, so work came after it";
  const debug::PageGuardTotals totals = page_guards_->totals();
  if (const std::uint64_t without = totals.over_cap + totals.refused; without != 0)
    fault.note += "; " + std::to_string(without) + " blocks had no pages of their own (cap, limit or driver)";
  fault.note +=
      ". Sides were drawn with page_guard_seed=" + std::to_string(debug::PageGuards::seed_of(options_.debug.pages));
  debugger_->report(std::move(fault));
}

// At the end of the pool, for what nobody holds. Addresses of blocks that are never freed stay.
void Core::free_guarded() {
  revoke_again();
  drop_revoked(0);
}

}  // namespace streampool::pool
