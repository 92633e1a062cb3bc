// How large the requests are. Counted off the fast path: exactly where each allocation takes the full call anyway, else
// from the sampled ones (sampler.hpp), each of which stands for many. So a bucket is an unbiased estimate, in
// fractions, and never goes down. Each thread counts for itself (counters.hpp).
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

#include "../base/types.hpp"

namespace streampool::observe {

// Upper bounds of the buckets: each eight times the one before, and one more bucket above them all.
inline constexpr std::size_t kSizeBounds = 8;
constexpr Bytes size_bound(std::size_t bucket) { return Bytes{512} << 3 * bucket; }
inline constexpr std::size_t kSizeBuckets = kSizeBounds + 1;
constexpr std::size_t size_bucket(Bytes size) {
  const Bytes above = size == 0 ? 0 : (size - 1) / size_bound(0);
  return std::min<std::size_t>((static_cast<std::size_t>(std::bit_width(above)) + 2) / 3, kSizeBounds);
}
inline constexpr std::uint64_t kCountUnit = 1024;  // counts are in 1/1024 of an allocation

}  // namespace streampool::observe
