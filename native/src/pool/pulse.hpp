// What an operator sees of all pools at one moment, as numbers in columns: one table of gauges and counters, from which
// the names in Python come, and the page of metrics. Read without a lock of the fast path and without a driver call
// (R20): so pending memory is a ceiling, what no call has found complete yet, and the numbers of one pool fit together
// only while it is quiet.
//
// Pools of one device, name and kind are one row. Counters of pools that are gone stay in theirs; gauges do not.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "../base/types.hpp"
#include "../driver/call_times.hpp"
#include "../observe/event_ring.hpp"
#include "../observe/event_tail.hpp"
#include "../observe/size_histogram.hpp"
#include "errors.hpp"

namespace streampool::pool {

class Core;

// Gauges: requested + rounding + guards + quarantined + pending_own + pending_waiting + cached = reserved (R19). What
// debug mode may take and takes besides: quarantine_limit; page_guarded, a part of the same sum; debug_host, of the
// host.
// clang-format off
#define STREAMPOOL_GAUGES(X) \
  X(requested) X(rounding) X(guards) X(quarantined) X(pending_own) X(pending_waiting) X(cached) X(reserved) \
  X(live_blocks) X(streams) X(busy_streams) X(live_pools) \
  X(quarantine_limit) X(page_guarded) X(debug_host)
// Of several pools in one row the largest counts; a sum of peaks would be a peak that never was.
#define STREAMPOOL_HIGHEST(X) X(largest_free) X(requested_peak) X(reserved_peak) X(requested_recent_peak)
#define STREAMPOOL_TALLIES(X) \
  X(allocations) X(frees) X(allocated_bytes) X(freed_bytes) X(trimmed_bytes) X(moved_handles) X(waits_on_host) \
  X(wait_edges) X(context_events) X(legacy_fences) X(fences) X(fences_failed) X(polls) X(stream_lookups) \
  X(refused_limit) X(refused_driver) X(faults) X(trampled)
// clang-format on

enum class Column : std::uint16_t {
#define STREAMPOOL_ROW(name) name,
  STREAMPOOL_GAUGES(STREAMPOOL_ROW) STREAMPOOL_HIGHEST(STREAMPOOL_ROW) STREAMPOOL_TALLIES(STREAMPOOL_ROW)
#undef STREAMPOOL_ROW
      paths,  // the arrays: one column each of their words
  failures = paths + 9,
  misuses = failures + 5,
  sizes = misuses + 6,  // in 1/kCountUnit, then their sum in bytes
  count_ = sizes + observe::kSizeBuckets + 1
};
inline constexpr std::size_t kColumns = static_cast<std::size_t>(Column::count_);
constexpr std::size_t index(Column column) { return static_cast<std::size_t>(column); }

// Misuse of free: Errc from double_free on.
inline constexpr std::size_t kMisuses = 6;

struct ColumnInfo {
  enum class Sort : std::uint8_t { gauge, highest, tally };
  std::string name;
  Sort sort = Sort::tally;
};
const std::vector<ColumnInfo>& columns();

struct PulseRow {
  std::string device, pool, kind;
  bool live = false;       // some pool of this name holds memory, or may take some: its gauges mean something
  bool unlimited = false;  // one of them has no limit
  Bytes limit = 0;         // of all of them, where all have one
  bool sized = false;      // request sizes are known of some pool, also of one that is gone
  std::array<std::uint64_t, kColumns> values{};

  std::uint64_t& operator[](Column column) { return values[index(column)]; }
  void add(const PulseRow& other);
};

struct DevicePulse {
  std::string name, version;
  bool simulated = false;
  Bytes total_memory = 0;
  double now = -1;  // on the device's clock; -1 where it has no pool at the moment
  // What sample_devices() found; `sampled_at` -1: nothing yet.
  Bytes free = 0, total = 0;
  double sampled_at = -1;  // on the device's clock
  std::array<Bins<driver::kCallTimeBuckets>, driver::kMemoryWorkCount> call_times{};
};

struct Pulse {
  std::vector<PulseRow> rows;
  std::vector<DevicePulse> devices;
  std::uint64_t dropped_events = 0;
  std::uint64_t other_names = 0;  // pools whose name had no place: they are in the row `_other`
};

// Names a device has rows for; pools of more names share the row kOtherName. What is no plain name (letters, digits,
// `_`, `.`, `-`; at most 64) is made one.
inline constexpr std::size_t kMostNames = 32;
inline constexpr const char* kOtherName = "_other";

enum class Rows : std::uint8_t {
  names,  // one for each device, name and kind, with the counters of pools that are gone: bounded, for series
  pools,  // one for each pool that is there, by its own name
};

// The numbers of all pools of the process; none in a forked child. Any thread, without the GIL; waits for nobody but
// for pools being made or ended at the same moment. A simulated machine that is made anew starts from nothing.
Pulse read_pulse(Rows of = Rows::names);

// Asks each device that has pools for its free memory, and looks at fences that exist: makes driver calls, and so
// belongs to a thread of its own and in no scrape. False: a device did not answer.
bool sample_devices();

// What happened to pools, for logs (observe/event_ring.hpp). Leaked on purpose (R22).
observe::EventRing& events();
// The last of them, whether or not logs took them. Leaked too.
observe::EventTail& last_events();

// A pool's place in the pulse, from its making to its end.
void pulse_begin(Core& core);
void pulse_end(Core& core);

}  // namespace streampool::pool
