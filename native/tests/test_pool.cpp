// The pool from C++ on the simulated device: what its fast paths cost the driver, how memory is found, what a wrong
// free is told, what the counters say. The random runs are in test_pool_random.cpp, the threads in test_stress.cpp.
#include <algorithm>
#include <set>
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

constexpr Bytes kLarge = 4 * kMiB;

// -- fast paths and the driver ---------------------------------------------------------------------------------------

STREAMPOOL_TEST("on a lasting stream neither alloc nor free makes a driver call, for slots and extents, in any order") {
  PoolScene scene;
  const StreamHandle s = scene.lasting();
  const auto round = [&](int n) {
    std::vector<BlockRef> blocks;
    for (int i = 0; i < 40; ++i) blocks.push_back(scene.alloc(static_cast<Bytes>((i * 7919 + n) % 200000 + 1), s));
    for (int i = 0; i < 10; ++i) blocks.push_back(scene.alloc(kMiB + static_cast<Bytes>(i) * 4096, s));
    for (std::size_t i = 0; i < blocks.size(); ++i) scene.free(blocks[(i * 37) % blocks.size()], s);
  };
  round(0);
  const std::uint64_t before = scene.all_calls();
  for (int n = 0; n < 50; ++n) round(0);
  CHECK_EQ(scene.all_calls(), before);
  scene.audit();
}

STREAMPOOL_TEST("the legacy stream is lasting without being registered, under both of its names") {
  PoolScene scene;
  scene.free(scene.alloc(4096, kDefaultStream), kLegacyStream);
  const std::uint64_t before = scene.all_calls();
  const BlockRef block = scene.alloc(4096, kLegacyStream);
  scene.free(block, kDefaultStream);
  scene.free(scene.alloc(kLarge, kDefaultStream), kDefaultStream);
  const std::uint64_t after = scene.all_calls();
  scene.free(scene.alloc(kLarge, kDefaultStream), kDefaultStream);
  CHECK_EQ(scene.all_calls() - after, std::uint64_t{0});
  CHECK(after >= before);
  CHECK_EQ(scene.core->stats().streams, std::uint64_t{1});
}

STREAMPOOL_TEST("a raw handle costs two look-ups a call, does it capture and what is its id, and nothing else") {
  PoolScene scene;
  const StreamHandle s = scene.stream();
  scene.free(scene.alloc(4096, s), s);
  const std::uint64_t all = scene.all_calls(), capturing = scene.calls(Call::stream_is_capturing),
                      ids = scene.calls(Call::stream_id);
  constexpr std::uint64_t kPairs = 20;
  for (std::uint64_t i = 0; i < kPairs; ++i) scene.free(scene.alloc(4096, s), s);
  CHECK_EQ(scene.calls(Call::stream_is_capturing) - capturing, 2 * kPairs);
  CHECK_EQ(scene.calls(Call::stream_id) - ids, 2 * kPairs);
  CHECK_EQ(scene.all_calls() - all, 4 * kPairs);
}

STREAMPOOL_TEST(
    "small frees of a raw handle are fenced in batches of 64 or of 1 MiB, one of 1 MiB in the call itself") {
  PoolScene scene;
  const StreamHandle s = scene.stream();
  const auto fences = [&] { return scene.calls(Call::event_record); };
  for (int i = 0; i < 63; ++i) scene.free(scene.alloc(256, s), s);
  CHECK_EQ(fences(), std::uint64_t{0});
  scene.free(scene.alloc(256, s), s);
  CHECK_EQ(fences(), std::uint64_t{1});
  std::vector<BlockRef> blocks;
  for (int i = 0; i < 32; ++i) blocks.push_back(scene.alloc(64 * kKiB, s));
  for (int i = 0; i < 32; ++i) {
    scene.free(blocks[static_cast<std::size_t>(i)], s);
    CHECK_EQ(fences(), std::uint64_t{1} + static_cast<std::uint64_t>((i + 1) / 16));
  }
  scene.free(scene.alloc(kMiB, s), s);
  CHECK_EQ(fences(), std::uint64_t{4});
  CHECK_EQ(scene.calls(Call::stream_synchronize) + scene.calls(Call::event_synchronize), std::uint64_t{0});
}

STREAMPOOL_TEST("an old free of a raw handle is fenced by the next call that names its stream") {
  Options options = steady();
  options.fence_age = 5;
  PoolScene scene(options);
  const StreamHandle s = scene.stream();
  scene.free(scene.alloc(256, s), s);
  const BlockRef kept = scene.alloc(256, s);
  CHECK_EQ(scene.calls(Call::event_record), std::uint64_t{0});
  sim::clock_advance(6);
  scene.free(scene.alloc(256, kLegacyStream), kLegacyStream);  // names another one
  CHECK_EQ(scene.calls(Call::event_record), std::uint64_t{0});
  const BlockRef next = scene.alloc(256, s);
  CHECK_EQ(scene.calls(Call::event_record), std::uint64_t{1});
  scene.free(kept, s);
  scene.free(next, s);
}

STREAMPOOL_TEST("an implicit release makes no driver call, and neither does the call that drains it") {
  PoolScene scene;
  const StreamHandle s = scene.lasting();
  const BlockRef block = scene.alloc(4096, s), large = scene.alloc(kLarge, s);
  const std::uint64_t before = scene.all_calls();
  scene.core->release(block);
  scene.core->release(block);  // twice is harmless
  scene.core->release(large);
  CHECK_EQ(scene.alloc(4096, s).address, block.address + 0 * scene.all_calls());
  CHECK_EQ(scene.all_calls(), before);
  CHECK_EQ(scene.core->stats().live_blocks, std::uint64_t{1});
  scene.audit();
}

// -- how memory is found: each path once
// --------------------------------------------------------------------------------

STREAMPOOL_TEST("path own: memory of the same stream comes back at once, while its work is still pending") {
  PoolScene scene;
  const StreamHandle s = scene.lasting();
  for (const Bytes size : {Bytes{4096}, kLarge}) {
    const BlockRef first = scene.alloc(size, s);
    const auto gate = scene.gated(s);
    scene.free(first, s);
    const std::uint64_t own = scene.path(Path::own);
    const BlockRef second = scene.alloc(size, s);
    CHECK_EQ(second.address, first.address);
    CHECK_EQ(scene.path(Path::own), own + 1);
    scene.free(second, s);
    gate->open();
  }
}

STREAMPOOL_TEST("paths grown and fresh: new memory from the driver, and what was reserved in advance") {
  PoolScene scene;
  const StreamHandle s = scene.lasting();
  scene.alloc(kLarge, s);
  CHECK_EQ(scene.path(Path::grown), std::uint64_t{1});
  Bytes reserved = 0;
  Failure failure;
  CHECK(scene.core->reserve(16 * kMiB, &reserved, &failure) == Errc::ok);
  CHECK_EQ(reserved, 16 * kMiB);
  const std::uint64_t before = scene.all_calls();
  scene.alloc(kLarge, s);
  CHECK_EQ(scene.path(Path::fresh), std::uint64_t{1});
  CHECK_EQ(scene.path(Path::grown), std::uint64_t{1});
  CHECK_EQ(scene.all_calls(), before);
  scene.audit();
}

STREAMPOOL_TEST("path completed: another stream's memory comes once its work is done, and not before") {
  for (const bool registered : {true, false})
    for (const Bytes size : {Bytes{4096}, Bytes{40000}, kLarge}) {
      Options options = steady();
      options.wait = false;
      options.fence_age = 5;
      PoolScene scene(options);
      const StreamHandle s = registered ? scene.lasting() : scene.stream(),
                         t = registered ? scene.lasting() : scene.stream();
      std::vector<BlockRef> blocks;
      for (int i = 0; i < 20; ++i) blocks.push_back(scene.alloc(size, s));
      std::set<Address> addresses;
      const auto gate = scene.gated(s);
      for (const BlockRef& block : blocks) {
        addresses.insert(block.address);
        scene.free(block, s);
      }
      const BlockRef early = scene.alloc(size, t);
      CHECK(!addresses.contains(early.address));
      CHECK_EQ(scene.path(Path::completed), std::uint64_t{0});
      gate->open();
      CHECK(sim::settle());
      sim::clock_advance(6);
      if (!registered) scene.alloc(size, s);  // names s: what is old is fenced
      CHECK(sim::settle());
      // What nobody has a claim on goes first; then, before anything is grown, what s left behind.
      const Bytes reserved = scene.core->stats().reserved;
      bool found = false;
      for (int i = 0; i < 2000 && !found && scene.core->stats().reserved == reserved; ++i)
        found = addresses.contains(scene.alloc(size, t).address);
      CHECK(found);
      CHECK_EQ(scene.core->stats().reserved, reserved);
      CHECK(scene.path(Path::completed) >= 1);
      scene.audit();
    }
}

STREAMPOOL_TEST("a single slot of another stream's slab comes once its work is done") {
  Options options = steady();
  options.limit = 2 * kMiB;
  PoolScene scene(options);
  const StreamHandle s = scene.lasting(), t = scene.lasting();
  std::vector<BlockRef> blocks;  // all of the limit, in slabs of s
  Failure failure;
  for (int i = 0; i < 512; ++i) blocks.push_back(scene.alloc(4096, s));
  const Address address = blocks[100].address;
  scene.free(blocks[100], s);
  CHECK_EQ(scene.alloc(4096, t).address, address);
  CHECK_EQ(scene.path(Path::completed), std::uint64_t{1});
  CHECK_EQ(scene.core->stats().reserved, 2 * kMiB);
  scene.audit();
}

STREAMPOOL_TEST("path waited: a stream is made to wait for the free of another one, late in the ladder") {
  Options options = steady();
  options.limit = kLarge;
  PoolScene scene(options);
  const StreamHandle s = scene.stream(), t = scene.stream();
  const BlockRef block = scene.alloc(kLarge, s);
  CHECK(scene.device->launch({.stream = s, .accesses = {sim::writes(block.address, kLarge)}}));
  const auto gate = scene.gated(s);
  scene.free(block, s);
  const BlockRef again = scene.alloc(kLarge, t);
  CHECK_EQ(again.address, block.address);
  CHECK_EQ(scene.path(Path::waited), std::uint64_t{1});
  CHECK_EQ(scene.calls(Call::stream_wait_event), std::uint64_t{1});
  CHECK_EQ(scene.core->stats().wait_edges, std::uint64_t{1});
  CHECK(scene.device->launch({.stream = t, .accesses = {sim::writes(again.address, kLarge)}}));
  const EventHandle done = scene.recorded(t);
  CHECK(scene.query(done) == Code::not_ready);
  gate->open();
  CHECK(scene.query(done) == Code::ok);
  CHECK(sim::races().empty());
  scene.audit();
}

STREAMPOOL_TEST("no stream is made to wait where the setting forbids it, or the memory is touched by the host") {
  for (const bool host : {false, true}) {
    Options options = steady();
    constexpr Bytes kSize = 6 * kMiB;
    options.limit = 8 * kMiB;
    options.wait = host;
    options.wait_timeout = 0;
    PoolScene scene(options, seeded(), host ? Kind::pinned : Kind::device);
    const StreamHandle s = scene.stream(), t = scene.stream();
    const BlockRef block = scene.alloc(kSize, s);
    const auto gate = scene.gated(s);
    scene.free(block, s);
    Failure failure;
    CHECK(scene.try_alloc(kSize, t, &failure) == Errc::out_of_memory);
    CHECK_EQ(scene.calls(Call::stream_wait_event), std::uint64_t{0});
    CHECK(failure.oom != nullptr && failure.oom->reason == OomReason::pending);
    CHECK_EQ(failure.oom->request, kSize);
    gate->open();
    scene.audit();
  }
}

STREAMPOOL_TEST("path host_waited: with nothing else left, the call waits a bounded time for pending frees") {
  Options options = steady();
  options.limit = kLarge;
  options.wait = false;
  PoolScene scene(options);
  const StreamHandle s = scene.lasting(), t = scene.lasting();
  const BlockRef block = scene.alloc(kLarge, s);
  const auto gate = scene.gated(s);
  scene.free(block, s);
  // Opens while the pool waits: it asks this between two looks.
  scene.core->hooks().interrupted = [&] {
    gate->open();
    return false;
  };
  CHECK_EQ(scene.alloc(kLarge, t).address, block.address);
  CHECK_EQ(scene.path(Path::host_waited), std::uint64_t{1});
  CHECK_EQ(scene.core->stats().host_waits, std::uint64_t{1});
  CHECK_EQ(scene.calls(Call::stream_synchronize) + scene.calls(Call::event_synchronize), std::uint64_t{0});
  scene.core->hooks().interrupted = nullptr;
  scene.audit();
}

STREAMPOOL_TEST("a wait for pending frees ends when it is interrupted, and the pool is as it was") {
  Options options = steady();
  options.limit = kLarge;
  options.wait = false;
  PoolScene scene(options);
  const StreamHandle s = scene.lasting();
  const BlockRef block = scene.alloc(kLarge, s);
  const auto gate = scene.gated(s);
  scene.free(block, s);
  scene.core->hooks().interrupted = [] { return true; };
  Failure failure;
  CHECK(scene.try_alloc(kLarge, scene.lasting(), &failure) == Errc::interrupted);
  scene.core->hooks().interrupted = nullptr;
  scene.audit();
  gate->open();
  CHECK_EQ(scene.alloc(kLarge, s).address, block.address);
}

STREAMPOOL_TEST("path moved: idle memory in pieces is given back and asked for again in one piece") {
  constexpr std::size_t kBlocks = 34;  // so many that two idle ones are within the slack that growth tolerates
  Options options = steady();
  options.limit = kBlocks * 2 * kMiB;
  PoolScene scene(options);
  const StreamHandle s = scene.lasting();
  std::vector<BlockRef> blocks;
  for (std::size_t i = 0; i < kBlocks; ++i) blocks.push_back(scene.alloc(2 * kMiB, s));
  std::sort(blocks.begin(), blocks.end(), [](const BlockRef& a, const BlockRef& b) { return a.address < b.address; });
  scene.free(blocks[3], s);
  scene.free(blocks[20], s);
  const BlockRef large = scene.alloc(4 * kMiB, s);
  CHECK_EQ(scene.path(Path::moved), std::uint64_t{1});
  CHECK_EQ(scene.core->stats().reserved, options.limit);
  CHECK_EQ(scene.core->stats().reserved_peak, options.limit);
  scene.free(large, s);
  scene.audit();
}

STREAMPOOL_TEST("path quarantine: freed blocks that are kept back are given up before an allocation fails") {
  Options options = steady();
  options.limit = kLarge;
  options.debug.track = true;
  options.debug.quarantine_bytes = kGiB;
  PoolScene scene(options);
  const StreamHandle s = scene.lasting();
  scene.free(scene.alloc(kLarge, s), s);
  CHECK_EQ(scene.core->stats().quarantined, kLarge);
  scene.alloc(kLarge, s);
  CHECK_EQ(scene.path(Path::quarantine), std::uint64_t{1});
  scene.audit();
}

STREAMPOOL_TEST("path called_back: a garbage collection, then the callback, may free something before the error") {
  for (const bool callback : {false, true}) {
    Options options = steady();
    options.limit = kLarge;
    PoolScene scene(options);
    const StreamHandle s = scene.lasting();
    const BlockRef garbage = scene.alloc(kLarge, s);
    int asked = 0;
    if (callback) {
      scene.core->hooks().out_of_memory = [&](Bytes bytes) {
        ++asked;
        CHECK_EQ(bytes, kLarge);
        scene.core->release(garbage);
        return true;
      };
    } else {
      scene.core->hooks().collect_garbage = [&] {
        ++asked;
        scene.core->release(garbage);
      };
    }
    scene.alloc(kLarge, s);
    CHECK_EQ(asked, 1);
    CHECK_EQ(scene.path(Path::called_back), std::uint64_t{1});
    scene.core->hooks() = {};
    scene.audit();
  }
}

STREAMPOOL_TEST("an out-of-memory callback that never helps is asked a bounded number of times") {
  Options options = steady();
  options.limit = kLarge;
  PoolScene scene(options);
  const StreamHandle s = scene.lasting();
  scene.alloc(kLarge, s);
  int asked = 0;
  scene.core->hooks().out_of_memory = [&](Bytes) { return ++asked, true; };
  Failure failure;
  CHECK(scene.try_alloc(kLarge, s, &failure) == Errc::out_of_memory);
  CHECK(asked >= 1 && asked <= options.oom_retries + 1);
  CHECK(failure.oom != nullptr);
  CHECK(failure.oom->reason == OomReason::limit);
  CHECK_EQ(failure.oom->limit, kLarge);
  CHECK_EQ(failure.oom->in_use, kLarge);
  CHECK_EQ(scene.core->stats().out_of_memory, std::uint64_t{1});
  scene.core->hooks() = {};
  scene.audit();
}

STREAMPOOL_TEST("the words of the reuse paths are those of their table") {
  CHECK_EQ(path_words().size(), kPathCount);
  CHECK_EQ(std::string(path_words()[static_cast<std::size_t>(Path::called_back)]), std::string("called_back"));
}

// -- sizes and alignments (R10)
// -----------------------------------------------------------------------------------------

STREAMPOOL_TEST("blocks of no bytes are unique, freeable, and cost no memory") {
  PoolScene scene;
  const StreamHandle s = scene.lasting();
  std::set<Address> addresses;
  std::vector<BlockRef> blocks;
  for (int i = 0; i < 1000; ++i) {
    blocks.push_back(scene.alloc(0, s));
    CHECK(addresses.insert(blocks.back().address).second);
  }
  CHECK_EQ(scene.core->stats().reserved, Bytes{0});
  CHECK_EQ(scene.core->stats().live_blocks, std::uint64_t{1000});
  for (const BlockRef& block : blocks) scene.free(block, s);
  CHECK_EQ(scene.core->stats().live_blocks, std::uint64_t{0});
  scene.audit();
}

STREAMPOOL_TEST("every size meets every alignment, with guards and without, and no two blocks overlap") {
  for (const bool guards : {false, true}) {
    Options options = steady();
    options.debug.guard_bytes = guards ? 256 : 0;
    PoolScene scene(options);
    const StreamHandle s = scene.lasting();
    std::vector<std::pair<Address, Bytes>> taken;
    std::vector<BlockRef> blocks;
    for (Bytes alignment = 1; alignment <= kMaxAlignment; alignment *= 2)
      for (const Bytes size : {Bytes{0}, Bytes{1}, Bytes{256}, Bytes{257}, Bytes{4096}, Bytes{60000}, 64 * kKiB,
                               64 * kKiB + 1, Bytes{300000}, 2 * kMiB + 1}) {
        blocks.push_back(scene.alloc(size, s, alignment));
        taken.emplace_back(blocks.back().address, size);
      }
    std::sort(taken.begin(), taken.end());
    for (std::size_t i = 1; i < taken.size(); ++i)
      CHECK(taken[i - 1].first + std::max<Bytes>(taken[i - 1].second, 1) <= taken[i].first);
    CHECK_EQ(scene.core->stats().live_blocks, std::uint64_t{blocks.size()});
    CHECK_EQ(scene.core->live_blocks().size(), blocks.size());
    scene.audit();
    for (const BlockRef& block : blocks) {
      CHECK_EQ(scene.core->facts(block)->address, block.address);
      Failure failure;
      CHECK(scene.free_quietly(block.address, s, &failure) == Errc::ok);
    }
    scene.core->check(1);
    CHECK(scene.core->take_faults().empty());
    scene.audit();
  }
}

STREAMPOOL_TEST("a block far behind its extent's start shares its page with the next block, and both are found") {
  Options options = steady();
  options.debug.guard_bytes = 256;
  PoolScene scene(options);
  const StreamHandle s = scene.lasting();
  std::vector<BlockRef> blocks;
  for (int i = 0; i < 6; ++i) {
    // The guard in front of an aligned block is as large as the alignment: the user's bytes are the extent's last.
    blocks.push_back(scene.alloc(100, s, kMaxAlignment));
    blocks.push_back(scene.alloc(100 * kKiB, s));
    blocks.push_back(scene.alloc(kMiB, s));
    scene.audit();
  }
  CHECK_EQ(scene.core->live_blocks().size(), blocks.size());
  for (const BlockRef& block : blocks) {
    Failure failure;
    CHECK_EQ(scene.core->facts(block)->address, block.address);
    CHECK(scene.free_quietly(block.address, s, &failure) == Errc::ok);
  }
  scene.core->check(1);
  CHECK(scene.core->take_faults().empty());
  scene.audit();
}

STREAMPOOL_TEST("a size that no device has, and an alignment that is none, are errors of their own") {
  PoolScene scene;
  const StreamHandle s = scene.lasting();
  Failure failure;
  for (const Bytes size : {~Bytes{0}, ~Bytes{0} - 511, Bytes{1} << 63, Bytes{1} << 48, Bytes{1} << 47}) {
    CHECK(scene.try_alloc(size, s, &failure) == Errc::out_of_memory);
    CHECK(failure.oom != nullptr);
    CHECK_EQ(failure.oom->request, size);
  }
  for (const Bytes alignment : {Bytes{0}, Bytes{3}, Bytes{768}, 4 * kMiB, Bytes{1} << 63})
    CHECK(scene.try_alloc(64, s, &failure, alignment) == Errc::invalid_alignment);
  CHECK_EQ(scene.core->stats().reserved, Bytes{0});
  scene.audit();
}

// -- memory that the host touches (R2)
// -------------------------------------------------------------------------------------

STREAMPOOL_TEST(
    "host-visible memory is handed out only when its work is done, unless the caller promises stream order") {
  for (const Kind kind : {Kind::pinned, Kind::managed})
    for (const Bytes size : {Bytes{4096}, kMiB}) {
      PoolScene scene(steady(), seeded(), kind);
      const StreamHandle s = scene.lasting();
      const BlockRef block = scene.alloc(size, s);
      const auto gate = scene.gated(s);
      scene.free(block, s);
      const BlockRef second = scene.alloc(size, s);
      CHECK(second.address != block.address);
      AllocRequest request;
      request.size = size;
      request.stream = s;
      request.stream_ordered = true;
      BlockRef ordered;
      Failure failure;
      // A promise at the call: but the slot waits on its list, so this may take any memory that is free on s.
      CHECK(scene.core->allocate(request, &ordered, &failure) == Errc::ok);
      scene.free(ordered, s);
      gate->open();
      CHECK(sim::settle());
      std::set<Address> found;
      for (int i = 0; i < 60 && !found.contains(block.address); ++i) {
        found.insert(scene.alloc(size, s).address);
        CHECK(sim::settle());  // the fence that was recorded meanwhile is done
      }
      CHECK(found.contains(block.address));
      scene.audit();
    }
}

// -- counters (R19)
// --------------------------------------------------------------------------------------------------------

STREAMPOOL_TEST("counters of one thread are exact, peaks included") {
  PoolScene scene;
  const StreamHandle s = scene.lasting();
  std::vector<BlockRef> blocks;
  Bytes in_use = 0, peak = 0, total = 0;
  std::uint64_t allocations = 0, x = 88172645463325252u;
  for (int i = 0; i < 4000; ++i) {
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    if (blocks.size() < 300 && x % 5 != 0) {
      const Bytes size = x % 11 == 0 ? (x >> 20) % (3 * kMiB) : (x >> 20) % 70000;
      blocks.push_back(scene.alloc(size, s));
      in_use += size;
      total += size;
      ++allocations;
      peak = std::max(peak, in_use);
    } else if (!blocks.empty()) {
      const std::size_t at = (x >> 30) % blocks.size();
      in_use -= scene.core->facts(blocks[at])->size;
      if (x % 3 == 0)
        scene.core->release(blocks[at]);
      else
        scene.free(blocks[at], s);
      blocks[at] = blocks.back();
      blocks.pop_back();
    }
    if (i % 16 != 0) continue;
    const Stats stats = scene.core->stats();
    CHECK_EQ(stats.in_use, in_use);
    CHECK_EQ(stats.in_use_peak, peak);
    CHECK_EQ(stats.allocated_bytes, total);
    CHECK_EQ(stats.allocations, allocations);
    CHECK_EQ(stats.frees, allocations - blocks.size());
    CHECK_EQ(stats.live_blocks, std::uint64_t{blocks.size()});
    CHECK_EQ(stats.in_use + stats.rounding + stats.guards + stats.quarantined + stats.pending + stats.cached,
             stats.reserved);
    CHECK(stats.reserved_peak >= stats.reserved);
    CHECK_EQ(stats.reserved, scene.device->used_memory());
  }
  std::uint64_t paths = 0;
  for (const std::uint64_t n : scene.core->stats().paths) paths += n;
  CHECK_EQ(paths, allocations);
  scene.core->reset_peaks();
  CHECK_EQ(scene.core->stats().in_use_peak, in_use);
  CHECK_EQ(scene.core->stats().reserved_peak, scene.core->stats().reserved);
}

STREAMPOOL_TEST("the peak of a reused byte counts once: live bytes, not allocated ones") {
  PoolScene scene;
  const StreamHandle s = scene.lasting();
  for (int i = 0; i < 1000; ++i) scene.free(scene.alloc(10 * kKiB, s), s);
  CHECK_EQ(scene.core->stats().in_use_peak, 10 * kKiB);
  CHECK_EQ(scene.core->stats().allocated_bytes, 1000 * 10 * kKiB);
}

STREAMPOOL_TEST("what threads counted stays counted when they end") {
  PoolScene scene(steady(), sim::Config{});
  const StreamHandle s = scene.lasting();
  std::vector<BlockRef> blocks(8);
  for (BlockRef& block : blocks) std::thread([&] { block = scene.alloc(1000, s); }).join();
  CHECK_EQ(scene.core->stats().in_use, Bytes{8000});
  CHECK_EQ(scene.core->stats().allocations, std::uint64_t{8});
  for (const BlockRef& block : blocks) scene.free(block, s);  // by another thread than allocated them
  CHECK_EQ(scene.core->stats().in_use, Bytes{0});
  CHECK_EQ(scene.core->stats().frees, std::uint64_t{8});
  scene.audit();
}

// -- limit, trim, close (R11, R13, R21)
// --------------------------------------------------------------------------------------

STREAMPOOL_TEST("the limit bounds what is reserved at every step, also with work pending") {
  Options options = steady();
  options.limit = 16 * kMiB;
  options.wait_timeout = 0;
  PoolScene scene(options);
  const StreamHandle s = scene.lasting(), t = scene.stream();
  std::vector<BlockRef> blocks;
  Failure failure;
  std::uint64_t x = 7;
  for (int i = 0; i < 300; ++i) {
    x = x * 6364136223846793005u + 1442695040888963407u;
    AllocRequest request;
    request.size = (x >> 33) % (3 * kMiB);
    request.stream = i % 3 == 0 ? t : s;
    BlockRef block;
    if (scene.core->allocate(request, &block, &failure) == Errc::ok)
      blocks.push_back(block);
    else
      CHECK(failure.code == Errc::out_of_memory);
    if (blocks.size() > 5) {
      scene.free(blocks.front(), i % 2 == 0 ? s : t);
      blocks.erase(blocks.begin());
    }
    CHECK(scene.core->stats().reserved_peak <= options.limit);
    CHECK(scene.device->used_memory() <= options.limit);
  }
  scene.audit();
}

STREAMPOOL_TEST("trim gives back what it can and says what it could not") {
  PoolScene scene;
  const StreamHandle s = scene.lasting();
  const BlockRef kept = scene.alloc(kLarge, s), pending = scene.alloc(kLarge, s), idle = scene.alloc(kLarge, s);
  scene.free(idle, s);
  CHECK(sim::settle());
  CHECK_EQ(scene.core->trim(0).released, kLarge);
  const auto gate = scene.gated(s);
  scene.free(pending, s);
  TrimResult result = scene.core->trim(0);
  CHECK_EQ(result.released, Bytes{0});
  CHECK_EQ(result.pending, kLarge);
  CHECK_EQ(result.pinned_by_live, kLarge);
  gate->open();
  CHECK(sim::settle());
  CHECK_EQ(scene.core->trim(0).released, kLarge);
  scene.free(kept, s);
  CHECK(sim::settle());
  result = scene.core->trim(0);
  CHECK_EQ(result.reserved, Bytes{0});
  CHECK_EQ(scene.device->used_memory(), Bytes{0});
  scene.audit();
}

STREAMPOOL_TEST("after close with nothing live the driver has everything back: memory, events, streams, addresses") {
  for (const bool mapped : {true, false}) {
    Options options = steady();
    options.segments = mapped ? SegmentSource::vmm : SegmentSource::malloc;
    PoolScene scene(options);
    const StreamHandle s = scene.lasting(), t = scene.stream();
    for (int i = 0; i < 100; ++i) {
      const BlockRef a = scene.alloc(1000 * static_cast<Bytes>(i + 1), s), b = scene.alloc(100000, t);
      scene.record(a, t);
      const EventHandle e = scene.recorded(t);
      Failure failure;
      CHECK(scene.core->record_event(b.address, e, &failure) == Errc::ok);
      CHECK(scene.device->event_destroy(e));
      scene.free(a, s);
      scene.free(b, t);
    }
    CHECK(sim::settle());
    scene.core->close();
    CHECK_EQ(scene.device->used_memory(), Bytes{0});
    Failure failure;
    CHECK(scene.try_alloc(1, s, &failure) == Errc::closed);
    scene.core.reset();
    CHECK_EQ(scene.device->live_events(), std::uint64_t{0});
    CHECK_EQ(scene.device->live_streams(), std::uint64_t{2});  // the two of this test
    CHECK_EQ(scene.calls(Call::address_reserve), scene.calls(Call::address_free));
    CHECK(sim::traps().empty());
  }
}

STREAMPOOL_TEST("live blocks of a closed pool stay valid until they are freed, in any order") {
  PoolScene scene;
  const StreamHandle s = scene.lasting();
  const BlockRef a = scene.alloc(4096, s), b = scene.alloc(kLarge, s), c = scene.alloc(kLarge, s);
  scene.core->close();
  scene.core->close();
  scene.free(b, s);
  CHECK(
      scene.device->launch({.stream = s, .accesses = {sim::writes(a.address, 4096), sim::writes(c.address, kLarge)}}));
  CHECK(sim::settle());
  scene.core->release(c);
  Failure failure;
  CHECK(scene.free_quietly(b.address, s, &failure) != Errc::ok);
  scene.free(a, s);
  CHECK(sim::settle());
  CHECK_EQ(scene.core->stats().live_blocks, std::uint64_t{0});
  CHECK_EQ(scene.device->used_memory(), Bytes{0});
  CHECK(sim::races().empty());
}

}  // namespace
