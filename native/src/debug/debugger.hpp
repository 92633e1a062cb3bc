// Guards, fills and quarantine of one pool. Knows addresses, facts and the driver; knows neither streams nor the pool:
// whether a block's pending work is done, and where a block goes when it leaves, it asks of its Host.
//
// A block's way:   live -> (freed) waiting -> guards verified, body refilled -> held in quarantine -> body verified ->
// back. Invariant: every freed block is in exactly one of `fresh` (since the last batch), `waiting` (its marks are not
// known to be complete), the batch under way, and `held`.
// Thread-safe; its lock is never held across a driver call or a call of the Host. One thread at a time does the
// checking: poll() returns at once when another is at it, check() and give_up() wait for it. From inside a function of
// the Host all three do nothing. Nothing here holds up a free: what is freed while somebody checks stays `fresh`, and
// its memory goes to nobody before that check is over, so that its guards may be looked at all the same.
//
// A batch that poll() starts is a job of the driver's, and is finished by a later call: nobody waits for it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "../driver/driver.hpp"
#include "fault.hpp"
#include "options.hpp"

namespace streampool::debug {

// A freed block in the debugger's hands. `cookie` is the pool's record of it.
struct FreedBlock {
  void* cookie = nullptr;
  BlockFacts facts;
};

// What the debugger needs of the pool.
class Host {
 public:
  virtual ~Host() = default;
  // True when every mark of the block is complete (polls what it must, never blocks).
  virtual bool work_done(void* cookie) = 0;
  // The same, said once for each block, before anything else happens to it.
  virtual void at_rest(void*) {}
  // The block leaves the debugger: its memory is nobody's, complete, and holds the pattern (as far as `fill` goes).
  virtual void give_back(void* cookie) = 0;
  // Facts of the blocks next to an address range, for the report.
  virtual void neighbours(Address begin, Bytes size, std::optional<BlockFacts>* below,
                          std::optional<BlockFacts>* above) = 0;
  // A fault was found; it may be kept or only counted.
  virtual void found(const Fault&) {}
  // Every live block whose pending work is done (`ready`), and those whose is not (`busy`). A block of the list may be
  // freed at any time, but its memory stays as it is until it is given back.
  virtual void live_blocks(std::vector<BlockFacts>* ready, std::vector<BlockFacts>* busy) = 0;
};

struct CheckResult {
  std::uint64_t checked_blocks = 0;
  std::uint64_t checked_bytes = 0;
  std::uint64_t faults = 0;             // found by this check
  std::vector<BlockFacts> not_checked;  // pending work, or everything when the driver failed
  driver::Status status;                // why nothing could be checked, when the driver failed
};

// How much of what one call site allocated was written by the time it was freed.
struct SiteUsage {
  std::uint64_t blocks = 0;
  Bytes bytes = 0, untouched = 0;
};

struct Totals {
  std::uint64_t checks = 0;              // batches verified: check N of a fault is one of them
  std::uint64_t blocks_checked = 0;      // summed over all checks
  std::uint64_t blocks_freed = 0;        // handed to on_free
  std::uint64_t blocks_not_checked = 0;  // listed by the last check()
  std::uint64_t driver_failures = 0;     // checks that a failing driver call broke off (nothing is lost by it)
  std::uint64_t quarantined_blocks = 0;
  Bytes quarantined_bytes = 0;  // of waiting and held together, whole slots and extents
  std::uint64_t faults = 0;
  std::uint64_t faults_dropped = 0;            // beyond max_faults
  std::uint64_t faults_repeated = 0;           // beyond max_repeats: counted with a kept one
  Bytes freed_bytes = 0, untouched_bytes = 0;  // of bodies at free: how much still held the pattern (a statistic)
};

class Debugger {
 public:
  Debugger(driver::Driver& driver, Kind kind, Options options, Host& host);
  ~Debugger();

  const Options& options() const;
  std::uint64_t key() const;  // of the pattern

  // Bytes to put before the user's pointer so that it keeps `alignment`, and to ask for behind the requested size.
  Bytes front_bytes(Bytes alignment) const;
  Bytes back_bytes() const;

  // New memory from the driver: filled and awaited before any of it is handed out. No-op unless the whole is filled.
  driver::Status on_new_memory(Address begin, Bytes size);
  // A block is about to be handed out, and is in nobody's list yet; its memory is complete. Queues nothing where the
  // pattern is in place already; writes the guards where bodies are filled only at their edges, or not at all. After a
  // failure the block should not be handed out, but freed at once: its guards hold no pattern, and are not judged.
  driver::Status on_allocate(const BlockFacts& block);
  // A live block was freed. Takes it over.
  void on_free(FreedBlock block);
  // Called after explicit calls, outside all locks: takes in the batch under way if it is done, and starts one when one
  // is due: by what was freed, or by the time where `now` says it.
  void poll(double now = 0);
  // Checks everything that can be checked now. `timeout` (seconds) bounds the wait for pending work (Driver::pause);
  // `interrupted` is asked between pauses, and true ends the wait.
  CheckResult check(double timeout, const std::function<bool()>& interrupted = {});
  // Gives up the quarantine, oldest first: verifies and gives back blocks whose work is done until `at_least` bytes are
  // back (kEverything: all of them); 0 only takes in what is due. Returns the bytes given back.
  static constexpr Bytes kEverything = ~Bytes{0};
  Bytes give_up(Bytes at_least);

  // Misuse at the call (double free and kin): kept with the other faults.
  void report(Fault fault);
  // Faults found since the last call, and whether there are any, which takes no lock.
  std::vector<Fault> take_faults();
  bool has_faults() const;
  Totals totals() const;
  // Of the totals, what can be read without the lock that frees take.
  struct Pulse {
    Bytes quarantined_bytes = 0;
    std::uint64_t quarantined_blocks = 0;
    std::uint64_t faults = 0;
  };
  Pulse pulse() const;
  // By the stack that allocated, where `count_untouched` asks for it.
  std::vector<std::pair<StackId, SiteUsage>> usage() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace streampool::debug
