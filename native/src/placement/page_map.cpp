#include "page_map.hpp"

#include <sys/mman.h>

namespace streampool::placement {

PageMap::Leaf* PageMap::leaf_of(Address address) {
  std::atomic<Leaf*>& slot = root_[address >> (kPageBits + kLeafBits)];
  Leaf* leaf = slot.load(std::memory_order_acquire);
  if (leaf != nullptr) return leaf;
  // Zero pages of the kernel: only what is written costs memory. Never given back: readers hold no lock.
  void* memory =
      mmap(nullptr, sizeof(Leaf), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  Leaf* fresh = static_cast<Leaf*>(memory);
  if (slot.compare_exchange_strong(leaf, fresh, std::memory_order_acq_rel)) return fresh;
  munmap(memory, sizeof(Leaf));
  return leaf;
}

bool PageMap::set(Address address, Bytes size, void* pointer, Tag tag) {
  if (address >= kAddressLimit || size > kAddressLimit - address) return false;
  const std::uintptr_t word = reinterpret_cast<std::uintptr_t>(pointer) | static_cast<std::uintptr_t>(tag);
  for (Address page = address >> kPageBits; page << kPageBits < address + size; ++page) {
    Leaf* leaf = leaf_of(page << kPageBits);
    if (leaf == nullptr) return false;
    (*leaf)[page & (kLeafSize - 1)].store(word, std::memory_order_release);
  }
  return true;
}

void PageMap::clear(Address address, Bytes size, const void* pointer) {
  for (Address page = address >> kPageBits; page << kPageBits < address + size; ++page) {
    Leaf* leaf = root_[page >> kLeafBits].load(std::memory_order_acquire);
    if (leaf == nullptr) continue;
    std::atomic<std::uintptr_t>& entry = (*leaf)[page & (kLeafSize - 1)];
    std::uintptr_t word = entry.load(std::memory_order_acquire);
    if ((word & ~std::uintptr_t{1}) == reinterpret_cast<std::uintptr_t>(pointer))
      entry.compare_exchange_strong(word, 0, std::memory_order_acq_rel);
  }
}

}  // namespace streampool::placement
