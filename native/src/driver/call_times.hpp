// How long the driver's calls for memory take: a histogram for each sort of work, kept by the device's name for the
// life of the process. Only these calls are timed; a look at the clock costs as much as a fast allocation.
// Imports base/ only.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

#include "../base/histogram.hpp"

namespace streampool::driver {

// clang-format off
#define STREAMPOOL_MEMORY_WORK(X) \
  X(alloc, "making memory")       \
  X(map, "mapping it and giving access") \
  X(unmap, "unmapping it")        \
  X(free, "giving it back")
// clang-format on
enum class MemoryWork : std::uint8_t {
#define STREAMPOOL_ROW(name, text) name,
  STREAMPOOL_MEMORY_WORK(STREAMPOOL_ROW)
#undef STREAMPOOL_ROW
      count_
};
inline constexpr std::size_t kMemoryWorkCount = static_cast<std::size_t>(MemoryWork::count_);
std::span<const char* const> memory_work_words();

// Upper bounds of the buckets in nanoseconds: from 10 us on, each four times the one before; one more above them all.
inline constexpr std::array<std::uint64_t, 9> kCallTimeBounds = [] {
  std::array<std::uint64_t, 9> bounds{};
  std::uint64_t bound = 10'000;
  for (std::uint64_t& b : bounds) {
    b = bound;
    bound *= 4;
  }
  return bounds;
}();
inline constexpr std::size_t kCallTimeBuckets = kCallTimeBounds.size() + 1;

struct CallTimes {
  std::array<Histogram<kCallTimeBuckets>, kMemoryWorkCount> work;  // sums in nanoseconds

  void add(MemoryWork which, std::uint64_t nanoseconds) {
    std::size_t bucket = 0;
    while (bucket < kCallTimeBounds.size() && nanoseconds > kCallTimeBounds[bucket]) ++bucket;
    work[static_cast<std::size_t>(which)].add(bucket, 1, nanoseconds);
  }
};

// Those of a device of that name; made on first use, never given back.
CallTimes& call_times_of(std::string_view device);

}  // namespace streampool::driver
