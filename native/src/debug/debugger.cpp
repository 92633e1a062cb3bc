// The debugger's public face: what the pool calls, whose turn it is, and the wait of check(). One batch of checks is in
// batch.cpp, geometry in guards.hpp, from bytes to findings in evidence.hpp, the queues in quarantine.hpp.
#include "debugger.hpp"

#include <algorithm>
#include <chrono>
#include <random>
#include <utility>

#include "debugger_impl.hpp"

namespace streampool::debug {

namespace {

using driver::Range;
using driver::Status;

// Pauses while check() waits for pending work: short at first, then a hundredth of a second.
constexpr double kFirstPause = 50e-6;
constexpr double kLongestPause = 10e-3;

// One key a process, so that the pattern of one run means nothing in another.
std::uint64_t process_key() {
  static const std::uint64_t key = [] {
    std::random_device device;
    return (std::uint64_t{device()} << 32) | device();
  }();
  return key;
}

Options usable(Options options) {
  options.check_every = std::max(options.check_every, 1u);
  options.check_bytes = std::max<Bytes>(options.check_bytes, 1);
  return options;
}

}  // namespace

// -- inside ---------------------------------------------------------------------------------------------------------
Debugger::Impl::Impl(driver::Driver& driver, Kind memory, Options wanted, Host& pool)
    : device(driver), kind(memory), options(usable(wanted)), host(pool), guards(wanted), key(process_key()) {
  if (options.count_untouched && guards.whole()) usage.emplace();
}

Debugger::Impl::Turn::Turn(Impl& impl, bool wait) : impl_(impl) {
  std::unique_lock lock(impl_.mutex);
  if (impl_.working && (!wait || impl_.worker == std::this_thread::get_id())) return;
  impl_.idle.wait(lock, [&] { return !impl_.working; });
  impl_.working = taken_ = true;
  impl_.worker = std::this_thread::get_id();
}

Debugger::Impl::Turn::~Turn() {
  if (!taken_) return;
  {
    const std::lock_guard lock(impl_.mutex);
    impl_.working = false;
    impl_.worker = {};
  }
  impl_.idle.notify_one();
}

void Debugger::Impl::keep(Fault fault) {
  static std::atomic<std::uint64_t> next_number{1};  // running, per process
  if (fault.number == 0) fault.number = next_number.fetch_add(1, std::memory_order_relaxed);
  host.found(fault);
  const std::lock_guard lock(mutex);
  faults_now.store(++totals.faults, std::memory_order_relaxed);
  if (keep_or_count(std::move(fault))) has_faults.store(true, std::memory_order_release);
}

bool Debugger::Impl::keep_or_count(Fault fault) {
  Repeats* same = nullptr;
  if (options.max_repeats != 0) {
    const StackId allocated_at = fault.block ? fault.block->allocated_at : 0;
    const StackId freed_at = fault.block ? fault.block->freed_at : 0;
    // Without a stack nothing says that two are the same.
    if ((fault.at | allocated_at | freed_at) != 0)
      same = &repeats[{static_cast<StackId>(fault.kind), fault.at, allocated_at, freed_at}];
  }
  const bool repeated = same != nullptr && same->kept >= options.max_repeats;
  if (repeated && same->counting) {
    ++faults[*same->counting].count;
    ++totals.faults_repeated;
    return true;
  }
  if (kept_faults >= options.max_faults) {
    ++totals.faults_dropped;
    return false;
  }
  ++kept_faults;
  if (repeated)
    same->counting = faults.size();
  else if (same != nullptr)
    ++same->kept;
  faults.push_back(std::move(fault));
  return true;
}

Good Debugger::Impl::good_of(std::uint64_t serial) const {
  if (serial == 0) return {};  // not tracked: all such blocks have that number
  const auto at = std::lower_bound(live_good.begin(), live_good.end(), serial,
                                   [](const LiveGood& entry, std::uint64_t wanted) { return entry.serial < wanted; });
  return at != live_good.end() && at->serial == serial ? at->good : Good{};
}

bool Debugger::Impl::is_unguarded(Address address) const {
  return std::find(unguarded.begin(), unguarded.end(), address) != unguarded.end();
}

// -- the public face ------------------------------------------------------------------------------------------------
Debugger::Debugger(driver::Driver& driver, Kind kind, Options options, Host& host)
    : impl_(std::make_unique<Impl>(driver, kind, options, host)) {}

Debugger::~Debugger() = default;

const Options& Debugger::options() const { return impl_->options; }

std::uint64_t Debugger::key() const { return impl_->key; }

Bytes Debugger::front_bytes(Bytes alignment) const { return impl_->guards.front_bytes(alignment); }

Bytes Debugger::back_bytes() const { return impl_->guards.back_bytes(); }

Status Debugger::on_new_memory(Address begin, Bytes size) {
  if (!impl_->guards.whole() || size == 0) return {};
  const Range range{begin, size};
  return impl_->device.pattern_fill(impl_->kind, {&range, 1}, impl_->key);
}

Status Debugger::on_allocate(const BlockFacts& block) {
  if (impl_->guards.whole() && block.pages == PageGuard::none) return {};
  Range ranges[2];
  std::size_t count = 0;
  for (const Range& range : {impl_->guards.front(block), impl_->guards.back(block)}) {
    if (range.size != 0) ranges[count++] = range;
  }
  if (count == 0) return {};
  const Status status = impl_->device.pattern_fill(impl_->kind, {ranges, count}, impl_->key);
  if (!status.ok()) {
    const std::lock_guard lock(impl_->mutex);
    impl_->unguarded.push_back(block.address);
  }
  return status;
}

void Debugger::on_free(FreedBlock block) {
  Impl& impl = *impl_;
  const Bytes reserved = block.facts.reserved;
  const double freed = block.facts.freed_time;
  const std::lock_guard lock(impl.mutex);
  ++impl.totals.blocks_freed;
  impl.quarantined_blocks_now.store(++impl.totals.quarantined_blocks, std::memory_order_relaxed);
  impl.quarantined_now.store(impl.totals.quarantined_bytes += reserved, std::memory_order_relaxed);
  const Good good = impl.good_of(block.facts.serial);
  const bool unguarded = std::erase(impl.unguarded, block.facts.address) != 0;
  Item item;
  item.freed = std::move(block);
  item.good = good;
  item.guards_verified = item.unguarded = unguarded;
  impl.fresh.push_back(std::move(item));
  impl.freed_bytes_since += reserved;
  if (++impl.freed_since >= impl.options.check_every || impl.freed_bytes_since >= impl.options.check_bytes)
    impl.due.store(true, std::memory_order_relaxed);
  if (impl.freed_since == 1)
    impl.next_time.store(std::min(impl.next_time.load(std::memory_order_relaxed), freed + impl.options.check_interval),
                         std::memory_order_relaxed);
}

void Debugger::poll(double now) {
  Impl& impl = *impl_;
  if (!impl.due.load(std::memory_order_relaxed) && now < impl.next_time.load(std::memory_order_relaxed)) return;
  const Impl::Turn turn(impl, false);
  if (!turn) return;
  Impl::Outcome ignored;
  if (!impl.finish(false, &ignored)) {
    impl.plan_next();
    return;
  }
  // What a driver does at once is done, what it queues has only begun.
  if (impl.start({}).ok()) impl.finish(false, &ignored);
  impl.plan_next();
}

CheckResult Debugger::check(double timeout, const std::function<bool()>& interrupted) {
  using Clock = std::chrono::steady_clock;
  Impl& impl = *impl_;
  // Both clocks: the device's may be simulated and stand still.
  const double device_start = impl.device.now();
  const Clock::time_point start = Clock::now();
  const auto time_is_up = [&] {
    if (!(timeout > 0)) return true;
    if (impl.device.now() - device_start >= timeout) return true;
    if (std::chrono::duration<double>(Clock::now() - start).count() >= timeout) return true;
    return interrupted && interrupted();
  };

  CheckResult result;
  double pause = kFirstPause;
  for (;;) {
    const bool last = time_is_up();
    {
      const Impl::Turn turn(impl, true);
      if (!turn) return result;  // from inside a call of the Host
      Impl::Outcome earlier;
      const bool alone = impl.finish(last, &earlier);  // no batch is under way any more
      result.faults += earlier.faults;
      if (alone) impl.take_in_fresh();
      if (alone && (last || impl.dead || impl.not_done() == 0)) {
        std::vector<BlockFacts> live, busy;
        impl.host.live_blocks(&live, &busy);
        if (last || impl.dead || busy.empty()) {
          impl.check_all(live, std::move(busy), interrupted, &result);
          impl.plan_next();
          return result;
        }
      }
    }
    impl.device.pause(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
}

Bytes Debugger::give_up(Bytes at_least) {
  const Impl::Turn turn(*impl_, true);
  if (!turn) return 0;
  Impl::Round round;
  round.ask_all = true;
  round.at_least = at_least;
  const Bytes given_back = impl_->run(round).given_back;
  impl_->plan_next();
  return given_back;
}

void Debugger::report(Fault fault) {
  if (fault.time == 0) fault.time = impl_->device.now();
  impl_->keep(std::move(fault));
}

std::vector<Fault> Debugger::take_faults() {
  const std::lock_guard lock(impl_->mutex);
  for (auto& [key, same] : impl_->repeats) same.counting.reset();
  impl_->has_faults.store(false, std::memory_order_relaxed);
  return std::exchange(impl_->faults, {});
}

bool Debugger::has_faults() const { return impl_->has_faults.load(std::memory_order_acquire); }

std::vector<std::pair<StackId, SiteUsage>> Debugger::usage() const {
  const std::lock_guard lock(impl_->mutex);
  if (!impl_->usage) return {};
  return {impl_->usage->begin(), impl_->usage->end()};
}

Debugger::Pulse Debugger::pulse() const {
  return {impl_->quarantined_now.load(std::memory_order_relaxed),
          impl_->quarantined_blocks_now.load(std::memory_order_relaxed),
          impl_->faults_now.load(std::memory_order_relaxed)};
}

Totals Debugger::totals() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->totals;
}

}  // namespace streampool::debug
