#include "sampler.hpp"

#include <atomic>
#include <cmath>
#include <limits>

namespace streampool::observe {
namespace {

// SplitMix64 (G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", 2014).
std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

constexpr std::uint64_t kStep = 0x9E3779B97F4A7C15u;
std::atomic<std::uint64_t> g_threads{0};

}  // namespace

Bytes Sampler::draw(std::uint64_t* random) const {
  if (mean_ == 0) return std::numeric_limits<Bytes>::max();
  // Each thread's numbers begin elsewhere, in the order in which threads come.
  if (*random == 0) *random = mixed(g_threads.fetch_add(1, std::memory_order_relaxed) + 1) | 1u;
  const std::uint64_t bits = mixed(*random += kStep) >> 11;  // 53
  const double uniform = (static_cast<double>(bits) + 0.5) * 0x1p-53;
  const double bytes = -std::log(uniform) * static_cast<double>(mean_);
  return static_cast<Bytes>(bytes) + 1;
}

double Sampler::weight(Bytes size) const {
  if (mean_ == 0 || size == 0) return static_cast<double>(size);
  return static_cast<double>(size) / -std::expm1(-static_cast<double>(size) / static_cast<double>(mean_));
}

}  // namespace streampool::observe
