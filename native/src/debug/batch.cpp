// One batch of checks: which blocks take part, one verification, one refill, faults, quarantine. Runs on one thread at
// a time (Debugger::Impl::Turn), and takes the lock only for what other threads touch.
#include <algorithm>
#include <atomic>
#include <iterator>
#include <utility>

#include "debugger_impl.hpp"

namespace streampool::debug {

namespace {

using driver::Mismatch;
using driver::Range;
using driver::Status;

// A poll asks at most so many old blocks whether their work is done, in turn; the newly freed are always asked.
constexpr std::size_t kAskedPerPoll = 256;

// Unpins once, at the latest when the batch ends.
class Pinned {
 public:
  Pinned(Host& host, bool pinned) : host_(host), pinned_(pinned) {}
  ~Pinned() { release(); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  void release() {
    if (std::exchange(pinned_, false)) host_.unpin_live();
  }

 private:
  Host& host_;
  bool pinned_;
};

std::vector<Fault> faults_of(std::vector<Finding> findings, const std::vector<Subject>& subjects, Good now) {
  std::vector<Fault> out;
  out.reserve(findings.size());
  for (Finding& finding : findings) {
    const Subject& subject = subjects[finding.subject];
    Fault fault;
    fault.kind = finding.kind;
    fault.block = *subject.block;
    fault.address = finding.first;
    fault.last = finding.last;
    fault.bad_bytes = finding.bad_bytes;
    fault.shown_from = finding.shown_from;
    fault.found = std::move(finding.found);
    fault.expected = std::move(finding.expected);
    fault.time = now.time;
    fault.found_by_check = now.check;
    fault.last_good_check = subject.good.check;
    fault.last_good_time = subject.good.time;
    fault.note = std::move(finding.note);
    out.push_back(std::move(fault));
  }
  return out;
}

// The bad bytes themselves, to be written over with the pattern: what was found is not found twice.
std::vector<Range> repairs_of(const std::vector<Mismatch>& mismatches, const std::vector<Probe>& probes) {
  std::vector<Range> out;
  for (const Mismatch& mismatch : mismatches) {
    if (probes[mismatch.range].side == Side::untouched) continue;
    out.push_back({mismatch.first, mismatch.last - mismatch.first + 1});
  }
  return out;
}

}  // namespace

void Debugger::Impl::Watch::add(Side side, Range range) {
  if (range.size == 0) return;
  ranges.push_back(range);
  probes.push_back({static_cast<std::uint32_t>(subjects.size() - 1), side});
}

std::uint64_t Debugger::Impl::Watch::blocks() const {
  std::uint64_t count = 0;
  for (std::size_t i = 0; i < probes.size(); ++i) {
    if (i == 0 || probes[i].subject != probes[i - 1].subject) ++count;
  }
  return count;
}

Status Debugger::Impl::failed(Status status) {
  if (status.code == driver::Code::lost || status.code == driver::Code::gone) dead = true;
  const std::lock_guard lock(mutex);
  ++totals.driver_failures;
  return status;
}

void Debugger::Impl::take_in_fresh() {
  const std::lock_guard lock(mutex);
  std::move(fresh.begin(), fresh.end(), std::back_inserter(quarantine.waiting));
  fresh.clear();
  freed_since = 0;
  freed_bytes_since = 0;
  due.store(false, std::memory_order_relaxed);
}

// Takes those whose work is done out of `waiting`, whose last `newest` are always asked. A stuck block holds up none
// behind it, and many stuck ones do not make each poll long: those asked in vain go to the end of the line.
std::deque<Item> Debugger::Impl::take_done(bool all, std::size_t newest) {
  std::deque<Item>& waiting = quarantine.waiting;
  const std::size_t old = waiting.size() - newest;
  const std::size_t asked_of_old = all ? old : std::min(old, kAskedPerPoll);
  std::deque<Item> asked;
  for (std::size_t i = 0; i < asked_of_old; ++i) {
    asked.push_back(std::move(waiting.front()));
    waiting.pop_front();
  }
  const auto first_new = waiting.end() - static_cast<std::ptrdiff_t>(newest);
  std::move(first_new, waiting.end(), std::back_inserter(asked));
  waiting.erase(first_new, waiting.end());

  std::deque<Item> done;
  for (Item& item : asked) (host.work_done(item.freed.cookie) ? done : waiting).push_back(std::move(item));
  return done;
}

std::size_t Debugger::Impl::not_done() {
  std::size_t count = 0;
  for (const Item& item : quarantine.waiting) count += host.work_done(item.freed.cookie) ? 0 : 1;
  return count;
}

void Debugger::Impl::back_to_waiting(std::deque<Item>* items) {
  quarantine.waiting.insert(quarantine.waiting.begin(), std::make_move_iterator(items->begin()),
                            std::make_move_iterator(items->end()));
  items->clear();
}

Debugger::Impl::Watch Debugger::Impl::watch(const std::deque<Item>& done, std::size_t held,
                                            const std::vector<BlockFacts>* live) {
  Watch out;
  if (!options.checks()) return out;
  std::vector<Range> parts;
  const bool count_untouched = options.count_untouched && guards.whole();
  for (const Item& item : done) {
    if (item.guards_verified) continue;
    const BlockFacts& block = item.freed.facts;
    out.subjects.push_back({&block, Role::freed, item.good});
    out.add(Side::front, guards.front(block));
    out.add(Side::back, guards.back(block));
    if (!count_untouched) continue;
    out.add(Side::untouched, {block.address, block.size});
    out.measured += block.size;
  }
  for (std::size_t i = 0; i < held; ++i) {
    const Item& item = quarantine.held()[i];
    out.subjects.push_back({&item.freed.facts, Role::held, item.good});
    parts.clear();
    guards.quarantined(item.freed.facts, &parts);
    for (const Range& part : parts) out.add(Side::quarantined, part);
  }
  if (live != nullptr) {
    const std::lock_guard lock(mutex);
    for (const BlockFacts& block : *live) {
      if (is_unguarded(block.address)) continue;
      out.subjects.push_back({&block, Role::live, good_of(block.serial)});
      out.add(Side::front, guards.front(block));
      out.add(Side::back, guards.back(block));
    }
  }
  return out;
}

Good Debugger::Impl::count_check(const Watch& watched, const std::vector<Mismatch>& mismatches) {
  Bytes touched = 0;
  for (const Mismatch& mismatch : mismatches) {
    if (watched.probes[mismatch.range].side == Side::untouched) touched += mismatch.count;
  }
  const double time = device.now();
  const std::lock_guard lock(mutex);
  totals.blocks_checked += watched.blocks();
  totals.freed_bytes += watched.measured;
  totals.untouched_bytes += watched.measured - touched;
  return {++totals.checks, time};
}

void Debugger::Impl::remember_live(const std::vector<BlockFacts>& live, const std::vector<BlockFacts>& busy, Good now) {
  if (now.check == 0) return;
  std::vector<LiveGood> known;
  known.reserve(live.size());
  for (const BlockFacts& block : live) known.push_back({block.serial, now});
  const std::lock_guard lock(mutex);
  for (const BlockFacts& block : busy) {
    if (const Good good = good_of(block.serial); good.check != 0) known.push_back({block.serial, good});
  }
  std::sort(known.begin(), known.end(), [](const LiveGood& a, const LiveGood& b) { return a.serial < b.serial; });
  live_good = std::move(known);
}

void Debugger::Impl::publish(std::vector<Fault> found) {
  for (Fault& fault : found) {
    host.neighbours(fault.block->begin, fault.block->reserved, &fault.below, &fault.above);
    keep(std::move(fault));
  }
}

// Gives back from the old end while the quarantine is too large or more was asked for.
void Debugger::Impl::give_back_oldest(std::size_t most, const Round& round, Outcome* out) {
  for (; most > 0 && !quarantine.held().empty(); --most) {
    if (quarantine.held_bytes() <= options.quarantine_bytes && out->given_back >= round.at_least) break;
    const Item item = quarantine.release_oldest();
    const Bytes reserved = item.freed.facts.reserved;
    out->given_back += reserved;
    {
      const std::lock_guard lock(mutex);
      --totals.quarantined_blocks;
      totals.quarantined_bytes -= reserved;
    }
    host.give_back(item.freed.cookie);
  }
}

Debugger::Impl::Outcome Debugger::Impl::run(const Round& round) {
  Outcome out;
  Pinned pinned(host, round.live != nullptr);
  if (dead) {
    out.status.code = driver::Code::lost;
    return out;
  }
  const std::size_t old_waiting = quarantine.waiting.size();
  take_in_fresh();
  std::deque<Item> done = take_done(round.ask_all, quarantine.waiting.size() - old_waiting);
  Bytes incoming = 0;
  for (const Item& item : done) incoming += item.freed.facts.reserved;
  const std::size_t old_held = quarantine.held().size();
  const std::size_t verified_held =
      round.verify_held ? old_held : quarantine.leaving(incoming, options.quarantine_bytes, round.at_least);

  const auto broken_off = [&] {
    back_to_waiting(&done);
    failed(out.status);
    return out;
  };
  if (!repairs.empty()) {
    out.status = device.pattern_fill(kind, repairs, key);
    if (!out.status.ok()) return broken_off();
    repairs.clear();
  }

  const Watch watched = watch(done, verified_held, round.live);
  std::vector<Mismatch> mismatches;
  Good now;
  if (!watched.ranges.empty()) {
    out.status = device.pattern_verify(kind, watched.ranges, key, &mismatches);
    if (!out.status.ok()) return broken_off();
    now = count_check(watched, mismatches);
    out.blocks = watched.blocks();
    for (const Range& range : watched.ranges) out.bytes += range.size;
    for (Item& item : done) item.guards_verified = true;
    for (std::size_t i = 0; i < verified_held; ++i) quarantine.held()[i].good = now;
  }
  std::vector<Fault> found = faults_of(read_evidence(watched.subjects, watched.ranges, watched.probes, mismatches, key),
                                       watched.subjects, now);
  out.faults = found.size();

  std::vector<Range> fills = repairs_of(mismatches, watched.probes);
  const std::size_t repaired = fills.size();
  for (const Item& item : done) guards.fill_after_free(item.freed.facts, item.unguarded, &fills);
  if (!fills.empty()) out.status = device.pattern_fill(kind, fills, key);
  if (round.live != nullptr) remember_live(*round.live, *round.busy, now);
  // Neighbours are asked for, and blocks given back, with nothing pinned: the pool may hold what it likes meanwhile.
  pinned.release();
  publish(std::move(found));
  if (!out.status.ok()) {
    fills.resize(repaired);
    repairs = std::move(fills);
    return broken_off();
  }

  for (Item& item : done) {
    item.freed.facts.state = BlockState::quarantined;
    item.unguarded = false;
    if (now.check != 0) item.good = now;
    quarantine.hold(std::move(item));
  }
  // Only what this batch verified or filled may leave: the oldest, and the newest once all older ones are verified.
  give_back_oldest(verified_held == old_held ? quarantine.held().size() : verified_held, round, &out);
  return out;
}

void Debugger::Impl::check_all(const std::vector<BlockFacts>& live, std::vector<BlockFacts> busy, CheckResult* result) {
  Round round;
  round.ask_all = round.verify_held = true;
  round.live = &live;
  round.busy = &busy;
  const Outcome out = run(round);
  result->status = out.status;
  result->checked_blocks = out.blocks;
  result->checked_bytes = out.bytes;
  result->faults = out.faults;
  result->not_checked = std::move(busy);
  for (const Item& item : quarantine.waiting) result->not_checked.push_back(item.freed.facts);
  if (!out.status.ok() && out.blocks == 0) {
    result->not_checked.insert(result->not_checked.end(), live.begin(), live.end());
    for (const Item& item : quarantine.held()) result->not_checked.push_back(item.freed.facts);
  }
  const std::lock_guard lock(mutex);
  totals.blocks_not_checked = result->not_checked.size();
}

}  // namespace streampool::debug
