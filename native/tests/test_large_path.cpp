// Blocks above the quick lists, served and taken back under their heap's lock, and streams that are remembered by
// handle and id (pool/extents.cpp, pool/alloc.cpp).
#include <map>
#include <memory>
#include <thread>
#include <utility>
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

constexpr Bytes kLarge = 3 * kMiB;

// Streams that come and go until the pool looks which of them left nothing behind.
void churn(const PoolScene& scene, int streams = 80) {
  for (int i = 0; i < streams; ++i) {
    const StreamHandle other = scene.stream();
    scene.free(scene.alloc(256, other), other);
    CHECK(sim::settle());
    CHECK(scene.device->stream_destroy(other));
  }
}

}  // namespace

STREAMPOOL_TEST("large blocks of a stream come back to it at once, without a driver call, and the counters are exact") {
  PoolScene scene;
  const StreamHandle s = scene.lasting();
  const auto gate = scene.gated(s);
  const BlockRef first = scene.alloc(kLarge, s), second = scene.alloc(2 * kLarge, s);
  scene.free(first, s);
  const std::uint64_t calls = scene.all_calls(), own = scene.path(Path::own);
  for (int i = 0; i < 20; ++i) {
    const BlockRef again = scene.alloc(kLarge, s);
    CHECK_EQ(again.address, first.address);
    CHECK_EQ(scene.core->stats().in_use, 3 * kLarge);
    CHECK(Core::live(again));
    scene.free(again, s);
    CHECK(!Core::live(again));
    CHECK_EQ(scene.core->stats().in_use, 2 * kLarge);
  }
  CHECK_EQ(scene.all_calls(), calls);
  CHECK_EQ(scene.path(Path::own), own + 20);
  pool::Failure failure;
  CHECK(scene.free_quietly(first.address, s, &failure) == Errc::double_free);
  CHECK(scene.free_quietly(second.address + kMiB, s, &failure) == Errc::interior_free);
  scene.free(second, s);
  gate->open();
  scene.audit();
}

STREAMPOOL_TEST(
    "a large block that its stream's work may still touch goes to no other stream, whichever call freed it") {
  PoolScene scene(limited(4 * kLarge));
  const StreamHandle s = scene.lasting(), t = scene.lasting();
  const BlockRef warm = scene.alloc(kLarge, s);  // so that each stream is the one this thread used last
  const auto gate = scene.gated(s);
  const BlockRef block = scene.alloc(kLarge, s);
  scene.free(block, s);
  const BlockRef other = scene.alloc(kLarge, t);
  CHECK(other.address != block.address);
  const BlockRef again = scene.alloc(kLarge, s);
  CHECK_EQ(again.address, block.address);
  scene.free(again, s);
  gate->open();
  CHECK(sim::settle());
  scene.free(other, t);
  scene.free(warm, s);
  CHECK_EQ(scene.core->trim(0).released, scene.core->stats().reserved_peak);
  scene.audit();
}

STREAMPOOL_TEST("a stream whose large block is live is not forgotten, and one whose block went elsewhere is") {
  PoolScene scene;
  const StreamHandle s = scene.stream(), t = scene.lasting();
  BlockRef block = scene.alloc(kLarge, s);
  scene.free(block, s);
  block = scene.alloc(kLarge, s);  // on the short way
  CHECK(sim::settle());
  churn(scene);
  const std::uint64_t streams = scene.core->stats().streams;
  scene.free(block, t);  // by another stream, in full
  CHECK(sim::settle());
  churn(scene, 200);
  CHECK(scene.core->stats().streams < streams + 150);
  const BlockRef next = scene.alloc(kLarge, s);
  scene.free(next, s);
  scene.audit();
}

STREAMPOOL_TEST("a remembered handle whose heap went to another stream meanwhile takes nothing from it") {
  PoolScene scene;
  const StreamHandle s = scene.stream();
  for (int i = 0; i < 3; ++i) scene.free(scene.alloc(4096, s), s);  // remembered by this thread
  CHECK(sim::settle());
  // All that was known of s is forgotten, and its place given to another stream.
  std::vector<StreamHandle> others;
  std::map<Address, StreamHandle> pending;
  std::vector<std::pair<std::shared_ptr<sim::Gate>, StreamHandle>> gates;
  std::thread elsewhere([&] {
    churn(scene, 200);
    for (int i = 0; i < 100; ++i) {
      const StreamHandle other = scene.stream();
      others.push_back(other);
      gates.emplace_back(scene.gated(other), other);
      for (const Bytes size : {Bytes{4096}, kLarge}) {
        const BlockRef block = scene.alloc(size, other);
        pending[block.address] = other;
        scene.free(block, other);
      }
    }
  });
  elsewhere.join();
  for (const Bytes size : {Bytes{4096}, kLarge}) {
    const BlockRef block = scene.alloc(size, s);
    CHECK(!pending.contains(block.address));
    scene.free(block, s);
  }
  for (const auto& [gate, other] : gates) gate->open();
  CHECK(sim::settle());
  scene.audit();
}

STREAMPOOL_TEST("memory is looked for on idle streams with one call each, and on busy ones with a fence") {
  PoolScene scene(limited(8 * kMiB));
  const StreamHandle s = scene.lasting(), t = scene.lasting(), u = scene.lasting();
  const BlockRef held = scene.alloc(4 * kMiB, t);
  scene.free(scene.alloc(4 * kMiB, s), s);
  const std::uint64_t fences = scene.core->stats().fences, queries = scene.calls(Call::stream_query);
  const BlockRef taken = scene.alloc(4 * kMiB, u);  // of s, which has nothing to do
  CHECK_EQ(scene.core->stats().fences, fences);
  CHECK_EQ(scene.calls(Call::stream_query), queries + 1);
  const auto gate = scene.gated(t);
  scene.free(held, t);
  pool::Failure failure;
  CHECK(scene.try_alloc(4 * kMiB, s, &failure) == Errc::out_of_memory);
  CHECK_EQ(scene.core->stats().fences, fences + 1);
  gate->open();
  CHECK(sim::settle());
  const BlockRef last = scene.alloc(4 * kMiB, s);
  CHECK_EQ(last.address, held.address);
  scene.free(last, s);
  scene.free(taken, u);
  scene.audit();
}
