// What a wrong free is told on the simulated device, in every mode (R8), and that it changes nothing.
#include <atomic>
#include <limits>
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

bool contains(const std::string& text, const std::string& word) { return text.find(word) != std::string::npos; }

// A free that must fail with `errc`, name `word`, and change nothing.
void refused(const PoolScene& scene, Address address, StreamHandle s, Errc errc, const std::string& word) {
  const Stats before = scene.core->stats();
  Failure failure;
  const Errc got = scene.free_quietly(address, s, &failure);
  CHECK_EQ(std::string(errc_word(got)), std::string(errc_word(errc)));
  CHECK(failure.code == errc);
  if (!contains(failure.text, word))
    testing::fail(__FILE__, __LINE__, "'" + failure.text + "' does not say '" + word + "'");
  const Stats after = scene.core->stats();
  CHECK_EQ(after.in_use, before.in_use);
  CHECK_EQ(after.frees, before.frees);
  CHECK_EQ(after.reserved, before.reserved);
  CHECK_EQ(after.cached + after.pending, before.cached + before.pending);
  scene.audit();
}

STREAMPOOL_TEST("an address that no pool owns is a foreign free, wherever it points") {
  PoolScene scene;
  const StreamHandle s = scene.lasting();
  scene.alloc(4096, s);
  scene.alloc(kLarge, s);
  int local = 0;
  const std::vector<Address> strange = {1,
                                        4096,
                                        reinterpret_cast<Address>(&local),
                                        reinterpret_cast<Address>(&scene),
                                        Address{1} << 47,
                                        Address{1} << 48,
                                        std::numeric_limits<Address>::max(),
                                        scene.memory(kMiB)};
  for (const Address address : strange) refused(scene, address, s, Errc::foreign_free, hex(address));
}

STREAMPOOL_TEST("an address inside a block is told apart, however deep it lies") {
  PoolScene scene;
  const StreamHandle s = scene.lasting();
  const BlockRef slot = scene.alloc(4096, s), large = scene.alloc(kLarge, s);
  for (const Bytes offset : {1u, 255u, 256u, 4095u})
    refused(scene, slot.address + offset, s, Errc::interior_free, hex(slot.address));
  for (const Bytes offset : {Bytes{1}, Bytes{512}, 64 * kKiB, 64 * kKiB + 1, kLarge / 2, kLarge - 1})
    refused(scene, large.address + offset, s, Errc::interior_free, hex(large.address));
  scene.free(slot, s);
  scene.free(large, s);
}

STREAMPOOL_TEST("the unused rest of a slab, and free memory of a pool, are no blocks") {
  PoolScene scene;
  const StreamHandle s = scene.lasting();
  const unsigned cls = placement::class_of(3 * kKiB);
  const BlockRef block = scene.alloc(3 * kKiB, s);
  const Address slab = round_down(block.address, placement::kSlabUnit);
  const Address rest = slab + placement::slots_of(cls) * placement::class_size(cls);
  CHECK(rest < slab + placement::slab_size(cls));
  refused(scene, rest, s, Errc::foreign_free, hex(rest));
  Bytes reserved = 0;
  Failure failure;
  CHECK(scene.core->reserve(64 * kMiB, &reserved, &failure) == Errc::ok);
  const BlockRef large = scene.alloc(kLarge, s);
  const Address behind = large.address + kLarge + 4096;
  refused(scene, behind, s, Errc::foreign_free, hex(behind));
}

STREAMPOOL_TEST("a second free is told apart as long as the memory has no new owner, slots and extents alike") {
  PoolScene scene;
  const StreamHandle s = scene.lasting();
  for (const Bytes size : {Bytes{0}, Bytes{1}, Bytes{4096}, 64 * kKiB, 100 * kKiB, kMiB, kLarge}) {
    const BlockRef block = scene.alloc(size, s), beside = scene.alloc(size, s);
    scene.free(block, s);
    refused(scene, block.address, s, Errc::double_free, hex(block.address));
    scene.core->release(beside);
    refused(scene, beside.address, s, Errc::double_free, hex(beside.address));
    // The record is found even after the memory went back to the driver.
    scene.core->trim(0);
    Failure failure;
    CHECK(scene.free_quietly(block.address, s, &failure) != Errc::ok);
  }
}

STREAMPOOL_TEST("of two threads that free one block at the same time exactly one succeeds") {
  PoolScene scene(steady(), sim::Config{});
  const StreamHandle s = scene.lasting();
  for (int round = 0; round < 300; ++round) {
    const BlockRef block = scene.alloc(round % 2 == 0 ? 4096 : kMiB, s);
    std::atomic<int> ready{0}, freed{0}, doubled{0};
    const auto one = [&] {
      ready.fetch_add(1);
      while (ready.load() < 2) std::this_thread::yield();
      Failure failure;
      const Errc errc = scene.free_quietly(block.address, s, &failure);
      (errc == Errc::ok ? freed : doubled).fetch_add(errc == Errc::ok || errc == Errc::double_free ? 1 : 100);
    };
    std::thread other(one);
    one();
    other.join();
    CHECK_EQ(freed.load(), 1);
    CHECK_EQ(doubled.load(), 1);
  }
  CHECK_EQ(scene.core->stats().live_blocks, std::uint64_t{0});
  scene.audit();
}

STREAMPOOL_TEST("a stale name never harms the block that took the memory over") {
  PoolScene scene;
  const StreamHandle s = scene.lasting();
  for (const Bytes size : {Bytes{4096}, kLarge}) {
    const BlockRef stale = scene.alloc(size, s);
    scene.free(stale, s);
    const BlockRef owner = scene.alloc(size, s);
    CHECK_EQ(owner.address, stale.address);
    Failure failure;
    FreeRequest request;
    request.stream = s;
    CHECK(scene.core->free(stale, request, &failure) == Errc::double_free);
    CHECK(contains(failure.text, "new owner"));
    CHECK(!scene.core->try_free(stale, request));
    scene.core->release(stale);
    CHECK(!scene.core->facts(stale).has_value());
    CHECK_EQ(scene.core->stats().live_blocks, std::uint64_t{1});
    CHECK_EQ(scene.core->facts(owner)->size, size);
    scene.free(owner, s);
    scene.audit();
  }
}

STREAMPOOL_TEST("a block of another pool, of another kind or device, is named with its pool") {
  sim::Config two = seeded();
  two.devices = 2;
  PoolScene scene(steady(), two);
  const StreamHandle s = scene.lasting();
  const auto same_device = scene.make(steady(), Kind::device, "beside");
  const auto pinned = scene.make(steady(), Kind::pinned, "host");
  Failure failure;
  const auto other_device = Core::create(sim::device(1), Kind::device, "far", steady(), &failure);
  for (const auto& other : {same_device, pinned, other_device})
    for (const Bytes size : {Bytes{512}, kLarge}) {
      AllocRequest request;
      request.size = size;
      BlockRef block;
      CHECK(other->allocate(request, &block, &failure) == Errc::ok);
      refused(scene, block.address, s, Errc::wrong_pool, other->name());
      CHECK(scene.core->record_stream(block.address, s, &failure) != Errc::ok);
      CHECK_EQ(other->stats().live_blocks, std::uint64_t{1});
      CHECK(other->free(block, FreeRequest{}, &failure) == Errc::ok);
      CHECK_EQ(other->audit(), std::string());
    }
}

STREAMPOOL_TEST("a record of a live block that was written over is named, not followed, and nothing is freed") {
  PoolScene scene;
  const StreamHandle s = scene.lasting();
  for (const Bytes size : {Bytes{4096}, kLarge}) {
    const BlockRef block = scene.alloc(size, s);
    const std::uint64_t word = block.record->word.load();
    for (const std::uint64_t junk : {std::uint64_t{0}, ~std::uint64_t{0}, std::uint64_t{0x4141414141414141}}) {
      block.record->word.store(junk);
      Failure failure;
      CHECK(scene.free_quietly(block.address, s, &failure) == Errc::trampled_record);
      CHECK(contains(failure.text, hex(block.address)));
      FreeRequest request;
      request.stream = s;
      CHECK(scene.core->free(block, request, &failure) == Errc::trampled_record);
      CHECK(!scene.core->try_free(block, request));
      scene.core->release(block);
      CHECK_EQ(block.record->word.load(), junk);
    }
    block.record->word.store(word);
    scene.free(block, s);
    scene.audit();
  }
}

STREAMPOOL_TEST("a free slot whose record was written over is never handed out again, and counted") {
  PoolScene scene;
  const StreamHandle s = scene.lasting();
  const BlockRef bad = scene.alloc(4096, s);
  scene.free(bad, s);
  bad.record->word.store(0x4242424242424242);
  std::vector<BlockRef> blocks;
  for (int i = 0; i < 64; ++i) {
    blocks.push_back(scene.alloc(4096, s));
    CHECK(blocks.back().address != bad.address);
  }
  CHECK_EQ(scene.core->stats().trampled, std::uint64_t{1});
  Failure failure;
  CHECK(scene.free_quietly(bad.address, s, &failure) == Errc::trampled_record);
  for (const BlockRef& block : blocks) scene.free(block, s);
  CHECK_EQ(scene.core->stats().live_blocks, std::uint64_t{0});
}

STREAMPOOL_TEST("the page map keeps no name of a pool that is gone") {
  PoolScene scene;
  const StreamHandle s = scene.lasting();
  std::vector<Address> old;
  {
    const auto brief = scene.make(steady(), Kind::device, "brief");
    for (const Bytes size : {Bytes{0}, Bytes{512}, Bytes{40000}, kLarge}) {
      AllocRequest request;
      request.size = size;
      BlockRef block;
      Failure failure;
      CHECK(brief->allocate(request, &block, &failure) == Errc::ok);
      old.push_back(block.address);
      CHECK(brief->free(block, FreeRequest{}, &failure) == Errc::ok);
    }
    brief->close();
  }
  for (const Address address : old) {
    CHECK(!placement::PageMap::find(address));
    refused(scene, address, s, Errc::foreign_free, hex(address));
  }
  // The next pool may well get the same addresses.
  const auto next = scene.make(steady(), Kind::device, "next");
  for (int i = 0; i < 8; ++i) {
    AllocRequest request;
    request.size = i % 2 == 0 ? 512 : kLarge;
    BlockRef block;
    Failure failure;
    CHECK(next->allocate(request, &block, &failure) == Errc::ok);
    CHECK(scene.free_quietly(block.address, s, &failure) == Errc::wrong_pool);
    CHECK(next->free(block.address, FreeRequest{}, &failure) == Errc::ok);
  }
  CHECK_EQ(next->audit(), std::string());
}

STREAMPOOL_TEST("memory in pieces that went back to the driver is nobody's, whoever gets the addresses next") {
  Options options = steady();
  options.segments = SegmentSource::malloc;
  PoolScene scene(options);
  const StreamHandle s = scene.lasting();
  std::vector<BlockRef> blocks = {scene.alloc(512, s), scene.alloc(8 * kMiB, s)};
  for (const BlockRef& block : blocks) scene.free(block, s);
  CHECK(sim::settle());
  scene.core->trim(0);
  CHECK_EQ(scene.core->stats().reserved, Bytes{0});
  for (const BlockRef& block : blocks) {
    CHECK(!placement::PageMap::find(block.address));
    refused(scene, block.address, s, Errc::foreign_free, hex(block.address));
  }
  const auto other = scene.make(options, Kind::device, "other");
  AllocRequest request;
  request.size = 8 * kMiB;
  BlockRef theirs;
  Failure failure;
  CHECK(other->allocate(request, &theirs, &failure) == Errc::ok);
  for (int i = 0; i < 4; ++i) scene.free(scene.alloc(i % 2 == 0 ? 512 : 8 * kMiB, s), s);
  CHECK(other->free(theirs, FreeRequest{}, &failure) == Errc::ok);
  CHECK_EQ(other->audit(), std::string());
  scene.audit();
}

}  // namespace
