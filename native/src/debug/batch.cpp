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
// check() looks at live blocks in batches of so many, so that each is a moderate job for the driver.
constexpr std::size_t kLivePerBatch = 4096;
// Scopes named in a fault's window.
constexpr std::size_t kScopesShown = 8;

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
    fault.scopes =
        scopes_between(std::max(subject.good.moment, subject.block->allocated_moment), now.moment, kScopesShown);
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

std::vector<Item> Debugger::Impl::take_fresh() {
  std::vector<Item> taken;
  const std::lock_guard lock(mutex);
  taken.reserve(fresh.capacity());  // what is swapped in has room for the next batch
  taken.swap(fresh);
  freed_since = 0;
  freed_bytes_since = 0;
  due.store(false, std::memory_order_relaxed);
  next_time.store(kNever, std::memory_order_relaxed);
  return taken;
}

void Debugger::Impl::take_in_fresh() {
  for (Item& item : take_fresh()) quarantine.waiting.push_back(std::move(item));
}

Bounds Debugger::Impl::bounds() const {
  Bounds out{options.quarantine_bytes, options.quarantine_blocks, -1};
  if (options.quarantine_age > 0) out.freed_before = device.now() - options.quarantine_age;
  return out;
}

// When to look again though nothing more is freed: at the batch under way and at blocks that wait for their work after
// the interval, and when the oldest held block has been there for long enough.
void Debugger::Impl::plan_next() {
  double next = kNever;
  if (under_way || !quarantine.waiting.empty()) next = device.now() + options.check_interval;
  if (options.quarantine_age > 0 && !quarantine.held().empty())
    next = std::min(next, quarantine.held().front().freed.facts.freed_time + options.quarantine_age);
  const std::lock_guard lock(mutex);
  if (under_way) {  // what was freed meanwhile makes the next look due, counted from here
    freed_since = 0;
    freed_bytes_since = 0;
    due.store(false, std::memory_order_relaxed);
  }
  if (!fresh.empty()) next = std::min(next, fresh.front().freed.facts.freed_time + options.check_interval);
  next_time.store(next, std::memory_order_relaxed);
}

// Takes those whose work is done out of `waiting`, and of `newest`, which are always asked; the others wait. A stuck
// block holds up none behind it, and many stuck ones do not make each poll long: those asked in vain go to the end of
// the line.
std::vector<Item> Debugger::Impl::take_done(bool all, std::vector<Item> newest) {
  Fifo<Item>& waiting = quarantine.waiting;
  std::vector<Item> done;
  done.reserve(newest.size());
  const auto ask = [&](Item item) {
    if (!host.work_done(item.freed.cookie)) {
      waiting.push_back(std::move(item));
      return;
    }
    if (!std::exchange(item.at_rest, true)) host.at_rest(item.freed.cookie);
    done.push_back(std::move(item));
  };
  const std::size_t old = all ? waiting.size() : std::min(waiting.size(), kAskedPerPoll);
  for (std::size_t i = 0; i < old; ++i) ask(waiting.pop_front());
  for (Item& item : newest) ask(std::move(item));
  return done;
}

std::size_t Debugger::Impl::not_done() {
  std::size_t count = 0;
  for (std::size_t i = 0; i < quarantine.waiting.size(); ++i)
    count += host.work_done(quarantine.waiting[i].freed.cookie) ? 0 : 1;
  return count;
}

void Debugger::Impl::back_to_waiting(std::vector<Item>* items) {
  for (; !items->empty(); items->pop_back()) quarantine.waiting.push_front(std::move(items->back()));
}

Debugger::Impl::Watch Debugger::Impl::watch(const std::vector<Item>& done, std::size_t held,
                                            std::span<const BlockFacts> live) {
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
    if (!count_untouched || block.pages != PageGuard::none) continue;
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
  if (live.empty()) return out;
  const std::lock_guard lock(mutex);
  for (const BlockFacts& block : live) {
    if (is_unguarded(block.address)) continue;
    out.subjects.push_back({&block, Role::live, good_of(block.serial)});
    out.add(Side::front, guards.front(block));
    out.add(Side::back, guards.back(block));
  }
  return out;
}

Good Debugger::Impl::count_check(const Batch& batch) {
  Bytes touched = 0;
  const Watch& watched = batch.watched;
  std::vector<Bytes> touched_of(usage ? watched.subjects.size() : 0);
  for (const Mismatch& mismatch : batch.job.found) {
    const Probe& probe = watched.probes[mismatch.range];
    if (probe.side != Side::untouched) continue;
    touched += mismatch.count;
    if (usage) touched_of[probe.subject] = mismatch.count;
  }
  const std::lock_guard lock(mutex);
  totals.blocks_checked += watched.blocks();
  totals.freed_bytes += watched.measured;
  totals.untouched_bytes += watched.measured - touched;
  if (usage)
    for (std::size_t i = 0; i < watched.subjects.size(); ++i) {
      const Subject& subject = watched.subjects[i];
      if (subject.role != Role::freed || subject.block->pages != PageGuard::none) continue;
      SiteUsage& site = (*usage)[subject.block->allocated_at];
      ++site.blocks;
      site.bytes += subject.block->size;
      site.untouched += subject.block->size - touched_of[i];
    }
  return {++totals.checks, batch.time, batch.moment};
}

void Debugger::Impl::publish(std::vector<Fault> found) {
  for (Fault& fault : found) {
    host.neighbours(fault.block->begin, fault.block->reserved, &fault.below, &fault.above);
    keep(std::move(fault));
  }
}

void Debugger::Impl::give_back(std::vector<Item> items, Outcome* out) {
  if (items.empty()) return;
  Bytes reserved = 0;
  for (const Item& item : items) reserved += item.freed.facts.reserved;
  out->given_back += reserved;
  {
    const std::lock_guard lock(mutex);
    quarantined_blocks_now.store(totals.quarantined_blocks -= items.size(), std::memory_order_relaxed);
    quarantined_now.store(totals.quarantined_bytes -= reserved, std::memory_order_relaxed);
  }
  for (const Item& item : items) host.give_back(item.freed.cookie);
}

// Out of the quarantine, from its old end, while it is too large or more was asked for.
std::vector<Item> Debugger::Impl::take_oldest(std::size_t most, const Round& round, Bytes given_back) {
  const Bounds most_held = bounds();
  std::vector<Item> leaving;
  for (; most > 0 && !quarantine.held().empty(); --most) {
    if (!quarantine.oldest_must_leave(most_held) && given_back >= round.at_least) break;
    leaving.push_back(quarantine.release_oldest());
    given_back += leaving.back().freed.facts.reserved;
  }
  return leaving;
}

Status Debugger::Impl::start(const Round& round) {
  Status status;
  if (dead) {
    status.code = driver::Code::lost;
    return status;
  }
  Batch& batch = under_way.emplace(Batch{});  // Clang 14 finds the nested type not default-constructible in here
  batch.round = round;
  if (round.freed) batch.done = take_done(round.ask_all, round.fresh ? take_fresh() : std::vector<Item>());
  Bytes incoming = 0;
  std::size_t incoming_blocks = 0;
  for (const Item& item : batch.done) {
    if (item.freed.facts.pages != PageGuard::none) continue;  // never held
    incoming += item.freed.facts.reserved;
    ++incoming_blocks;
  }
  if (round.freed)
    batch.held = round.verify_held ? quarantine.held().size()
                                   : quarantine.leaving(incoming, incoming_blocks, bounds(), round.at_least);
  if (!repairs.empty()) {
    status = device.pattern_fill(kind, repairs, key);
    if (!status.ok()) {
      back_to_waiting(&batch.done);
      under_way.reset();
      return failed(status);
    }
    repairs.clear();
  }
  batch.watched = watch(batch.done, batch.held, round.live);
  batch.job.kind = kind;
  batch.job.key = key;
  batch.job.verify = batch.watched.ranges;
  for (const Item& item : batch.done)
    if (item.freed.facts.pages == PageGuard::none)
      guards.fill_after_free(item.freed.facts, item.unguarded, &batch.job.fill);
  batch.time = device.now();
  batch.moment = now_moment();
  batch.job.verified = batch.job.verify.empty();
  batch.started = !batch.job.verify.empty() || !batch.job.fill.empty();
  if (batch.started) device.pattern_start(&batch.job);
  return {};
}

// False: it is not done yet. With nothing under way there is nothing to be done.
bool Debugger::Impl::finish(bool wait, Outcome* out) {
  if (!under_way) return true;
  if (under_way->started && !device.pattern_finish(&under_way->job, wait)) return false;
  Batch batch = std::move(*under_way);
  under_way.reset();
  out->status = batch.job.status;
  if (!batch.job.verified) {
    back_to_waiting(&batch.done);
    failed(out->status);
    return true;
  }
  Good now;
  const Watch& watched = batch.watched;
  if (!watched.ranges.empty()) {
    out->now = now = count_check(batch);
    out->blocks = watched.blocks();
    for (const Range& range : watched.ranges) out->bytes += range.size;
    for (Item& item : batch.done) item.guards_verified = true;
    for (std::size_t i = 0; i < batch.held; ++i) quarantine.held()[i].good = now;
  }
  std::vector<Range> bad = repairs_of(batch.job.found, watched.probes);
  Good found_at = now;
  found_at.time = device.now();
  std::vector<Fault> found =
      faults_of(read_evidence(watched.subjects, watched.ranges, watched.probes, std::move(batch.job.found), key),
                watched.subjects, found_at);
  out->faults = found.size();
  publish(std::move(found));
  // Before anybody else can have the memory.
  if (out->status.ok() && !bad.empty()) out->status = device.pattern_fill(kind, bad, key);
  if (!out->status.ok()) {
    repairs = std::move(bad);
    back_to_waiting(&batch.done);
    failed(out->status);
    return true;
  }

  const std::size_t old_held = quarantine.held().size();
  std::vector<Item> leaving;
  for (Item& item : batch.done) {
    if (item.freed.facts.pages != PageGuard::none) {  // what is behind it goes; its addresses stay its own
      leaving.push_back(std::move(item));
      continue;
    }
    item.freed.facts.state = BlockState::quarantined;
    item.unguarded = false;
    if (now.check != 0) item.good = now;
    quarantine.hold(std::move(item));
  }
  give_back(std::move(leaving), out);
  if (!batch.round.freed) return true;
  // Only what this batch verified or filled may leave: the oldest, and the newest once all older ones are verified.
  const std::size_t most = batch.held == old_held ? quarantine.held().size() : batch.held;
  give_back(take_oldest(most, batch.round, out->given_back), out);
  return true;
}

Debugger::Impl::Outcome Debugger::Impl::run(const Round& round) {
  Outcome out;
  finish(true, &out);
  Outcome last;
  last.status = start(round);
  if (last.status.ok()) finish(true, &last);
  last.blocks += out.blocks;
  last.bytes += out.bytes;
  last.faults += out.faults;
  last.given_back += out.given_back;
  return last;
}

void Debugger::Impl::check_all(std::span<const BlockFacts> live, std::vector<BlockFacts> busy,
                               const std::function<bool()>& interrupted, CheckResult* result) {
  // What is freed from now on takes no part: it may be in the list of live blocks, and must stay where it is.
  Round round;
  round.fresh = false;
  round.ask_all = round.verify_held = true;
  std::vector<LiveGood> known;
  std::size_t looked = 0;
  do {
    const std::size_t some = std::min(kLivePerBatch, live.size() - looked);
    round.live = live.subspan(looked, some);
    const Outcome out = run(round);
    result->status = out.status;
    result->checked_blocks += out.blocks;
    result->checked_bytes += out.bytes;
    result->faults += out.faults;
    if (!out.status.ok() && out.blocks == 0) break;
    if (out.now.check != 0)
      for (const BlockFacts& block : round.live) known.push_back({block.serial, out.now});
    looked += some;
    round.freed = false;
  } while (looked < live.size() && !(interrupted && interrupted()));

  result->not_checked = std::move(busy);
  const std::size_t busy_blocks = result->not_checked.size();
  for (std::size_t i = 0; i < quarantine.waiting.size(); ++i)
    result->not_checked.push_back(quarantine.waiting[i].freed.facts);
  result->not_checked.insert(result->not_checked.end(), live.begin() + static_cast<std::ptrdiff_t>(looked), live.end());
  if (!result->status.ok() && result->checked_blocks == 0)
    for (std::size_t i = 0; i < quarantine.held().size(); ++i)
      result->not_checked.push_back(quarantine.held()[i].freed.facts);
  const std::lock_guard lock(mutex);
  totals.blocks_not_checked = result->not_checked.size();
  // What is known of blocks that were not looked at now stays known.
  const auto keep = [&](const BlockFacts& block) {
    if (const Good good = good_of(block.serial); good.check != 0) known.push_back({block.serial, good});
  };
  for (std::size_t i = 0; i < busy_blocks; ++i) keep(result->not_checked[i]);
  for (const BlockFacts& block : live.subspan(looked)) keep(block);
  std::sort(known.begin(), known.end(), [](const LiveGood& a, const LiveGood& b) { return a.serial < b.serial; });
  live_good = std::move(known);
}

}  // namespace streampool::debug
