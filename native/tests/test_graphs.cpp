// Captures from many threads on one pool (R23). What a capture is given: tests/test_graphs.py.
#include <atomic>
#include <memory>
#include <thread>
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

void use(const PoolScene& scene, StreamHandle stream, const BlockRef& block, Bytes size) {
  CHECK(scene.device->launch({.stream = stream, .accesses = {sim::writes(block.address, size)}}));
}

// Captures, launches, frees in the capture and after it, and gives the graph up.
void capture_once(const PoolScene& scene, StreamHandle stream, int round) {
  constexpr Bytes kSizes[] = {1000, 70'000, 2 * kMiB};
  Failure failure;
  scene.core->begin_capture();
  CHECK(scene.device->begin_capture(stream));
  std::vector<std::pair<BlockRef, Bytes>> kept;
  for (int i = 0; i < 4; ++i) {
    const Bytes size = kSizes[static_cast<std::size_t>(round + i) % 3];
    const BlockRef block = scene.alloc(size, stream);
    use(scene, stream, block, size);
    if (i % 2 == 0)
      scene.free(block, stream);
    else
      kept.emplace_back(block, size);
  }
  std::shared_ptr<sim::Graph> graph;
  CHECK(scene.device->end_capture(stream, &graph));
  CHECK(graph != nullptr);
  CHECK(scene.core->end_capture(stream, &failure) == Errc::ok);
  for (int launch = 0; launch < 2; ++launch) CHECK(scene.device->launch_graph(graph, stream));
  for (std::size_t i = 0; i < kept.size(); ++i) {
    use(scene, stream, kept[i].first, kept[i].second);
    // Dropped memory waits for a moment without captures.
    if (kept[i].second <= 1000 && round % 3 == 0)
      scene.core->release(kept[i].first);
    else
      scene.free(kept[i].first, stream);
  }
  graph.reset();
  // Nobody waits for memory inside a capture, so what one round left is done before the next.
  CHECK(scene.device->stream_synchronize(stream));
}

}  // namespace

STREAMPOOL_TEST("threads capture, launch and free beside others that do not, and nothing races or is left behind") {
  sim::Config config;
  config.devices = 1;
  pool::Options options = steady();
  options.limit = 256 * kMiB;
  options.wait_timeout = 0.05;
  PoolScene scene(options, config);
  constexpr int kCapturing = 3, kEager = 3, kRounds = 60;
  std::atomic<int> left{kCapturing};
  std::vector<std::thread> threads;
  std::vector<StreamHandle> raw;
  for (int t = 0; t < kCapturing; ++t) {
    const StreamHandle stream = t == 0 ? scene.lasting() : raw.emplace_back(scene.stream());
    threads.emplace_back([&, stream] {
      for (int round = 0; round < kRounds; ++round) capture_once(scene, stream, round);
      --left;
    });
  }
  for (int t = 0; t < kEager; ++t) {
    const StreamHandle stream = scene.lasting();
    threads.emplace_back([&, stream, t] {
      for (int i = 0; left.load() != 0; ++i) {
        const Bytes size = (i + t) % 2 == 0 ? 5000 : 3 * kMiB;
        const BlockRef block = scene.alloc(size, stream);
        use(scene, stream, block, size);
        scene.free(block, stream);
        if (i % 16 == 0) scene.core->trim(32 * kMiB);
        if (i % 64 == 0) CHECK(scene.device->stream_synchronize(stream));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(scene.device->synchronize());
  CHECK_EQ(sim::races().size(), std::size_t{0});
  CHECK_EQ(sim::traps().size(), std::size_t{0});
  Failure failure;
  for (const StreamHandle stream : raw) CHECK(scene.core->register_stream(stream, &failure) == Errc::ok);
  CHECK(scene.try_alloc(512 * kMiB, raw[0], &failure) == Errc::out_of_memory);  // looks at everything
  CHECK(sim::settle());
  scene.core->trim(0);
  CHECK_EQ(scene.core->audit(), std::string());
  CHECK_EQ(scene.core->stats().pending, Bytes{0});
  CHECK_EQ(scene.core->stats().reserved, Bytes{0});
}

STREAMPOOL_TEST("a graph's block that is freed without a stream is pending until a context event after the free") {
  for (const Bytes size : {Bytes{5000}, 3 * kMiB}) {
    pool::Options options = steady();
    options.limit = 64 * kMiB;
    options.wait_timeout = 0.05;
    PoolScene scene(options);
    Failure failure;
    const StreamHandle stream = scene.lasting();
    scene.core->begin_capture();
    CHECK(scene.device->begin_capture(stream));
    const BlockRef block = scene.alloc(size, stream);
    use(scene, stream, block, size);
    std::shared_ptr<sim::Graph> graph;
    CHECK(scene.device->end_capture(stream, &graph));
    CHECK(scene.core->end_capture(stream, &failure) == Errc::ok);
    graph.reset();
    CHECK(scene.core->free(block, FreeRequest{}, &failure) == Errc::ok);
    CHECK(sim::settle());
    CHECK(scene.core->stats().pending >= size);
    // Who needs memory, or gives it back, makes the event.
    if (size > kMiB) CHECK(scene.try_alloc(128 * kMiB, stream, &failure) == Errc::out_of_memory);
    scene.core->trim(0);
    CHECK(sim::settle());
    scene.core->trim(0);
    CHECK_EQ(scene.core->stats().pending, Bytes{0});
    CHECK_EQ(scene.core->stats().reserved, Bytes{0});
  }
}

// Reported by a run under load: a stream may begin to capture right after another thread asked it whether it does.
STREAMPOOL_TEST("while a capture is declared nobody but its owner's calls touches a registered stream") {
  PoolScene scene(limited(4 * kMiB));
  Failure failure;
  const StreamHandle a = scene.lasting(), b = scene.lasting();
  const BlockRef block = scene.alloc(3 * kMiB, a);
  use(scene, a, block, 3 * kMiB);
  CHECK(sim::settle());
  const auto touches = [&] {
    return scene.calls(Call::event_record) + scene.calls(Call::stream_query) + scene.calls(Call::stream_wait_event);
  };
  scene.core->begin_capture();
  const std::uint64_t before = touches();
  scene.free(block, a);
  CHECK(scene.try_alloc(3 * kMiB, b, &failure) == Errc::out_of_memory);
  CHECK(failure.text.find("reason: capture") != std::string::npos);
  CHECK_EQ(touches(), before);
  CHECK(scene.device->begin_capture(a));
  CHECK(scene.try_alloc(3 * kMiB, b, &failure) == Errc::out_of_memory);
  CHECK_EQ(touches(), before);
  std::shared_ptr<sim::Graph> graph;
  CHECK(scene.device->end_capture(a, &graph));
  CHECK(graph != nullptr);
  // Its owner's next call fences what others looked for.
  scene.free(scene.alloc(1000, a), a);
  CHECK(touches() > before);
  CHECK(sim::settle());
  scene.free(scene.alloc(3 * kMiB, b), b);
  CHECK(scene.core->end_capture(a, &failure) == Errc::ok);
}

// Reported by a tester: a warm-up on the stream, then its capture, and no memory although none was in use.
STREAMPOOL_TEST("what was freed before a capture is declared serves the capture once it is done") {
  PoolScene scene(limited(40 * kMiB));
  Failure failure;
  const StreamHandle stream = scene.lasting();
  for (int round = 0; round < 3; ++round) {
    const BlockRef warm = scene.alloc(30 * kMiB, stream);
    use(scene, stream, warm, 30 * kMiB);
    scene.free(warm, stream);
    CHECK(scene.device->stream_synchronize(stream));
    scene.core->begin_capture();
    CHECK(scene.device->begin_capture(stream));
    const BlockRef block = scene.alloc(30 * kMiB, stream);
    use(scene, stream, block, 30 * kMiB);
    std::shared_ptr<sim::Graph> graph;
    CHECK(scene.device->end_capture(stream, &graph));
    CHECK(scene.core->end_capture(stream, &failure) == Errc::ok);
    CHECK(scene.device->launch_graph(graph, stream));
    CHECK(scene.device->stream_synchronize(stream));
    graph.reset();
    scene.free(block, stream);
    CHECK(scene.device->stream_synchronize(stream));
  }
}
