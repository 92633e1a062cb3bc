// From an address to its block, and what else an address may be: misuse is named, and changes nothing (R8).
#include <algorithm>

#include "core.hpp"

namespace streampool::pool {

using placement::PageMap;

// The live large block of any pool that holds `address`; `in_pool`: some pool owns the address. The page map has the
// start of a block only, so this looks page by page towards lower addresses: for interior addresses and errors, not for
// frees.
LargeBlock* Core::covering(Address address, bool* in_pool) {
  constexpr Bytes kPage = Bytes{1} << PageMap::kPageBits;
  for (const auto& other : all()) {
    std::lock_guard lock(other->extent_lock_);
    if (LargeBlock* block = other->guarded_at(address)) {
      *in_pool = true;
      const bool held = block->record.is(Magic::live) || block->record.is(Magic::released);
      return held && address >= block->begin && address < block->begin + block->bytes ? block : nullptr;
    }
    const placement::Range* range = other->extents_.range_of(address);
    if (range == nullptr) continue;
    *in_pool = true;
    for (Address page = round_down(address, kPage) + (kPage - 1); page >= range->begin; page -= kPage) {
      const PageMap::Entry e = PageMap::find(page);
      if (!e) continue;
      if (e.tag() == PageMap::Tag::slab) {
        if (static_cast<Slab*>(e.pointer())->retired) continue;
        return nullptr;
      }
      LargeBlock* block = static_cast<LargeBlock*>(e.pointer());
      if (block->extent == nullptr || block->begin > address)
        continue;  // freed, or it starts behind us in the same page
      return address < block->begin + block->bytes ? block : nullptr;
    }
    return nullptr;
  }
  return nullptr;
}

void Core::count_misuse(Errc errc) {
  const std::size_t which = static_cast<std::size_t>(errc) - static_cast<std::size_t>(Errc::double_free);
  misuses_[which].fetch_add(1, std::memory_order_relaxed);
  tell(observe::EventKind::free_invalid, 0, 0, errc_word(errc));
}

// Finds the block that starts at `address`, in whatever state it is. Anything else is an error that names what is
// there, and for a free a fault too.
Errc Core::locate(Address address, BlockRef* out, Failure* failure, debug::StackId stack, bool is_free) {
  const auto misuse = [&](Errc errc, std::string text, const BlockRecord* record, Address at, Core* owner = nullptr) {
    if (is_free) count_misuse(errc);
    if (debugger_ != nullptr && is_free) {
      debug::Fault fault;
      fault.kind = *fault_of(errc);
      fault.address = fault.last = address;
      fault.at = stack;
      fault.note = text;
      if (record != nullptr) fault.block = (owner != nullptr ? owner : this)->facts_of(*record, at);
      debugger_->report(std::move(fault));
    }
    return failure->set(errc, std::move(text));
  };

  PageMap::Entry entry = PageMap::find(address);
  BlockRecord* record = nullptr;
  Address begin = 0;
  Bytes bytes = 0;
  Core* core = nullptr;
  // What the entry says may be history: a larger block can have grown over the page since.
  const bool history =
      !entry || (entry.tag() == PageMap::Tag::slab ? static_cast<Slab*>(entry.pointer())->retired.load()
                                                   : static_cast<LargeBlock*>(entry.pointer())->page != address);
  bool in_pool = false;
  if (history)
    if (LargeBlock* block = covering(address, &in_pool))
      entry.word = reinterpret_cast<std::uintptr_t>(block) | static_cast<std::uintptr_t>(PageMap::Tag::large);
  if (entry && entry.tag() == PageMap::Tag::slab) {
    Slab* slab = static_cast<Slab*>(entry.pointer());
    core = slab->core;
    const unsigned slot = slab->slot_of(address);
    if (slot < slab->stack.slots) {
      record = &slab->records[slot];
      begin = slab->slot_begin(slot);
      bytes = slab->slot_bytes;
    }
  } else if (entry) {
    LargeBlock* block = static_cast<LargeBlock*>(entry.pointer());
    core = block->core;
    record = &block->record;
    begin = block->begin;
    bytes = block->bytes;
    if (address < begin || address >= begin + bytes) record = nullptr;
  }
  if (record == nullptr && in_pool)
    return misuse(Errc::foreign_free, hex(address) + " is not a block: it lies in free memory of a pool", nullptr, 0);
  if (record == nullptr)
    return misuse(
        Errc::foreign_free,
        hex(address) + " was not allocated from this or any other pool of the process; free it where it came from",
        nullptr, 0);
  const std::uint64_t word = record->word.load(std::memory_order_acquire);
  if (!is_magic(BlockRecord::magic_of(word)))
    return misuse(Errc::trampled_record,
                  "the record of the block at " + hex(address) + " was overwritten in host memory (state word " +
                      hex(word) + "); nothing was freed. A stray host write is the likely cause",
                  nullptr, 0);
  const Address user = begin + record->front();
  if (core != this)
    return misuse(Errc::wrong_pool,
                  "the block at " + hex(user) + " belongs to pool '" + core->name() + "' (" +
                      std::string(kind_name(core->kind())) + " memory of " + std::string(core->driver_->name()) +
                      "), not to pool '" + name_ + "'",
                  record, user, core);
  if (user != address) {
    const bool live = record->is(Magic::live) || record->is(Magic::released);
    return misuse(Errc::interior_free,
                  hex(address) + " is not the start of a block: it lies " +
                      (address >= user ? std::to_string(address - user) + " bytes into"
                                       : std::to_string(user - address) + " bytes before") +
                      " the " + (live ? "" : "freed ") + "block of " + std::to_string(record->size) + " bytes at " +
                      hex(user),
                  record, user);
  }
  *out = BlockRef{address, record, BlockRecord::generation_of(word)};
  return Errc::ok;
}

// A caller that keeps a block's size and names another one means another block, or has lost count. What is not live is
// told as that.
Errc Core::must_have_size(const BlockRef& block, const FreeRequest& request, Failure* failure) {
  const Bytes size = block.record->size.load(std::memory_order_relaxed);
  if (!request.size.has_value() || *request.size == size || !live(block)) return Errc::ok;
  const std::string text = "the block at " + hex(block.address) + " of pool '" + name_ + "' has " +
                           std::to_string(size) + " bytes, and the free says " + std::to_string(*request.size);
  if (debugger_ != nullptr) {
    debug::Fault fault;
    fault.kind = debug::FaultKind::size_mismatch;
    fault.address = fault.last = block.address;
    fault.at = request.stack;
    fault.note = text;
    fault.block = facts_of(*block.record, block.address);
    debugger_->report(std::move(fault));
  }
  return failure->set(Errc::size_mismatch, text);
}

// The block is not live: say what it is instead.
Errc Core::not_live(const BlockRef& block, std::uint64_t word, Failure* failure, debug::StackId stack, bool is_free) {
  const BlockRecord& record = *block.record;
  const bool trampled = !is_magic(BlockRecord::magic_of(word));
  if (is_free) count_misuse(trampled ? Errc::trampled_record : Errc::double_free);
  if (trampled) {
    std::string text = "the record of the block at " + hex(block.address) +
                       " was overwritten in host memory; nothing was freed. A stray host write is the likely cause";
    if (debugger_ != nullptr && is_free) {
      debug::Fault fault;
      fault.kind = debug::FaultKind::trampled_record;
      fault.address = fault.last = block.address;
      fault.at = stack;
      fault.note = text;
      debugger_->report(std::move(fault));
    }
    return failure->set(Errc::trampled_record, std::move(text));
  }
  // With another generation the record speaks of the new owner, who has nothing to do with this.
  const bool reused = BlockRecord::generation_of(word) != block.generation;
  std::string text = reused ? "the block" : "the block of " + std::to_string(record.size) + " bytes";
  text += " at " + hex(block.address) + " of pool '" + name_ + "' ";
  if (reused)
    text += "was freed before, and its memory has been handed out again since; the new owner is not harmed";
  else if (BlockRecord::magic_of(word) == static_cast<std::uint32_t>(Magic::released))
    text += "was released already";
  else
    text += "is free already";
  if (debugger_ != nullptr && is_free) {
    debug::Fault fault;
    fault.kind = debug::FaultKind::double_free;
    fault.address = fault.last = block.address;
    fault.at = stack;
    fault.note = text;
    if (!reused) fault.block = facts_of(record, block.address);
    debugger_->report(std::move(fault));
  }
  return failure->set(Errc::double_free, std::move(text));
}

// The live block that an address inside it belongs to.
Errc Core::enclosing(Address address, BlockRef* out, Failure* failure) {
  const auto missing = [&] {
    return failure->set(Errc::foreign_free, hex(address) + " lies in no live block of pool '" + name_ + "'");
  };
  const PageMap::Entry entry = PageMap::find(address);
  BlockRecord* record = nullptr;
  Address begin = 0;
  if (entry && entry.tag() == PageMap::Tag::slab && !static_cast<Slab*>(entry.pointer())->retired) {
    Slab* slab = static_cast<Slab*>(entry.pointer());
    const unsigned slot = slab->slot_of(address);
    if (slab->core != this || slot >= slab->stack.slots) return missing();
    record = &slab->records[slot];
    begin = slab->slot_begin(slot);
  } else {
    bool in_pool = false;
    LargeBlock* block = covering(address, &in_pool);
    if (block == nullptr || block->core != this) return missing();
    record = &block->record;
    begin = block->begin;
  }
  if (record == nullptr || !record->is(Magic::live)) return missing();
  const Address user = begin + record->front();
  if (address < user || address >= user + std::max<Bytes>(record->size, 1)) return missing();
  *out = BlockRef{user, record, BlockRecord::generation_of(record->word.load(std::memory_order_acquire))};
  return Errc::ok;
}

}  // namespace streampool::pool
