// Streams of a peer device that use a block (section 6 of docs/design.md: record_stream takes them): their work is
// waited for like any other, through events of their own context.
#include "pool_scene.hpp"
#include "test.hpp"

namespace {

using namespace streampool;
using namespace streampool::testing;
using pool::BlockRef;
using pool::Errc;

sim::Config two_devices() {
  sim::Config config = seeded();
  config.devices = 2;
  return config;
}

struct Peers : PoolScene {
  explicit Peers(pool::Options options = steady()) : PoolScene(std::move(options), two_devices()) {
    far = sim::device(1);
    CHECK(far->stream_create(&theirs));
  }
  ~Peers() { far->stream_destroy(theirs); }

  // A block that gated work on the peer's stream reads, freed on its own stream.
  Address freed_under_work(StreamHandle s) {
    const BlockRef block = alloc(4 * kMiB, s);
    record(block, theirs);
    gate = std::make_shared<sim::Gate>();
    CHECK(far->launch({.stream = theirs, .accesses = {sim::reads(block.address, 4 * kMiB)}, .gate = gate}));
    free(block, s);
    return block.address;
  }
  // Where the next such block lies.
  Address next(StreamHandle s) const {
    const BlockRef block = alloc(4 * kMiB, s);
    free(block, s);
    return block.address;
  }
  void done() {
    gate->open();
    CHECK(sim::settle());
  }

  std::shared_ptr<sim::Device> far;
  StreamHandle theirs = 0;
  std::shared_ptr<sim::Gate> gate;
};

}  // namespace

STREAMPOOL_TEST("a block that a peer's stream uses is not reused before that work is done, and then it is") {
  Peers scene;
  const StreamHandle s = scene.lasting(), t = scene.lasting();
  const Address used = scene.freed_under_work(s);
  const BlockRef beside = scene.alloc(4 * kMiB, s);
  CHECK(beside.address != used);
  CHECK(scene.next(t) != used);
  scene.record(beside, scene.theirs);  // names the peer's stream: what it owes is fenced
  CHECK(scene.next(s) != used);
  scene.done();
  CHECK_EQ(scene.next(t), used);
  scene.free(beside, s);
  scene.audit();
  CHECK(sim::races().empty());
}

STREAMPOOL_TEST("a registered stream of a peer is fenced by whoever looks for memory") {
  Peers scene;
  pool::Failure failure;
  CHECK(scene.core->register_stream(scene.theirs, &failure) == Errc::ok);
  const StreamHandle s = scene.lasting();
  const Address used = scene.freed_under_work(s);
  CHECK(scene.next(s) != used);
  scene.done();
  const Bytes reserved = scene.core->stats().reserved;
  const BlockRef a = scene.alloc(4 * kMiB, s), b = scene.alloc(4 * kMiB, s);
  CHECK_EQ(scene.core->stats().reserved, reserved);
  scene.free(a, s);
  scene.free(b, s);
  CHECK(scene.core->forget_stream(scene.theirs, &failure) == Errc::ok);
  scene.audit();
}

STREAMPOOL_TEST("a peer's stream that nobody names again is covered by an event of its own context") {
  pool::Options options = steady();
  options.limit = 6 * kMiB;
  Peers scene(options);
  const StreamHandle s = scene.lasting();
  const Address used = scene.freed_under_work(s);
  scene.done();
  const std::uint64_t before = scene.far->calls()[static_cast<std::size_t>(Call::context_event_record)];
  CHECK_EQ(scene.next(s), used);
  CHECK(scene.far->calls()[static_cast<std::size_t>(Call::context_event_record)] > before);
  scene.audit();
}

STREAMPOOL_TEST("work of a peer that never ends does not keep the pool's own stranded memory") {
  pool::Options options = steady();
  options.limit = 10 * kMiB;
  Peers scene(options);
  const StreamHandle s = scene.lasting();
  scene.freed_under_work(s);
  // A stream that comes, frees and goes without a word.
  const StreamHandle raw = scene.stream(false);
  const BlockRef small = scene.alloc(4 * kMiB, raw);
  scene.record(small, raw);
  pool::FreeRequest implicit;
  pool::Failure failure;
  CHECK(scene.core->free(small, implicit, &failure) == Errc::ok);
  CHECK(scene.device->stream_destroy(raw));
  CHECK_EQ(scene.next(s), small.address);
  scene.done();
  scene.audit();
}

STREAMPOOL_TEST("memory is neither allocated nor freed on a peer's stream, registered or not") {
  Peers scene;
  const StreamHandle s = scene.lasting();
  const BlockRef block = scene.alloc(4096, s);
  for (const bool registered : {false, true}) {
    pool::Failure failure;
    if (registered) CHECK(scene.core->register_stream(scene.theirs, &failure) == Errc::ok);
    CHECK(scene.try_alloc(4096, scene.theirs, &failure) == Errc::stream);
    CHECK(failure.text.find("another device") != std::string::npos);
    CHECK(scene.free_quietly(block.address, scene.theirs, &failure) == Errc::stream);
    CHECK(scene.core->live(block));
    BlockRef out;
    pool::AllocRequest request;
    request.size = 4096;
    request.stream = scene.theirs;
    CHECK(!scene.core->try_allocate(request, &out));
  }
  scene.free(block, s);
}

STREAMPOOL_TEST("a peer that is lost leaves the pool's own device alone; what it used stays pending") {
  pool::Options options = steady();
  options.wait_timeout = 0.01;
  Peers scene(options);
  const StreamHandle s = scene.lasting();
  const Address used = scene.freed_under_work(s);
  scene.far->set_lost(700);
  CHECK(scene.next(s) != used);
  CHECK(scene.core->check(0.01).errc == Errc::ok);
  CHECK_EQ(scene.core->trim(0).pending, 4 * kMiB);
  scene.gate->open();
  scene.audit();
}

STREAMPOOL_TEST("every driver call of a peer, failed in turn, leaves the pool whole") {
  for (const Call call : {Call::event_create, Call::event_record, Call::event_query, Call::context_event_record}) {
    pool::Options options = steady();
    options.limit = 6 * kMiB;
    options.wait_timeout = 0.05;
    Peers scene(options);
    const StreamHandle s = scene.lasting();
    const Address used = scene.freed_under_work(s);
    scene.done();
    scene.far->fail_call(call, 1, 1, Code::failed);
    CHECK_EQ(scene.next(s), used);  // by the next attempt
    scene.audit();
    scene.far->clear_failures();
  }
}
