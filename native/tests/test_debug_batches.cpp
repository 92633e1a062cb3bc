// The debugger alone: what waits, what a batch takes, quarantine, checks that fail or go on for long (debug_scene.hpp).
#include <algorithm>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "debug_scene.hpp"

namespace {

using namespace streampool;
using namespace streampool::debug;
using namespace streampool::testing;
using driver::Code;

}  // namespace

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
