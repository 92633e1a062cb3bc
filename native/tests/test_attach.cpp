// Memory for other libraries: without the order of a stream, and PyTorch's entry points.
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "attach/torch.hpp"
#include "attach/unordered.hpp"
#include "pool_scene.hpp"

namespace {

using namespace streampool;
using attach::Unordered;
using testing::PoolScene;
using testing::StreamHandle;

struct Scene : PoolScene {
  using PoolScene::PoolScene;
  std::unique_ptr<Unordered> unordered() const {
    pool::Failure failure;
    auto made = Unordered::create(core, &failure);
    CHECK(made != nullptr);
    return made;
  }
  Address take(Unordered& memory, Bytes size) const {
    Address address = 0;
    pool::Failure failure;
    if (memory.allocate(size, 0, &address, &failure) != pool::Errc::ok) testing::fail(__FILE__, __LINE__, failure.text);
    return address;
  }
  void give(Unordered& memory, Address address) const {
    pool::Failure failure;
    if (memory.free(address, 0, &failure) != pool::Errc::ok) testing::fail(__FILE__, __LINE__, failure.text);
  }
};

STREAMPOOL_TEST("memory without a stream's order is handed out when nothing queued touches it") {
  Scene scene(testing::limited(2 * kMiB));
  const auto memory = scene.unordered();
  const StreamHandle s = scene.lasting();
  const auto block = scene.alloc(2 * kMiB - 64 * kKiB, s);
  const auto gate = scene.gated(s);
  scene.free(block, s);
  Address address = 0;
  pool::Failure failure;
  CHECK(memory->allocate(1 * kMiB, 0, &address, &failure) == pool::Errc::out_of_memory);
  gate->open();
  CHECK(driver::sim::settle());
  CHECK(scene.take(*memory, 1 * kMiB) != 0);
  scene.audit();
}

STREAMPOOL_TEST("a free without a stream waits for all that is queued, on whatever stream") {
  Scene scene(testing::limited(2 * kMiB));
  const auto memory = scene.unordered();
  const StreamHandle nobody_told = scene.stream();
  const Address address = scene.take(*memory, 1 * kMiB + 512 * kKiB);
  const auto gate = scene.gated(nobody_told);
  scene.give(*memory, address);
  const StreamHandle s = scene.lasting();
  pool::Failure failure;
  CHECK(scene.try_alloc(1 * kMiB, s, &failure) == pool::Errc::out_of_memory);
  gate->open();
  CHECK(driver::sim::settle());
  scene.alloc(1 * kMiB, s);
  scene.audit();
}

STREAMPOOL_TEST("a free without a stream in a capture is done after it, and the capture stays valid") {
  Scene scene;
  const auto memory = scene.unordered();
  const StreamHandle s = scene.lasting();
  const Address address = scene.take(*memory, 5000);
  scene.core->begin_capture();
  CHECK(scene.device->begin_capture(s));
  scene.give(*memory, address);
  CHECK_EQ(scene.core->stats().live_blocks, 1u);
  CHECK(scene.core->live_blocks().empty());  // it is nobody's leak meanwhile
  pool::Failure twice;
  CHECK(memory->free(address, 0, &twice) == pool::Errc::double_free);
  std::shared_ptr<driver::sim::Graph> graph;
  CHECK(scene.device->end_capture(s, &graph));
  CHECK(graph != nullptr);
  pool::Failure failure;
  CHECK(scene.core->end_capture(s, &failure) == pool::Errc::ok);
  const Address next = scene.take(*memory, 5000);
  CHECK_EQ(scene.core->stats().live_blocks, 1u);
  scene.give(*memory, next);
  CHECK_EQ(scene.core->stats().live_blocks, 0u);
}

// Reported by a reviewer: in a capture the report named no line, and outside of one there was no report.
STREAMPOOL_TEST("a second free without a stream is filed with both lines, in a capture and outside of one") {
  pool::Options options = testing::steady();
  options.debug.guard_bytes = 256;
  options.debug.quarantine_bytes = kMiB;
  options.debug.track = true;
  const Scene scene(options);
  const auto memory = scene.unordered();
  for (const bool capturing : {false, true}) {
    const Address address = scene.take(*memory, 5000);
    pool::Failure failure;
    if (capturing) scene.core->begin_capture();
    CHECK(memory->free(address, 11, &failure) == pool::Errc::ok);
    CHECK(memory->free(address, 12, &failure) == pool::Errc::double_free);
    if (capturing) CHECK(scene.core->end_capture(0, &failure) == pool::Errc::ok);
    const auto faults = scene.core->take_faults();
    CHECK_EQ(faults.size(), std::size_t{1});
    CHECK_EQ(faults[0].at, debug::StackId{12});
    CHECK(faults[0].block.has_value());
    CHECK_EQ(faults[0].block->freed_at, debug::StackId{11});
  }
}

STREAMPOOL_TEST("a free that the driver refuses to order is done by a later call") {
  Scene scene;
  const auto memory = scene.unordered();
  const Address first = scene.take(*memory, 5000), second = scene.take(*memory, 7000);
  scene.device->fail_call(driver::Call::context_event_record, 1, 3, driver::Code::failed);
  scene.give(*memory, first);
  CHECK_EQ(scene.core->stats().live_blocks, 2u);
  scene.give(*memory, second);  // the first is tried again
  CHECK_EQ(scene.core->stats().live_blocks, 2u);
  CHECK(scene.core->live_blocks().empty());
  const Address third = scene.take(*memory, 9000);
  CHECK_EQ(scene.core->stats().live_blocks, 1u);
  scene.give(*memory, third);
  CHECK_EQ(scene.core->stats().live_blocks, 0u);
  pool::Failure failure;
  CHECK(memory->free(third, 0, &failure) == pool::Errc::double_free);  // an error of the caller's is told at once
  scene.audit();
}

STREAMPOOL_TEST("a driver without events of a whole context is refused, for no free could be ordered") {
  driver::sim::Config config = testing::seeded();
  config.context_events = false;
  const Scene scene(testing::steady(), config);
  pool::Failure failure;
  CHECK(Unordered::create(scene.core, &failure) == nullptr);
  CHECK(failure.text.find("CUDA 12.5") != std::string::npos);
}

// A device that PyTorch's entry points serve from a scene's pool, and no longer.
struct TorchDevice {
  explicit TorchDevice(const Scene& scene) { CHECK(attach::torch::give_pool(kDevice, scene.core)); }
  ~TorchDevice() { attach::torch::take_back(kDevice); }
  TorchDevice(const TorchDevice&) = delete;
  TorchDevice& operator=(const TorchDevice&) = delete;
  static constexpr int kDevice = 7;
};

STREAMPOOL_TEST(
    "what is allocated without a stream while a capture is known stays, whoever frees it: a graph may use it") {
  Scene scene;
  const auto memory = scene.unordered();
  const StreamHandle s = scene.stream();
  pool::Failure failure;
  scene.core->begin_capture();
  CHECK(scene.device->begin_capture(s));
  const Address block = scene.take(*memory, 64 * kKiB);
  CHECK(scene.device->launch({.stream = s, .accesses = {driver::sim::writes(block, 64 * kKiB)}}));
  scene.give(*memory, block);
  std::shared_ptr<driver::sim::Graph> graph;
  CHECK(scene.device->end_capture(s, &graph));
  CHECK(graph != nullptr);
  CHECK(scene.core->end_capture(s, &failure) == pool::Errc::ok);
  for (int i = 0; i < 3; ++i) {
    const Address other = scene.take(*memory, 64 * kKiB);
    CHECK(other != block);
    CHECK(scene.device->launch_graph(graph, s));
    scene.give(*memory, other);
    CHECK(driver::sim::settle());
  }
  CHECK_EQ(scene.core->stats().live_blocks, std::uint64_t{1});
  CHECK(scene.core->live_blocks().empty());  // nobody leaks it
  CHECK(memory->free(block, 0, &failure) == pool::Errc::double_free);
  scene.audit();
}

STREAMPOOL_TEST("the end of PyTorch's capture waits for those who ask whether a stream takes part") {
  const Scene scene;
  const TorchDevice served(scene);
  constexpr std::pair<std::uint64_t, std::uint64_t> kPool{0, 2};
  std::atomic<bool> inside{false}, over{false}, over_while_inside{false};
  sp_torch_begin_allocate_to_pool(TorchDevice::kDevice, kPool, [&](void*) {
    inside = true;
    for (int i = 0; i < 50 && !over; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    over_while_inside = over.load();
    return false;
  });
  void* const stream = reinterpret_cast<void*>(scene.stream());
  std::thread other([&] { sp_torch_free(sp_torch_alloc(1000, TorchDevice::kDevice, stream), 1000, 7, stream); });
  while (!inside) std::this_thread::yield();
  sp_torch_end_allocate_to_pool(TorchDevice::kDevice, kPool);  // what the filter refers to goes
  over = true;
  other.join();
  CHECK(!over_while_inside);
}

// pytorch/pytorch#159594, NVIDIA/cuopt#1748 (case 47): growth during a capture invalidated it.
STREAMPOOL_TEST("PyTorch's entry points serve a capture by growth too, and throw what has the whole account") {
  const Scene scene(testing::limited(64 * kMiB));
  namespace torch = attach::torch;
  constexpr int kDevice = TorchDevice::kDevice;
  constexpr std::pair<std::uint64_t, std::uint64_t> kPool{0, 1};
  const TorchDevice served(scene);
  const std::uint64_t problems = torch::problems().count;  // the process's
  CHECK(!torch::give_pool(kDevice, scene.core));
  const StreamHandle s = scene.stream(), t = scene.stream();
  void* const stream = reinterpret_cast<void*>(s);
  torch::add_lasting_stream(kDevice, s);
  void* const plain = sp_torch_alloc(5000, kDevice, stream);

  std::vector<void*> asked;
  sp_torch_begin_allocate_to_pool(kDevice, kPool, [&asked, stream](void* one) {
    asked.push_back(one);
    return one == stream;
  });
  CHECK(scene.device->begin_capture(s));
  void* const other = sp_torch_alloc(700, kDevice, reinterpret_cast<void*>(t));  // takes no part
  void* const first = sp_torch_alloc(1000, kDevice, stream);
  void* const large = sp_torch_alloc(20 * kMiB, kDevice, stream);
  sp_torch_free(plain, 5000, kDevice, stream);
  sp_torch_free(first, 1000, kDevice, stream);
  CHECK(sp_torch_alloc(1000, kDevice, stream) == first);  // in the captured order, at once
  CHECK_EQ(asked.size(), std::size_t{2});                 // until a stream of the capture was seen
  std::shared_ptr<driver::sim::Graph> graph;
  CHECK(scene.device->end_capture(s, &graph));
  CHECK(graph != nullptr);
  sp_torch_end_allocate_to_pool(kDevice, kPool);
  sp_torch_end_allocate_to_pool(kDevice, kPool);  // there is none
  sp_torch_release_pool(kDevice, kPool);

  // What is the graph's stays so while there is a graph.
  sp_torch_free(large, 20 * kMiB, kDevice, stream);
  sp_torch_free(first, 1000, kDevice, stream);
  CHECK(sp_torch_alloc(1000, kDevice, stream) != first);
  sp_torch_free(other, 700, kDevice, reinterpret_cast<void*>(t));
  CHECK_EQ(torch::problems().count, problems);

  std::string text;
  try {
    sp_torch_alloc(1024 * kMiB, kDevice, stream);
  } catch (const std::runtime_error& error) {  // no PyTorch is loaded here
    text = error.what();
  }
  CHECK(text.find("the pool's own limit is reached") != std::string::npos);
  std::size_t size = 0;
  void* const block = sp_torch_alloc(3000, kDevice, stream);
  void* const base = sp_torch_base_alloc(block, &size);
  CHECK(base <= block && static_cast<char*>(block) < static_cast<char*>(base) + size);
  sp_torch_free(block, 3000, kDevice, stream);
  sp_torch_free(block, 3000, kDevice, stream);  // cannot be told to anybody
  CHECK_EQ(torch::problems().count, problems + 1);
  CHECK(!torch::problems().first.empty());
  graph.reset();
  scene.audit();
}

}  // namespace
