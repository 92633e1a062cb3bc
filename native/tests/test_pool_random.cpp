// Random programs over the pool on the seeded simulated device: streams that last and streams that come and go, gated
// work, recorded streams, frees on other streams, implicit releases, trims. After each step the pool is audited from
// the ground and the device is asked for races: memory handed out too early is one. STREAMPOOL_TEST_SEED=N repeats a
// run.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "pool_scene.hpp"
#include "test.hpp"

namespace {

using namespace streampool;
using namespace streampool::driver;
using namespace streampool::pool;
using testing::PoolScene;
using testing::seeded;
using testing::steady;

struct Random {
  std::uint64_t state;
  std::uint64_t next() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state >> 11;
  }
  std::uint64_t below(std::uint64_t bound) { return next() % bound; }
  bool one_in(std::uint64_t n) { return below(n) == 0; }
};

struct Settings {
  Options options = steady();
  Kind kind = Kind::device;
  bool failing = false;  // the driver fails a call now and then
  bool tight = false;    // two sizes and few streams, so that everybody wants the same memory
  int steps = 250;
};

struct Program : PoolScene {
  struct Live {
    BlockRef block;
    Bytes size = 0;
    StreamHandle home = 0;
    std::vector<StreamHandle> recorded{};  // from the first one on the block is only read
    bool used = false;
  };

  Settings settings;
  Random random;
  std::vector<StreamHandle> lasting_streams, raw;
  std::vector<std::shared_ptr<sim::Gate>> gates;
  std::vector<Live> live;
  std::vector<sim::Race> races;
  std::uint64_t refused = 0;

  Program(const Settings& with, std::uint64_t seed)
      : PoolScene(with.options, seeded(seed), with.kind),
        settings(with),
        random{seed * 2654435761u + 88172645463325252u} {
    for (int i = 0; i < 2; ++i) lasting_streams.push_back(lasting());
    lasting_streams.push_back(kLegacyStream);
    for (int i = 0; i < 3; ++i) raw.push_back(stream());
  }

  StreamHandle some_stream() {
    if (settings.tight) return random.one_in(2) ? raw[0] : lasting_streams[random.below(2)];
    if (random.one_in(12)) return kPerThreadStream;
    return random.one_in(2) ? raw[random.below(raw.size())] : lasting_streams[random.below(lasting_streams.size())];
  }
  Bytes some_size() {
    if (settings.tight) return random.one_in(4) ? kMiB : 64 * kKiB;
    switch (random.below(6)) {
      case 0: return random.below(3);
      case 1: return random.below(3 * kMiB);
      case 2: return 64 * kKiB + random.below(512);
      default: return random.below(20000);
    }
  }
  void work(StreamHandle s, const Live& on, bool write) {
    if (on.size == 0) return;
    sim::Work task{.stream = s, .accesses = {{on.block.address, on.size, write}}};
    CHECK(device->launch(std::move(task)));
  }
  // The program's own order: what follows on `to` comes after what is queued on `from`.
  void after(StreamHandle from, StreamHandle to) {
    const EventHandle event = recorded(from);
    CHECK(device->stream_wait_event(to, event));
    CHECK(device->event_destroy(event));
  }
  // The pool's next call meets a driver that fails one of its calls.
  void sabotage() {
    if (!settings.failing || !random.one_in(3)) return;
    static constexpr Call kCalls[] = {
        Call::mem_create,           Call::mem_map,         Call::mem_set_access, Call::mem_unmap,
        Call::mem_release,          Call::event_create,    Call::event_record,   Call::event_query,
        Call::stream_wait_event,    Call::address_reserve, Call::stream_id,      Call::stream_is_capturing,
        Call::context_event_record, Call::mem_alloc,       Call::mem_free};
    static constexpr Code kCodes[] = {Code::failed, Code::out_of_memory, Code::invalid, Code::capturing};
    device->fail_call(kCalls[random.below(std::size(kCalls))], 1 + random.below(2), 1 + random.below(2),
                      kCodes[random.below(std::size(kCodes))]);
  }
  void repaired() {
    if (settings.failing) device->clear_failures();
  }

  void allocate() {
    AllocRequest request;
    request.size = some_size();
    request.stream = some_stream();
    if (random.one_in(4)) request.alignment = kMinAlignment << random.below(random.one_in(8) ? 14 : 5);
    request.raw = random.one_in(2);
    Live block{{}, request.size, request.stream};
    pool::Failure failure;
    sabotage();
    const bool quick = core->try_allocate(request, &block.block);
    const Errc errc = quick ? Errc::ok : core->allocate(request, &block.block, &failure);
    repaired();
    if (errc != Errc::ok) {
      ++refused;
      CHECK(settings.failing || (settings.options.limit != 0 && errc == Errc::out_of_memory));
      return;
    }
    CHECK_EQ(block.block.address % request.alignment, Bytes{0});
    for (const Live& other : live)
      CHECK(block.block.address + std::max<Bytes>(block.size, 1) <= other.block.address ||
            other.block.address + std::max<Bytes>(other.size, 1) <= block.block.address);
    if (host_visible(settings.kind) && block.size != 0)
      device->host_access(sim::writes(block.block.address, block.size), "host", 0);
    if (!random.one_in(4)) {
      work(block.home, block, true);
      block.used = true;
    }
    live.push_back(block);
  }
  void use() {
    if (live.empty()) return;
    Live& block = live[random.below(live.size())];
    block.used = true;
    if (random.one_in(2) || block.home == kPerThreadStream) return work(block.home, block, block.recorded.empty());
    // On another stream, as a program should: ordered after what home did, and recorded, before the launch or after it.
    const StreamHandle other = some_stream();
    after(block.home, other);
    const bool before = random.one_in(2);
    if (!before) work(other, block, false);
    pool::Failure failure;
    sabotage();
    const Address inside = block.block.address + (block.size > 1 ? random.below(block.size) : 0);
    const Errc errc = core->record_stream(inside, other, &failure);
    repaired();
    if (errc != Errc::ok) {
      CHECK(settings.failing);
      if (!before) after(other, block.home);
      return;
    }
    if (before) work(other, block, false);
    block.recorded.push_back(other);
  }
  void release_one() {
    if (live.empty()) return;
    const std::size_t at = random.below(live.size());
    Live block = live[at];
    FreeRequest request;
    if (random.one_in(5)) {
      core->release(block.block);
      live[at] = live.back();
      live.pop_back();
      return;
    }
    request.stream = block.home;
    if (random.one_in(3)) {
      // The caller says that this stream is ordered after all other use; so it has to be.
      request.stream = some_stream();
      if (block.used) after(block.home, *request.stream);  // a block that nobody touched needs no order
      for (const StreamHandle s : block.recorded) after(s, *request.stream);
    }
    pool::Failure failure;
    sabotage();
    Errc errc = Errc::ok;
    if (random.one_in(2))
      errc = core->try_free(block.block, request) ? Errc::ok : core->free(block.block, request, &failure);
    else
      errc = core->free(block.block.address, request, &failure);
    repaired();
    if (errc != Errc::ok) {
      CHECK(settings.failing);
      CHECK(errc == Errc::stream || errc == Errc::capture);
      CHECK(core->facts(block.block)->state == debug::BlockState::live);
      return;
    }
    live[at] = live.back();
    live.pop_back();
    if (random.one_in(4)) {
      CHECK(core->free(block.block, request, &failure) == Errc::double_free);
      CHECK(core->free(block.block.address, request, &failure) != Errc::ok);
    }
  }
  void other() {
    pool::Failure failure;
    switch (random.below(9)) {
      case 0:
      case 1:
        if (gates.size() < 4) gates.push_back(gated(some_stream()));
        break;
      case 2:
      case 3:
        if (!gates.empty()) {
          const std::size_t at = random.below(gates.size());
          gates[at]->open();
          gates.erase(gates.begin() + static_cast<std::ptrdiff_t>(at));
        }
        break;
      case 4: CHECK(sim::settle()); break;
      case 5: {
        sabotage();
        core->trim(random.below(8) * kMiB);
        repaired();
        break;
      }
      case 6: {  // a raw stream ends: nothing live may name it, as its blocks' owner would see to
        const std::size_t at = random.below(raw.size());
        for (std::size_t i = 0; i < live.size();) {
          const Live& block = live[i];
          if (block.home != raw[at] &&
              std::find(block.recorded.begin(), block.recorded.end(), raw[at]) == block.recorded.end()) {
            ++i;
            continue;
          }
          core->release(block.block);
          live[i] = live.back();
          live.pop_back();
        }
        CHECK(device->stream_destroy(raw[at]));
        raw[at] = stream();
        break;
      }
      case 7: {
        StreamHandle& s = lasting_streams[random.below(2)];
        if (core->forget_stream(s, &failure) == Errc::ok && core->register_stream(s, &failure) != Errc::ok)
          testing::fail(__FILE__, __LINE__, failure.text);
        break;
      }
      case 8: sim::clock_advance(1); break;
    }
  }

  void check() {
    std::string broken = core->audit();
    // Pieces go back on a thread of their own, which may be at it still.
    for (int i = 0; i < 200 && settings.options.segments == SegmentSource::malloc && !broken.empty(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      broken = core->audit();
    }
    CHECK_EQ(broken, std::string());
    for (sim::Race& race : sim::races()) races.push_back(std::move(race));
    const std::vector<std::string> traps = sim::traps();
    if (!traps.empty()) testing::fail(__FILE__, __LINE__, traps.front());
    CHECK_EQ(device->fault_text(), std::string());
    const Stats stats = core->stats();
    CHECK_EQ(stats.live_blocks, std::uint64_t{live.size()});
    if (settings.options.limit != 0) CHECK(stats.reserved_peak <= settings.options.limit);
  }
  void run(bool stop_at_races = true) {
    for (int step = 0; step < settings.steps; ++step) {
      const std::uint64_t what = random.below(10);
      if (what < 4 && live.size() < 60)
        allocate();
      else if (what < 6)
        use();
      else if (what < 8)
        release_one();
      else
        other();
      check();
      if (stop_at_races && !races.empty())
        testing::fail(__FILE__, __LINE__, "step " + std::to_string(step) + ": a race, " + told(races.front()));
    }
  }
  static std::string told(const sim::Race& race) {
    return std::to_string(race.size) + " bytes at " + hex(race.address) + ", " + race.first.stream_name +
           (race.first.write ? " writes, " : " reads, ") + race.second.stream_name +
           (race.second.write ? " writes" : " reads");
  }
  // All work done, all blocks free: the driver has everything back.
  void finish() {
    for (const auto& gate : gates) gate->open();
    CHECK(sim::settle());
    for (const Live& block : live) core->release(block.block);
    live.clear();
    check();
    core->close();
    CHECK_EQ(core->stats().reserved, Bytes{0});
    CHECK_EQ(device->used_memory(), Bytes{0});
    core.reset();
    CHECK_EQ(device->live_events(), std::uint64_t{0});
    CHECK(sim::traps().empty());
  }
};

std::uint64_t chosen_seed() {
  const char* text = std::getenv("STREAMPOOL_TEST_SEED");
  return text == nullptr ? 1 : std::strtoull(text, nullptr, 10);
}

template <typename Body>
void with_seeds(std::uint64_t count, Body body) {
  const std::uint64_t first = chosen_seed();
  for (std::uint64_t seed = first; seed < first + count; ++seed) try {
      body(seed);
    } catch (const testing::Failure& failure) {
      throw testing::Failure(std::string(failure.what()) + "\n  STREAMPOOL_TEST_SEED=" + std::to_string(seed));
    }
}

STREAMPOOL_TEST("random programs see no race and no lost byte, and everything goes back at the end") {
  with_seeds(12, [](std::uint64_t seed) {
    Program program({}, seed);
    program.run();
    program.finish();
  });
}

STREAMPOOL_TEST("random programs under a limit, which wait and reuse across streams, see no race") {
  with_seeds(12, [](std::uint64_t seed) {
    Settings settings;
    settings.options.limit = 16 * kMiB;
    settings.options.wait_timeout = 0;
    settings.options.fence_age = seed % 2 == 0 ? 0 : 1e9;
    Program program(settings, seed);
    program.run();
  });
}

STREAMPOOL_TEST("random programs on three streams that fight for little memory see no race") {
  with_seeds(24, [](std::uint64_t seed) {
    Settings settings;
    settings.tight = true;
    settings.options.limit = (seed % 3 + 4) * kMiB;
    settings.options.wait_timeout = 0;
    settings.options.fence_age = seed % 2 == 0 ? 0 : 1e9;
    settings.steps = 500;
    Program program(settings, seed);
    program.run();
  });
}

STREAMPOOL_TEST("random programs without reuse across streams, and with driver pieces, see no race") {
  with_seeds(8, [](std::uint64_t seed) {
    Settings settings;
    settings.options.opportunistic = settings.options.wait = seed % 2 == 0;
    settings.options.segments = static_cast<SegmentSource>(seed / 2 % 3);
    Program program(settings, seed);
    program.run();
    program.finish();
  });
}

STREAMPOOL_TEST("random programs on pinned and managed memory, which the host touches at once, see no race") {
  with_seeds(8, [](std::uint64_t seed) {
    Settings settings;
    settings.kind = seed % 2 == 0 ? Kind::pinned : Kind::managed;
    Program program(settings, seed);
    program.run();
    for (const auto& gate : program.gates) gate->open();
  });
}

STREAMPOOL_TEST("random programs with guards, fills and a quarantine see no race and no fault") {
  with_seeds(6, [](std::uint64_t seed) {
    Settings settings;
    settings.options.debug.guard_bytes = 256;
    settings.options.debug.fill = true;
    settings.options.debug.quarantine_bytes = 4 * kMiB;
    settings.options.debug.track = true;
    settings.steps = 120;
    Program program(settings, seed);
    program.run();
    for (const debug::Fault& fault : program.core->take_faults())  // the second frees are the program's own
      CHECK_EQ(std::string(debug::fault_word(fault.kind)),
               std::string(debug::fault_word(debug::FaultKind::double_free)));
    program.finish();
  });
}

STREAMPOOL_TEST("whatever driver call fails in a random program, the pool stays whole") {
  with_seeds(16, [](std::uint64_t seed) {
    Settings settings;
    settings.failing = true;
    settings.options.wait_timeout = 0;
    settings.options.segments = static_cast<SegmentSource>(seed % 3);
    settings.options.fence_age = 0;
    Program program(settings, seed);
    program.run();
  });
}

#ifdef STREAMPOOL_TEST_SWITCHES
STREAMPOOL_TEST("with R1 broken on purpose the random programs do see races") {
  struct Broken {
    Broken() { order::break_r1(true); }
    ~Broken() { order::break_r1(false); }
  } broken;
  std::size_t seen = 0;
  with_seeds(4, [&](std::uint64_t seed) {
    Settings settings;
    settings.options.limit = 16 * kMiB;
    settings.options.wait_timeout = 0;
    Program program(settings, seed);
    try {
      program.run(false);
      seen += program.races.size();
    } catch (const testing::Failure&) {
      ++seen;  // memory was taken away under running work
    }
  });
  CHECK(seen > 0);
}
#endif

}  // namespace
