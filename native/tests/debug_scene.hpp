// What the debugger's own tests share: a fake driver (a host vector) and a fake pool around one debugger.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "../src/debug/capture.hpp"
#include "../src/debug/debugger.hpp"
#include "../src/debug/scopes.hpp"
#include "../src/driver/pattern.hpp"
#include "test.hpp"

namespace streampool::testing {

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
  Status graph_retain(driver::StreamHandle, std::uint64_t, void (*)(void*), void*) override { return no(); }
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

inline Options debug_options() {
  Options options;
  options.track = options.fill = true;
  options.guard_bytes = 256;
  options.quarantine_bytes = kMiB;
  return options;
}

inline Options edge_options() {
  Options options = debug_options();
  options.fill_edge_bytes = 64;
  return options;
}

inline void expect_one(FakePool& pool, FaultKind kind, std::uint64_t serial, Address first, Address last) {
  const std::vector<Fault> faults = pool.debugger.take_faults();
  CHECK_EQ(faults.size(), 1u);
  CHECK_EQ(fault_word(faults[0].kind), fault_word(kind));
  CHECK_EQ(faults[0].block->serial, serial);
  CHECK_EQ(faults[0].address, first);
  CHECK_EQ(faults[0].last, last);
}

inline bool holds_pattern(FakePool& pool, Address begin, Bytes size) {
  for (Address a = begin; a < begin + size; ++a) {
    if (pool.device.at(a) != driver::pattern_byte(a, pool.debugger.key())) return false;
  }
  return true;
}

inline void spoil(FakePool& pool, Address at, Bytes size = 1) {
  for (Address a = at; a < at + size; ++a) {
    pool.device.at(a) = static_cast<std::uint8_t>(~driver::pattern_byte(a, pool.debugger.key()));
  }
}

}  // namespace streampool::testing
