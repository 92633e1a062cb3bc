// From bytes that do not hold the pattern to findings: whose bytes they are, what that is called, what to show.
// Pure: no driver call, no lock. Imports base/, driver/ (Range, Mismatch, pattern), fault and guards.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "../driver/driver.hpp"
#include "fault.hpp"

namespace streampool::debug {

// When a block's bytes were last found whole. check 0: never.
struct Good {
  std::uint64_t check = 0;
  double time = 0;
  std::uint64_t moment = 0;  // of scopes.hpp
};

// How a block takes part in a check: `live` and `freed` (not refilled yet) by their guards, `held` by all its bytes.
enum class Role : std::uint8_t { live, freed, held };

struct Subject {
  const BlockFacts* block = nullptr;
  Role role = Role::live;
  Good good;
};

enum class Side : std::uint8_t { front, back, quarantined, untouched };

// What a range that is verified stands for. `untouched`: a body whose unwritten bytes are only counted.
struct Probe {
  std::uint32_t subject = 0;
  Side side = Side::front;
};

struct Finding {
  FaultKind kind{};
  std::uint32_t subject = 0;
  Address first = 0;
  Address last = 0;
  Bytes bad_bytes = 0;
  Address shown_from = 0;
  std::vector<std::uint8_t> found;
  std::vector<std::uint8_t> expected;
  std::string note;
};

inline constexpr Bytes kShownBytes = 64;  // of a fault's bytes, in a report
inline constexpr Bytes kShownBefore = 8;  // untouched bytes shown before the first bad one

// One finding a run of bad bytes. A run that crosses from one block into the next is one finding (one write made it),
// of the block it most likely came from: a live one rather than a freed one, else the one whose edge is nearer.
std::vector<Finding> read_evidence(std::span<const Subject> subjects, std::span<const driver::Range> ranges,
                                   std::span<const Probe> probes, std::vector<driver::Mismatch> mismatches,
                                   std::uint64_t key);

}  // namespace streampool::debug
