// The simulated device's happens-before check: every pair of conflicting accesses that nothing orders, and no other.
#include <random>
#include <set>

#include "sim_scene.hpp"
#include "test.hpp"

namespace {

using namespace streampool;
using namespace streampool::driver;
using testing::Scene;
using testing::seeded;
using testing::under_both;

constexpr Bytes kBlock = 4096;

void touch(const Scene& scene, StreamHandle stream, sim::Access access, const char* label = "") {
  CHECK(scene.device->launch({.stream = stream, .accesses = {access}, .label = label}));
}

STREAMPOOL_TEST("two streams that write the same bytes with nothing between them race, once done as well as pending") {
  under_both([](const sim::Config& config) {
    const Scene scene(config);
    const Address a = scene.memory(kBlock);
    const StreamHandle s = scene.stream(), t = scene.stream();
    CHECK(scene.device->launch({.stream = s, .accesses = {sim::writes(a, 100)}, .label = "first", .stack = 7}));
    CHECK(sim::settle());  // having run is no order
    CHECK(scene.device->launch({.stream = t, .accesses = {sim::reads(a + 50, 100)}, .label = "second", .stack = 8}));
    const auto races = sim::races();
    CHECK_EQ(races.size(), 1u);
    CHECK_EQ(races[0].address, a + 50);
    CHECK_EQ(races[0].size, 50u);
    CHECK(races[0].first.write && !races[0].second.write);
    CHECK_EQ(races[0].first.label, "first");
    CHECK_EQ(races[0].second.label, "second");
    CHECK_EQ(races[0].first.stack, 7u);
    CHECK_EQ(races[0].second.stack, 8u);
    std::uint64_t id = 0;
    CHECK(scene.device->stream_id(t, &id));
    CHECK_EQ(races[0].second.stream, id);
    CHECK(sim::races().empty());
  });
}

STREAMPOOL_TEST("reads do not race with reads, nor writes of bytes next to each other") {
  const Scene scene;
  const Address a = scene.memory(kBlock);
  const StreamHandle s = scene.stream(), t = scene.stream();
  touch(scene, s, sim::reads(a, 100));
  touch(scene, t, sim::reads(a, 100));
  touch(scene, s, sim::writes(a + 100, 100));
  touch(scene, t, sim::writes(a + 200, 100));
  touch(scene, t, sim::writes(a + 150, 0));
  CHECK(sim::races().empty());
}

STREAMPOOL_TEST("stream order, wait edges, host waits, successful queries and the legacy stream order accesses") {
  under_both([](const sim::Config& config) {
    const Scene scene(config);
    const Address a = scene.memory(kBlock);
    const StreamHandle s = scene.stream(), t = scene.stream(), blocking = scene.stream(true);
    touch(scene, s, sim::writes(a, kBlock));
    touch(scene, s, sim::writes(a, kBlock));
    CHECK(scene.device->stream_wait_event(t, scene.recorded(s)));
    touch(scene, t, sim::writes(a, kBlock));
    CHECK(scene.device->stream_synchronize(t));
    touch(scene, s, sim::writes(a, kBlock));
    const EventHandle e = scene.recorded(s);
    CHECK(scene.query(e) == Code::ok);
    touch(scene, blocking, sim::writes(a, kBlock));
    touch(scene, kLegacyStream, sim::writes(a, kBlock));
    touch(scene, blocking, sim::writes(a, kBlock));
    CHECK(scene.device->stream_destroy(blocking));
    touch(scene, kDefaultStream, sim::writes(a, kBlock));
    CHECK(scene.device->synchronize());
    touch(scene, t, sim::writes(a, kBlock));
    CHECK(sim::settle());
    CHECK(scene.device->stream_query(t));
    touch(scene, s, sim::writes(a, kBlock));
    CHECK(sim::races().empty());
  });
}

STREAMPOOL_TEST("an event covers only what was queued before its record") {
  const Scene scene;
  const Address a = scene.memory(kBlock);
  const StreamHandle s = scene.stream(), t = scene.stream();
  touch(scene, s, sim::writes(a, 10));
  const EventHandle e = scene.recorded(s);
  touch(scene, s, sim::writes(a + 10, 10));
  CHECK(scene.query(e) == Code::ok);
  touch(scene, t, sim::writes(a, 10));
  CHECK(sim::races().empty());
  touch(scene, t, sim::writes(a + 10, 10));
  CHECK_EQ(sim::races().size(), 1u);
}

STREAMPOOL_TEST("a query that said not ready orders nothing") {
  const Scene scene;
  const Address a = scene.memory(kBlock);
  const StreamHandle s = scene.stream();
  const auto gate = scene.gated(s);
  touch(scene, s, sim::writes(a, 10));
  CHECK(scene.query(scene.recorded(s)) == Code::not_ready);
  touch(scene, scene.stream(), sim::writes(a, 10));
  CHECK_EQ(sim::races().size(), 1u);
  gate->open();
}

STREAMPOOL_TEST("a context event orders all streams' work, destroyed streams' too") {
  const Scene scene;
  const Address a = scene.memory(kBlock);
  for (Bytes i = 0; i < 5; ++i) {
    const StreamHandle s = scene.stream();
    touch(scene, s, sim::writes(a + i * 100, 100));
    CHECK(scene.device->stream_destroy(s));
  }
  const EventHandle all = scene.event();
  CHECK(scene.device->context_event_record(all));
  CHECK(scene.query(all) == Code::ok);
  touch(scene, scene.stream(), sim::writes(a, 500));
  CHECK(sim::races().empty());
}

STREAMPOOL_TEST("a new stream with a dead stream's handle is a stranger to its work") {
  const Scene scene;
  const Address a = scene.memory(kBlock);
  const StreamHandle s = scene.stream();
  touch(scene, s, sim::writes(a, 100));
  CHECK(scene.device->stream_destroy(s));
  const StreamHandle t = scene.stream();
  CHECK_EQ(s, t);
  touch(scene, t, sim::writes(a, 100));
  CHECK_EQ(sim::races().size(), 1u);
}

STREAMPOOL_TEST("aliases of one memory race with each other and a new handle at an old address does not") {
  const Scene scene;
  MemoryHandle handle = 0;
  Address range = 0;
  CHECK(scene.device->address_reserve(8 * kMiB, 0, &range));
  CHECK(scene.device->mem_create(2 * kMiB, &handle));
  for (const Bytes offset : {Bytes{0}, 4 * kMiB}) {
    CHECK(scene.device->mem_map(range + offset, 2 * kMiB, handle));
    CHECK(scene.device->mem_set_access(range + offset, 2 * kMiB));
  }
  const StreamHandle s = scene.stream(), t = scene.stream();
  touch(scene, s, sim::writes(range, 100));
  touch(scene, t, sim::writes(range + 4 * kMiB, 100));
  const auto races = sim::races();
  CHECK_EQ(races.size(), 1u);
  CHECK_EQ(races[0].address, range + 4 * kMiB);
  CHECK(sim::settle());
  CHECK(scene.device->mem_unmap(range, 2 * kMiB));
  CHECK(scene.device->mem_create(2 * kMiB, &handle));
  CHECK(scene.device->mem_map(range, 2 * kMiB, handle));
  CHECK(scene.device->mem_set_access(range, 2 * kMiB));
  touch(scene, scene.stream(), sim::writes(range, 100));
  CHECK(sim::races().empty());
}

STREAMPOOL_TEST("the host's own accesses and the debugger's pattern race with pending work, and with nothing later") {
  const Scene scene;
  const Address a = scene.memory(kBlock);
  const StreamHandle s = scene.stream();
  touch(scene, s, sim::reads(a, 100), "reader");
  scene.device->host_access(sim::reads(a, 100), "peek", 0);
  CHECK(sim::races().empty());
  scene.device->host_access(sim::writes(a + 99, 100), "poke", 0);
  auto races = sim::races();
  CHECK_EQ(races.size(), 1u);
  CHECK_EQ(races[0].second.label, "poke");
  const Range range{a, 100};
  CHECK(sim::settle());
  CHECK(scene.device->pattern_fill(Kind::device, {&range, 1}, 1));
  races = sim::races();
  CHECK_EQ(races.size(), 1u);
  CHECK_EQ(races[0].first.label, "reader");
  CHECK_EQ(races[0].second.label, "streampool pattern");
  CHECK(scene.device->synchronize());
  CHECK(scene.device->pattern_fill(Kind::device, {&range, 1}, 1));
  touch(scene, s, sim::writes(a, 100));
  CHECK(sim::races().empty());
}

STREAMPOOL_TEST("a race that repeats is one report with a count") {
  const Scene scene;
  const Address a = scene.memory(kBlock);
  const StreamHandle s = scene.stream(), t = scene.stream();
  for (int i = 0; i < 10; ++i) {
    CHECK(scene.device->launch({.stream = s, .accesses = {sim::writes(a, 10)}, .stack = 1}));
    CHECK(scene.device->launch({.stream = t, .accesses = {sim::writes(a, 10)}, .stack = 2}));
  }
  const auto races = sim::races();
  CHECK_EQ(races.size(), 2u);  // s before t, and t before s
  CHECK(races[0].count + races[1].count == 19);
}

STREAMPOOL_TEST("one overlap that the history had cut is one race, and two overlaps are counted") {
  const Scene scene;
  const Address a = scene.memory(kBlock);
  const StreamHandle s = scene.stream(), t = scene.stream();
  CHECK(scene.device->launch({.stream = t, .accesses = {sim::reads(a + 30, 10)}, .stack = 9}));
  CHECK(scene.device->launch({.stream = s, .accesses = {sim::writes(a, 50)}, .stack = 1}));
  CHECK_EQ(sim::races().size(), 1u);
  CHECK(scene.device->launch({.stream = t, .accesses = {sim::reads(a + 10, 40)}, .stack = 2}));
  CHECK(scene.device->launch({.stream = t, .accesses = {sim::reads(a + 10, 20)}, .stack = 2}));
  const auto races = sim::races();
  CHECK_EQ(races.size(), 1u);
  CHECK_EQ(races[0].address, a + 10);
  CHECK_EQ(races[0].size, 40u);
  CHECK_EQ(races[0].count, 2u);
}

STREAMPOOL_TEST("very many sites at the same bytes stay bounded") {
  const Scene scene;
  const Address a = scene.memory(kBlock);
  const StreamHandle s = scene.stream();
  for (std::uint32_t i = 0; i < 20'000; ++i)
    CHECK(scene.device->launch({.stream = s, .accesses = {sim::writes(a, 50)}, .stack = i + 1}));
  CHECK(sim::history_size() < 1000);
  touch(scene, scene.stream(), sim::reads(a, 1));
  CHECK(!sim::races().empty());
}

STREAMPOOL_TEST("the race check agrees with a slow one on random programs") {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    const Scene scene(seeded(seed));
    std::mt19937_64 random(seed);
    const auto pick = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
    const Address a = scene.memory(kBlock);
    // The slow check: for each piece of work the whole set of what comes before it.
    struct Piece {
      std::set<std::size_t> before;
      sim::Access access;
    };
    using Set = std::set<std::size_t>;
    std::vector<Piece> pieces;
    std::vector<StreamHandle> streams;
    std::vector<bool> blocking;
    std::vector<Set> after;  // what the next work of each stream comes after; 0 is the legacy stream
    std::vector<std::pair<EventHandle, Set>> events;
    Set host;
    streams.push_back(kLegacyStream), blocking.push_back(true), after.emplace_back();
    for (int i = 0; i < 4; ++i) {
      blocking.push_back(pick(2) == 0);
      streams.push_back(scene.stream(blocking.back()));
      after.emplace_back();
    }
    const auto join = [](Set& into, const Set& from) { into.insert(from.begin(), from.end()); };
    // An operation on stream i is ordered after what the legacy rule says.
    const auto order = [&](std::size_t i) {
      if (i == 0) {
        for (std::size_t j = 1; j < streams.size(); ++j)
          if (blocking[j]) join(after[0], after[j]);
      } else if (blocking[i]) {
        join(after[i], after[0]);
      }
    };
    std::set<std::pair<std::string, std::string>> expected, found;
    for (int i = 0; i < 60; ++i) {
      const std::size_t s = pick(streams.size());
      switch (pick(8)) {
        case 0:
          order(s);
          events.emplace_back(scene.recorded(streams[s]), after[s]);
          break;
        case 1:
          if (events.empty()) break;
          {
            const auto& [event, covered] = events[pick(events.size())];
            order(s);
            CHECK(scene.device->stream_wait_event(streams[s], event));
            join(after[s], covered);
          }
          break;
        case 2:
          if (events.empty()) break;
          {
            const auto& [event, covered] = events[pick(events.size())];
            if (scene.device->event_query(event)) join(host, covered);
          }
          break;
        case 3:
          if (pick(4) != 0) break;
          CHECK(scene.device->stream_synchronize(streams[s]));
          join(host, after[s]);
          break;
        default: {
          order(s);
          Piece piece;
          piece.before = after[s];
          join(piece.before, host);
          piece.access = {a + pick(200), 1 + pick(40), pick(2) == 0};
          const std::string label = std::to_string(pieces.size());
          for (std::size_t old = 0; old < pieces.size(); ++old) {
            const sim::Access& other = pieces[old].access;
            if (!other.write && !piece.access.write) continue;
            if (other.begin >= piece.access.begin + piece.access.size) continue;
            if (piece.access.begin >= other.begin + other.size) continue;
            if (!piece.before.contains(old)) expected.emplace(std::to_string(old), label);
          }
          touch(scene, streams[s], piece.access, label.c_str());
          after[s] = piece.before;
          after[s].insert(pieces.size());
          pieces.push_back(std::move(piece));
        }
      }
    }
    for (const sim::Race& race : sim::races()) found.emplace(race.first.label, race.second.label);
    CHECK(found == expected);
  }
}

STREAMPOOL_TEST("the history stays bounded over many launches") {
  const Scene scene;
  const Address a = scene.memory(64 * kMiB);
  const StreamHandle s = scene.stream(), t = scene.stream();
  std::mt19937_64 random(1);
  std::uint64_t most = 0;
  constexpr int kLaunches = 200'000;
  for (int i = 0; i < kLaunches; ++i) {
    const Address at = a + random() % (31 * kMiB);
    touch(scene, i % 2 == 0 ? s : t, sim::writes(at + (i % 2 == 0 ? 0 : 32 * kMiB), 256));
    if (i % 1000 == 0) {
      CHECK(scene.device->stream_synchronize(s));
      CHECK(scene.device->stream_synchronize(t));
      most = std::max(most, sim::history_size());
    }
  }
  CHECK(most < 50'000);
  CHECK(sim::races().empty());
}

STREAMPOOL_TEST("short-lived streams leave nothing behind in the clocks") {
  const Scene scene;
  const Address a = scene.memory(kBlock);
  for (int i = 0; i < 10'000; ++i) {
    const StreamHandle s = scene.stream(i % 2 == 0);
    touch(scene, s, sim::writes(a, 100));
    CHECK(scene.device->stream_synchronize(s));
    CHECK(scene.device->stream_destroy(s));
  }
  CHECK(sim::races().empty());
  CHECK(sim::history_size() < 10'000);
  CHECK_EQ(scene.device->live_streams(), 0u);
}

}  // namespace
