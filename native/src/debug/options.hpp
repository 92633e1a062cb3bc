// What debug mode is asked to do. Filled from the options table (streampool/config.py); every field is a run-time
// setting.
#pragma once

#include <string>

#include "../base/types.hpp"

namespace streampool::debug {

// Which blocks get pages of their own (page_guards.hpp). An access beyond them ends the device's context.
struct PageGuardOptions {
  enum class Which : std::uint8_t { off, sampled, all } which = Which::off;
  enum class Side : std::uint8_t { random, right, left } side = Side::random;
  Bytes sample_bytes = 64 * kMiB;  // sampled: one block in so many bytes on average
  Bytes smallest = 0;              // only blocks of at least so many bytes,
  Bytes largest = 0;               // and at most so many; 0: of any size
  std::string sites;               // a glob on function, file or tag; empty: everywhere
  Bytes cap = 4 * kGiB;            // behind such blocks; further ones get guard bytes
  std::uint32_t kept = 4096;       // revoked blocks whose addresses nobody else gets
  std::uint64_t seed = 0;          // of sides and samples; 0: chosen
  std::string records;             // a file that outlives the process; empty: none

  bool on() const { return which != Which::off; }
};

struct Options {
  bool track = false;                   // keep serial, thread, time and stack of every block
  Bytes guard_bytes = 0;                // known bytes before and after each block; 0: no guards
  bool fill = false;                    // free memory holds the pattern; freed bodies are filled and verified
  Bytes fill_edge_bytes = 0;            // 0: whole bodies; N: only the first and last N bytes of a body
  Bytes quarantine_bytes = 0;           // freed blocks kept back, first in first out; 0: they leave after their check
  std::uint32_t quarantine_blocks = 0;  // and at most so many; 0: any number
  double quarantine_age = 0;            // and none longer than so many seconds; 0: for ever
  bool count_untouched = false;         // count the bytes of freed bodies that were never written (whole fill only)
  // A batch of checks is due after so many frees, so many freed bytes, or so many seconds.
  std::uint32_t check_every = 64;
  Bytes check_bytes = 32 * kMiB;
  double check_interval = 0.1;
  std::uint32_t max_faults = 100;  // more are counted and not kept
  std::uint32_t max_repeats = 10;  // of one kind from the same lines; more are counted with the last. 0: any number
  PageGuardOptions pages;
  bool regions = false;  // an attached tool watches every access (memory_regions.hpp): our own would be reported too

  bool enabled() const { return track || guard_bytes != 0 || fill || quarantine_bytes != 0 || pages.on() || regions; }
  bool checks() const { return (guard_bytes != 0 || fill) && !regions; }
};

}  // namespace streampool::debug
