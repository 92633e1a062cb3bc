#include "page_guards.hpp"

#include <fnmatch.h>

#include <algorithm>

namespace streampool::debug {

namespace {

// Of the cap: beyond it samples of call sites that have a guarded block already are left out, as KFENCE does, so that
// what room is left goes to others.
constexpr double kCrowded = 0.75;

std::uint64_t chosen_seed() {
  static const std::uint64_t seed = [] {
    std::random_device device;
    return std::uint64_t{device()} % 1000000000 + 1;  // one that is easily typed
  }();
  return seed;
}

bool matches(const std::string& glob, const std::string& text) { return fnmatch(glob.c_str(), text.c_str(), 0) == 0; }

}  // namespace

PageGuards::PageGuards(const PageGuardOptions& options, std::uint64_t salt)
    : options_(options), random_(seed_of(options) + salt * 0x9E3779B97F4A7C15ull) {}

std::uint64_t PageGuards::seed_of(const PageGuardOptions& options) {
  return options.seed != 0 ? options.seed : chosen_seed();
}

bool PageGuards::take(Bytes size, Bytes pages, StackId stack, std::string_view tag, const ResolveStack& resolve) {
  if (options_.which == PageGuardOptions::Which::off || size == 0) return false;
  if (size < options_.smallest || (options_.largest != 0 && size > options_.largest)) return false;
  const bool fits = options_.sites.empty() || site_fits(stack, tag, resolve);
  if (!fits) return false;
  const std::lock_guard lock(mutex_);
  if (options_.which == PageGuardOptions::Which::sampled) {
    // Each byte is a sample with the same probability, so large blocks are guarded more often. Beyond one in a block
    // they make no difference.
    if (until_sample_ <= 0)
      until_sample_ = std::exponential_distribution<double>(1 / static_cast<double>(options_.sample_bytes))(random_);
    until_sample_ -= static_cast<double>(size);
    if (until_sample_ > 0) return false;
    const bool crowded = static_cast<double>(totals_.bytes + pages) > kCrowded * static_cast<double>(options_.cap);
    if (crowded && stack != 0 && live_of_.contains(stack)) {
      ++totals_.covered;
      return false;
    }
  }
  if (pages > options_.cap || totals_.bytes > options_.cap - pages) {
    ++totals_.over_cap;
    return false;
  }
  bytes_.store(totals_.bytes += pages, std::memory_order_relaxed);
  ++totals_.guarded;
  ++totals_.live;
  if (stack != 0) ++live_of_[stack];
  return true;
}

void PageGuards::release(Bytes pages, StackId stack) {
  const std::lock_guard lock(mutex_);
  bytes_.store(totals_.bytes -= pages, std::memory_order_relaxed);
  --totals_.live;
  if (const auto at = live_of_.find(stack); at != live_of_.end() && --at->second == 0) live_of_.erase(at);
}

void PageGuards::refused(Bytes pages, StackId stack) {
  release(pages, stack);
  const std::lock_guard lock(mutex_);
  --totals_.guarded;
  ++totals_.refused;
}

PageGuard PageGuards::draw_side() {
  switch (options_.side) {
    case PageGuardOptions::Side::right: return PageGuard::right;
    case PageGuardOptions::Side::left: return PageGuard::left;
    case PageGuardOptions::Side::random: break;
  }
  const std::lock_guard lock(mutex_);
  return (random_() >> 63) != 0 ? PageGuard::right : PageGuard::left;
}

PageGuardTotals PageGuards::totals() const {
  const std::lock_guard lock(mutex_);
  return totals_;
}

Address PageGuards::place(PageGuard side, Address begin, Bytes pages, Bytes size, Bytes alignment) {
  return side == PageGuard::right ? round_down(begin + pages - size, alignment) : begin;
}

// The glob is held against the tag and, for each frame, its function, its file, its file without folders, and both
// with the line.
bool PageGuards::site_fits(StackId stack, std::string_view tag, const ResolveStack& resolve) {
  if (!tag.empty() && matches(options_.sites, std::string(tag))) return true;
  if (stack == 0 || !resolve) return false;
  {
    const std::lock_guard lock(mutex_);
    if (const auto known = fits_.find(stack); known != fits_.end()) return known->second;
  }
  bool fits = false;
  for (const SourceFrame& frame : resolve(stack)) {
    const std::string name = frame.file.substr(frame.file.rfind('/') + 1);
    const std::string line = ":" + std::to_string(frame.line);
    fits = fits || matches(options_.sites, frame.function) || matches(options_.sites, frame.file) ||
           matches(options_.sites, name) || matches(options_.sites, frame.file + line) ||
           matches(options_.sites, name + line);
  }
  const std::lock_guard lock(mutex_);
  fits_.emplace(stack, fits);
  return fits;
}

}  // namespace streampool::debug
