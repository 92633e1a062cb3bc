// The simulated device: memory, streams, events, gated work, both schedulers, failures. Races are in
// test_sim_races.cpp.
#include <atomic>
#include <cstring>
#include <set>
#include <thread>

#include "driver/pattern.hpp"
#include "sim_scene.hpp"
#include "test.hpp"

#if defined(__SANITIZE_THREAD__)
#define STREAMPOOL_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define STREAMPOOL_TSAN 1
#endif
#endif

namespace {

using namespace streampool;
using namespace streampool::driver;
using testing::Scene;
using testing::seeded;
using testing::under_both;

STREAMPOOL_TEST("gated work keeps its stream's event not ready until the gate opens") {
  under_both([](const sim::Config& config) {
    const Scene scene(config);
    const StreamHandle s = scene.stream();
    const auto gate = scene.gated(s);
    const EventHandle e = scene.recorded(s);
    CHECK(scene.query(e) == Code::not_ready);
    gate->open();
    CHECK(scene.query(e) == Code::ok);
    CHECK_EQ(scene.device->pending_work(), 0u);
  });
}

STREAMPOOL_TEST("streams run independently and a wait edge orders them") {
  under_both([](const sim::Config& config) {
    const Scene scene(config);
    const StreamHandle s = scene.stream(), t = scene.stream();
    const auto gate = scene.gated(s);
    const EventHandle on_s = scene.recorded(s);
    CHECK(scene.query(scene.recorded(t)) == Code::ok);
    CHECK(scene.device->stream_wait_event(t, on_s));
    const EventHandle on_t = scene.recorded(t);
    CHECK(scene.query(on_t) == Code::not_ready);
    gate->open();
    CHECK(scene.query(on_t) == Code::ok);
  });
}

STREAMPOOL_TEST("an event that was never recorded queries as done") {
  const Scene scene;
  CHECK(scene.device->event_query(scene.event()));
}

STREAMPOOL_TEST("the legacy stream waits for blocking streams and they for it, and non-blocking ones for neither") {
  under_both([](const sim::Config& config) {
    const Scene scene(config);
    const StreamHandle blocking = scene.stream(true), other = scene.stream(true), free = scene.stream(false);
    const auto gate = scene.gated(blocking);
    const EventHandle on_legacy = scene.recorded(kDefaultStream);
    const EventHandle on_other = scene.recorded(other);
    const EventHandle on_thread = scene.recorded(kPerThreadStream);
    CHECK(scene.query(scene.recorded(free)) == Code::ok);
    CHECK(scene.query(on_legacy) == Code::not_ready);
    CHECK(scene.query(on_other) == Code::not_ready);
    CHECK(scene.query(on_thread) == Code::not_ready);
    gate->open();
    CHECK(scene.query(on_legacy) == Code::ok);
    CHECK(scene.query(on_other) == Code::ok);
    CHECK(scene.query(on_thread) == Code::ok);
  });
}

STREAMPOOL_TEST("the per-thread default stream is another stream in each thread") {
  const Scene scene;
  std::uint64_t here = 0, again = 0, there = 0, legacy = 0;
  CHECK(scene.device->stream_id(kPerThreadStream, &here));
  CHECK(scene.device->stream_id(kPerThreadStream, &again));
  CHECK(scene.device->stream_id(kDefaultStream, &legacy));
  std::thread([&] { CHECK(scene.device->stream_id(kPerThreadStream, &there)); }).join();
  CHECK_EQ(here, again);
  CHECK(here != there);
  CHECK(here != legacy);
  CHECK_EQ(legacy, scene.device->legacy_stream_id());
}

STREAMPOOL_TEST("a destroyed stream's handle value is handed out again with another id and its work still completes") {
  under_both([](const sim::Config& config) {
    const Scene scene(config);
    const StreamHandle first = scene.stream();
    std::uint64_t first_id = 0, second_id = 0;
    CHECK(scene.device->stream_id(first, &first_id));
    const auto gate = scene.gated(first);
    const EventHandle e = scene.recorded(first);
    CHECK(scene.device->stream_destroy(first));
    const StreamHandle second = scene.stream();
    CHECK_EQ(first, second);
    CHECK(scene.device->stream_id(second, &second_id));
    CHECK(first_id != second_id);
    CHECK(scene.query(scene.recorded(second)) == Code::ok);
    const EventHandle all = scene.event();
    CHECK(scene.device->context_event_record(all));
    CHECK(scene.query(all) == Code::not_ready);
    gate->open();
    CHECK(scene.query(e) == Code::ok);
    CHECK(scene.query(all) == Code::ok);
  });
}

STREAMPOOL_TEST("the use of a dead handle is trapped and changes nothing") {
  const Scene scene;
  const StreamHandle s = scene.stream();
  const EventHandle e = scene.event();
  CHECK(scene.device->stream_destroy(s));
  std::uint64_t id = 0;
  const Status status = scene.device->stream_id(s, &id);
  CHECK(status.code == Code::failed);
  CHECK_EQ(std::string(status.call), "stream_id");
  CHECK(scene.device->event_record(e, s).code == Code::failed);
  CHECK(scene.device->event_destroy(e));
  CHECK(scene.device->event_destroy(e).code == Code::failed);
  const auto traps = sim::traps();
  CHECK_EQ(traps.size(), 3u);
  CHECK(traps[0].find("stream_id: stream handle 0x") == 0);
  CHECK(sim::traps().empty());
  CHECK_EQ(scene.device->live_events(), 0u);
}

STREAMPOOL_TEST("a driver call from inside a queued body is trapped") {
  const Scene scene;
  const StreamHandle s = scene.stream();
  const EventHandle e = scene.event();
  Code inside = Code::ok;
  CHECK(scene.device->launch({.stream = s, .body = [&] { inside = scene.device->event_query(e).code; }}));
  CHECK(scene.device->stream_synchronize(s));
  CHECK(inside == Code::failed);
  CHECK_EQ(sim::traps().size(), 1u);
}

STREAMPOOL_TEST("fills and copies run in stream order") {
  under_both([](const sim::Config& config) {
    const Scene scene(config);
    const StreamHandle s = scene.stream();
    const Address a = scene.memory(4096), b = scene.memory(4096), pinned = scene.memory(4096, Kind::pinned);
    const auto gate = scene.gated(s);
    CHECK(scene.device->fill(s, a, 0x11, 4096));
    CHECK(scene.device->copy(s, b, a, 4096));
    CHECK(scene.device->fill(s, a, 0x22, 4096));
    CHECK(scene.device->copy(s, pinned, b, 4096));
    gate->open();
    CHECK(scene.device->stream_synchronize(s));
    const auto* bytes = reinterpret_cast<const unsigned char*>(pinned);
    CHECK_EQ(int{bytes[0]}, 0x11);
    CHECK_EQ(int{bytes[4095]}, 0x11);
    unsigned char pageable[16] = {};
    CHECK(scene.device->copy(s, reinterpret_cast<Address>(pageable), a, 16));
    CHECK_EQ(int{pageable[15]}, 0x22);
    pageable[0] = 0x33;
    CHECK(scene.device->copy(s, a, reinterpret_cast<Address>(pageable), 16));
    pageable[0] = 0x44;  // pageable memory was read before the call returned
    CHECK(scene.device->stream_synchronize(s));
    CHECK_EQ(int{*reinterpret_cast<const unsigned char*>(a)}, 0x33);
    CHECK(scene.device->copy(s, a, 64, 16).code == Code::invalid);
  });
}

STREAMPOOL_TEST("memory information counts allocations and handles until they are really gone") {
  const Scene scene({.memory = kGiB});
  Bytes free_bytes = 0, total = 0;
  const auto used = [&] {
    CHECK(scene.device->mem_info(&free_bytes, &total));
    CHECK_EQ(total, kGiB);
    return total - free_bytes;
  };
  CHECK_EQ(used(), 0u);
  const Address a = scene.memory(1);
  CHECK_EQ(used(), 2 * kMiB);
  MemoryHandle handle = 0;
  CHECK(scene.device->mem_create(64 * kMiB, &handle));
  CHECK_EQ(used(), 66 * kMiB);
  Address range = 0;
  CHECK(scene.device->address_reserve(128 * kMiB, 0, &range));
  CHECK(scene.device->mem_map(range, 64 * kMiB, handle));
  CHECK(scene.device->mem_release(handle));
  CHECK_EQ(used(), 66 * kMiB);  // a mapping keeps it
  CHECK(scene.device->address_free(range, 128 * kMiB).code == Code::invalid);
  CHECK(scene.device->mem_unmap(range, 64 * kMiB));
  CHECK_EQ(used(), 2 * kMiB);
  CHECK(scene.device->address_free(range, 128 * kMiB));
  CHECK(scene.device->mem_free(Kind::device, a));
  CHECK(scene.device->mem_free(Kind::device, a).code == Code::invalid);
  CHECK_EQ(used(), 0u);
  Address big = 0;
  CHECK(scene.device->mem_alloc(Kind::device, 2 * kGiB, &big).code == Code::out_of_memory);
  CHECK(scene.device->mem_alloc(Kind::device, ~Bytes{0}, &big).code == Code::out_of_memory);
  scene.device->set_occupied(kGiB - 2 * kMiB);
  CHECK(scene.device->mem_create(4 * kMiB, &handle).code == Code::out_of_memory);
  CHECK_EQ(used(), kGiB - 2 * kMiB);
}

STREAMPOOL_TEST("a handle is mapped whole, at several addresses, and both show the same bytes") {
  const Scene scene;
  MemoryHandle handle = 0;
  Address range = 0;
  CHECK(scene.device->mem_create(4 * kMiB, &handle));
  CHECK(scene.device->address_reserve(64 * kMiB, 16 * kMiB, &range));
  CHECK_EQ(range % (16 * kMiB), 0u);
  CHECK(scene.device->mem_map(range, 2 * kMiB, handle).number == 801);
  CHECK(scene.device->mem_map(range + 4096, 4 * kMiB, handle).code == Code::invalid);
  CHECK(scene.device->mem_map(range, 4 * kMiB, handle));
  CHECK(scene.device->mem_map(range + 2 * kMiB, 4 * kMiB, handle).code == Code::invalid);
  CHECK(scene.device->mem_map(range + 32 * kMiB, 4 * kMiB, handle));
  CHECK(scene.device->mem_set_access(range, 4 * kMiB));
  CHECK(scene.device->mem_set_access(range + 32 * kMiB, 4 * kMiB));
  *reinterpret_cast<int*>(range + 5000 * sizeof(int)) = 77;
  CHECK_EQ(*reinterpret_cast<int*>(range + 32 * kMiB + 5000 * sizeof(int)), 77);
  CHECK(scene.device->mem_unmap(range, 2 * kMiB).code == Code::invalid);
  CHECK(scene.device->mem_unmap(range, 4 * kMiB));
  CHECK_EQ(*reinterpret_cast<int*>(range + 32 * kMiB + 5000 * sizeof(int)), 77);
  CHECK(scene.device->mem_unmap(range + 32 * kMiB, 4 * kMiB));
  CHECK(scene.device->mem_release(handle));
  CHECK(scene.device->mem_release(handle).code == Code::invalid);
  CHECK(scene.device->address_free(range, 64 * kMiB));
}

STREAMPOOL_TEST("the host's addresses and mappings are bounded and running out of them is out of memory") {
#if defined(STREAMPOOL_TSAN)
  return;  // ThreadSanitizer's own layout has no room for a whole terabyte
#endif
  const Scene scene({.memory = 256 * kGiB});
  Address range = 0, more = 0;
  CHECK(scene.device->address_reserve(512 * kGiB, 0, &range));
  CHECK(scene.device->address_reserve(512 * kGiB, 0, &more));
  Address none = 0;
  CHECK(scene.device->address_reserve(2 * kMiB, 0, &none).code == Code::out_of_memory);
  std::vector<MemoryHandle> handles;
  Status status;
  Bytes count = 0;
  for (; count < 60'000; ++count) {  // with a hole between each two
    MemoryHandle handle = 0;
    CHECK(scene.device->mem_create(2 * kMiB, &handle));
    status = scene.device->mem_map(range + count * 4 * kMiB, 2 * kMiB, handle);
    CHECK(scene.device->mem_release(handle));
    if (!status) break;
  }
  CHECK(status.code == Code::out_of_memory);
  CHECK(count > 10'000);
  CHECK_EQ(scene.device->used_memory(), count * 2 * kMiB);
  for (Bytes i = 0; i < count; ++i) CHECK(scene.device->mem_unmap(range + i * 4 * kMiB, 2 * kMiB));
  CHECK(scene.device->address_free(range, 512 * kGiB));
  CHECK(scene.device->address_free(more, 512 * kGiB));
  CHECK(scene.device->address_reserve(600 * kGiB, 0, &range));
  CHECK(scene.device->address_free(range, 600 * kGiB));
}

STREAMPOOL_TEST("queued work on an unmapped address makes the device lost for every later call") {
  under_both([](const sim::Config& config) {
    const Scene scene(config);
    const StreamHandle s = scene.stream();
    MemoryHandle handle = 0;
    Address range = 0;
    CHECK(scene.device->address_reserve(4 * kMiB, 0, &range));
    CHECK(scene.device->mem_create(2 * kMiB, &handle));
    CHECK(scene.device->mem_map(range, 2 * kMiB, handle));
    CHECK(scene.device->mem_set_access(range, 2 * kMiB));
    CHECK(scene.device->launch({.stream = s, .accesses = {sim::writes(range, 2 * kMiB)}}));
    CHECK(scene.device->stream_synchronize(s));
    const EventHandle e = scene.event();
    // Held back until the event is recorded: with worker threads the fault could come first.
    const auto gate = std::make_shared<sim::Gate>();
    CHECK(scene.device->launch(
        {.stream = s, .accesses = {sim::writes(range, 2 * kMiB + 1)}, .gate = gate, .label = "too far"}));
    CHECK(scene.device->event_record(e, s));
    gate->open();
    CHECK(sim::settle());
    const Status status = scene.device->event_query(e);
    CHECK(status.code == Code::lost);
    CHECK_EQ(status.number, 700);
    CHECK(scene.device->mem_create(2 * kMiB, &handle).code == Code::lost);
    CHECK(scene.device->fault_text().find("'too far'") != std::string::npos);
    CHECK_EQ(scene.device->pending_work(), 0u);
  });
}

STREAMPOOL_TEST("memory that is unmapped under running work is a fault and not a crash") {
  const Scene scene;
  const StreamHandle s = scene.stream();
  const EventHandle e = scene.event();
  MemoryHandle handle = 0;
  Address range = 0;
  CHECK(scene.device->address_reserve(2 * kMiB, 0, &range));
  CHECK(scene.device->mem_create(2 * kMiB, &handle));
  CHECK(scene.device->mem_map(range, 2 * kMiB, handle));
  CHECK(scene.device->mem_set_access(range, 2 * kMiB));
  std::atomic<int> stage{0};
  CHECK(scene.device->launch({.stream = s,
                              .body =
                                  [&] {
                                    stage = 1;
                                    while (stage != 2) std::this_thread::yield();
                                    std::memset(reinterpret_cast<void*>(range), 1, 4096);
                                    stage = 3;
                                  },
                              .accesses = {sim::writes(range, 4096)}}));
  while (stage != 1) std::this_thread::yield();
  CHECK(scene.device->mem_unmap(range, 2 * kMiB));
  stage = 2;
  while (stage != 3) std::this_thread::yield();
  CHECK(scene.device->event_query(e).code == Code::lost);
}

STREAMPOOL_TEST("freeing memory of any kind waits for the device's work") {
  const Scene scene;
  const StreamHandle s = scene.stream();
  for (const Kind kind : {Kind::device, Kind::pinned, Kind::managed}) {
    const Address a = scene.memory(4096, kind);
    const auto gate = scene.gated(s);
    std::atomic<bool> freed{false};
    std::thread other([&] {
      CHECK(scene.device->mem_free(kind, a));
      freed = true;
    });
    CHECK(scene.query(scene.recorded(s)) == Code::not_ready);
    CHECK(!freed);
    gate->open();
    other.join();
    CHECK(freed);
  }
}

STREAMPOOL_TEST("a host wait that can never end is an error under the seeded scheduler") {
  const Scene scene(seeded());
  const StreamHandle s = scene.stream();
  const auto gate = scene.gated(s);
  const Status status = scene.device->stream_synchronize(s);
  CHECK(status.code == Code::failed);
  CHECK(describe(status).find("gate is shut") != std::string::npos);
  gate->open();
  CHECK(scene.device->stream_synchronize(s));
}

STREAMPOOL_TEST("under the seeded scheduler nothing runs by itself and a seed gives one order") {
  std::set<std::string> orders;
  const auto order_of = [&](std::uint64_t seed) {
    const Scene scene(seeded(seed));
    std::string order;
    for (char name = 'a'; name < 'f'; ++name) {
      const StreamHandle s = scene.stream();
      for (int i = 0; i < 3; ++i) CHECK(scene.device->launch({.stream = s, .body = [&order, name] { order += name; }}));
    }
    CHECK(order.empty());
    CHECK(sim::settle());
    CHECK_EQ(order.size(), 15u);
    return order;
  };
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    const std::string order = order_of(seed);
    CHECK_EQ(order, order_of(seed));
    orders.insert(order);
  }
  CHECK(orders.size() > 8);
}

STREAMPOOL_TEST("under the seeded scheduler polling makes progress but never runs a caller's body") {
  const Scene scene(seeded());
  const StreamHandle s = scene.stream(), t = scene.stream();
  bool ran = false;
  CHECK(scene.device->launch({.stream = s, .body = [&] { ran = true; }}));
  CHECK(scene.device->launch({.stream = t}));
  const EventHandle on_s = scene.recorded(s), on_t = scene.recorded(t);
  int polls = 0;
  while (scene.device->event_query(on_t).code == Code::not_ready) CHECK(++polls < 1000);
  for (int i = 0; i < 100; ++i) CHECK(scene.device->event_query(on_s).code == Code::not_ready);
  CHECK(!ran);
  while (scene.device->poll(on_s).code == Code::not_ready) CHECK(++polls < 1000);
  CHECK(ran);
}

STREAMPOOL_TEST("the seeded clock is virtual and the other one can be moved") {
  {
    const Scene scene(seeded());
    CHECK_EQ(scene.device->now(), 0.0);
    scene.device->pause(2.5);
    sim::clock_advance(10);
    CHECK_EQ(scene.device->now(), 12.5);
  }
  const Scene scene;
  CHECK(scene.device->now() < 1000);
  sim::clock_advance(3600);
  CHECK(scene.device->now() > 3600);
  CHECK_EQ(sim::clock_now() > 3600, true);
}

STREAMPOOL_TEST("any call can be made to fail on its n-th use and then has no effect") {
  const Scene scene;
  MemoryHandle handle = 0;
  scene.device->fail_call(Call::mem_create, 3, 2, Code::out_of_memory);
  CHECK(scene.device->mem_create(2 * kMiB, &handle));
  CHECK(scene.device->mem_create(2 * kMiB, &handle));
  for (int i = 0; i < 2; ++i) {
    const Status status = scene.device->mem_create(2 * kMiB, &handle);
    CHECK(status.code == Code::out_of_memory);
    CHECK_EQ(describe(status), "mem_create: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory");
  }
  CHECK(scene.device->mem_create(2 * kMiB, &handle));
  CHECK_EQ(scene.device->used_memory(), 6 * kMiB);
  CHECK_EQ(scene.device->calls()[static_cast<std::size_t>(Call::mem_create)], 5u);
  scene.device->fail_call(Call::event_create, 1, 1, Code::failed);
  EventHandle e = 0;
  CHECK(scene.device->event_create(&e).code == Code::failed);
  CHECK_EQ(scene.device->live_events(), 0u);
}

STREAMPOOL_TEST("a driver that is gone or lost answers so to every call") {
  const Scene scene;
  const EventHandle e = scene.event();
  scene.device->set_gone(true);
  CHECK(scene.device->event_query(e).code == Code::gone);
  scene.device->set_gone(false);
  CHECK(scene.device->event_query(e));
  scene.device->set_lost();
  CHECK(scene.device->event_query(e).code == Code::lost);
  CHECK(scene.device->event_destroy(e).code == Code::lost);
}

STREAMPOOL_TEST(
    "the machine is configured before its first use or after a reset, and drivers of the old one are lost") {
  const Scene scene({.devices = 2, .memory = kGiB});
  std::string error;
  CHECK(!sim::configure({}, &error));
  CHECK(error.find("in use") != std::string::npos);
  CHECK(sim::device(2, &error) == nullptr);
  CHECK_EQ(std::string(sim::device(1)->name()), "sim:1");
  const Address a = scene.memory(4096);
  const StreamHandle s = scene.stream();
  const auto gate = scene.gated(s);
  sim::reset();
  CHECK(!sim::in_use());
  CHECK(scene.device->event_query(1).code == Code::lost);
  *reinterpret_cast<int*>(a) = 1;  // readable as long as somebody holds the old device
  gate->open();
  CHECK(sim::configure({.virtual_memory = false, .managed_memory = false, .context_events = false}, &error));
  const auto fresh = sim::device(0);
  CHECK(!fresh->capabilities().virtual_memory);
  CHECK_EQ(fresh->capabilities().total_memory, 80 * kGiB);
  Address out = 0;
  CHECK(fresh->address_reserve(2 * kMiB, 0, &out).code == Code::not_supported);
  CHECK(fresh->mem_alloc(Kind::managed, 1, &out).code == Code::not_supported);
}

STREAMPOOL_TEST("devices are opened by name") {
  const Scene scene;
  OpenError kind = OpenError::none;
  std::string error;
  CHECK_EQ(std::string(open("sim", &kind, &error)->name()), "sim:0");
  CHECK(open("sim:0", &kind, &error) == scene.device);
  CHECK(open("sim:1", &kind, &error) == nullptr);
  CHECK(kind == OpenError::no_device);
  for (const char* bad : {"", "gpu", "sim:", "sim:x", "sim:-1", "sim:1 ", "simulated"}) {
    CHECK(open(bad, &kind, &error) == nullptr);
    CHECK(kind == OpenError::bad_name);
  }
}

STREAMPOOL_TEST("the pattern is written and checked to the byte, whatever the alignment") {
  const Scene scene;
  const Address a = scene.memory(kMiB);
  constexpr std::uint64_t key = 0x1234'5678'9abc'def0;
  for (Bytes offset = 0; offset < 9; ++offset) {
    for (const Bytes size : {Bytes{0}, Bytes{1}, Bytes{3}, Bytes{7}, Bytes{8}, Bytes{17}, Bytes{4099}}) {
      std::memset(reinterpret_cast<void*>(a), 0, 8192);
      const Range range{a + 64 + offset, size};
      CHECK(scene.device->pattern_fill(Kind::device, {&range, 1}, key));
      for (Bytes i = 0; i < size; ++i) {
        const auto byte = *reinterpret_cast<unsigned char*>(range.begin + i);
        CHECK_EQ(int{byte}, int{pattern_byte(range.begin + i, key)});
      }
      CHECK_EQ(int{*reinterpret_cast<unsigned char*>(range.begin - 1)}, 0);
      CHECK_EQ(int{*reinterpret_cast<unsigned char*>(range.begin + size)}, 0);
      std::vector<Mismatch> found;
      CHECK(scene.device->pattern_verify(Kind::device, {&range, 1}, key, &found));
      CHECK(found.empty());
      if (size < 7) continue;
      *reinterpret_cast<unsigned char*>(range.begin + 2) ^= 1;
      *reinterpret_cast<unsigned char*>(range.begin + size - 1) ^= 1;
      const Range ranges[] = {{a + 64, 0}, range};
      CHECK(scene.device->pattern_verify(Kind::device, ranges, key, &found));
      CHECK_EQ(found.size(), 1u);
      CHECK_EQ(found[0].range, 1u);
      CHECK_EQ(found[0].first, range.begin + 2);
      CHECK_EQ(found[0].last, range.begin + size - 1);
      CHECK_EQ(found[0].count, 2u);
      CHECK_EQ(Bytes{found[0].sample_size}, std::min<Bytes>(64, size - 2));
      CHECK_EQ(int{found[0].sample[0]}, int{*reinterpret_cast<unsigned char*>(range.begin + 2)});
    }
  }
}

STREAMPOOL_TEST("many threads use streams, events and memory of one device at once") {
  const Scene scene;
  std::vector<std::thread> threads;
  std::atomic<int> ran{0};
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 50; ++round) {
        const StreamHandle s = scene.stream(round % 2 == 0), t = scene.stream();
        const Address a = scene.memory(4096);
        auto gate = std::make_shared<sim::Gate>();
        CHECK(scene.device->launch(
            {.stream = s, .body = [&] { ++ran; }, .accesses = {sim::writes(a, 4096)}, .gate = gate}));
        const EventHandle e = scene.recorded(s);
        CHECK(scene.device->stream_wait_event(t, e));
        CHECK(scene.device->fill(t, a, 1, 4096));
        CHECK(scene.device->launch({.stream = kPerThreadStream, .body = [&] { ++ran; }}));
        gate->open();
        CHECK(scene.device->event_destroy(e));
        CHECK(scene.device->stream_synchronize(t));
        CHECK(scene.device->stream_destroy(s));
        CHECK(scene.device->stream_destroy(t));
        CHECK(scene.device->mem_free(Kind::device, a));
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(sim::settle());
  CHECK_EQ(ran.load(), 400);
  CHECK(sim::races().empty());
  CHECK(sim::traps().empty());
  CHECK_EQ(scene.device->used_memory(), 0u);
  CHECK_EQ(scene.device->live_streams(), 0u);
}

STREAMPOOL_TEST("bodies that block do not keep other streams' bodies from running") {
  const Scene scene;
  std::atomic<bool> go{false};
  std::atomic<int> inside{0};
  for (int i = 0; i < 20; ++i) {
    CHECK(scene.device->launch({.stream = scene.stream(), .body = [&] {
                                  ++inside;
                                  while (!go) std::this_thread::yield();
                                }}));
  }
  while (inside != 20) std::this_thread::yield();
  go = true;
  CHECK(sim::settle());
}

STREAMPOOL_TEST("a long chain of pending work is dropped by a reset without harm") {
  under_both([](const sim::Config& config) {
    const Scene scene(config);
    const StreamHandle s = scene.stream();
    const auto gate = scene.gated(s);
    for (int i = 0; i < 200'000; ++i) CHECK(scene.device->launch({.stream = s}));
    CHECK_EQ(scene.device->pending_work(), 200'001u);
    sim::reset();
  });
}

}  // namespace
