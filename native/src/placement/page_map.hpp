// From any address to the slab or the large block that starts in, or covers, its 64 KiB page: two loads, no lock (R7).
// One map a process, since a free must tell "another pool's block" from "nobody's".
//
// An entry is a pointer with a tag in its lowest bit. It is set when a slab or a large block is handed out and stays
// after the free (so that a second free is recognised) until the page is handed out again or its memory leaves the
// pool. At most one large block starts in a page, because large blocks are larger than a page; a slab covers whole
// pages.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "../base/types.hpp"

namespace streampool::placement {

class PageMap {
 public:
  static constexpr unsigned kPageBits = 16;
  static constexpr unsigned kLeafBits = 16;
  static constexpr unsigned kRootBits = 16;
  static constexpr Address kAddressLimit = Address{1} << (kPageBits + kLeafBits + kRootBits);

  enum class Tag : std::uintptr_t { slab = 0, large = 1 };

  struct Entry {
    std::uintptr_t word = 0;
    explicit operator bool() const { return word != 0; }
    Tag tag() const { return static_cast<Tag>(word & 1u); }
    void* pointer() const { return reinterpret_cast<void*>(word & ~std::uintptr_t{1}); }
  };

  static Entry find(Address address) {
    if (address >= kAddressLimit) return {};
    const Leaf* leaf = root_[address >> (kPageBits + kLeafBits)].load(std::memory_order_acquire);
    if (leaf == nullptr) return {};
    return {(*leaf)[(address >> kPageBits) & (kLeafSize - 1)].load(std::memory_order_acquire)};
  }

  // False when host memory for the map cannot be had, or the address is beyond what it covers.
  static bool set(Address address, Bytes size, void* pointer, Tag tag);
  // Clears the entries of these pages that still hold `pointer`.
  static void clear(Address address, Bytes size, const void* pointer);

 private:
  static constexpr std::size_t kLeafSize = std::size_t{1} << kLeafBits;
  using Leaf = std::array<std::atomic<std::uintptr_t>, kLeafSize>;
  static Leaf* leaf_of(Address address);
  static inline std::array<std::atomic<Leaf*>, std::size_t{1} << kRootBits> root_{};
};

}  // namespace streampool::placement
