// Memory for other libraries: without the order of a stream, and PyTorch's entry points.
#include <stdexcept>
#include <string>
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

// pytorch/pytorch#159594, NVIDIA/cuopt#1748 (case 47): growth during a capture invalidated it.
STREAMPOOL_TEST("PyTorch's entry points serve a capture by growth too, and throw what has the whole account") {
  const Scene scene(testing::limited(64 * kMiB));
  namespace torch = attach::torch;
  constexpr int kDevice = 7;  // of no other test
  constexpr std::pair<std::uint64_t, std::uint64_t> kPool{0, 1};
  CHECK(torch::give_pool(kDevice, scene.core));
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
  CHECK_EQ(torch::problems().count, 0u);

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
  CHECK_EQ(torch::problems().count, 1u);
  CHECK(torch::problems().first.find("free") != std::string::npos);
  graph.reset();
  scene.audit();
}

}  // namespace
