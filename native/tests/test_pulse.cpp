// The numbers for metrics (pool/pulse.hpp): what they say when a pool is quiet, and that reading them disturbs nobody.
#include <algorithm>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "lock_holder.hpp"
#include "pool/pulse.hpp"
#include "pool_scene.hpp"
#include "test.hpp"

namespace {

using namespace streampool;
using namespace streampool::driver;
using namespace streampool::pool;
using testing::limited;
using testing::PoolScene;
using testing::seeded;
using testing::steady;

PulseRow row_of(const std::string& pool, const std::string& device = "sim:0") {
  for (const PulseRow& row : read_pulse().rows)
    if (row.pool == pool && row.device == device) return row;
  return {};
}

Bytes sum_of_parts(PulseRow& r) {
  return r[Column::requested] + r[Column::rounding] + r[Column::guards] + r[Column::quarantined] +
         r[Column::pending_own] + r[Column::pending_waiting] + r[Column::cached];
}

// What the pulse and stats() both count is the same.
void check_agrees(pool::Core& core, PulseRow r) {
  const Stats s = core.stats();
  CHECK_EQ(r[Column::requested], s.in_use);
  CHECK_EQ(r[Column::rounding], s.rounding);
  CHECK_EQ(r[Column::guards], s.guards);
  CHECK_EQ(r[Column::quarantined], s.quarantined);
  CHECK(r[Column::pending_own] + r[Column::pending_waiting] >= s.pending);  // a ceiling, exact where nothing is pending
  if (!core.debugging()) CHECK_EQ(r[Column::cached], s.cached);
  CHECK_EQ(r[Column::reserved], s.reserved);
  CHECK_EQ(r[Column::requested_peak], s.in_use_peak);
  CHECK_EQ(r[Column::reserved_peak], s.reserved_peak);
  CHECK_EQ(r[Column::live_blocks], s.live_blocks);
  CHECK_EQ(r[Column::allocations], s.allocations);
  CHECK_EQ(r[Column::frees], s.frees);
  CHECK_EQ(r[Column::allocated_bytes] - r[Column::freed_bytes], s.in_use);
  CHECK_EQ(sum_of_parts(r), s.reserved);
  for (std::size_t i = 0; i < kPathCount; ++i) CHECK_EQ(r.values[index(Column::paths) + i], s.paths[i]);
}

// A scene whose pool has a row of its own.
struct NamedScene : PoolScene {
  explicit NamedScene(std::string name, pool::Options options = steady(), sim::Config config = seeded())
      : PoolScene(options, config) {
    core = make(std::move(options), Kind::device, std::move(name));
  }
};

pool::Options debugging() {
  pool::Options options = steady();
  options.debug.guard_bytes = 256;
  options.debug.quarantine_bytes = kMiB;
  return options;
}

}  // namespace

STREAMPOOL_TEST("the pulse and stats() agree about a quiet pool, in production and in debug mode") {
  for (const pool::Options& options : {steady(), debugging()}) {
    const std::string name = options.debug.enabled() ? "pulse-quiet-debug" : "pulse-quiet";
    NamedScene scene(name, options);
    pool::Core* core = scene.core.get();
    const StreamHandle s = scene.lasting(), t = scene.lasting();
    std::vector<BlockRef> blocks;
    for (Bytes size = 1; size < 40 * kMiB; size = size * 3 + 5) blocks.push_back(scene.alloc(size, s));
    check_agrees(*core, row_of(name));
    for (std::size_t i = 0; i < blocks.size(); i += 2) scene.free(blocks[i], i % 4 == 0 ? s : t);
    CHECK(sim::settle());
    core->look();
    CHECK(sim::settle());
    core->look();
    check_agrees(*core, row_of(name));
  }
}

STREAMPOOL_TEST("memory that waits for another stream's work is told apart from what its own stream may take") {
  NamedScene scene("pulse-pending");
  pool::Core* core = scene.core.get();
  Failure failure;
  const StreamHandle s = scene.lasting(), t = scene.lasting();
  const BlockRef slot = scene.alloc(4096, s), large = scene.alloc(8 * kMiB, s), own = scene.alloc(3 * kMiB, s);
  const auto gate = scene.gated(t);
  const auto gate_s = scene.gated(s);
  CHECK(core->record_stream(slot, t, &failure) == Errc::ok);
  CHECK(core->record_stream(large, t, &failure) == Errc::ok);
  for (const BlockRef& block : {slot, large, own}) scene.free(block, s);
  core->look();
  PulseRow r = row_of("pulse-pending");
  CHECK_EQ(r[Column::pending_waiting], 8 * kMiB + 4096);
  CHECK(r[Column::pending_own] >= 3 * kMiB);
  CHECK(r[Column::pending_own] + r[Column::pending_waiting] >= core->stats().pending);  // a ceiling
  CHECK_EQ(sum_of_parts(r), r[Column::reserved]);
  gate->open();
  gate_s->open();
  CHECK(sim::settle());
  core->look();
  r = row_of("pulse-pending");
  CHECK_EQ(r[Column::pending_own] + 0, Bytes{0});
  CHECK_EQ(core->stats().pending, Bytes{0});
}

STREAMPOOL_TEST("reading the pulse makes no driver call and waits for no lock that an allocation takes") {
  NamedScene scene("pulse-locks");
  testing::LockHolder holder("pulse-locks", scene.lasting());
  const auto before = scene.device->calls();
  for (int i = 0; i < 100; ++i) CHECK(row_of("pulse-locks")[Column::allocations] > 0);
  CHECK(scene.device->calls() == before);
  CHECK(!holder.timed_out());
}

STREAMPOOL_TEST("the parts of the pulse add up to what is reserved at each moment, whatever other threads do") {
  NamedScene scene("pulse-race", steady(), {});
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int n = 0; n < 2; ++n)
    threads.emplace_back([&, stream = scene.lasting()] {
      while (!stop.load()) {
        const BlockRef blocks[] = {scene.alloc(512, stream), scene.alloc(100 * kKiB, stream),
                                   scene.alloc(3 * kMiB, stream)};
        for (const BlockRef& block : blocks) scene.free(block, stream);
        scene.core->trim(0);
      }
    });
  std::uint64_t allocations = 0, trimmed = 0;
  for (int i = 0; i < 2000; ++i) {
    PulseRow r = row_of("pulse-race");
    CHECK_EQ(sum_of_parts(r), r[Column::reserved]);
    CHECK(r[Column::requested_peak] >= r[Column::requested]);
    CHECK(r[Column::reserved_peak] >= r[Column::reserved]);
    CHECK(r[Column::allocations] >= allocations && r[Column::trimmed_bytes] >= trimmed);  // counters never go back
    allocations = r[Column::allocations];
    trimmed = r[Column::trimmed_bytes];
  }
  stop.store(true);
  for (std::thread& thread : threads) thread.join();
}

STREAMPOOL_TEST("a spike is in the recent peak for a window or two, and in the peak for good") {
  NamedScene scene("pulse-window");
  const StreamHandle s = scene.lasting();
  const auto spike = [&](Bytes size) { scene.free(scene.alloc(size, s), s); };
  const auto recent = [] { return row_of("pulse-window")[Column::requested_recent_peak]; };
  spike(50 * kMiB);
  CHECK_EQ(recent(), 50 * kMiB);
  CHECK_EQ(recent(), 50 * kMiB);  // a look takes nothing away
  sim::clock_advance(61);
  CHECK_EQ(recent(), 50 * kMiB);  // the last full window
  spike(kMiB);
  spike(20 * kKiB);
  CHECK_EQ(recent(), 50 * kMiB);
  sim::clock_advance(61);
  CHECK_EQ(recent(), kMiB);
  sim::clock_advance(61);
  CHECK_EQ(recent(), Bytes{0});
  spike(20 * kKiB);
  CHECK_EQ(recent(), 20 * kKiB);
  CHECK_EQ(row_of("pulse-window")[Column::requested_peak], 50 * kMiB);
}

STREAMPOOL_TEST("counters of a pool that is gone stay and go on with the next pool of its name, gauges do not") {
  PoolScene scene;
  for (std::uint64_t round = 1; round <= 3; ++round) {
    scene.core = scene.make(limited(64 * kMiB), Kind::device, "pulse-again");
    const StreamHandle s = scene.lasting();
    Failure failure;
    scene.alloc(kMiB, s);
    CHECK(scene.try_alloc(kGiB, s, &failure) == Errc::out_of_memory);
    CHECK(scene.free_quietly(12345, s, &failure) == Errc::foreign_free);
    PulseRow r = row_of("pulse-again");
    CHECK(r.live && !r.unlimited);
    CHECK_EQ(r.limit, 64 * kMiB);
    CHECK_EQ(r[Column::allocations], round);
    CHECK_EQ(r[Column::requested], kMiB);
    CHECK_EQ(r.values[index(Column::failures) + static_cast<std::size_t>(OomReason::limit)], round);
    CHECK(r[Column::refused_limit] >= round);
    CHECK_EQ(r.values[index(Column::misuses) + 1], round);  // double_free, foreign_free, ...
    scene.core.reset();
    r = row_of("pulse-again");
    CHECK(!r.live);
    CHECK_EQ(r.limit, Bytes{0});
    for (std::size_t i = 0; i < kColumns; ++i)
      if (columns()[i].sort != ColumnInfo::Sort::tally) CHECK_EQ(r.values[i], std::uint64_t{0});
    CHECK_EQ(r[Column::allocations], round);
  }
}

STREAMPOOL_TEST("ten thousand pools, streams and names leave a bounded number of rows") {
  sim::Config config = seeded();
  config.devices = 8;
  PoolScene scene(steady(), config);
  const std::string device = "sim:7";
  const auto driver = sim::device(7);
  Failure failure;
  constexpr int kPools = 10'000;
  for (int i = 0; i < kPools; ++i) {
    auto core =
        Core::create(driver, Kind::device, "pulse-" + std::to_string(i % 100) + "-0x7f\n\"", steady(), &failure);
    CHECK(core != nullptr);
  }
  std::size_t rows = 0;
  for (const PulseRow& row : read_pulse().rows) {
    if (row.device != device) continue;
    ++rows;
    CHECK(row.pool.find_first_of("\n\"\\ ") == std::string::npos);
  }
  CHECK_EQ(rows, kMostNames + 1);
  CHECK(read_pulse().other_names > 0);
  const auto late = Core::create(driver, Kind::device, "late \"one\"", steady(), &failure);
  const Pulse each = read_pulse(Rows::pools);
  const auto own = [&](const PulseRow& row) { return row.device == device && row.pool == "late \"one\"" && row.live; };
  CHECK_EQ(std::count_if(each.rows.begin(), each.rows.end(), own), 1);
}

STREAMPOOL_TEST("a machine that is made anew has none of the old one's names and counts") {
  {
    NamedScene scene("pulse-old");
    Failure failure;
    for (std::size_t i = 0; i < kMostNames; ++i)
      CHECK(Core::create(scene.device, Kind::device, "crowd-" + std::to_string(i), steady(), &failure) != nullptr);
    scene.free(scene.alloc(kKiB, kLegacyStream), kLegacyStream);
  }
  NamedScene scene("pulse-fresh");
  CHECK(row_of("pulse-fresh").live);
  CHECK_EQ(row_of("pulse-old")[Column::allocations], 0U);
}

STREAMPOOL_TEST("request sizes are counted in fractions of samples, and add up to what was allocated") {
  pool::Options options = steady();
  options.sample_bytes = 256 * kKiB;
  NamedScene scene("pulse-sizes", options);
  const StreamHandle s = scene.lasting();
  constexpr int kPairs = 100'000;
  for (int i = 0; i < kPairs; ++i)
    for (const Bytes size : {Bytes{4000}, 40 * kMiB}) {
      if (size > kMiB && i % 1000 != 0) continue;
      scene.free(scene.alloc(size, s), s);
    }
  PulseRow r = row_of("pulse-sizes");
  CHECK(r.sized);
  const auto count = [&](std::size_t bucket) {
    return static_cast<double>(r.values[index(Column::sizes) + bucket]) / observe::kCountUnit;
  };
  CHECK(std::abs(count(1) / kPairs - 1) < 0.15);  // 1 500 samples: five standard errors
  CHECK(std::abs(count(6) - 100) < 1);            // each of them is sampled
  CHECK_EQ(count(0) + count(2) + count(3) + count(4) + count(5) + count(7) + count(8), 0.0);
}

STREAMPOOL_TEST(
    "events of many threads come out of the ring whole and in each thread's order, or are counted as dropped") {
  auto ring = std::make_unique<observe::EventRing>();
  constexpr std::uint64_t kThreads = 3, kEvents = 20'000;
  std::atomic<std::uint64_t> running{kThreads};
  std::vector<std::thread> threads;
  for (std::uint64_t n = 0; n < kThreads; ++n)
    threads.emplace_back([&ring, &running, n] {
      for (std::uint64_t i = 1; i <= kEvents; ++i) {
        observe::Event event;
        observe::Event::put(event.pool, "a name that is much too long for the place that there is for it");
        event.number = n;
        event.more = i;
        ring->push(event);
      }
      running.fetch_sub(1);
    });
  std::uint64_t seen = 0;
  std::vector<std::uint64_t> last(kThreads, 0);
  for (bool more = true; more;) {
    more = running.load() != 0;
    for (const observe::Event& event : ring->drain()) {
      ++seen;
      CHECK(event.more > last[event.number]);
      last[event.number] = event.more;
      CHECK_EQ(std::string(event.pool.data()).size(), event.pool.size() - 1);
    }
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(seen + ring->dropped(), kThreads * kEvents);
}

STREAMPOOL_TEST("the last events are kept whether or not anybody took them, and a reader takes nothing away") {
  auto tail = std::make_unique<observe::EventTail>();
  CHECK(tail->read().empty());
  observe::Event event;
  observe::Event::put(event.pool, "kept");
  for (event.number = 0; event.number < observe::EventTail::kSlots + 100; ++event.number) tail->push(event);
  for (int look = 0; look < 2; ++look) {
    const std::vector<observe::Event> last = tail->read();
    CHECK_EQ(last.size(), observe::EventTail::kSlots);
    for (std::size_t i = 0; i < last.size(); ++i) {
      CHECK_EQ(last[i].number, i + 100);
      CHECK_EQ(std::string(last[i].pool.data()), std::string("kept"));
    }
  }
}

STREAMPOOL_TEST("the last events of many threads are whole and in each thread's order, also while they are written") {
  auto tail = std::make_unique<observe::EventTail>();
  constexpr std::uint64_t kThreads = 3, kEvents = 50'000;
  std::atomic<std::uint64_t> running{kThreads};
  std::vector<std::thread> threads;
  for (std::uint64_t n = 0; n < kThreads; ++n)
    threads.emplace_back([&tail, &running, n] {
      for (std::uint64_t i = 1; i <= kEvents; ++i) {
        observe::Event event;
        const std::string text = std::to_string(n) + " " + std::to_string(i);
        observe::Event::put(event.pool, text);
        observe::Event::put(event.device, text);
        event.number = n;
        event.more = i;
        event.at = static_cast<double>(i);
        tail->push(event);
      }
      running.fetch_sub(1);
    });
  bool seen = false;
  for (bool more = true; more;) {
    more = running.load() != 0;
    std::vector<std::uint64_t> last(kThreads, 0);
    for (const observe::Event& event : tail->read()) {
      seen = true;
      const std::string text = std::to_string(event.number) + " " + std::to_string(event.more);
      CHECK_EQ(std::string(event.pool.data()), text);
      CHECK_EQ(std::string(event.device.data()), text);
      CHECK_EQ(event.at, static_cast<double>(event.more));
      CHECK(event.more > last[event.number]);
      last[event.number] = event.more;
    }
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(seen);
}

STREAMPOOL_TEST("the largest free pieces are listed by who may take them") {
  NamedScene scene("pulse-pieces");
  const StreamHandle s = scene.lasting(), t = scene.lasting();
  Failure failure;
  std::vector<BlockRef> blocks;
  for (int i = 0; i < 9; ++i) blocks.push_back(scene.alloc(static_cast<Bytes>(i + 2) * kMiB, s));
  CHECK(scene.core->record_stream(blocks[4], t, &failure) == Errc::ok);
  const auto gate_s = scene.gated(s), gate_t = scene.gated(t);
  for (const int i : {2, 4, 6}) scene.free(blocks[static_cast<std::size_t>(i)], s);
  std::vector<FreePiece> pieces = scene.core->free_pieces(1000);
  const auto has = [&](Bytes bytes, const std::string& reuse) {
    return std::any_of(pieces.begin(), pieces.end(),
                       [&](const FreePiece& p) { return p.bytes == bytes && p.reuse == reuse; });
  };
  CHECK(has(4 * kMiB, "own_stream"));
  CHECK(has(6 * kMiB, "waiting"));
  CHECK(has(8 * kMiB, "own_stream"));
  CHECK(std::is_sorted(pieces.begin(), pieces.end(),
                       [](const FreePiece& a, const FreePiece& b) { return a.bytes > b.bytes; }));
  const Bytes largest = pieces.front().bytes, second = pieces[1].bytes;
  pieces = scene.core->free_pieces(2);
  CHECK_EQ(pieces.size(), std::size_t{2});
  CHECK_EQ(pieces[0].bytes, largest);
  CHECK_EQ(pieces[1].bytes, second);
  CHECK(scene.core->free_pieces(0).empty());
  gate_s->open();
  gate_t->open();
  CHECK(sim::settle());
  scene.core->look();
  CHECK_EQ(scene.core->free_pieces(1)[0].bytes, scene.core->stats().largest_free);
}

STREAMPOOL_TEST("driver calls for memory are timed, each under its own sort of work") {
  NamedScene scene("pulse-calls");
  const auto total = [](MemoryWork work) {
    std::uint64_t calls = 0;
    for (const std::uint64_t n : call_times_of("sim:0").work[static_cast<std::size_t>(work)].read().counts) calls += n;
    return calls;
  };
  const std::uint64_t made = total(MemoryWork::alloc), mapped = total(MemoryWork::map),
                      unmapped = total(MemoryWork::unmap), freed = total(MemoryWork::free);
  const auto before = scene.device->calls();
  Failure failure;
  Bytes reserved = 0;
  CHECK(scene.core->reserve(4 * kMiB, &reserved, &failure) == Errc::ok);
  scene.core->trim(0);
  const auto after = scene.device->calls();
  const auto calls = [&](Call call) {
    return after[static_cast<std::size_t>(call)] - before[static_cast<std::size_t>(call)];
  };
  CHECK(calls(Call::mem_create) > 0);
  CHECK_EQ(total(MemoryWork::alloc) - made, calls(Call::mem_create));
  CHECK_EQ(total(MemoryWork::map) - mapped, calls(Call::mem_map) + calls(Call::mem_set_access));
  CHECK_EQ(total(MemoryWork::unmap) - unmapped, calls(Call::mem_unmap));
  CHECK_EQ(total(MemoryWork::free) - freed, calls(Call::mem_release));
}
