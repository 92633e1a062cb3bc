// The fast path (pool/fast.hpp): that it does what the full calls do, or nothing.
#include <vector>

#include "pool_scene.hpp"
#include "test.hpp"

namespace {

using namespace streampool;
using namespace streampool::driver;
using namespace streampool::pool;
using testing::PoolScene;
using testing::steady;

constexpr Bytes kLarge = 4 * kMiB;

struct FastScene : PoolScene {
  FastScene() {
    s = lasting();
    for (int i = 0; i < 32; ++i) {
      const BlockRef block = raw(4096);
      give(block.address);
    }
  }
  BlockRef raw(Bytes size) const {
    BlockRef block;
    take_raw(size, s, &block);
    return block;
  }
  void give(Address address) const { give_raw(address, s); }
  bool fast(Address address) {
    FreeRequest by;
    by.stream = s;
    return core->try_free(address, by);
  }
  StreamHandle s = 0;
};

}  // namespace

STREAMPOOL_TEST("the short calls do what the long ones do, or nothing") {
  if (!BiasedLock::prepare()) return testing::skip("no membarrier(2) here: there is no fast path");
  PoolScene scene;
  const StreamHandle s = scene.lasting();
  AllocRequest request;
  request.size = 4096;
  request.stream = s;
  BlockRef block;
  CHECK(!scene.core->try_allocate(request, &block));  // nothing cut yet
  // Until the heap's lock is this thread's by bias.
  for (int i = 0; i < 32; ++i) scene.free(scene.alloc(4096, s), s);
  CHECK(scene.core->try_allocate(request, &block));
  CHECK_EQ(scene.core->stats().in_use, Bytes{4096});
  FreeRequest by;
  CHECK(!scene.core->try_free(block, by));  // names no stream
  by.stream = scene.stream();
  CHECK(!scene.core->try_free(block, by));  // not the cached one
  by.stream = s;
  CHECK(!scene.core->try_free(block.address, by));  // an object may be releasing it: the full call's business
  CHECK(scene.core->try_free(block, by));
  request.raw = true;
  CHECK(scene.core->try_allocate(request, &block));
  CHECK(!scene.core->try_free(block.address + 256, by));
  CHECK(scene.core->try_free(block.address, by));
  CHECK(!scene.core->try_free(block.address, by));
  CHECK(!scene.core->try_free(block, by));
  CHECK_EQ(scene.core->stats().in_use, Bytes{0});
  request.size = kLarge;
  CHECK(!scene.core->try_allocate(request, &block));
  scene.audit();
}

STREAMPOOL_TEST("blocks of no bytes leave the counters as they were on the fast path too") {
  FastScene scene;
  const BlockRef kept = scene.raw(1000);
  const Stats before = scene.core->stats();
  for (int i = 0; i < 1000; ++i) scene.give(scene.raw(0).address);
  scene.audit();
  CHECK_EQ(scene.core->stats().rounding, before.rounding);
  scene.give(kept.address);
}

STREAMPOOL_TEST("another pool's block that was offered to a fast free is not remembered when that pool is gone") {
  FastScene scene;
  {
    const auto other = scene.make(steady(), Kind::device, "other");
    pool::Failure failure;
    AllocRequest request;
    request.size = 4096;
    request.stream = scene.s;
    request.raw = true;
    BlockRef block;
    CHECK(other->allocate(request, &block, &failure) == Errc::ok);
    const BlockRef mine = scene.raw(4096);
    CHECK(!scene.fast(block.address));
    scene.give(mine.address);
    CHECK(!scene.fast(block.address));
    CHECK(other->free(block, FreeRequest{}, &failure) == Errc::ok);
  }
  for (int i = 0; i < 4; ++i) scene.give(scene.raw(4096).address);  // AddressSanitizer looks on
  scene.audit();
}

STREAMPOOL_TEST("a slab whose memory went elsewhere and came back does not make frees slow") {
  if (!BiasedLock::prepare()) return testing::skip("no membarrier(2) here: there is no fast path");
  FastScene scene;
  for (int round = 0; round < 4; ++round) {
    scene.core->trim(0);
    std::vector<Address> blocks;
    for (int i = 0; i < 100; ++i) blocks.push_back(scene.raw(2048).address);
    for (const Address address : blocks) scene.give(address);
    scene.core->trim(0);
    for (int i = 0; i < 40; ++i) scene.give(scene.raw(4096).address);
    int fast = 0;
    for (int i = 0; i < 100; ++i) fast += scene.fast(scene.raw(4096).address) ? 1 : 0;
    CHECK_EQ(fast, 100);
  }
}

STREAMPOOL_TEST("peaks that are set anew begin at what there is, and stay exact") {
  FastScene scene;
  const BlockRef big = scene.raw(30000);
  const BlockRef small = scene.raw(1000);
  scene.core->reset_peaks();
  CHECK_EQ(scene.core->stats().in_use_peak, Bytes{31000});
  scene.give(big.address);
  const BlockRef next = scene.raw(10);
  CHECK_EQ(scene.core->stats().in_use_peak, Bytes{31000});
  const BlockRef high = scene.raw(60000);
  CHECK_EQ(scene.core->stats().in_use_peak, Bytes{61010});
  for (const BlockRef& block : {small, next, high}) scene.give(block.address);
}
