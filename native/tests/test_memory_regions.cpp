// Memory regions of NVTX, with a stand-in for the tool: what it is told of heaps and blocks, and when.
#include <dlfcn.h>

#include <array>
#include <string>
#include <vector>

#include "debug/memory_regions.hpp"
#include "pool_scene.hpp"
#include "test.hpp"

namespace {

using namespace streampool;
using namespace streampool::driver;
using namespace streampool::pool;
using debug::MemoryRegions;
using testing::PoolScene;

// The stand-in, attached for as long as this lives.
struct Attached {
  // `first_slot`: where it puts its functions. Headers of 2020 count from 0, later ones from 1.
  explicit Attached(int first_slot = 1) {
    std::string why;
    library = dlopen(STREAMPOOL_TEST_STUB_NVTX, RTLD_LAZY | RTLD_LOCAL);
    CHECK(library != nullptr);
    at<void(int)>("nvtx_stub_count_from")(first_slot);
    const auto tool = MemoryRegions::load(STREAMPOOL_TEST_STUB_NVTX, &why);
    CHECK_EQ(why, std::string());
    CHECK(tool != nullptr);
    MemoryRegions::attach(tool);
  }
  ~Attached() {
    MemoryRegions::attach(nullptr);
    dlclose(library);
  }
  template <typename Function>
  Function* at(const char* function) const {
    return reinterpret_cast<Function*>(dlsym(library, function));
  }
  std::size_t region(Address address) {
    return at<std::size_t(std::uintptr_t, char*, std::size_t)>("nvtx_stub_region")(address, name.data(), name.size());
  }
  int mistakes() const { return at<int()>("nvtx_stub_mistakes")(); }
  std::size_t heaps() const { return at<std::size_t()>("nvtx_stub_heaps")(); }

  static constexpr std::size_t kNone = ~std::size_t{0};
  void* library = nullptr;
  std::array<char, 100> name{};
};

Options with_regions() {
  OptionMap map{{"mode", "debug"}, {"nvtx_regions", "on"}, {"quarantine_bytes", "4MiB"}, {"check_every", "1"}};
  Options options;
  std::string error;
  CHECK(to_options(map, &options, &error));
  options.fence_age = 1e9;
  return options;
}

void tell_of_each_live_block(int first_slot) {
  Attached tool(first_slot);
  {
    const PoolScene scene(with_regions());
    CHECK(scene.core->source() == SegmentSource::malloc);
    const StreamHandle s = scene.lasting();
    std::vector<BlockRef> blocks;
    for (const Bytes size : {1, 100, 257, 70000, 3000000}) {
      blocks.push_back(scene.alloc(size, s));
      CHECK_EQ(tool.region(blocks.back().address), size);
      CHECK_EQ(std::string(tool.name.data()), "streampool block #" + std::to_string(blocks.size()));
    }
    // Between two blocks there is room that is nobody's.
    for (const BlockRef& block : blocks) CHECK_EQ(tool.region(block.address - 256), Attached::kNone);
    const BlockRef empty = scene.alloc(0, s);
    CHECK_EQ(tool.region(empty.address), Attached::kNone);
    scene.free(empty, s);
    CHECK(tool.heaps() >= 1);
    for (const BlockRef& block : blocks) scene.free(block, s);
    CHECK(scene.core->check(1).errc == Errc::ok);
    for (const BlockRef& block : blocks) CHECK_EQ(tool.region(block.address), Attached::kNone);
    CHECK_EQ(scene.calls(Call::pattern_verify) + scene.calls(Call::pattern_fill), 0u);
    scene.audit();
    scene.core->trim(0);
    scene.core->close();
  }
  CHECK_EQ(tool.mistakes(), 0);
}

STREAMPOOL_TEST("an attached tool is told of each live block, with its size and name, in driver allocations") {
  tell_of_each_live_block(1);
}

STREAMPOOL_TEST("a tool that was built with the first headers, which count functions from 0, is told the same") {
  tell_of_each_live_block(0);
}

STREAMPOOL_TEST("a region ends when the marks of its block are complete, and not before") {
  Attached tool;
  const PoolScene scene(with_regions());
  const StreamHandle s = scene.lasting(), t = scene.lasting();
  const BlockRef block = scene.alloc(1000, s);
  scene.record(block, t);
  const auto gate = scene.gated(t);
  scene.free(block, s);
  scene.core->check(0);
  CHECK_EQ(tool.region(block.address), Bytes{1000});
  gate->open();
  CHECK(sim::settle());
  scene.core->check(0);
  CHECK_EQ(tool.region(block.address), Attached::kNone);
  CHECK_EQ(scene.core->debug_totals().quarantined_blocks, 1u);  // its memory is still nobody else's
  CHECK_EQ(tool.mistakes(), 0);
}

STREAMPOOL_TEST("many blocks come and go, and the tool is never told a wrong thing") {
  Attached tool;
  {
    const PoolScene scene(with_regions());
    const StreamHandle s = scene.lasting();
    std::vector<BlockRef> live;
    for (std::uint32_t i = 0; i < 3000; ++i) {
      const std::uint32_t mixed = i * 2654435761u;
      if (mixed % 3 != 0 || live.empty()) {
        live.push_back(scene.alloc(mixed % 200000, s));
      } else {
        const std::size_t at = mixed / 3 % live.size();
        scene.free(live[at], s);
        live.erase(live.begin() + static_cast<std::ptrdiff_t>(at));
      }
      if (i % 500 == 0) scene.core->trim(0);
    }
    for (const BlockRef& block : live) scene.free(block, s);
    CHECK(scene.core->take_faults().empty());
    scene.core->close();
  }
  CHECK_EQ(tool.mistakes(), 0);
}

STREAMPOOL_TEST("without a tool the option changes nothing, and a library that is none says why") {
  MemoryRegions::attach(nullptr);
  const PoolScene scene(with_regions());
  CHECK(scene.core->source() == SegmentSource::vmm);
  std::string why;
  CHECK(MemoryRegions::load("/no/such/library.so", &why) == nullptr);
  CHECK(why.find("cannot be loaded") != std::string::npos);
  CHECK(MemoryRegions::load(STREAMPOOL_TEST_STUB_LIBCUDA, &why) == nullptr);
  CHECK_EQ(why, std::string("the tool takes no extension of NVTX"));
}

}  // namespace
