// Size classes of slabs: geometric, at most 12.5 % rounding, found by bit arithmetic. Pure numbers.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

#include "../base/types.hpp"

namespace streampool::placement {

// Blocks above this are extents of their exact size. A class needs a slab of several slots, so classes further up would
// make a program that uses few blocks of many sizes reserve much (docs/design.md, "Decisions").
inline constexpr Bytes kMaxSlotSize = 64 * kKiB;
// Up to here classes are multiples of 256; from here on eight to a doubling.
inline constexpr Bytes kLinearLimit = 2 * kKiB;
inline constexpr unsigned kLinearClasses = kLinearLimit / kMinAlignment;
inline constexpr unsigned kDoublings = 5;  // 2 KiB to 64 KiB
inline constexpr unsigned kClassCount = kLinearClasses + 8 * kDoublings;

// Class of a total size in 0..kMaxSlotSize.
constexpr unsigned class_of(Bytes size) {
  if (size <= kLinearLimit) return size == 0 ? 0 : static_cast<unsigned>((size - 1) / kMinAlignment);
  const Bytes s = size - 1;
  const unsigned exponent = 63u - static_cast<unsigned>(std::countl_zero(s));  // >= 11
  const unsigned step = static_cast<unsigned>((s >> (exponent - 3)) & 7u);
  return kLinearClasses + (exponent - 11u) * 8u + step;
}

// The same for 1 to kMaxSlotSize, by one load: all class sizes are multiples of 256.
namespace detail {
inline constexpr auto kClassTable = [] {
  std::array<std::uint8_t, kMaxSlotSize / kMinAlignment> table{};
  for (std::size_t i = 0; i < table.size(); ++i)
    table[i] = static_cast<std::uint8_t>(class_of((i + 1) * kMinAlignment));
  return table;
}();
}  // namespace detail
constexpr unsigned class_of_slot(Bytes size) { return detail::kClassTable[(size - 1) / kMinAlignment]; }

constexpr Bytes class_size(unsigned cls) {
  if (cls < kLinearClasses) return (cls + 1) * kMinAlignment;
  const unsigned k = cls - kLinearClasses;
  return static_cast<Bytes>(9 + k % 8) << (8 + k / 8);
}

// A slab starts at a multiple of the page map's page and covers whole pages.
inline constexpr Bytes kSlabUnit = 64 * kKiB;
inline constexpr Bytes kSmallSlab = kSlabUnit;
inline constexpr Bytes kLargeSlab = 4 * kSlabUnit;
constexpr Bytes slab_size(unsigned cls) { return class_size(cls) <= 8 * kKiB ? kSmallSlab : kLargeSlab; }
constexpr unsigned slots_of(unsigned cls) { return static_cast<unsigned>(slab_size(cls) / class_size(cls)); }
inline constexpr unsigned kMaxSlots = kSmallSlab / kMinAlignment;

// Slot index from a byte offset without a division: offsets and sizes are multiples of 256, so n < 1024 and
// floor(n / d) = n * ceil(2^32 / d) >> 32 exactly.
constexpr std::uint64_t slot_reciprocal(unsigned cls) {
  const std::uint64_t d = class_size(cls) / kMinAlignment;
  return ((std::uint64_t{1} << 32) + d - 1) / d;
}

}  // namespace streampool::placement
