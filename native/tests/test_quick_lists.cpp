// Quick lists (pool/heap.hpp): large blocks kept whole for the next of their size, and that nobody else pays for it.
#include <vector>

#include "pool_scene.hpp"
#include "test.hpp"

namespace {

using namespace streampool;
using namespace streampool::driver;
using namespace streampool::pool;
using testing::limited;
using testing::PoolScene;
using testing::steady;

}  // namespace

STREAMPOOL_TEST("a large block that was freed is its stream's next one of that size, with no lock but the heap's") {
  PoolScene scene;
  const StreamHandle s = scene.lasting();
  for (const Bytes size : {64 * kKiB + 1, 100000 * Bytes{1}, kMiB}) {
    const BlockRef first = scene.alloc(size, s);
    scene.free(first, s);
    CHECK_EQ(scene.core->stats().live_blocks, std::uint64_t{0});
    for (int i = 0; i < 40; ++i) {
      const BlockRef next = scene.alloc(size, s);
      CHECK_EQ(next.address, first.address);
      CHECK_EQ(scene.core->stats().in_use, size);
      scene.free(next, s);
    }
    if (BiasedLock::prepare()) {
      AllocRequest request;
      request.size = size;
      request.stream = s;
      request.raw = true;
      BlockRef quick;
      CHECK(scene.core->try_allocate(request, &quick));
      FreeRequest by;
      by.stream = s;
      CHECK(!scene.core->try_free(quick.address + 512, by));
      CHECK(scene.core->try_free(quick.address, by));
      CHECK(!scene.core->try_free(quick.address, by));
      pool::Failure failure;
      CHECK(scene.core->free(quick.address, by, &failure) == Errc::double_free);
      CHECK(scene.core->free(quick, by, &failure) == Errc::double_free);
    }
    scene.audit();
  }
}

STREAMPOOL_TEST("what the quick lists hold becomes one piece before its stream makes the pool grow") {
  PoolScene scene(limited(4 * kMiB));
  const StreamHandle s = scene.lasting();
  std::vector<BlockRef> blocks;
  for (int i = 0; i < 8; ++i) blocks.push_back(scene.alloc(512 * kKiB, s));
  for (const BlockRef& block : blocks) scene.free(block, s);
  CHECK_EQ(scene.core->stats().cached + scene.core->stats().pending, 4 * kMiB);
  const std::uint64_t calls = scene.all_calls();
  const BlockRef whole = scene.alloc(4 * kMiB, s);
  CHECK_EQ(scene.all_calls(), calls);  // before anybody else is asked, the driver neither
  CHECK_EQ(scene.core->stats().reserved, 4 * kMiB);
  scene.free(whole, s);
  // The same for slots: they need a slab, which is cut from what merges.
  for (BlockRef& block : blocks) block = scene.alloc(512 * kKiB, s);
  for (const BlockRef& block : blocks) scene.free(block, s);
  std::vector<BlockRef> slots;
  for (int i = 0; i < 64; ++i) slots.push_back(scene.alloc(50000, s));
  CHECK_EQ(scene.core->stats().reserved, 4 * kMiB);
  for (const BlockRef& block : slots) scene.free(block, s);
  scene.audit();
}

STREAMPOOL_TEST("another stream gets what a quick list holds once it is complete, in any policy, before an error") {
  for (const bool deterministic : {false, true}) {
    pool::Options options = limited(2 * kMiB);
    options.opportunistic = options.wait = !deterministic;
    PoolScene scene(options);
    const StreamHandle s = scene.lasting(), t = scene.lasting();
    const auto gate = scene.gated(s);
    std::vector<BlockRef> blocks;
    for (int i = 0; i < 2; ++i) blocks.push_back(scene.alloc(kMiB, s));
    for (const BlockRef& block : blocks) scene.free(block, s);
    pool::Failure failure;
    if (deterministic) {
      CHECK(scene.try_alloc(kMiB, t, &failure) == Errc::out_of_memory);
      CHECK_EQ(scene.core->stats().pending, 2 * kMiB);
    }
    gate->open();
    CHECK(sim::settle());
    CHECK(scene.core->trim(2 * kMiB).released == 0);  // a poll, and nothing given back
    const BlockRef taken = scene.alloc(kMiB, t);
    scene.free(taken, t);
    scene.audit();
  }
}

STREAMPOOL_TEST("a block out of a quick list keeps its stream's mark when another stream frees it") {
  PoolScene scene(limited(2 * kMiB));
  const StreamHandle s = scene.lasting(), t = scene.lasting(), u = scene.lasting();
  const BlockRef kept = scene.alloc(kMiB, s);
  const BlockRef first = scene.alloc(kMiB, s);
  const auto gate = scene.gated(s);
  scene.free(first, s);
  const BlockRef again = scene.alloc(kMiB, s);
  CHECK_EQ(again.address, first.address);
  scene.free(again, t);  // t says that it comes after the second use; the first one was s's business
  pool::Failure failure;
  CHECK(scene.try_alloc(kMiB, u, &failure) == Errc::out_of_memory);
  CHECK(scene.try_alloc(kMiB, t, &failure) == Errc::out_of_memory);
  gate->open();
  CHECK(sim::settle());
  scene.free(scene.alloc(kMiB, u), u);
  scene.free(kept, s);
  scene.audit();
}

STREAMPOOL_TEST("a large block that another stream was declared to use does not go by a quick list") {
  PoolScene scene(limited(2 * kMiB));
  const StreamHandle s = scene.lasting(), t = scene.lasting();
  const BlockRef kept = scene.alloc(kMiB, s);
  for (int i = 0; i < 3; ++i) scene.free(scene.alloc(kMiB, s), s);
  const BlockRef block = scene.alloc(kMiB, s);
  const auto gate = scene.gated(t);
  scene.record(block, t);
  scene.free(block, s);
  pool::Failure failure;
  CHECK(scene.try_alloc(kMiB, s, &failure) == Errc::out_of_memory);
  gate->open();
  CHECK(sim::settle());
  scene.free(scene.alloc(kMiB, s), s);
  scene.free(kept, s);
  scene.audit();
}

STREAMPOOL_TEST("quick lists hold a bounded number of bytes, whatever sizes come and go") {
  PoolScene scene;
  const StreamHandle s = scene.lasting();
  std::vector<BlockRef> blocks;
  for (Bytes size = 65 * kKiB; size <= kMiB; size += 3 * kKiB) blocks.push_back(scene.alloc(size, s));
  for (const BlockRef& block : blocks) scene.free(block, s);
  CHECK(sim::settle());
  CHECK_EQ(scene.core->stats().cached + scene.core->stats().pending, scene.core->stats().reserved);
  // Far more was freed than the lists may hold: most of it has merged.
  CHECK(scene.core->stats().largest_free >= scene.core->stats().reserved / 2);
  scene.audit();
  CHECK_EQ(scene.core->trim(0).reserved, Bytes{0});
}

STREAMPOOL_TEST("a stream that left blocks in its quick lists is forgotten without a trace") {
  PoolScene scene;
  for (int i = 0; i < 300; ++i) {
    const StreamHandle s = scene.stream();
    scene.free(scene.alloc(200 * kKiB, s), s);
    CHECK(scene.device->stream_destroy(s));
  }
  CHECK(sim::settle());
  CHECK(scene.core->stats().streams < 150);
  CHECK(scene.core->stats().reserved <= 16 * kMiB);
  scene.core->close();  // asks for those that nobody can fence any more
  CHECK_EQ(scene.core->stats().reserved, Bytes{0});
}

STREAMPOOL_TEST("a record in a quick list that was written over is not followed") {
  PoolScene scene;
  const StreamHandle s = scene.lasting();
  const BlockRef good = scene.alloc(300 * kKiB, s), bad = scene.alloc(300 * kKiB, s);
  scene.free(good, s);
  scene.free(bad, s);
  bad.record->word.store(0x4242424242424242);
  bad.record->link = reinterpret_cast<BlockRecord*>(0x4242424242424240);
  (void)scene.core->stats();
  for (int i = 0; i < 3; ++i) {
    const BlockRef next = scene.alloc(300 * kKiB, s);
    CHECK(next.address != bad.address);
    scene.free(next, s);
  }
  CHECK_EQ(scene.core->stats().trampled, std::uint64_t{1});
  CHECK_EQ(scene.core->stats().live_blocks, std::uint64_t{0});
}

STREAMPOOL_TEST("a block that was released without a stream goes into a quick list too, and empties none") {
  if (!BiasedLock::prepare()) return testing::skip("no membarrier(2) here: there is no fast path");
  PoolScene scene;
  const StreamHandle s = scene.lasting();
  BlockRef kept, other, again;
  for (int i = 0; i < 40; ++i) {
    scene.take_raw(300 * kKiB, s, &kept);
    scene.give_raw(kept.address, s);
  }
  other = scene.alloc(500 * kKiB, s);
  scene.core->release(other);
  (void)scene.core->stats();  // drains
  CHECK(scene.take_raw(500 * kKiB, s, &again));
  CHECK_EQ(again.address, other.address);
  CHECK(scene.take_raw(300 * kKiB, s, &again));
  CHECK_EQ(again.address, kept.address);
}

STREAMPOOL_TEST("what lies in quick lists is pending while its stream works, and cached after") {
  PoolScene scene;
  const StreamHandle s = scene.lasting(), t = scene.lasting();
  const BlockRef block = scene.alloc(300 * kKiB, s);
  const auto gate = scene.gated(s);
  scene.free(block, s);
  CHECK_EQ(scene.core->stats().pending, 300 * kKiB);
  gate->open();
  CHECK(sim::settle());
  // Somebody else's miss asks whether it is done.
  scene.free(scene.alloc(64 * kMiB, t), t);
  const Stats stats = scene.core->stats();
  CHECK(stats.pending <= 64 * kMiB);
  CHECK_EQ(stats.pending % (2 * kMiB), Bytes{0});
  CHECK_EQ(stats.pending + stats.cached, stats.reserved);
}

STREAMPOOL_TEST("a block with a declared use leaves the quick lists as they are") {
  PoolScene scene;
  const StreamHandle s = scene.lasting(), t = scene.lasting();
  const BlockRef kept = scene.alloc(300 * kKiB, s), used = scene.alloc(300 * kKiB, s);
  scene.record(used, t);
  scene.free(kept, s);
  scene.free(used, s);
  CHECK_EQ(scene.alloc(300 * kKiB, s).address, kept.address);
}

STREAMPOOL_TEST("the last live block of a slab is freed on the fast path as long as the slab may stay") {
  if (!BiasedLock::prepare()) return testing::skip("no membarrier(2) here: there is no fast path");
  PoolScene scene;
  const StreamHandle s = scene.lasting();
  std::vector<BlockRef> blocks(2 * placement::slots_of(placement::class_of(40000)));  // two slabs full
  for (BlockRef& block : blocks) scene.take_raw(40000, s, &block);
  scene.give_raw(blocks[0].address, s);  // one slab is listed, and the other then in front of it
  for (std::size_t i = blocks.size() / 2; i < blocks.size(); ++i) scene.give_raw(blocks[i].address, s);
  int fast = 0;
  for (int i = 0; i < 200; ++i) {
    BlockRef block;
    scene.take_raw(40000, s, &block);
    fast += scene.give_raw(block.address, s);
  }
  CHECK(fast > 150);
  scene.audit();
}
