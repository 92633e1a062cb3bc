// What the pool says of a block: addresses, sizes, facts; and which blocks are live.
#include "core.hpp"

namespace streampool::pool {

using placement::PageMap;

Address Core::address_of(const BlockRecord& record) const {
  const PageMap::Entry container{record.container};
  if (container.tag() == PageMap::Tag::large)
    return static_cast<LargeBlock*>(container.pointer())->begin + record.front();
  const Slab* slab = static_cast<Slab*>(container.pointer());
  return slab->slot_begin(slab->number_of(&record)) + record.front();
}

Bytes Core::gross_of(const BlockRecord& record) const {
  const PageMap::Entry container{record.container};
  if (container.tag() == PageMap::Tag::large) return static_cast<LargeBlock*>(container.pointer())->bytes;
  return static_cast<Slab*>(container.pointer())->gross;
}

Bytes Core::guards_of(const BlockRecord& record) const {
  if (debugger_ == nullptr) return 0;
  const PageMap::Entry container{record.container};
  if (page_guards_ != nullptr && container.tag() == PageMap::Tag::large) {
    const LargeBlock* block = static_cast<LargeBlock*>(container.pointer());
    if (block->side.load(std::memory_order_relaxed) != debug::PageGuard::none) return block->bytes - record.size;
  }
  return record.front() + debugger_->back_bytes();
}

debug::BlockFacts Core::facts_of(const BlockRecord& record, Address address) {
  std::lock_guard lock(extra_lock(&record));
  return facts_under_lock(record, address);
}

debug::BlockFacts Core::facts_under_lock(const BlockRecord& record, Address address) const {
  debug::BlockFacts f;
  const std::uint32_t magic = BlockRecord::magic_of(record.word.load(std::memory_order_acquire));
  f.state = magic == static_cast<std::uint32_t>(Magic::live)          ? debug::BlockState::live
            : magic == static_cast<std::uint32_t>(Magic::released)    ? debug::BlockState::released
            : magic == static_cast<std::uint32_t>(Magic::quarantined) ? debug::BlockState::quarantined
                                                                      : debug::BlockState::freed;
  f.address = address;
  f.size = record.size;
  f.begin = address - record.front();
  f.reserved = gross_of(record);
  const Heap* home = record.home.load(std::memory_order_relaxed);
  f.stream = home != nullptr ? home->stream.id.load(std::memory_order_relaxed) : 0;
  f.allocated_at = record.stack();
  f.raw = (record.flags() & (kRawBlock | kOwned)) == kRawBlock;
  f.exported = (record.flags() & kExported) != 0;
  if (PageMap::Entry{record.container}.tag() == PageMap::Tag::large)
    f.pages = LargeBlock::of(record)->side.load(std::memory_order_relaxed);
  if (record.extra) {
    const BlockExtra& e = *record.extra;
    f.serial = e.serial;
    f.allocated_thread = e.allocated_thread;
    f.freed_thread = e.freed_thread;
    f.allocated_time = e.allocated_time;
    f.freed_time = e.freed_time;
    f.allocated_moment = e.allocated_moment;
    f.freed_at = e.freed_at;
    f.tag = e.tag;
  }
  return f;
}

// Blocks as they are now; those that come or go meanwhile may be missing or seen.
void Core::for_each_live(const std::function<void(BlockRecord&)>& function, bool retired) {
  const auto counts = [&](const BlockRecord& record) {
    return record.is(Magic::live) || (retired && record.is(Magic::released));
  };
  std::vector<Slab*> slabs;
  std::vector<LargeBlock*> large;
  {
    std::lock_guard lock(extent_lock_);
    for (const auto& s : slabs_)
      if (s->base != 0 && !s->retired) slabs.push_back(s.get());
    for_each_large([&](LargeBlock& block) { large.push_back(&block); });
  }
  for (Slab* slab : slabs)
    for (unsigned i = 0; i < slab->stack.slots; ++i)
      if (counts(slab->records[i])) function(slab->records[i]);
  for (LargeBlock* block : large)
    if (counts(block->record)) function(block->record);
}

std::vector<debug::BlockFacts> Core::live_blocks() {
  drain();
  std::vector<debug::BlockFacts> blocks;
  for_each_live([&](BlockRecord& record) { blocks.push_back(facts_of(record, address_of(record))); });
  return blocks;
}

void Core::set_exported(const BlockRef& block, bool on) noexcept {
  BlockRecord& record = *block.record;
  if (BlockRecord::generation_of(record.word.load(std::memory_order_acquire)) != block.generation) return;
  constexpr std::uint64_t kFlag = BlockRecord::pack_origin(0, kExported, 0);
  if (on)
    record.origin.fetch_or(kFlag, std::memory_order_relaxed);
  else
    record.origin.fetch_and(~kFlag, std::memory_order_relaxed);
}

std::optional<debug::BlockFacts> Core::facts(const BlockRef& block) {
  const std::uint64_t word = block.record->word.load(std::memory_order_acquire);
  if (BlockRecord::generation_of(word) != block.generation) return std::nullopt;
  return facts_of(*block.record, block.address);
}

bool Core::segment_of(Address address, Address* begin, Bytes* size) {
  std::lock_guard lock(extent_lock_);
  const placement::Range* range = extents_.range_of(address);
  if (range == nullptr) return false;
  *begin = range->begin;
  *size = range->size;
  return true;
}

}  // namespace streampool::pool
