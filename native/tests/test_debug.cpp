// The debugger alone: guards, fills, what a fault says, windows and stacks (debug_scene.hpp).
#include <string>
#include <thread>
#include <vector>

#include "debug_scene.hpp"

namespace {

using namespace streampool;
using namespace streampool::debug;
using namespace streampool::testing;
using driver::Range;

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

STREAMPOOL_TEST("faults of one kind from the same lines are kept so often, and then counted with the last") {
  Options options = debug_options();
  options.max_repeats = 2;
  FakePool pool(options);
  const auto misuse = [&](FaultKind kind, StackId at) {
    Fault fault;
    fault.kind = kind;
    fault.at = at;
    pool.debugger.report(fault);
  };
  CHECK(!pool.debugger.has_faults());
  for (int i = 0; i < 9; ++i) misuse(FaultKind::foreign_free, 5);
  misuse(FaultKind::foreign_free, 6);
  misuse(FaultKind::interior_free, 5);
  for (int i = 0; i < 4; ++i) misuse(FaultKind::foreign_free, 0);  // without a stack nothing says that they are alike
  CHECK(pool.debugger.has_faults());
  std::vector<std::uint64_t> counts;
  for (const Fault& fault : pool.debugger.take_faults()) counts.push_back(fault.count);
  CHECK(counts == (std::vector<std::uint64_t>{1, 1, 7, 1, 1, 1, 1, 1, 1}));
  CHECK(!pool.debugger.has_faults());
  misuse(FaultKind::foreign_free, 5);
  CHECK(pool.debugger.has_faults());
  CHECK_EQ(pool.debugger.take_faults().at(0).count, 1u);
  CHECK_EQ(pool.debugger.totals().faults, 16u);
  CHECK_EQ(pool.debugger.totals().faults_repeated, 6u);
  CHECK_EQ(pool.debugger.totals().faults_dropped, 0u);
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

STREAMPOOL_TEST("every fault kind and block state has its word") {
  CHECK_EQ(fault_word(FaultKind::write_after_free), "write_after_free");
  CHECK_EQ(fault_meaning(FaultKind::overrun), "a write behind the end of a block");
  CHECK_EQ(block_state_word(BlockState::quarantined), "quarantined");
}
