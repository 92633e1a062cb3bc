#include "sampler.hpp"

#include <atomic>
#include <bit>
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

// The natural logarithm of a positive normal number, to seven digits: a large block is sampled nearly each time, and
// std::log took a fifth of what such a block costs. x = 2^e m with m near 1, ln m = 2 artanh((m - 1) / (m + 1)).
double quick_log(double x) {
  constexpr std::uint64_t kHalfRoot = 0x3FE6A09E00000000u;  // 1 / sqrt 2
  constexpr unsigned kMantissa = 52;
  const std::uint64_t bits = std::bit_cast<std::uint64_t>(x) - kHalfRoot;
  const double exponent = static_cast<double>(static_cast<std::int64_t>(bits) >> kMantissa);
  const double m = std::bit_cast<double>((bits & ((std::uint64_t{1} << kMantissa) - 1)) + kHalfRoot);
  const double t = (m - 1) / (m + 1), q = t * t;
  return exponent * 0.69314718055994531 + 2 * t * (1 + q * (1. / 3 + q * (1. / 5 + q * (1. / 7))));
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
  const double bytes = -quick_log(uniform) * static_cast<double>(mean_);
  return static_cast<Bytes>(bytes) + 1;
}

double Sampler::weight(Bytes size) const {
  if (mean_ == 0 || size == 0) return static_cast<double>(size);
  return static_cast<double>(size) / -std::expm1(-static_cast<double>(size) / static_cast<double>(mean_));
}

}  // namespace streampool::observe
