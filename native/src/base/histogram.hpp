// A histogram with fixed bounds, for what happens off the fast path: writers add without a lock, a reader may see a
// count before its sum. Imports nothing of ours.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace streampool {

// What a histogram holds at one moment, bucket by bucket (not cumulated).
template <std::size_t kBuckets>
struct Bins {
  std::array<std::uint64_t, kBuckets> counts{};
  std::uint64_t sum = 0;

  Bins& operator+=(const Bins& other) {
    for (std::size_t i = 0; i < kBuckets; ++i) counts[i] += other.counts[i];
    sum += other.sum;
    return *this;
  }
};

template <std::size_t kBuckets>
class Histogram {
 public:
  void add(std::size_t bucket, std::uint64_t count, std::uint64_t sum) {
    counts_[bucket].fetch_add(count, std::memory_order_relaxed);
    sum_.fetch_add(sum, std::memory_order_relaxed);
  }
  Bins<kBuckets> read() const {
    Bins<kBuckets> bins;
    for (std::size_t i = 0; i < kBuckets; ++i) bins.counts[i] = counts_[i].load(std::memory_order_relaxed);
    bins.sum = sum_.load(std::memory_order_relaxed);
    return bins;
  }

 private:
  std::array<std::atomic<std::uint64_t>, kBuckets> counts_{};
  std::atomic<std::uint64_t> sum_{0};
};

}  // namespace streampool
