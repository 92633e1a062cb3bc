// The simulated driver's own pools: allocations and frees take place in the order of a stream, and nowhere else.
#include <string>

#include "sim_scene.hpp"
#include "test.hpp"

namespace {

using namespace streampool;
using namespace streampool::driver;
using testing::Scene;
using testing::seeded;
using testing::under_both;

struct PoolOfDriver : Scene {
  explicit PoolOfDriver(sim::Config config = seeded()) : Scene(config) { CHECK(device->pool_create(&pool)); }
  Address take(StreamHandle stream, Bytes size) const {
    Address address = 0;
    CHECK(device->pool_alloc(pool, stream, size, &address));
    return address;
  }
  void write(StreamHandle stream, Address at, Bytes size) const {
    CHECK(device->launch({.stream = stream, .accesses = {sim::writes(at, size)}}));
  }
  PoolHandle pool = 0;
};

STREAMPOOL_TEST("sim: memory of a driver's pool is used in the order of its stream, and used again there at once") {
  under_both([](sim::Config config) {
    const PoolOfDriver scene(config);
    const StreamHandle s = scene.stream();
    const auto gate = scene.gated(s);  // nothing of what follows has taken place when it is queued
    const Address first = scene.take(s, 4 * kMiB);
    scene.write(s, first, 4 * kMiB);
    CHECK(scene.device->pool_free(s, first));
    const Address second = scene.take(s, 4 * kMiB);
    CHECK_EQ(second, first);
    scene.write(s, second, 4 * kMiB);
    CHECK_EQ(scene.device->used_memory(), 4 * kMiB);
    gate->open();
    CHECK(sim::settle());
    CHECK_EQ(scene.device->fault_text(), std::string());
    CHECK(sim::races().empty());
  });
}

STREAMPOOL_TEST("sim: another stream gets freed memory of a driver's pool only when the free has taken place") {
  const PoolOfDriver scene;
  const StreamHandle s = scene.stream(), t = scene.stream();
  const Address first = scene.take(s, 4 * kMiB);
  const auto gate = scene.gated(s);
  CHECK(scene.device->pool_free(s, first));
  const Address other = scene.take(t, 4 * kMiB);
  CHECK(other != first);
  gate->open();
  CHECK(sim::settle());
  CHECK_EQ(scene.take(t, 4 * kMiB), first);
}

STREAMPOOL_TEST(
    "sim: work on memory of a driver's pool that is not there yet faults, and so does work after the free") {
  for (const bool after : {false, true}) {
    const PoolOfDriver scene;
    const StreamHandle s = scene.stream(), t = scene.stream();
    const auto gate = after ? nullptr : scene.gated(s);
    const Address at = scene.take(s, 2 * kMiB);
    if (after) CHECK(scene.device->pool_free(s, at));
    if (after) CHECK(sim::settle());
    scene.write(t, at, 2 * kMiB);
    CHECK(sim::settle());
    CHECK(!scene.device->fault_text().empty());
  }
}

STREAMPOOL_TEST("sim: work that is not ordered after the allocation, or before the free, is a race") {
  for (const bool ordered : {false, true}) {
    const PoolOfDriver scene;
    const StreamHandle s = scene.stream(), t = scene.stream();
    const Address at = scene.take(s, 2 * kMiB);
    if (ordered) CHECK(scene.device->stream_wait_event(t, scene.recorded(s)));
    if (!ordered) CHECK(sim::settle());  // it happens to be there; nobody has waited for it
    scene.write(t, at, 2 * kMiB);
    if (ordered) CHECK(scene.device->stream_wait_event(s, scene.recorded(t)));
    CHECK(sim::settle());
    CHECK(scene.device->pool_free(s, at));
    CHECK(sim::settle());
    CHECK_EQ(scene.device->fault_text(), std::string());
    CHECK_EQ(sim::races().empty(), ordered);
  }
}

STREAMPOOL_TEST("sim: a driver's pool keeps what is freed, makes room of it, and gives it back at a trim") {
  sim::Config config = seeded();
  config.memory = 16 * kMiB;
  const PoolOfDriver scene(config);
  const StreamHandle s = scene.stream();
  for (const Address at : {scene.take(s, 4 * kMiB), scene.take(s, 4 * kMiB), scene.take(s, 3 * kMiB)})
    CHECK(scene.device->pool_free(s, at));
  CHECK(sim::settle());
  CHECK_EQ(scene.device->used_memory(), 12 * kMiB);
  CHECK(scene.device->pool_observe(s));
  const Address large = scene.take(s, 14 * kMiB);  // made of what was kept
  CHECK_EQ(scene.device->used_memory(), 14 * kMiB);
  Address none = 0;
  CHECK(scene.device->pool_alloc(scene.pool, s, 4 * kMiB, &none).code == Code::out_of_memory);
  CHECK(scene.device->pool_free(s, large));
  CHECK(scene.device->pool_free(s, large).code == Code::invalid);
  CHECK(sim::settle());
  CHECK(scene.device->pool_trim(scene.pool, 0));
  CHECK_EQ(scene.device->used_memory(), 14 * kMiB);  // done, but the host has not taken note
  const auto gate = scene.gated(s);
  CHECK(scene.device->pool_observe(s).code == Code::not_ready);
  gate->open();
  CHECK(sim::settle());
  CHECK(scene.device->pool_observe(s));
  CHECK(scene.device->pool_trim(scene.pool, 15 * kMiB));
  CHECK(scene.device->pool_trim(scene.pool, kMiB));
  CHECK_EQ(scene.device->used_memory(), 14 * kMiB);  // less than that would be less than a megabyte
  CHECK(scene.device->pool_trim(scene.pool, 0));
  CHECK_EQ(scene.device->used_memory(), Bytes{0});
}

STREAMPOOL_TEST("sim: a destroyed driver's pool goes with its last allocation") {
  const PoolOfDriver scene;
  const StreamHandle s = scene.stream();
  const Address at = scene.take(s, 2 * kMiB);
  CHECK(scene.device->pool_free(s, scene.take(s, 4 * kMiB)));
  CHECK(scene.device->pool_destroy(scene.pool));
  CHECK(scene.device->pool_destroy(scene.pool).code == Code::invalid);
  CHECK(sim::settle());
  CHECK_EQ(scene.device->used_memory(), 2 * kMiB);
  CHECK(scene.device->pool_free(s, at));
  CHECK(sim::settle());
  CHECK_EQ(scene.device->used_memory(), Bytes{0});
}

STREAMPOOL_TEST("sim: a device without driver's pools, and a stream that captures, say no") {
  sim::Config config = seeded();
  config.driver_pools = false;
  {
    const Scene scene(config);
    PoolHandle pool = 0;
    CHECK(scene.device->pool_create(&pool).code == Code::not_supported);
    CHECK(!scene.device->capabilities().driver_pools);
  }
  const PoolOfDriver scene;
  const StreamHandle s = scene.stream();
  CHECK(scene.device->begin_capture(s));
  Address at = 0;
  CHECK(scene.device->pool_alloc(scene.pool, s, 2 * kMiB, &at).code == Code::capturing);
  CHECK_EQ(scene.device->used_memory(), Bytes{0});
}

}  // namespace
