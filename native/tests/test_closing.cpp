// A pool that is closed while other threads are inside its calls.
#include <array>
#include <atomic>
#include <thread>
#include <vector>

#include "pool_scene.hpp"
#include "test.hpp"

namespace {

using namespace streampool;
using namespace streampool::driver;
using namespace streampool::pool;
using testing::PoolScene;
using testing::steady;

// Whatever the threads come to after the close is refused, or served by what is left: never by a stream or a driver's
// pool that is gone, which the machine tells as a trap.
void close_beside_calls(SegmentSource source, int rounds) {
  sim::Config config;
  config.check_races = false;  // nothing is launched
  pool::Options options = steady();
  options.segments = source;
  PoolScene scene(options, config);
  scene.core.reset();
  constexpr int kThreads = 3;
  for (int round = 0; round < rounds; ++round) {
    scene.core = scene.make(options, Kind::device, "closing");
    std::array<StreamHandle, kThreads> streams{};
    std::array<BlockRef, kThreads> blocks{};
    std::array<EventHandle, kThreads> events{};
    for (std::size_t t = 0; t < kThreads; ++t) {
      streams[t] = scene.lasting();
      blocks[t] = scene.alloc((t + 1) * kMiB, streams[t]);
      events[t] = scene.recorded(streams[t]);
    }
    std::atomic<int> ready{0};
    std::atomic<bool> closed{false};
    const auto meet = [&] {
      ++ready;
      while (ready.load() < kThreads + 1) std::this_thread::yield();
    };
    std::vector<std::thread> threads;
    for (std::size_t t = 0; t < kThreads; ++t)
      threads.emplace_back([&, t] {
        meet();
        Failure failure;
        for (int i = 0; i < round % 8; ++i) {
          (void)scene.core->record_event(blocks[t].address, events[t], &failure);
          BlockRef more;
          AllocRequest request;
          request.size = 3 * kMiB;
          request.stream = streams[t];
          if (scene.core->allocate(request, &more, &failure) == Errc::ok) scene.free(more, streams[t]);
        }
        scene.free(blocks[t], streams[t]);
      });
    threads.emplace_back([&] {
      meet();
      scene.core->close();
      closed = true;
    });
    for (std::thread& thread : threads) thread.join();
    CHECK(closed.load());
    CHECK(scene.device->synchronize());
    CHECK_EQ(sim::traps().size(), std::size_t{0});
    scene.core->close();
    CHECK_EQ(scene.core->stats().reserved, Bytes{0});
    CHECK_EQ(scene.core->audit(), std::string());
    scene.core.reset();
    for (const EventHandle event : events) CHECK(scene.device->event_destroy(event));
    for (const StreamHandle stream : streams) CHECK(scene.device->stream_destroy(stream));
    CHECK_EQ(scene.device->used_memory(), Bytes{0});
    CHECK_EQ(scene.device->live_events(), std::uint64_t{0});
    CHECK_EQ(scene.device->live_streams(), std::uint64_t{0});
  }
}

}  // namespace

STREAMPOOL_TEST("a pool is closed beside its last frees, allocations and events, and nothing that is gone is used") {
  close_beside_calls(SegmentSource::vmm, 400);
}

STREAMPOOL_TEST("the same of a pool that takes its memory from the driver's own pool") {
  close_beside_calls(SegmentSource::driver, 1500);  // has more that could be pulled away
}
