// The happens-before check: remembers who touched which bytes and finds pairs that nothing orders. Knows places
// (memory.hpp) and clocks (clocks.hpp), no streams and no locks: the engine calls it under its own.
//
// Invariant: of accesses with the same site and stream only the latest is kept (whoever is not ordered after an earlier
// one is not ordered after it either), and none that the host's clock covers survives a sweep. So the history is
// bounded by what is in flight, for each site.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "clocks.hpp"
#include "machine.hpp"
#include "memory.hpp"

namespace streampool::driver::sim {

// Who touches: shared by all accesses of one piece of work.
struct Site {
  std::string label;
  std::uint64_t stream = 0;
  std::string stream_name;
  std::uint32_t stack = 0;
};

class History {
 public:
  // One access at (slot, tick), ordered after `clock` and after the host's clock. Remembers it, if `remember`.
  void access(int device, const Place& place, bool write, Slot slot, Tick tick, const std::shared_ptr<const Site>& site,
              const Clock& clock, const HostClock& host, bool remember);
  std::vector<Race> take();
  std::uint64_t size() const { return seen_count_; }
  // Forgets what the host's clock covers, when enough has come together.
  void maybe_sweep(const HostClock& host);
  void sweep(const HostClock& host);

 private:
  struct Seen {
    Slot slot = 0;
    Tick tick = 0;
    bool write = false;
    std::shared_ptr<const Site> site;
  };
  struct Segment {
    std::uint64_t end = 0;
    std::vector<Seen> seen;
  };
  using Segments = std::map<std::uint64_t, Segment>;

  Segments::iterator split(Segments::iterator segment, std::uint64_t at);
  void report(int device, const Place& place, std::uint64_t begin, std::uint64_t end, const Seen& old, const Seen& now);
  void add(Segment& segment, const Seen& now, const Clock& clock);

  Segments segments_;
  std::uint64_t seen_count_ = 0;
  std::uint64_t sweep_at_ = 4096;
  std::vector<Race> races_;
  struct Known {  // a pair of sites in races_, and the accesses that made it last
    std::size_t index = 0;
    Tick old = 0;
    Tick now = 0;
  };
  std::unordered_map<std::string, Known> known_;
};

}  // namespace streampool::driver::sim
