// The debugger alone: guards, fills, quarantine and faults over a fake driver (a host vector) and a fake pool.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "../src/debug/capture.hpp"
#include "../src/debug/debugger.hpp"
#include "../src/debug/scopes.hpp"
#include "../src/driver/pattern.hpp"
#include "test.hpp"

namespace {

using namespace streampool;
using namespace streampool::debug;
using driver::Code;
using driver::Mismatch;
using driver::Range;
using driver::Status;

constexpr Address kBase = 0x7f0000000000;

// Memory is a vector at a pretended address; time passes in pause() only.
class FakeDriver final : public driver::Driver {
 public:
  explicit FakeDriver(Bytes size) : memory_(size, std::uint8_t{0xAA}) {}

  std::vector<std::uint8_t>& memory() { return memory_; }
  std::uint8_t& at(Address address) { return memory_.at(static_cast<std::size_t>(address - kBase)); }
  int fills = 0, verifies = 0;
  int fail_fill = 0, fail_verify = 0;  // the n-th call from now on fails
  Code failure = Code::failed;
  std::function<void()> on_pause, on_verify;
  // As a device does it: a job runs when somebody waits for it, or looks after `jobs_run` was set.
  bool queues_jobs = false, jobs_run = false;
  int fail_wait = 0;  // the n-th wait from now on ends with the job called off
  driver::PatternJob* queued = nullptr;

  std::string_view name() const override { return "fake:0"; }
  int ordinal() const override { return 0; }
  bool simulated() const override { return true; }
  const driver::Capabilities& capabilities() const override { return capabilities_; }
  std::string version() const override { return "fake"; }
  double now() const override { return now_; }
  void pause(double seconds) override {
    now_ = now_ + seconds;
    if (on_pause) on_pause();
  }
  Status mem_alloc(Kind, Bytes, Address*) override { return no(); }
  Status mem_free(Kind, Address) override { return no(); }
  Status mem_info(Bytes*, Bytes*) override { return no(); }
  Status address_reserve(Bytes, Bytes, Address*) override { return no(); }
  Status address_free(Address, Bytes) override { return no(); }
  Status mem_granularity(const driver::MemoryTraits&, Bytes*) override { return no(); }
  Status mem_create(Bytes, const driver::MemoryTraits&, driver::MemoryHandle*) override { return no(); }
  Status mem_release(driver::MemoryHandle) override { return no(); }
  Status mem_map(Address, Bytes, driver::MemoryHandle) override { return no(); }
  Status mem_unmap(Address, Bytes) override { return no(); }
  Status mem_set_access(Address, Bytes, const driver::MemoryTraits&) override { return no(); }
  Status pool_create(driver::PoolHandle*) override { return no(); }
  Status pool_destroy(driver::PoolHandle) override { return no(); }
  Status pool_alloc(driver::PoolHandle, driver::StreamHandle, Bytes, Address*) override { return no(); }
  Status pool_free(driver::StreamHandle, Address) override { return no(); }
  Status pool_observe(driver::StreamHandle) override { return no(); }
  Status pool_trim(driver::PoolHandle, Bytes) override { return no(); }
  Status stream_is_capturing(driver::StreamHandle, driver::CaptureState*) override { return no(); }
  Status stream_id(driver::StreamHandle, std::uint64_t*) override { return no(); }
  Status stream_owner(driver::StreamHandle, std::shared_ptr<driver::Driver>*) override { return no(); }
  Status stream_create(driver::StreamHandle*) override { return no(); }
  Status stream_destroy(driver::StreamHandle) override { return no(); }
  Status stream_wait_event(driver::StreamHandle, driver::EventHandle) override { return no(); }
  Status stream_query(driver::StreamHandle) override { return no(); }
  Status event_create(driver::EventHandle*) override { return no(); }
  Status event_destroy(driver::EventHandle) override { return no(); }
  Status event_record(driver::EventHandle, driver::StreamHandle) override { return no(); }
  Status event_query(driver::EventHandle) override { return no(); }
  Status context_event_record(driver::EventHandle) override { return no(); }
  Status fill(driver::StreamHandle, Address, std::uint8_t, Bytes) override { return no(); }
  Status copy(driver::StreamHandle, Address, Address, Bytes) override { return no(); }

  void pattern_start(driver::PatternJob* job) override {
    if (!queues_jobs) return Driver::pattern_start(job);
    CHECK(queued == nullptr);
    queued = job;
  }
  bool pattern_finish(driver::PatternJob* job, bool wait) override {
    if (!queues_jobs) return true;
    CHECK(queued == job);
    if (!wait && !jobs_run) return false;
    queued = nullptr;
    if (wait && fail_wait > 0 && --fail_wait == 0) {
      job->verified = false;
      job->status = {Code::not_ready, 600, "pattern_finish"};
      return true;
    }
    Driver::pattern_start(job);
    return true;
  }
  void advance(double seconds) { now_ = now_ + seconds; }

  Status pattern_fill(Kind, std::span<const Range> ranges, std::uint64_t key) override {
    ++fills;
    if (fail_fill > 0 && --fail_fill == 0) return {failure, 1, "pattern_fill"};
    for (const Range& range : ranges) {
      for (Address a = range.begin; a < range.begin + range.size; ++a) at(a) = driver::pattern_byte(a, key);
    }
    return {};
  }
  Status pattern_verify(Kind, std::span<const Range> ranges, std::uint64_t key, std::vector<Mismatch>* out) override {
    ++verifies;
    if (on_verify) on_verify();
    if (fail_verify > 0 && --fail_verify == 0) return {failure, 1, "pattern_verify"};
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      Mismatch m;
      m.range = static_cast<std::uint32_t>(i);
      for (Address a = ranges[i].begin; a < ranges[i].begin + ranges[i].size; ++a) {
        if (at(a) == driver::pattern_byte(a, key)) continue;
        if (m.count++ == 0) m.first = a;
        m.last = a;
      }
      if (m.count == 0) continue;
      const Bytes left = ranges[i].begin + ranges[i].size - m.first;
      m.sample_size = static_cast<std::uint8_t>(std::min<Bytes>(left, m.sample.size()));
      for (std::uint8_t b = 0; b < m.sample_size; ++b) m.sample[b] = at(m.first + b);
      out->push_back(m);
    }
    return {};
  }

 private:
  static Status no() { return {Code::not_supported, 0, nullptr}; }
  driver::Capabilities capabilities_;
  std::vector<std::uint8_t> memory_;
  std::atomic<double> now_{1};
};

// A pool of blocks laid one behind the other, which never reuses memory and remembers what came back.
class FakePool final : public Host {
 public:
  FakePool(Options options, Bytes size = kMiB, Bytes slack = 0)
      : device(size), slack_(slack), debugger(device, Kind::device, options, *this) {
    CHECK(debugger.on_new_memory(kBase, size).ok());
  }

  // The facts of a new block; its body is overwritten as a program does.
  BlockFacts allocate(Bytes size, Bytes alignment = kMinAlignment) {
    const std::lock_guard lock(mutex_);
    BlockFacts block;
    block.serial = ++serial_;
    block.size = size;
    block.begin = top_;
    block.address = round_up(top_ + debugger.front_bytes(kMinAlignment), alignment);
    block.reserved = round_up(block.address - block.begin + size + debugger.back_bytes() + slack_, kMinAlignment);
    block.allocated_at = static_cast<StackId>(block.serial);
    top_ += block.reserved;
    CHECK(top_ <= kBase + device.memory().size());
    CHECK(debugger.on_allocate(block).ok());
    for (Bytes i = 0; i < size; ++i) device.at(block.address + i) = 0x11;
    live_[block.serial] = block;
    return block;
  }
  void adopt(const BlockFacts& block) { live_[block.serial] = block; }
  void free(const BlockFacts& block) {
    FreedBlock freed;
    {
      const std::lock_guard lock(mutex_);
      CHECK_EQ(live_.erase(block.serial), 1u);
      freed.cookie = &all_.emplace(block.serial, block).first->second;
    }
    freed.facts = block;
    freed.facts.state = BlockState::freed;
    freed.facts.freed_time = device.now();
    freed.facts.freed_at = 1000 + block.allocated_at;
    debugger.on_free(std::move(freed));
  }

  bool work_done(void* cookie) override {
    const std::lock_guard lock(mutex_);
    return !gate_shut.contains(serial_of(cookie));
  }
  void give_back(void* cookie) override {
    const std::lock_guard lock(mutex_);
    back.push_back(serial_of(cookie));
  }
  void neighbours(Address begin, Bytes size, std::optional<BlockFacts>* below,
                  std::optional<BlockFacts>* above) override {
    const std::lock_guard lock(mutex_);
    for (const auto& [serial, block] : live_) {
      if (block.begin + block.reserved == begin) *below = block;
      if (block.begin == begin + size) *above = block;
    }
  }
  void live_blocks(std::vector<BlockFacts>* ready, std::vector<BlockFacts>* busy) override {
    const std::lock_guard lock(mutex_);
    for (const auto& [serial, block] : live_) (gate_shut.contains(serial) ? busy : ready)->push_back(block);
  }

  FakeDriver device;
  std::set<std::uint64_t> gate_shut;
  std::vector<std::uint64_t> back;

 private:
  static std::uint64_t serial_of(void* cookie) { return static_cast<BlockFacts*>(cookie)->serial; }
  std::mutex mutex_;
  std::uint64_t serial_ = 0;
  Address top_ = kBase;
  Bytes slack_;
  std::map<std::uint64_t, BlockFacts> live_, all_;

 public:
  Debugger debugger;
};

Options debug_options() {
  Options options;
  options.track = options.fill = true;
  options.guard_bytes = 256;
  options.quarantine_bytes = kMiB;
  return options;
}

Options edge_options() {
  Options options = debug_options();
  options.fill_edge_bytes = 64;
  return options;
}

void expect_one(FakePool& pool, FaultKind kind, std::uint64_t serial, Address first, Address last) {
  const std::vector<Fault> faults = pool.debugger.take_faults();
  CHECK_EQ(faults.size(), 1u);
  CHECK_EQ(fault_word(faults[0].kind), fault_word(kind));
  CHECK_EQ(faults[0].block->serial, serial);
  CHECK_EQ(faults[0].address, first);
  CHECK_EQ(faults[0].last, last);
}

bool holds_pattern(FakePool& pool, Address begin, Bytes size) {
  for (Address a = begin; a < begin + size; ++a) {
    if (pool.device.at(a) != driver::pattern_byte(a, pool.debugger.key())) return false;
  }
  return true;
}

void spoil(FakePool& pool, Address at, Bytes size = 1) {
  for (Address a = at; a < at + size; ++a) {
    pool.device.at(a) = static_cast<std::uint8_t>(~driver::pattern_byte(a, pool.debugger.key()));
  }
}

}  // namespace

STREAMPOOL_TEST("a program without faults gets no fault report") {
  for (const Options& options : {debug_options(), edge_options()}) {
    FakePool pool(options);
    std::vector<BlockFacts> blocks;
    for (Bytes size : {0, 1, 2, 3, 255, 256, 257, 1013, 4096, 5000}) blocks.push_back(pool.allocate(size));
    CHECK_EQ(pool.debugger.check(0).faults, 0u);
    for (const BlockFacts& block : blocks) pool.free(block);
    const CheckResult result = pool.debugger.check(0);
    CHECK_EQ(result.faults, 0u);
    CHECK_EQ(result.checked_blocks, blocks.size());
    CHECK(result.not_checked.empty());
    Bytes reserved = 0;
    for (const BlockFacts& block : blocks) reserved += block.reserved;
    CHECK_EQ(pool.debugger.totals().quarantined_bytes, reserved);
    CHECK_EQ(pool.debugger.give_up(Debugger::kEverything), reserved);
    CHECK_EQ(pool.debugger.totals().quarantined_bytes, 0u);
    CHECK_EQ(pool.back.size(), blocks.size());
    CHECK(pool.debugger.take_faults().empty());
  }
}

STREAMPOOL_TEST("an alloc in whole-fill mode makes no driver call") {
  FakePool pool(debug_options());
  const int before = pool.device.fills;
  pool.allocate(1000);
  CHECK_EQ(pool.device.fills, before);
  CHECK_EQ(pool.device.verifies, 0);
}

STREAMPOOL_TEST("one byte behind the end is an overrun, to the byte, from the requested size") {
  for (const Options& options : {debug_options(), edge_options()}) {
    for (Bytes size : {Bytes{0}, Bytes{1}, Bytes{1013}, Bytes{4096}}) {
      FakePool pool(options);
      const BlockFacts block = pool.allocate(size);
      spoil(pool, block.address + size);
      CHECK_EQ(pool.debugger.check(0).faults, 1u);
      expect_one(pool, FaultKind::overrun, block.serial, block.address + size, block.address + size);
    }
  }
}

STREAMPOOL_TEST("one byte before the start is an underrun, of the last guard byte and of the first") {
  for (const Options& options : {debug_options(), edge_options()}) {
    FakePool pool(options);
    const BlockFacts block = pool.allocate(100);
    for (Address at : {block.address - 1, block.begin}) {
      spoil(pool, at);
      pool.debugger.check(0);
      expect_one(pool, FaultKind::underrun, block.serial, at, at);
    }
  }
}

STREAMPOOL_TEST("every configured guard byte is checked, and rounding slack too: flashinfer-ai/flashinfer#5344") {
  for (Bytes guard : {1, 3, 4, 16, 255}) {
    for (Bytes edge : {0, 16}) {
      Options options = debug_options();
      options.guard_bytes = guard;
      options.max_faults = 10000;
      options.fill_edge_bytes = edge;
      FakePool pool(options, kMiB, 40);
      const BlockFacts block = pool.allocate(1000);
      const Address end = block.begin + block.reserved;
      for (Address at = block.address + block.size; at < end; ++at) {
        spoil(pool, at);
        pool.debugger.check(0);
        expect_one(pool, FaultKind::overrun, block.serial, at, at);
      }
      for (Address at = block.address - guard; at < block.address; ++at) {
        spoil(pool, at);
        pool.debugger.check(0);
        expect_one(pool, FaultKind::underrun, block.serial, at, at);
      }
    }
  }
}

STREAMPOOL_TEST("with guards off nothing is written at alloc and nothing before a block is asked for") {
  Options options;
  options.quarantine_bytes = kMiB;
  FakePool pool(options);
  CHECK_EQ(pool.debugger.front_bytes(512), 0u);
  CHECK_EQ(pool.debugger.back_bytes(), 0u);
  pool.free(pool.allocate(100));
  const CheckResult result = pool.debugger.check(0);
  CHECK_EQ(result.checked_blocks, 0u);
  CHECK_EQ(pool.device.fills + pool.device.verifies, 0);
}

STREAMPOOL_TEST("the front keeps the alignment that was asked for") {
  FakePool pool(debug_options());
  CHECK_EQ(pool.debugger.front_bytes(1), 256u);
  CHECK_EQ(pool.debugger.front_bytes(256), 256u);
  CHECK_EQ(pool.debugger.front_bytes(4096), 4096u);
  const BlockFacts block = pool.allocate(10, 4096);
  CHECK_EQ(block.address % 4096, 0u);
  spoil(pool, block.begin + 3);  // far before the start, still the block's own front
  pool.debugger.check(0);
  expect_one(pool, FaultKind::underrun, block.serial, block.begin + 3, block.begin + 3);
}

STREAMPOOL_TEST("a guard too large for any block fails the request and wraps nothing") {
  Options options;
  options.guard_bytes = ~Bytes{0} - 5;
  FakePool pool(Options{});
  const Debugger debugger(pool.device, Kind::device, options, pool);
  CHECK_EQ(debugger.front_bytes(256), ~Bytes{0});
}

STREAMPOOL_TEST("an overrun of a live block is reported once and repaired") {
  FakePool pool(debug_options());
  const BlockFacts block = pool.allocate(1013);
  spoil(pool, block.address + 1013, 5);
  CHECK_EQ(pool.debugger.check(0).faults, 1u);
  CHECK_EQ(pool.debugger.check(0).faults, 0u);
  pool.free(block);
  CHECK_EQ(pool.debugger.check(0).faults, 0u);
  CHECK_EQ(pool.debugger.give_up(Debugger::kEverything), block.reserved);
  expect_one(pool, FaultKind::overrun, block.serial, block.address + 1013, block.address + 1017);
}

STREAMPOOL_TEST("an overrun found after the free carries the facts of the free") {
  FakePool pool(debug_options());
  const BlockFacts block = pool.allocate(1013);
  spoil(pool, block.address + 1013, 1);
  pool.free(block);
  pool.debugger.check(0);
  const std::vector<Fault> faults = pool.debugger.take_faults();
  CHECK_EQ(faults.size(), 1u);
  CHECK_EQ(faults[0].block->freed_at, 1001u);
  CHECK_EQ(faults[0].block->allocated_at, 1u);
}

STREAMPOOL_TEST("a write after free is found at check and when the block leaves quarantine, once") {
  for (const bool leave : {false, true}) {
    FakePool pool(debug_options());
    const BlockFacts block = pool.allocate(5000);
    pool.free(block);
    pool.debugger.check(0);
    spoil(pool, block.address + 777, 4);
    if (leave)
      pool.debugger.give_up(Debugger::kEverything);
    else
      pool.debugger.check(0);
    expect_one(pool, FaultKind::write_after_free, block.serial, block.address + 777, block.address + 780);
    CHECK(holds_pattern(pool, block.begin, block.reserved));
    pool.debugger.give_up(Debugger::kEverything);
    CHECK(pool.debugger.take_faults().empty());
  }
}

STREAMPOOL_TEST("guard bytes written while a block is in quarantine are a write after free") {
  FakePool pool(debug_options());
  const BlockFacts block = pool.allocate(100);
  pool.free(block);
  pool.debugger.check(0);
  spoil(pool, block.address + 100, 8);
  pool.debugger.check(0);
  expect_one(pool, FaultKind::write_after_free, block.serial, block.address + 100, block.address + 107);
}

STREAMPOOL_TEST("edges of a freed body are watched in edge mode, its middle is not") {
  FakePool pool(edge_options());
  const BlockFacts block = pool.allocate(1000);
  pool.free(block);
  pool.debugger.check(0);
  spoil(pool, block.address + 64);
  spoil(pool, block.address + 1000 - 65);
  CHECK_EQ(pool.debugger.check(0).faults, 0u);
  spoil(pool, block.address + 63);
  spoil(pool, block.address + 1000 - 64);
  CHECK_EQ(pool.debugger.check(0).faults, 2u);
}

STREAMPOOL_TEST("a block that waits for its work is neither verified nor given back, and is listed") {
  FakePool pool(debug_options());
  const BlockFacts waits = pool.allocate(100), done = pool.allocate(200);
  pool.gate_shut.insert(waits.serial);
  spoil(pool, waits.address + 100);
  pool.free(waits);
  pool.free(done);
  const CheckResult result = pool.debugger.check(0.01);
  CHECK_EQ(result.faults, 0u);
  CHECK_EQ(result.not_checked.size(), 1u);
  CHECK_EQ(result.not_checked[0].serial, waits.serial);
  CHECK_EQ(pool.debugger.totals().blocks_not_checked, 1u);
  CHECK_EQ(pool.debugger.give_up(Debugger::kEverything), done.reserved);
  CHECK_EQ(pool.debugger.totals().quarantined_bytes, waits.reserved);
  pool.gate_shut.clear();
  CHECK_EQ(pool.debugger.check(0).faults, 1u);
}

STREAMPOOL_TEST("a live block with pending work is not checked until the work is done") {
  FakePool pool(debug_options());
  const BlockFacts block = pool.allocate(100);
  spoil(pool, block.address + 100);
  pool.gate_shut.insert(block.serial);
  CHECK_EQ(pool.debugger.check(0).not_checked.size(), 1u);
  pool.device.on_pause = [&] { pool.gate_shut.clear(); };
  const CheckResult result = pool.debugger.check(10);
  CHECK_EQ(result.faults, 1u);
  CHECK(result.not_checked.empty());
}

STREAMPOOL_TEST("check stops waiting at its timeout and when it is interrupted") {
  FakePool pool(debug_options());
  const BlockFacts block = pool.allocate(100);
  pool.gate_shut.insert(block.serial);
  const double start = pool.device.now();
  CHECK_EQ(pool.debugger.check(0.5).not_checked.size(), 1u);
  CHECK(pool.device.now() - start >= 0.5);
  CHECK(pool.device.now() - start < 0.6);
  int asked = 0;
  CHECK_EQ(pool.debugger.check(1e9, [&] { return ++asked == 3; }).not_checked.size(), 1u);
  CHECK_EQ(asked, 3);
}

STREAMPOOL_TEST("quarantine is first in first out and bounded by bytes, and what leaves it holds the pattern") {
  Options options = debug_options();
  options.quarantine_bytes = 3 * 1536;
  options.check_every = 1;
  FakePool pool(options);
  std::vector<BlockFacts> blocks;
  for (int i = 0; i < 10; ++i) blocks.push_back(pool.allocate(1000));
  CHECK_EQ(blocks[0].reserved, 1536u);
  for (const BlockFacts& block : blocks) {
    pool.free(block);
    pool.debugger.poll();
    const Totals totals = pool.debugger.totals();
    CHECK(totals.quarantined_bytes <= options.quarantine_bytes);
    CHECK_EQ(totals.quarantined_blocks + pool.back.size(), totals.blocks_freed);
  }
  CHECK(pool.back == (std::vector<std::uint64_t>{1, 2, 3, 4, 5, 6, 7}));
  for (int i = 0; i < 7; ++i) CHECK(holds_pattern(pool, blocks[static_cast<std::size_t>(i)].begin, 1536));
}

STREAMPOOL_TEST("without quarantine a block goes back straight after its check") {
  Options options = debug_options();
  options.quarantine_bytes = 0;
  options.check_every = 2;
  FakePool pool(options);
  const BlockFacts a = pool.allocate(10), b = pool.allocate(0);
  pool.free(a);
  pool.debugger.poll();
  CHECK(pool.back.empty());
  pool.free(b);
  pool.debugger.poll();
  CHECK_EQ(pool.back.size(), 2u);
  CHECK_EQ(pool.device.verifies, 1);
  CHECK_EQ(pool.debugger.totals().quarantined_bytes, 0u);
}

STREAMPOOL_TEST("a batch of frees is one verification and one fill") {
  FakePool pool(debug_options());
  std::vector<BlockFacts> blocks;
  for (int i = 0; i < 64; ++i) blocks.push_back(pool.allocate(100));
  const int fills = pool.device.fills;
  for (const BlockFacts& block : blocks) {
    pool.free(block);
    pool.debugger.poll();
  }
  CHECK_EQ(pool.device.verifies, 1);
  CHECK_EQ(pool.device.fills, fills + 1);
}

STREAMPOOL_TEST("a large free makes a batch due by itself") {
  FakePool pool(debug_options(), 40 * kMiB);
  pool.free(pool.allocate(33 * kMiB));
  pool.debugger.poll();
  CHECK_EQ(pool.device.verifies, 1);
  CHECK_EQ(pool.back.size(), 1u);
}

STREAMPOOL_TEST("give_up gives back the oldest first and only as much as was asked for") {
  FakePool pool(debug_options());
  std::vector<BlockFacts> blocks;
  for (int i = 0; i < 6; ++i) blocks.push_back(pool.allocate(1000));
  for (const BlockFacts& block : blocks) pool.free(block);
  CHECK_EQ(pool.debugger.give_up(0), 0u);
  CHECK_EQ(pool.debugger.give_up(2000), 2 * 1536u);
  CHECK(pool.back == (std::vector<std::uint64_t>{1, 2}));
  CHECK_EQ(pool.debugger.give_up(Debugger::kEverything), 4 * 1536u);
  CHECK_EQ(pool.debugger.totals().quarantined_blocks, 0u);
}

STREAMPOOL_TEST("give_up takes blocks that were never checked before, after their check") {
  FakePool pool(debug_options());
  const BlockFacts block = pool.allocate(1000);
  spoil(pool, block.address - 1);
  pool.free(block);
  CHECK_EQ(pool.debugger.give_up(1), block.reserved);
  expect_one(pool, FaultKind::underrun, block.serial, block.address - 1, block.address - 1);
}

STREAMPOOL_TEST("the window names the last check that found the bytes whole") {
  FakePool pool(debug_options());
  const BlockFacts never = pool.allocate(100);
  spoil(pool, never.address + 100);
  pool.debugger.check(0);
  std::vector<Fault> faults = pool.debugger.take_faults();
  CHECK_EQ(faults.at(0).last_good_check, 0u);
  CHECK_EQ(faults[0].found_by_check, 1u);
  pool.device.pause(5);
  spoil(pool, never.address + 100);
  pool.debugger.check(0);
  faults = pool.debugger.take_faults();
  CHECK_EQ(faults.at(0).last_good_check, 1u);
  CHECK_EQ(faults[0].last_good_time, 1.0);
  CHECK_EQ(faults[0].time, 6.0);
  CHECK_EQ(faults[0].found_by_check, 2u);
  // Known across the free, and from then on by the quarantine's own checks.
  spoil(pool, never.address + 100);
  pool.free(never);
  pool.debugger.check(0);
  CHECK_EQ(pool.debugger.take_faults().at(0).last_good_check, 2u);
  spoil(pool, never.address);
  pool.debugger.check(0);
  CHECK_EQ(pool.debugger.take_faults().at(0).last_good_check, 3u);
}

STREAMPOOL_TEST("the bytes shown are found and expected, with untouched ones before the first bad byte") {
  FakePool pool(debug_options());
  const BlockFacts block = pool.allocate(1000);
  const Address bad = block.address + 1020;
  spoil(pool, bad, 3);
  pool.debugger.check(0);
  const Fault fault = pool.debugger.take_faults().at(0);
  CHECK_EQ(fault.shown_from, bad - 8);
  CHECK_EQ(fault.bad_bytes, 3u);
  CHECK_EQ(fault.found.size(), fault.expected.size());
  CHECK(fault.found.size() <= 64);
  for (std::size_t i = 0; i < fault.found.size(); ++i) {
    CHECK_EQ(fault.found[i] != fault.expected[i], i >= 8 && i < 11);
    CHECK_EQ(fault.expected[i], driver::pattern_byte(fault.shown_from + i, pool.debugger.key()));
  }
}

STREAMPOOL_TEST("holes in what was written are counted, first and last bad byte span them") {
  FakePool pool(debug_options());
  const BlockFacts block = pool.allocate(1000);
  spoil(pool, block.address + 1001);
  spoil(pool, block.address + 1100, 2);
  pool.debugger.check(0);
  const Fault fault = pool.debugger.take_faults().at(0);
  CHECK_EQ(fault.bad_bytes, 3u);
  CHECK_EQ(fault.address, block.address + 1001);
  CHECK_EQ(fault.last, block.address + 1101);
}

STREAMPOOL_TEST("a write that runs on into the next block's guard is one overrun, and says so") {
  FakePool pool(debug_options());
  const BlockFacts a = pool.allocate(1000), b = pool.allocate(1000);
  const Bytes length = b.address - (a.address + 1000);
  spoil(pool, a.address + 1000, length);
  CHECK_EQ(pool.debugger.check(0).faults, 1u);
  const Fault fault = pool.debugger.take_faults().at(0);
  CHECK_EQ(fault_word(fault.kind), "overrun");
  CHECK_EQ(fault.block->serial, a.serial);
  CHECK_EQ(fault.bad_bytes, length);
  CHECK(fault.note.find("block #2") != std::string::npos);
}

STREAMPOOL_TEST("a write that runs down over the border is an underrun of the block above") {
  FakePool pool(debug_options());
  const BlockFacts a = pool.allocate(1000), b = pool.allocate(1000);
  spoil(pool, b.begin - 3, b.address - b.begin + 3);
  CHECK_EQ(pool.debugger.check(0).faults, 1u);
  expect_one(pool, FaultKind::underrun, b.serial, b.begin - 3, b.address - 1);
  CHECK(a.serial != b.serial);
}

STREAMPOOL_TEST("an overrun of a live block into a quarantined one is the live block's") {
  FakePool pool(debug_options());
  const BlockFacts a = pool.allocate(1000), b = pool.allocate(1000);
  pool.free(b);
  pool.debugger.check(0);
  spoil(pool, a.address + 1000, b.address + 500 - (a.address + 1000));
  CHECK_EQ(pool.debugger.check(0).faults, 1u);
  expect_one(pool, FaultKind::overrun, a.serial, a.address + 1000, b.address + 499);
}

STREAMPOOL_TEST("two separate faults of two blocks are two faults") {
  FakePool pool(debug_options());
  const BlockFacts a = pool.allocate(1000), b = pool.allocate(1000);
  spoil(pool, a.address + 1000);
  spoil(pool, b.address - 1);
  CHECK_EQ(pool.debugger.check(0).faults, 2u);
}

STREAMPOOL_TEST("neighbours come with the fault") {
  FakePool pool(debug_options());
  const BlockFacts a = pool.allocate(1000), b = pool.allocate(1000), c = pool.allocate(1000);
  spoil(pool, b.address + 1000);
  pool.debugger.check(0);
  const Fault fault = pool.debugger.take_faults().at(0);
  CHECK_EQ(fault.below->serial, a.serial);
  CHECK_EQ(fault.above->serial, c.serial);
}

STREAMPOOL_TEST("faults beyond the maximum are counted and not kept") {
  Options options = debug_options();
  options.max_faults = 2;
  FakePool pool(options);
  for (int i = 0; i < 5; ++i) {
    const BlockFacts block = pool.allocate(100);
    spoil(pool, block.address + 100);
  }
  CHECK_EQ(pool.debugger.check(0).faults, 5u);
  CHECK_EQ(pool.debugger.take_faults().size(), 2u);
  CHECK_EQ(pool.debugger.totals().faults, 5u);
  CHECK_EQ(pool.debugger.totals().faults_dropped, 3u);
}

STREAMPOOL_TEST("misuse at the call is kept with the other faults and numbered") {
  FakePool pool(debug_options());
  Fault fault;
  fault.kind = FaultKind::double_free;
  pool.debugger.report(fault);
  pool.debugger.report(fault);
  const std::vector<Fault> faults = pool.debugger.take_faults();
  CHECK_EQ(faults.size(), 2u);
  CHECK_EQ(faults[1].number, faults[0].number + 1);
  CHECK_EQ(faults[0].time, 1.0);
}

STREAMPOOL_TEST("each failing driver call in turn loses no block and reports each fault once (R14)") {
  for (const bool at_verify : {false, true}) {
    for (int n = 1; n <= 6; ++n) {
      Options options = debug_options();
      options.quarantine_bytes = 2000;
      options.check_every = 1;
      FakePool pool(options);
      std::vector<BlockFacts> blocks;
      for (int i = 0; i < 8; ++i) blocks.push_back(pool.allocate(1000));
      spoil(pool, blocks[7].address + 1000);
      (at_verify ? pool.device.fail_verify : pool.device.fail_fill) = n;
      for (int i = 0; i < 7; ++i) {
        spoil(pool, blocks[static_cast<std::size_t>(i)].address - 1);
        pool.free(blocks[static_cast<std::size_t>(i)]);
        pool.debugger.poll();
        const Totals totals = pool.debugger.totals();
        CHECK_EQ(totals.quarantined_blocks + pool.back.size(), static_cast<std::size_t>(i + 1));
        if (i == 3) pool.debugger.check(0);
      }
      pool.debugger.check(0);
      CHECK_EQ(pool.debugger.check(0).status.ok(), true);
      CHECK_EQ(pool.debugger.totals().driver_failures, 1u);
      const std::vector<Fault> faults = pool.debugger.take_faults();
      CHECK_EQ(faults.size(), 8u);
      std::set<std::uint64_t> blamed;
      for (const Fault& fault : faults) blamed.insert(fault.block->serial);
      CHECK_EQ(blamed.size(), 8u);
      pool.debugger.give_up(Debugger::kEverything);
      CHECK_EQ(pool.back.size(), 7u);
      CHECK_EQ(std::set<std::uint64_t>(pool.back.begin(), pool.back.end()).size(), 7u);
    }
  }
}

STREAMPOOL_TEST("a block whose guards could not be written is never judged by them") {
  FakePool pool(edge_options());
  const BlockFacts model = pool.allocate(1000);
  BlockFacts block = model;
  block.serial = 99;
  block.begin = block.begin + 4096;
  block.address = block.address + 4096;
  pool.device.fail_fill = 1;
  CHECK(!pool.debugger.on_allocate(block).ok());
  pool.adopt(block);
  CHECK_EQ(pool.debugger.check(0).faults, 0u);
  pool.free(block);
  CHECK_EQ(pool.debugger.check(0).faults, 0u);
  CHECK_EQ(pool.debugger.check(0).faults, 0u);  // in quarantine its guards stand
  spoil(pool, block.address - 1);
  CHECK_EQ(pool.debugger.check(0).faults, 1u);
}

STREAMPOOL_TEST("a failed check says so and lists everything as not checked") {
  FakePool pool(debug_options());
  pool.allocate(10);
  pool.free(pool.allocate(10));
  pool.device.fail_verify = 1;
  const CheckResult result = pool.debugger.check(0);
  CHECK(!result.status.ok());
  CHECK_EQ(result.not_checked.size(), 2u);
}

STREAMPOOL_TEST("a lost device ends the checks and is asked no more") {
  FakePool pool(debug_options());
  pool.free(pool.allocate(10));
  pool.device.fail_verify = 1;
  pool.device.failure = Code::lost;
  CHECK(!pool.debugger.check(0).status.ok());
  const int calls = pool.device.verifies + pool.device.fills;
  CHECK_EQ(pool.debugger.check(5).not_checked.size(), 1u);
  CHECK_EQ(pool.debugger.give_up(Debugger::kEverything), 0u);
  CHECK_EQ(pool.device.verifies + pool.device.fills, calls);
}

STREAMPOOL_TEST("untouched bytes are counted when asked, and are no fault") {
  Options options = debug_options();
  options.count_untouched = true;
  FakePool pool(options);
  const BlockFacts block = pool.allocate(1000);
  const Range body{block.address, block.size};
  CHECK(pool.device.pattern_fill(Kind::device, {&body, 1}, pool.debugger.key()).ok());
  spoil(pool, block.address, 300);
  pool.free(block);
  CHECK_EQ(pool.debugger.check(0).faults, 0u);
  CHECK_EQ(pool.debugger.totals().freed_bytes, 1000u);
  CHECK_EQ(pool.debugger.totals().untouched_bytes, 700u);
}

STREAMPOOL_TEST("many stuck blocks do not keep newly freed ones from their check") {
  Options options = debug_options();
  options.quarantine_bytes = 0;
  FakePool pool(options, 4 * kMiB);
  for (int i = 0; i < 1000; ++i) {
    const BlockFacts block = pool.allocate(10);
    pool.gate_shut.insert(block.serial);
    pool.free(block);
    pool.debugger.poll();
  }
  CHECK(pool.back.empty());
  for (int i = 0; i < 128; ++i) {
    pool.free(pool.allocate(10));
    pool.debugger.poll();
  }
  CHECK(pool.back.size() >= 64u);
  pool.gate_shut.clear();
  for (int i = 0; i < 640; ++i) {
    pool.free(pool.allocate(10));
    pool.debugger.poll();
  }
  CHECK(pool.back.size() > 1000u);
}

STREAMPOOL_TEST("poll and check from inside the pool's own functions do nothing and do not hang") {
  FakePool pool(debug_options());
  pool.free(pool.allocate(10));
  int calls = 0;
  pool.device.on_verify = [&] {
    ++calls;
    pool.debugger.poll();
    CHECK_EQ(pool.debugger.check(0).checked_blocks, 0u);
    CHECK_EQ(pool.debugger.give_up(Debugger::kEverything), 0u);
  };
  CHECK_EQ(pool.debugger.check(0).checked_blocks, 1u);
  CHECK_EQ(calls, 1);
}

STREAMPOOL_TEST("threads that free, poll and check at once lose and duplicate nothing") {
  Options options = debug_options();
  options.quarantine_bytes = 20000;
  options.check_every = 8;
  FakePool pool(options, 8 * kMiB);
  constexpr int kThreads = 4, kEach = 400;
  std::vector<std::vector<BlockFacts>> blocks(kThreads);
  for (auto& mine : blocks) {
    for (int i = 0; i < kEach; ++i) mine.push_back(pool.allocate(static_cast<Bytes>(i)));
  }
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (const BlockFacts& block : blocks[static_cast<std::size_t>(t)]) {
        pool.free(block);
        pool.debugger.poll();
        if (block.size % 100 == 0) pool.debugger.give_up(block.size);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  pool.debugger.check(0);
  pool.debugger.give_up(Debugger::kEverything);
  CHECK(pool.debugger.take_faults().empty());
  CHECK_EQ(pool.back.size(), static_cast<std::size_t>(kThreads * kEach));
  CHECK_EQ(std::set<std::uint64_t>(pool.back.begin(), pool.back.end()).size(), pool.back.size());
  CHECK_EQ(pool.debugger.totals().quarantined_bytes, 0u);
}

STREAMPOOL_TEST("a batch that the driver queues is waited for by nobody, and taken in by a later call") {
  Options options = debug_options();
  options.check_every = 1;
  options.quarantine_bytes = 0;
  FakePool pool(options);
  pool.device.queues_jobs = true;
  const BlockFacts bad = pool.allocate(100), good = pool.allocate(100);
  spoil(pool, bad.address + 100);
  pool.free(bad);
  pool.debugger.poll();
  CHECK(pool.device.queued != nullptr);
  CHECK_EQ(pool.device.verifies, 0);
  pool.free(good);  // joins the next batch
  pool.debugger.poll();
  CHECK_EQ(pool.debugger.totals().faults, 0u);
  CHECK(pool.back.empty());
  pool.device.jobs_run = true;
  pool.free(pool.allocate(1));
  pool.debugger.poll();
  expect_one(pool, FaultKind::overrun, bad.serial, bad.address + 100, bad.address + 100);
  CHECK(pool.back.size() >= 1u);
  CHECK(holds_pattern(pool, bad.begin, bad.reserved));
  pool.debugger.check(0);
  CHECK_EQ(pool.back.size(), 3u);
  CHECK(pool.device.queued == nullptr);
}

STREAMPOOL_TEST("check and give_up take in the batch under way first, and check counts what it found") {
  Options options = debug_options();
  options.check_every = 1;
  for (const bool by_check : {true, false}) {
    FakePool pool(options);
    pool.device.queues_jobs = true;
    const BlockFacts block = pool.allocate(100);
    spoil(pool, block.address - 1);
    pool.free(block);
    pool.debugger.poll();
    CHECK(pool.device.queued != nullptr);
    if (by_check)
      CHECK_EQ(pool.debugger.check(0).faults, 1u);
    else
      CHECK_EQ(pool.debugger.give_up(Debugger::kEverything), block.reserved);
    expect_one(pool, FaultKind::underrun, block.serial, block.address - 1, block.address - 1);
    CHECK(pool.device.queued == nullptr);
  }
}

STREAMPOOL_TEST("a batch that was called off loses no block, and finds its faults the next time") {
  Options options = debug_options();
  options.check_every = 1;
  FakePool pool(options);
  pool.device.queues_jobs = true;
  const BlockFacts block = pool.allocate(100);
  spoil(pool, block.address + 103);
  pool.free(block);
  pool.debugger.poll();
  pool.device.fail_wait = 1;
  pool.debugger.give_up(0);
  CHECK_EQ(pool.debugger.totals().quarantined_blocks, 1u);
  CHECK_EQ(pool.debugger.totals().driver_failures, 1u);
  pool.debugger.check(0);
  expect_one(pool, FaultKind::overrun, block.serial, block.address + 103, block.address + 103);
}

STREAMPOOL_TEST("a check that goes on for long holds up no free, and what is freed meanwhile is judged once") {
  FakePool pool(debug_options(), 16 * kMiB);
  std::vector<BlockFacts> blocks;
  for (int i = 0; i < 5000; ++i) blocks.push_back(pool.allocate(1));
  spoil(pool, blocks[4500].address + 1);
  spoil(pool, blocks[4600].address + 1);
  bool freed = false;
  pool.device.on_verify = [&] {
    if (std::exchange(freed, true)) return;
    std::thread([&] {
      pool.free(blocks[4500]);
      pool.free(blocks[10]);
      pool.debugger.poll();
    }).join();
  };
  const CheckResult result = pool.debugger.check(0);
  CHECK(freed);
  CHECK(pool.device.verifies > 1);  // in batches
  CHECK_EQ(pool.debugger.totals().faults, 2u);
  pool.debugger.check(0);
  pool.debugger.give_up(Debugger::kEverything);
  CHECK_EQ(pool.debugger.totals().faults, 2u);
  CHECK_EQ(pool.back.size(), 2u);
}

STREAMPOOL_TEST("an interrupted check lists the blocks it did not come to") {
  FakePool pool(debug_options(), 16 * kMiB);
  for (int i = 0; i < 5000; ++i) pool.allocate(1);
  const CheckResult result = pool.debugger.check(0, [] { return true; });
  CHECK_EQ(result.checked_blocks + result.not_checked.size(), 5000u);
  CHECK(!result.not_checked.empty());
}

STREAMPOOL_TEST("a batch is due by time, too, when the pool is called") {
  FakePool pool(debug_options());
  const BlockFacts block = pool.allocate(100);
  spoil(pool, block.address + 100);
  pool.free(block);
  pool.debugger.poll(pool.device.now());
  CHECK_EQ(pool.device.verifies, 0);
  pool.device.advance(0.2);
  pool.debugger.poll(pool.device.now());
  CHECK_EQ(pool.debugger.totals().faults, 1u);
  // A block whose work was not done is asked again without another free.
  const BlockFacts waits = pool.allocate(100);
  pool.gate_shut.insert(waits.serial);
  pool.free(waits);
  pool.device.advance(0.2);
  pool.debugger.poll(pool.device.now());
  CHECK_EQ(pool.device.verifies, 1);
  pool.gate_shut.clear();
  pool.device.advance(0.2);
  pool.debugger.poll(pool.device.now());
  CHECK_EQ(pool.device.verifies, 2);
}

STREAMPOOL_TEST("quarantine is bounded by count and by age") {
  Options options = debug_options();
  options.check_every = 1;
  options.quarantine_blocks = 3;
  {
    FakePool pool(options);
    for (int i = 0; i < 10; ++i) {
      pool.free(pool.allocate(10));
      pool.debugger.poll();
    }
    CHECK(pool.back == (std::vector<std::uint64_t>{1, 2, 3, 4, 5, 6, 7}));
  }
  options.quarantine_blocks = 0;
  options.quarantine_age = 5;
  FakePool pool(options);
  const BlockFacts old = pool.allocate(10);
  pool.free(old);
  pool.debugger.poll();
  pool.device.advance(4);
  const BlockFacts young = pool.allocate(10);
  pool.free(young);
  pool.debugger.poll(pool.device.now());
  CHECK(pool.back.empty());
  spoil(pool, old.address + 3);
  pool.device.advance(2);
  pool.debugger.poll(pool.device.now());  // nothing is freed: its time alone drives it out, verified
  CHECK(pool.back == (std::vector<std::uint64_t>{old.serial}));
  expect_one(pool, FaultKind::write_after_free, old.serial, old.address + 3, old.address + 3);
}

STREAMPOOL_TEST("untouched bytes are counted by the call site that allocated") {
  Options options = debug_options();
  options.count_untouched = true;
  FakePool pool(options);
  const BlockFacts written = pool.allocate(1000), unwritten = pool.allocate(3000);
  for (Address a = unwritten.address + 1000; a < unwritten.address + 3000; ++a)
    pool.device.at(a) = driver::pattern_byte(a, pool.debugger.key());
  pool.free(written);
  pool.free(unwritten);
  pool.debugger.check(0);
  for (const auto& [site, usage] : pool.debugger.usage()) {
    CHECK_EQ(usage.blocks, 1u);
    CHECK_EQ(usage.bytes, site == written.allocated_at ? 1000u : 3000u);
    CHECK_EQ(usage.untouched, site == written.allocated_at ? 0u : 2000u);
  }
  CHECK_EQ(pool.debugger.usage().size(), 2u);
}

STREAMPOOL_TEST("guards of no bytes, one and three are exact to the byte") {
  for (const Bytes guard : {0, 1, 3}) {
    Options options = edge_options();
    options.guard_bytes = guard;
    options.quarantine_bytes = 0;
    options.fill_edge_bytes = 0;
    options.fill = false;  // guards alone
    FakePool pool(options);
    const BlockFacts block = pool.allocate(100);
    CHECK_EQ(block.address - block.begin, guard == 0 ? 0u : 256u);
    for (Bytes byte = 0; byte < guard; ++byte) {
      spoil(pool, block.address + 100 + byte);
      CHECK_EQ(pool.debugger.check(0).faults, 1u);
      expect_one(pool, FaultKind::overrun, block.serial, block.address + 100 + byte, block.address + 100 + byte);
      spoil(pool, block.address - 1 - byte);
      CHECK_EQ(pool.debugger.check(0).faults, 1u);
      expect_one(pool, FaultKind::underrun, block.serial, block.address - 1 - byte, block.address - 1 - byte);
    }
    if (guard == 0) continue;
    spoil(pool, block.address - guard - 1);  // nobody's byte
    CHECK_EQ(pool.debugger.check(0).faults, 0u);
  }
}

STREAMPOOL_TEST("the window names the scopes that were open in it") {
  FakePool pool(debug_options());
  const std::uint64_t before = enter_scope("before");
  const BlockFacts block = pool.allocate(100);
  leave_scope(before);
  pool.debugger.check(0);
  const std::uint64_t decode = enter_scope("decode");
  for (int i = 0; i < 3; ++i) leave_scope(enter_scope("layer"));
  spoil(pool, block.address + 100);
  leave_scope(decode);
  leave_scope(decode);  // twice
  const std::uint64_t open = enter_scope("still open");
  pool.debugger.check(0);
  leave_scope(open);
  leave_scope(enter_scope("after"));
  const std::vector<Fault> faults = pool.debugger.take_faults();
  CHECK_EQ(faults.size(), 1u);
  CHECK(faults[0].scopes == (std::vector<std::string>{"decode", "layer (3 x)", "still open"}));
}

STREAMPOOL_TEST("a block that was never checked has a window that begins with its allocation") {
  FakePool pool(debug_options());
  leave_scope(enter_scope("long ago"));
  BlockFacts block = pool.allocate(100);
  block.allocated_moment = now_moment();
  pool.adopt(block);
  leave_scope(enter_scope("since"));
  spoil(pool, block.address + 100);
  pool.debugger.check(0);
  CHECK(pool.debugger.take_faults().at(0).scopes == (std::vector<std::string>{"since"}));
}

STREAMPOOL_TEST("scopes beyond those kept are forgotten, oldest first, and never mistaken") {
  const Moment start = now_moment();
  const std::uint64_t outer = enter_scope("outer");
  for (std::size_t i = 0; i < kScopesKept + 10; ++i) leave_scope(enter_scope("inner " + std::to_string(i % 3)));
  leave_scope(outer);  // forgotten: nothing else is closed by it
  const std::vector<std::string> names = scopes_between(start, now_moment(), 2);
  CHECK_EQ(names.size(), 3u);
  CHECK_EQ(names.back(), std::string("and 1 earlier ones"));
}

STREAMPOOL_TEST("a thread without Python has a native stack where one was asked for and somebody takes stacks") {
  // Inside Python the extension takes them; alone nobody does.
  StackId none = 1, elsewhere = 0;
  std::thread([&] {
    none = capture(10, 0);
    elsewhere = capture(10, 16);
  }).join();
  const StackId here = capture(0, 16);
  CHECK_EQ(none, 0u);
  CHECK_EQ(elsewhere != 0, here != 0);
  CHECK(here == 0 || here != elsewhere);
}

STREAMPOOL_TEST("random frees, gates, writes and failures: every planted fault is found exactly once") {
  std::mt19937 random(7);
  const auto pick = [&](unsigned below) { return static_cast<unsigned>(random() % below); };
  for (int run = 0; run < 30; ++run) {
    Options options = debug_options();
    options.quarantine_bytes = 1000u * pick(40);
    options.check_every = 1 + pick(20);
    FakePool pool(options, 2 * kMiB);
    pool.device.queues_jobs = run % 2 != 0;
    std::vector<BlockFacts> live, all;
    std::set<std::uint64_t> planted;
    for (int step = 0; step < 300; ++step) {
      pool.device.jobs_run = pick(2) != 0;
      switch (pick(8)) {
        case 0:
        case 1:
        case 2: {
          live.push_back(pool.allocate(pick(3000)));
          all.push_back(live.back());
          break;
        }
        case 3:
        case 4: {
          if (live.empty()) break;
          const std::size_t at = pick(static_cast<unsigned>(live.size()));
          if (pick(3) == 0) pool.gate_shut.insert(live[at].serial);
          pool.free(live[at]);
          live.erase(live.begin() + static_cast<std::ptrdiff_t>(at));
          pool.debugger.poll();
          break;
        }
        case 5: {
          if (live.empty()) break;
          const BlockFacts& block = live[pick(static_cast<unsigned>(live.size()))];
          if (!planted.insert(block.serial).second) break;
          spoil(pool, pick(2) ? block.address - 1 : block.address + block.size);
          break;
        }
        case 6: pool.gate_shut.clear(); break;
        case 7: {
          if (pick(4) == 0) pool.device.fail_wait = 1;
          if (pick(4) == 0) (pick(2) ? pool.device.fail_fill : pool.device.fail_verify) = static_cast<int>(1 + pick(3));
          pool.debugger.check(0);
          break;
        }
      }
    }
    pool.gate_shut.clear();
    pool.device.fail_fill = pool.device.fail_verify = pool.device.fail_wait = 0;
    pool.debugger.check(0);
    std::multiset<std::uint64_t> found;
    for (const Fault& fault : pool.debugger.take_faults()) found.insert(fault.block->serial);
    CHECK_EQ(pool.debugger.totals().faults_dropped, 0u);
    CHECK_EQ(found.size(), planted.size());
    for (const std::uint64_t serial : planted) CHECK_EQ(found.count(serial), 1u);
    CHECK_EQ(pool.debugger.totals().quarantined_blocks + pool.back.size() + live.size(), all.size());
    pool.debugger.give_up(Debugger::kEverything);
    for (const BlockFacts& block : all) {
      const auto same = [&](const BlockFacts& other) { return other.serial == block.serial; };
      if (std::none_of(live.begin(), live.end(), same)) CHECK(holds_pattern(pool, block.begin, block.reserved));
    }
  }
}

STREAMPOOL_TEST("every fault kind and block state has its word") {
  CHECK_EQ(fault_word(FaultKind::write_after_free), "write_after_free");
  CHECK_EQ(fault_meaning(FaultKind::overrun), "a write behind the end of a block");
  CHECK_EQ(block_state_word(BlockState::quarantined), "quarantined");
}
