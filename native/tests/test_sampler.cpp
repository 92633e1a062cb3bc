// Sampled call stacks (observe/sampler.hpp): that samples stand for what there is, without bias.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "observe/sampler.hpp"
#include "pool_scene.hpp"
#include "test.hpp"

namespace {

using namespace streampool;
using namespace streampool::driver;
using namespace streampool::pool;
using testing::PoolScene;
using testing::steady;

}  // namespace

STREAMPOOL_TEST("the weights of sampled blocks add up to all bytes, for small and large blocks alike") {
  const observe::Sampler sampler(512 * kKiB);
  std::uint64_t random = 12345;  // the seed
  for (const Bytes size : {Bytes{64}, Bytes{4096}, 100 * kKiB, kMiB, 16 * kMiB}) {
    const Bytes total = std::max<Bytes>(4096 * sampler.mean(), 4096 * size);
    double estimate = 0;
    Bytes left = sampler.draw(&random);
    std::uint64_t samples = 0;
    for (Bytes done = 0; done < total; done += size) {
      if (size < left) {
        left -= size;
        continue;
      }
      left = sampler.draw(&random);
      estimate += sampler.weight(size);
      ++samples;
    }
    // Five standard errors of a sum of so many samples.
    const double error = std::abs(estimate / static_cast<double>(total) - 1);
    CHECK(error < 5 / std::sqrt(static_cast<double>(samples)));
    CHECK(samples >= 1900);
  }
}

STREAMPOOL_TEST("no samples are taken where none are asked for, and each thread draws other numbers") {
  std::uint64_t random = 0;
  CHECK_EQ(observe::Sampler(0).draw(&random), std::numeric_limits<Bytes>::max());
  CHECK_EQ(random, std::uint64_t{0});
  std::uint64_t other = 0;
  const observe::Sampler sampler(1000);
  CHECK(sampler.draw(&random) != sampler.draw(&other) || sampler.draw(&random) != sampler.draw(&other));
  CHECK_EQ(sampler.weight(0), 0.0);
}

STREAMPOOL_TEST("a pool samples on the fast path as often as it should, and sampled blocks are freed on it") {
  pool::Options options = steady();
  options.sample_bytes = 64 * kKiB;
  PoolScene scene(options);
  const StreamHandle s = scene.lasting();
  constexpr int kPairs = 40000;
  int sampled = 0, fast = 0, fast_sampled_frees = 0;
  for (int i = 0; i < kPairs; ++i) {
    BlockRef block;
    fast += scene.take_raw(4096, s, &block);
    const bool is_sample = (block.record->flags() & kSampled) != 0;
    sampled += is_sample;
    fast_sampled_frees += scene.give_raw(block.address, s) && is_sample;
  }
  // 1 - exp(-1/16) of them, that is about 2424; five standard deviations are 240.
  CHECK(sampled > 2424 - 240 && sampled < 2424 + 240);
  if (BiasedLock::prepare()) {
    CHECK(fast > kPairs - sampled - 100);
    CHECK(fast_sampled_frees > sampled - 100);
  }
  scene.audit();
}

STREAMPOOL_TEST("an out-of-memory error in production estimates what its holders hold") {
  pool::Options options = steady();
  options.sample_bytes = 64 * kKiB;
  options.limit = 64 * kMiB;
  options.wait_timeout = 0;
  PoolScene scene(options);
  const StreamHandle s = scene.lasting();
  AllocRequest request;
  request.stream = s;
  std::vector<BlockRef> blocks;
  pool::Failure failure;
  for (int i = 0; i < 2000; ++i) {
    BlockRef block;
    request.size = i % 2 != 0 ? 20000 : 4000;
    request.stack = i % 2 != 0 ? 7 : 8;
    CHECK(scene.core->allocate(request, &block, &failure) == Errc::ok);
    blocks.push_back(block);
  }
  request.size = kGiB;
  BlockRef none;
  CHECK(scene.core->allocate(request, &none, &failure) == Errc::out_of_memory);
  CHECK_EQ(failure.oom->sample_bytes, 64 * kKiB);
  CHECK_EQ(failure.oom->holders.size(), std::size_t{2});
  const Holder& large = failure.oom->holders[0];
  CHECK_EQ(large.stack, debug::StackId{7});
  CHECK(large.bytes > 15'000'000 && large.bytes < 25'000'000);  // 20 MB, known to 6 %
  CHECK(large.blocks > 750 && large.blocks < 1250);
  for (const BlockRef& block : blocks) scene.free(block, s);
}

STREAMPOOL_TEST("an out-of-memory callback that allocates leaves its thread the fast path, and its samples") {
  pool::Options options = testing::limited(32 * kMiB);
  options.sample_bytes = kMiB;
  PoolScene scene(options);
  options.limit = 0;
  const auto other = scene.make(options, Kind::device, "other");
  const StreamHandle s = scene.lasting();
  for (const bool same : {false, true})
    for (const bool helps : {false, true}) {
      BlockRef held = scene.alloc(24 * kMiB, s);
      scene.core->hooks().out_of_memory = [&](Bytes) {
        pool::Core& core = same ? *scene.core : *other;
        AllocRequest inside;
        inside.size = 100 * kKiB;
        inside.stream = s;
        BlockRef block;
        pool::Failure ignored;
        for (int i = 0; i < 500; ++i)
          if (core.allocate(inside, &block, &ignored) == Errc::ok) CHECK(core.free(block, {}, &ignored) == Errc::ok);
        if (helps) scene.free(held, s);
        return helps;
      };
      pool::Failure failure;
      BlockRef large;
      AllocRequest request;
      request.size = helps ? 20 * kMiB : 500 * kMiB;
      request.stream = s;
      CHECK(scene.core->allocate(request, &large, &failure) == (helps ? Errc::ok : Errc::out_of_memory));
      scene.core->hooks().out_of_memory = nullptr;
      scene.free(helps ? large : held, s);
      int fast = 0, sampled = 0;
      constexpr int kPairs = 20000;
      for (int i = 0; i < kPairs; ++i) {
        BlockRef block;
        fast += scene.take_raw(4096, s, &block);
        sampled += (block.record->flags() & kSampled) != 0;
        scene.give_raw(block.address, s);
      }
      if (sampled <= 30 || sampled >= 130)  // 80 MB, one in 1 MiB
        testing::fail(__FILE__, __LINE__, std::to_string(sampled) + " samples, " + std::to_string(fast) + " fast");
      if (BiasedLock::prepare()) CHECK(fast > kPairs - 500);
    }
}
