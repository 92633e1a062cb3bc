// The few words every room of the house shares. Imports nothing of ours.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace streampool {

using Address = std::uint64_t;  // an address in the device's (or the host's) address space
using Bytes = std::uint64_t;    // sizes are 64-bit everywhere (R10)

// Where memory lives. `pinned` is page-locked host memory; `managed` is reachable from both sides.
enum class Kind : std::uint8_t { device, pinned, managed };

constexpr std::string_view kind_name(Kind kind) {
  switch (kind) {
    case Kind::device: return "device";
    case Kind::pinned: return "pinned";
    case Kind::managed: return "managed";
  }
  return "?";
}

// Memory that the host can touch: the host is one more reader, which no stream orders (R2).
constexpr bool host_visible(Kind kind) { return kind != Kind::device; }

// Set in the id under which blocks of a captured graph are known; the rest is the capture's id.
inline constexpr std::uint64_t kCapturedId = std::uint64_t{1} << 63;

inline constexpr Bytes kKiB = 1024;
inline constexpr Bytes kMiB = 1024 * kKiB;
inline constexpr Bytes kGiB = 1024 * kMiB;

// What every pointer is aligned to at least, guards or not (R10). cudaMalloc promises the same.
inline constexpr Bytes kMinAlignment = 256;
inline constexpr Bytes kMaxAlignment = 2 * kMiB;

constexpr bool is_power_of_two(Bytes value) { return value != 0 && (value & (value - 1)) == 0; }

// Rounding up that cannot wrap: false when the result does not fit 64 bits. `to` is a power of two.
[[nodiscard]] constexpr bool round_up_checked(Bytes value, Bytes to, Bytes* out) {
  const Bytes mask = to - 1;
  if (value > ~mask) return false;
  *out = (value + mask) & ~mask;
  return true;
}

// For values that are known to be small.
constexpr Bytes round_up(Bytes value, Bytes to) { return (value + to - 1) & ~(to - 1); }
constexpr Bytes round_down(Bytes value, Bytes to) { return value & ~(to - 1); }

}  // namespace streampool
