// Declared uses: record_stream and record_event; and streams that come, go and are forgotten.
#include <set>
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
using testing::steady;

constexpr Bytes kLarge = 4 * kMiB;

STREAMPOOL_TEST("a recorded stream holds the block back until its work up to the free is done") {
  for (const Bytes size : {Bytes{4096}, kLarge}) {
    PoolScene scene;
    const StreamHandle s = scene.lasting(), t = scene.lasting();
    const BlockRef block = scene.alloc(size, s);
    scene.record({block.address + size / 2, nullptr, 0}, t);  // any address inside
    const auto gate = scene.gated(t);
    scene.free(block, s);
    for (int i = 0; i < 20; ++i) CHECK(scene.alloc(size, s).address != block.address);
    gate->open();
    CHECK(sim::settle());
    std::set<Address> found;
    for (int i = 0; i < 40 && !found.contains(block.address); ++i) found.insert(scene.alloc(size, s).address);
    if (size == kLarge) CHECK(found.contains(block.address));
    scene.audit();
  }
}

// The memory's former life counts although its present owner never touched it: that owner need not order anything.
STREAMPOOL_TEST("a block that nobody used and that another stream frees keeps the marks of its memory's former life") {
  enum class Way { slot, extent, waited, run };
  for (const Way way : {Way::slot, Way::extent, Way::waited, Way::run}) {
    Options options = steady();
    options.limit = way == Way::slot ? 2 * kMiB : kLarge;
    options.wait = way == Way::waited;
    options.wait_timeout = 0;
    PoolScene scene(options);
    const StreamHandle s = scene.lasting(), t = scene.lasting(), u = scene.lasting(), v = scene.lasting();
    const StreamHandle raw = scene.stream();
    const Bytes size = way == Way::slot ? 4096 : kLarge;
    const Bytes half = way == Way::run ? size / 2 : size;
    Failure failure;
    const StreamHandle former = way == Way::waited ? raw : s;
    if (way == Way::run) {
      const BlockRef low = scene.alloc(half, s), high = scene.alloc(half, s);
      scene.free(low.address < high.address ? high : low, s);
      for (int i = 0; i < 3; ++i) {  // its half becomes everybody's
        CHECK(sim::settle());
        CHECK(scene.try_alloc(size, v, &failure) == Errc::out_of_memory);
      }
      scene.free(low.address < high.address ? low : high, s);
    }
    const BlockRef used = scene.alloc(half, former);
    auto gate = std::make_shared<sim::Gate>();
    CHECK(scene.device->launch({.stream = former, .accesses = {sim::writes(used.address, half)}, .gate = gate}));
    scene.free(used, former);
    const StreamHandle owner = way == Way::waited ? t : s;
    const BlockRef unused = scene.alloc(size, owner);
    CHECK(unused.address <= used.address && used.address < unused.address + size);
    scene.free(unused, u);
    // Another stream takes all that it can get: not this, unless it was made to wait for the work of the former life.
    for (int i = 0; i < 600; ++i) {
      AllocRequest request;
      request.size = size;
      request.stream = v;
      BlockRef block;
      const bool got = scene.core->allocate(request, &block, &failure) == Errc::ok;
      if (got) CHECK(scene.device->launch({.stream = v, .accesses = {sim::writes(block.address, size)}}));
      if (!got && i > 4) break;
      CHECK(sim::settle());
    }
    gate->open();
    CHECK(sim::settle());
    CHECK(sim::races().empty());
    scene.audit();
  }
}

// The slot's own stream may use it since it waits for the recorded one; a third stream waits for nobody.
STREAMPOOL_TEST("a slot that its own stream got by waiting for another one is not complete for anybody else") {
  Options options = steady();
  options.limit = 6 * kMiB;
  options.wait_timeout = 0;
  PoolScene scene(options);
  const StreamHandle s = scene.lasting(), t = scene.lasting(), reader = scene.stream();
  std::vector<BlockRef> slots;
  for (int i = 0; i < 512; ++i) slots.push_back(scene.alloc(4096, s));  // 2 MiB
  const BlockRef large = scene.alloc(kLarge, reader);                   // the rest of the limit
  const BlockRef first = slots[10], second = slots[20];
  for (const BlockRef& block : {first, second}) scene.record(block, reader);
  auto gate = std::make_shared<sim::Gate>();
  CHECK(scene.device->launch({.stream = reader,
                              .accesses = {sim::reads(first.address, 4096), sim::reads(second.address, 4096)},
                              .gate = gate}));
  scene.free(first, s);
  scene.free(second, s);
  scene.free(large, reader);  // fenced in the call
  // t's miss has s fenced: the frees on s are complete, those of the reader are not.
  Failure failure;
  for (int i = 0; i < 3; ++i) {
    CHECK(scene.try_alloc(4096, t, &failure) == Errc::out_of_memory);
    CHECK(sim::settle());
  }
  CHECK_EQ(scene.alloc(kLarge, s).address, large.address);
  CHECK_EQ(scene.path(Path::waited), std::uint64_t{1});
  const BlockRef again = scene.alloc(4096, s);
  CHECK(again.address == first.address || again.address == second.address);
  // The other one is still being read.
  AllocRequest request;
  request.size = 4096;
  request.stream = t;
  BlockRef early;
  if (scene.core->allocate(request, &early, &failure) == Errc::ok) {
    CHECK(scene.device->launch({.stream = t, .accesses = {sim::writes(early.address, 4096)}}));
    CHECK(sim::races().empty());
    testing::fail(__FILE__, __LINE__, "there was memory after all");
  }
  gate->open();
  CHECK(sim::settle());
  for (int i = 0; i < 3 && scene.try_alloc(4096, t, &failure) != Errc::ok; ++i) CHECK(sim::settle());
  CHECK(sim::races().empty());
  scene.audit();
}

STREAMPOOL_TEST("a recorded event holds the block back for what the event covers, and for nothing later") {
  PoolScene scene;
  const StreamHandle s = scene.lasting(), t = scene.stream();
  const BlockRef block = scene.alloc(kLarge, s);
  const auto first = scene.gated(t);
  const EventHandle event = scene.recorded(t);
  const auto later = scene.gated(t);
  Failure failure;
  CHECK(scene.core->record_event(block.address, event, &failure) == Errc::ok);
  scene.free(block, s);
  CHECK(scene.alloc(kLarge, s).address != block.address);
  first->open();
  CHECK(sim::settle());
  std::set<Address> found;
  for (int i = 0; i < 3; ++i) found.insert(scene.alloc(kLarge, s).address);
  CHECK(found.contains(block.address));
  later->open();
  scene.audit();
}

STREAMPOOL_TEST("a stream that took a dead one's handle is another stream") {
  PoolScene scene;
  const StreamHandle s = scene.stream();
  const BlockRef block = scene.alloc(kLarge, s);
  const auto gate = scene.gated(s);
  scene.free(block, s);
  CHECK(scene.device->stream_destroy(s));
  const StreamHandle t = scene.stream();
  CHECK_EQ(t, s);  // the device hands values out again
  CHECK(scene.alloc(kLarge, t).address != block.address);
  gate->open();
  CHECK(sim::settle());
  CHECK(sim::traps().empty());
  scene.audit();
}

STREAMPOOL_TEST("a thousand streams that come and go leave a bounded table and bounded memory behind") {
  PoolScene scene;
  for (int i = 0; i < 1000; ++i) {
    const StreamHandle s = scene.stream();
    const BlockRef small = scene.alloc(4096, s), large = scene.alloc(kMiB, s);
    scene.free(small, s);
    scene.free(large, s);
    CHECK(scene.device->stream_destroy(s));
    CHECK(sim::settle());
  }
  CHECK(scene.core->stats().streams <= 200);
  CHECK(scene.core->stats().reserved <= 256 * kMiB);
  CHECK(sim::traps().empty());
  scene.audit();
}

STREAMPOOL_TEST("a thousand streams that come and go with blocks of no bytes leave a bounded table behind") {
  PoolScene scene;
  for (int i = 0; i < 1000; ++i) {
    const StreamHandle s = scene.stream();
    scene.free(scene.alloc(0, s), s);
    CHECK(scene.device->stream_destroy(s));
    CHECK(sim::settle());
  }
  CHECK(scene.core->stats().streams <= 200);
  scene.audit();
}

STREAMPOOL_TEST("streams that are swept away leave no event behind") {
  constexpr std::size_t kStreams = 10;
  Options options = steady();
  options.limit = kStreams * 2 * kMiB;
  options.wait = false;
  PoolScene scene(options, sim::Config{});
  std::vector<StreamHandle> streams;
  std::vector<std::shared_ptr<sim::Gate>> gates;
  for (std::size_t i = 0; i < kStreams; ++i) {
    streams.push_back(scene.stream());
    const BlockRef block = scene.alloc(2 * kMiB, streams.back());
    gates.push_back(scene.gated(streams.back()));
    scene.free(block, streams.back());  // fenced in the call
  }
  // While t waits for them, the work ends; the questions after those fences fail, and a context event says that all is
  // done.
  scene.core->hooks().interrupted = [&] {
    for (const auto& gate : gates) gate->open();
    CHECK(sim::settle());
    scene.device->fail_call(Call::event_query, 1, kStreams, Code::failed);
    return false;
  };
  const StreamHandle t = scene.lasting();
  const BlockRef all = scene.alloc(options.limit, t);
  scene.core->hooks().interrupted = nullptr;
  scene.device->clear_failures();
  for (const StreamHandle s : streams) CHECK(scene.device->stream_destroy(s));
  scene.free(all, t);
  // Others come and go until the first sweep.
  std::uint64_t known = 0;
  for (int i = 0; i < 1000 && scene.core->stats().streams >= known; ++i) {
    known = scene.core->stats().streams;
    const StreamHandle brief = scene.stream();
    scene.free(scene.alloc(256, brief), brief);
    CHECK(scene.device->stream_destroy(brief));
    CHECK(sim::settle());
  }
  CHECK(scene.core->stats().streams < known);
  scene.core->close();
  scene.core.reset();
  CHECK_EQ(scene.device->live_events(), std::uint64_t{0});
}

STREAMPOOL_TEST("a forgotten stream may be destroyed, and its memory comes back without its handle being touched") {
  Options options = steady();
  options.limit = kLarge;
  PoolScene scene(options);
  const StreamHandle s = scene.lasting(), t = scene.lasting();
  const BlockRef block = scene.alloc(kLarge, s);
  scene.free(block, s);
  Failure failure;
  CHECK(scene.core->forget_stream(s, &failure) == Errc::ok);
  CHECK(scene.device->stream_destroy(s));
  CHECK(sim::settle());
  CHECK_EQ(scene.alloc(kLarge, t).address, block.address);
  CHECK(scene.core->forget_stream(s, &failure) != Errc::ok);
  CHECK(sim::traps().size() <= 1);  // that last question, if the device was asked at all
  scene.audit();
}

STREAMPOOL_TEST("while live blocks are checked other threads allocate and free, and their blocks are judged right") {
  for (const Bytes edge : {Bytes{0}, Bytes{512}}) {  // guards in place already, and guards written at allocation
    Options options = testing::steady();
    options.debug.track = options.debug.fill = true;
    options.debug.guard_bytes = 256;
    options.debug.fill_edge_bytes = edge;
    options.debug.check_every = 1;
    const PoolScene scene(options);
    const StreamHandle s = scene.lasting();
    std::vector<BlockRef> blocks;
    for (int i = 0; i < 5000; ++i) blocks.push_back(scene.alloc(1, s));
    bool meanwhile = false;
    // Asked between two batches of a check, on the thread that makes it.
    scene.core->hooks().interrupted = [&] {
      if (std::exchange(meanwhile, true)) return false;
      std::thread([&] {
        for (std::size_t i = 4000; i < 4500; ++i) scene.free(blocks[i], s);
        for (int i = 0; i < 500; ++i) scene.free(scene.alloc(1, s), s);
      }).join();
      return false;
    };
    CHECK(scene.core->check(0).errc == Errc::ok);
    CHECK(meanwhile);
    scene.core->hooks().interrupted = {};
    for (std::size_t i = 0; i < blocks.size(); ++i)
      if (i < 4000 || i >= 4500) scene.free(blocks[i], s);
    CHECK(scene.core->check(1).errc == Errc::ok);
    CHECK(scene.core->take_faults().empty());
    CHECK_EQ(scene.core->debug_totals().blocks_not_checked, 0u);
    scene.audit();
  }
}

STREAMPOOL_TEST("recording everything on a block is refused without a driver call in a forked child and at exit") {
  const PoolScene scene;
  const StreamHandle s = scene.lasting();
  const BlockRef block = scene.alloc(4096, s);
  Failure failure;
  CHECK(scene.core->record_everything(block.address, &failure) == Errc::ok);
  for (const auto why : {driver::Ending::exiting, driver::Ending::forked}) {
    const std::uint64_t before = scene.all_calls();
    driver::set_ending(why);
    const Errc errc = scene.core->record_everything(block.address, &failure);
    const std::uint64_t after = scene.all_calls();
    driver::set_ending(driver::Ending::no);
    CHECK(errc == (why == driver::Ending::forked ? Errc::forked : Errc::exiting));
    CHECK_EQ(after, before);
  }
  scene.free(block, s);
  scene.audit();
}

}  // namespace
