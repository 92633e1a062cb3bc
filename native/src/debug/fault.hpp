// What a proven misuse of memory looks like: the closed table of kinds, the facts of a block, and the fault itself.
// Imports base/ and driver/ only.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "../base/types.hpp"

namespace streampool::debug {

using StackId = std::uint32_t;  // an interned call stack; 0: none was taken

// One row a kind: its word (JSON, suppressions, docs/faults/WORD.md) and what it means in one sentence.
#define STREAMPOOL_FAULT_KINDS(X)                                           \
  X(overrun, "a write behind the end of a block")                           \
  X(underrun, "a write before the start of a block")                        \
  X(write_after_free, "a write into a block after it was freed")            \
  X(double_free, "a block freed twice")                                     \
  X(foreign_free, "a free of an address that no pool owns")                 \
  X(interior_free, "a free of an address inside a block, not at its start") \
  X(wrong_pool_free, "a free of a block that belongs to another pool")      \
  X(trampled_record, "the pool's own record of a block was overwritten")    \
  X(size_mismatch, "a free that names another size than was allocated")     \
  X(illegal_access, "an access to memory that is not there")                \
  X(race, "two uses of the same bytes that nothing orders")

enum class FaultKind : std::uint8_t {
#define STREAMPOOL_ROW(name, text) name,
  STREAMPOOL_FAULT_KINDS(STREAMPOOL_ROW)
#undef STREAMPOOL_ROW
};

std::string_view fault_word(FaultKind kind);
std::string_view fault_meaning(FaultKind kind);

// Where the block stood when the facts were taken.
enum class BlockState : std::uint8_t { live, released, quarantined, freed };
std::string_view block_state_word(BlockState state);

// Where a block lies that has pages of its own between unmapped ones: at their end, where a byte beyond it faults, or
// at their start.
enum class PageGuard : std::uint8_t { none, right, left };
std::string_view page_guard_word(PageGuard guard);

// A block as a report describes it. Addresses and sizes in bytes, times in seconds of Driver::now().
struct BlockFacts {
  std::uint64_t serial = 0;  // the pool's running number of this allocation
  BlockState state = BlockState::live;
  Address address = 0;       // the user's pointer
  Bytes size = 0;            // requested
  Address begin = 0;         // of slot or extent: begin <= address
  Bytes reserved = 0;        // of slot or extent: everything up to begin + reserved is the block's
  std::uint64_t stream = 0;  // driver id of the home stream
  std::uint64_t allocated_thread = 0;
  std::uint64_t freed_thread = 0;
  double allocated_time = 0;
  double freed_time = 0;
  StackId allocated_at = 0;
  StackId freed_at = 0;
  bool raw = false;       // allocated with allocate_raw: nobody's object owns it
  bool exported = false;  // lent: somebody outside holds it, and is to give it back
  PageGuard pages = PageGuard::none;
  std::uint64_t allocated_moment = 0;  // of scopes.hpp
  std::string tag;
};

// A block that an illegal access may have been meant for, and what makes it one.
struct Candidate {
  BlockFacts block;
  std::string why;
};

struct Fault {
  FaultKind kind{};
  std::uint64_t number = 0;         // running, per process
  std::uint64_t count = 1;          // it and so many less one that followed it from the same lines, and are not kept
  std::optional<BlockFacts> block;  // the block that was hit (absent: no pool owns the address)
  std::optional<BlockFacts> below;  // its neighbours by address, where they are known
  std::optional<BlockFacts> above;
  Address address = 0;     // what was freed, or the first bad byte
  Address last = 0;        // the last bad byte
  Bytes bad_bytes = 0;     // how many differ between the two
  Address shown_from = 0;  // `found` holds the bytes from here on, `expected` what should be there
  std::vector<std::uint8_t> found;
  std::vector<std::uint8_t> expected;
  StackId at = 0;  // where the call that found it was made (misuse at the call)
  double time = 0;
  std::uint64_t last_good_check = 0;  // running number of the last check that found these bytes whole; 0: none
  std::uint64_t found_by_check = 0;
  double last_good_time = 0;
  std::vector<std::string> scopes;  // of the program, that were open in the window
  std::vector<Candidate> candidates;
  std::string note;
};

}  // namespace streampool::debug
