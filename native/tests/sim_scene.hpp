// A scene for native tests on the simulated device: a fresh machine, streams, events, gates.
#pragma once

#include <memory>

#include "driver/sim/machine.hpp"
#include "test.hpp"

namespace streampool::testing {

using namespace streampool::driver;

// A fresh machine for one test.
struct Scene {
  explicit Scene(sim::Config config = {}) {
    sim::reset();
    std::string error;
    CHECK(sim::configure(config, &error));
    device = sim::device(0);
  }
  Scene(const Scene&) = delete;
  Scene& operator=(const Scene&) = delete;
  ~Scene() { sim::reset(); }

  StreamHandle stream(bool blocking = false) const {
    StreamHandle handle = 0;
    CHECK(device->create_stream(blocking, {}, &handle));
    return handle;
  }
  EventHandle event() const {
    EventHandle handle = 0;
    CHECK(device->event_create(&handle));
    return handle;
  }
  EventHandle recorded(StreamHandle stream) const {
    const EventHandle handle = event();
    CHECK(device->event_record(handle, stream));
    return handle;
  }
  Address memory(Bytes size, Kind kind = Kind::device) const {
    Address address = 0;
    CHECK(device->mem_alloc(kind, size, &address));
    return address;
  }
  std::shared_ptr<sim::Gate> gated(StreamHandle stream) const {
    auto gate = std::make_shared<sim::Gate>();
    CHECK(device->launch({.stream = stream, .gate = gate}));
    return gate;
  }
  Code query(EventHandle event) const {
    CHECK(sim::settle());
    return device->event_query(event).code;
  }

  std::shared_ptr<sim::Device> device;
};

inline sim::Config seeded(std::uint64_t seed = 1) { return {.scheduler = sim::Scheduler::seeded, .seed = seed}; }

// Every ordering rule holds under both schedulers.
template <typename Body>
void under_both(Body body) {
  body(sim::Config{});
  body(seeded());
}

}  // namespace streampool::testing
