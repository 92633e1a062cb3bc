// Pools that are made through the C ABI, for whoever watches the process (streampool run). Imports the pool.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "debug/debugger.hpp"
#include "debug/fault.hpp"
#include "debug/page_guards.hpp"
#include "pool/core.hpp"
#include "pool/options.hpp"

namespace streampool::capi {

struct Watched {
  std::uint64_t number = 0;          // of the pool, from 1 up, in the order of their making
  std::shared_ptr<pool::Core> core;  // null: it was destroyed, and take_ended() has what it left
  pool::OptionMap options;           // all, as they were resolved
};

// What stays of a destroyed pool. Those with nothing to tell are one for all of the same name and settings.
struct Ended {
  std::uint64_t number = 0;  // 0: of pools with nothing to tell
  std::uint64_t pools = 1;
  std::uint64_t not_kept = 0;  // of them, with something to tell, beyond kMostTold
  std::string name, device;
  Kind kind{};
  pool::OptionMap options;
  std::vector<debug::Fault> faults;
  std::vector<debug::BlockFacts> live_blocks;
  debug::Totals totals;
  debug::PageGuardTotals pages;
  pool::Stats stats;
  double at = 0;  // seconds of the device's clock
};

inline constexpr std::size_t kMostTold = 256;    // destroyed pools whose faults and live blocks are kept
inline constexpr std::size_t kMostGroups = 256;  // names of pools with nothing to tell; then they have one together

// Pools made from here on are known until they are destroyed, and then what was found in them. `mode`: theirs, whatever
// the program asks for; empty: as it asks.
void watch_pools(std::string mode);
// No pool is known any more, nor what any left.
void forget_pools();
// In the order of their making: those that live, and by their number alone those of which more than counts is kept.
std::vector<Watched> watched_pools();
// Faults that the program was told of (option on_fault), in pools that live.
std::vector<std::pair<std::uint64_t, std::vector<debug::Fault>>> take_told();
std::vector<Ended> take_ended();

// The C ABI's part. Nothing is done in a forked child, which may find the lock held.
std::string watched_mode();
void note_pool(const std::shared_ptr<pool::Core>& core, pool::OptionMap options);
// The program is told of these, and nobody else will be.
void note_told(const pool::Core& core, const std::vector<debug::Fault>& faults);
// It is closed, and its handle goes.
void note_end(pool::Core& core);

}  // namespace streampool::capi
