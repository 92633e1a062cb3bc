#include "capi_watch.hpp"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

namespace streampool::capi {
namespace {

using debug::Fault;
using pool::Core;

struct Live {
  std::uint64_t number = 0;
  const Core* which = nullptr;
  std::weak_ptr<Core> core;  // its memory goes back when the program destroys it
  pool::OptionMap options;
  std::vector<Fault> told;
};

struct Watch {
  std::atomic<bool> on{false};  // looked at without the lock by programs that nobody watches
  std::mutex mutex;
  std::string mode;
  std::uint64_t made = 0;
  std::vector<Live> live;
  std::vector<Ended> told;    // with something to tell, at most kMostTold
  std::vector<Ended> groups;  // the others
};
// Leaked on purpose: a program's own statics may make and end pools after ours are gone (R22).
Watch& watch() {
  static Watch* const one = new Watch;
  return *one;
}

bool watching() { return driver::ending() == driver::Ending::no && watch().on; }

// Under the lock.
std::vector<Live>::iterator find(const Core& core) {
  return std::find_if(watch().live.begin(), watch().live.end(), [&](const Live& one) { return one.which == &core; });
}

void append(std::vector<Fault>* to, std::vector<Fault> from) {
  to->insert(to->end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
}

bool has_to_tell(const Ended& one) {
  return one.totals.faults != 0 || !one.faults.empty() || one.stats.live_blocks != 0 || !one.live_blocks.empty();
}

// Of a pool that holds nothing any more: what its destructor gives back is not reserved.
pool::Stats without_memory(pool::Stats stats) {
  stats.rounding = stats.guards = stats.quarantined = stats.pending = stats.cached = stats.reserved = 0;
  return stats;
}

void add(Ended* to, const Ended& one) {
  to->pools += one.pools;
  to->not_kept += one.not_kept;
  to->at = one.at;
  to->stats.allocations += one.stats.allocations;
  to->stats.frees += one.stats.frees;
  to->stats.allocated_bytes += one.stats.allocated_bytes;
  to->stats.out_of_memory += one.stats.out_of_memory;
  to->stats.in_use_peak = std::max(to->stats.in_use_peak, one.stats.in_use_peak);
  to->stats.reserved_peak = std::max(to->stats.reserved_peak, one.stats.reserved_peak);
  to->totals.checks += one.totals.checks;
  to->totals.blocks_checked += one.totals.blocks_checked;
  to->totals.blocks_freed += one.totals.blocks_freed;
  to->totals.driver_failures += one.totals.driver_failures;
  to->totals.faults += one.totals.faults;
  to->totals.faults_dropped += one.totals.faults_dropped;
  to->totals.faults_repeated += one.totals.faults_repeated;
  to->totals.freed_bytes += one.totals.freed_bytes;
  to->totals.untouched_bytes += one.totals.untouched_bytes;
}

// Under the lock: with those of the same name and settings.
void group(Ended one) {
  one.number = 0;
  one.faults.clear();
  one.live_blocks.clear();
  std::vector<Ended>& groups = watch().groups;
  const auto same = [&](const Ended& other) {
    return other.name == one.name && other.device == one.device && other.kind == one.kind &&
           other.options == one.options;
  };
  auto at = std::find_if(groups.begin(), groups.end(), same);
  if (at == groups.end() && groups.size() >= kMostGroups) {
    one.name = "(others)";
    at = std::find_if(groups.begin(), groups.end(), same);
  }
  if (at == groups.end())
    groups.push_back(std::move(one));
  else
    add(&*at, one);
}

}  // namespace

void watch_pools(std::string mode) {
  const std::lock_guard lock(watch().mutex);
  watch().on = true;
  watch().mode = std::move(mode);
}

void forget_pools() {
  const std::lock_guard lock(watch().mutex);
  watch().on = false;
  watch().mode.clear();
  watch().live.clear();
  watch().told.clear();
  watch().groups.clear();
}

std::vector<Watched> watched_pools() {
  std::vector<Watched> out;  // a pool may end with it: then the lock is free again
  const std::lock_guard lock(watch().mutex);
  for (const Ended& one : watch().told) out.push_back({.number = one.number, .core = {}, .options = {}});
  for (const Live& one : watch().live)
    if (auto core = one.core.lock()) out.push_back({one.number, std::move(core), one.options});
  std::sort(out.begin(), out.end(), [](const Watched& a, const Watched& b) { return a.number < b.number; });
  return out;
}

std::vector<std::pair<std::uint64_t, std::vector<Fault>>> take_told() {
  std::vector<std::pair<std::uint64_t, std::vector<Fault>>> out;
  const std::lock_guard lock(watch().mutex);
  for (Live& one : watch().live)
    if (!one.told.empty()) out.emplace_back(one.number, std::exchange(one.told, {}));
  return out;
}

std::vector<Ended> take_ended() {
  const std::lock_guard lock(watch().mutex);
  std::vector<Ended> out = std::exchange(watch().told, {});
  for (Ended& one : std::exchange(watch().groups, {})) out.push_back(std::move(one));
  return out;
}

std::string watched_mode() {
  if (!watching()) return {};
  const std::lock_guard lock(watch().mutex);
  return watch().mode;
}

void note_pool(const std::shared_ptr<Core>& core, pool::OptionMap options) {
  if (!watching()) return;
  const std::lock_guard lock(watch().mutex);
  if (watch().on) watch().live.push_back({++watch().made, core.get(), core, std::move(options), {}});
}

void note_told(const Core& core, const std::vector<Fault>& faults) {
  if (!watching()) return;
  const std::lock_guard lock(watch().mutex);
  if (const auto at = find(core); at != watch().live.end()) append(&at->told, faults);
}

void note_end(Core& core) {
  if (!watching()) return;
  Ended one;
  {
    const std::lock_guard lock(watch().mutex);
    const auto at = find(core);
    if (at == watch().live.end()) return;
    one.number = at->number;
    one.options = at->options;
    one.faults = std::exchange(at->told, {});
  }
  one.name = core.name();
  one.device = core.driver().name();
  one.kind = core.kind();
  append(&one.faults, core.take_faults());
  one.totals = core.debug_totals();
  one.pages = core.page_guard_totals();
  one.stats = core.stats();
  if (one.stats.live_blocks != 0) one.live_blocks = core.live_blocks();
  one.at = core.driver().now();
  const bool tells = has_to_tell(one);
  if (one.stats.live_blocks == 0) one.stats = without_memory(one.stats);
  const std::lock_guard lock(watch().mutex);
  const auto at = find(core);
  if (at == watch().live.end()) return;  // nobody watches any more
  watch().live.erase(at);
  if (tells && watch().told.size() < kMostTold) {
    watch().told.push_back(std::move(one));
    return;
  }
  if (tells) {
    one.not_kept = 1;
    for (const Fault& fault : one.faults) one.totals.faults_dropped += fault.count;
  }
  group(std::move(one));
}

}  // namespace streampool::capi
