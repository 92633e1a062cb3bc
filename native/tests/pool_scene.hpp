// A scene for native tests of the pool: the simulated device of sim_scene.hpp with one pool on it.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "pool/core.hpp"
#include "sim_scene.hpp"

namespace streampool::testing {

// Settings under which nothing happens that depends on how fast the machine is.
inline pool::Options steady() {
  pool::Options options;
  options.fence_age = 1e9;
  return options;
}

// With a limit, and an error instead of a wait.
inline pool::Options limited(Bytes limit) {
  pool::Options options = steady();
  options.limit = limit;
  options.wait_timeout = 0;
  return options;
}

struct PoolScene : Scene {
  explicit PoolScene(pool::Options options = steady(), sim::Config config = seeded(), Kind kind = Kind::device)
      : Scene(config) {
    core = make(std::move(options), kind, "test");
  }
  ~PoolScene() { core.reset(); }

  std::shared_ptr<pool::Core> make(pool::Options options, Kind kind, std::string name) const {
    pool::Failure failure;
    auto made = pool::Core::create(device, kind, std::move(name), options, &failure);
    if (made == nullptr) fail(__FILE__, __LINE__, "no pool: " + failure.text);
    return made;
  }
  // A stream that is registered with the pool.
  StreamHandle lasting(bool blocking = false) const {
    const StreamHandle handle = stream(blocking);
    pool::Failure failure;
    CHECK(core->register_stream(handle, &failure) == pool::Errc::ok);
    return handle;
  }

  pool::BlockRef alloc(Bytes size, StreamHandle stream, Bytes alignment = kMinAlignment) const {
    pool::BlockRef block;
    pool::Failure failure;
    pool::AllocRequest request;
    request.size = size;
    request.alignment = alignment;
    request.stream = stream;
    if (core->allocate(request, &block, &failure) != pool::Errc::ok)
      fail(__FILE__, __LINE__, "allocate: " + failure.text);
    CHECK_EQ(block.address % std::max(alignment, kMinAlignment), Bytes{0});
    return block;
  }
  pool::Errc try_alloc(Bytes size, StreamHandle stream, pool::Failure* failure, Bytes alignment = kMinAlignment) const {
    pool::BlockRef block;
    pool::AllocRequest request;
    request.size = size;
    request.alignment = alignment;
    request.stream = stream;
    return core->allocate(request, &block, failure);
  }
  pool::Errc free_quietly(Address address, StreamHandle stream, pool::Failure* failure) const {
    pool::FreeRequest request;
    request.stream = stream;
    return core->free(address, request, failure);
  }
  void free(const pool::BlockRef& block, StreamHandle stream) const {
    pool::Failure failure;
    pool::FreeRequest request;
    request.stream = stream;
    if (core->free(block, request, &failure) != pool::Errc::ok)
      testing::fail(__FILE__, __LINE__, "free: " + failure.text);
  }
  // Raw blocks as the C ABI and Python take and give them: by the short call where it does it (true), else by the full
  // one, which must succeed.
  bool take_raw(Bytes size, StreamHandle stream, pool::BlockRef* out) const {
    pool::AllocRequest request;
    request.size = size;
    request.stream = stream;
    request.raw = true;
    if (core->try_allocate(request, out)) return true;
    pool::Failure failure;
    CHECK(core->allocate(request, out, &failure) == pool::Errc::ok);
    return false;
  }
  bool give_raw(Address address, StreamHandle stream) const {
    pool::FreeRequest request;
    request.stream = stream;
    if (core->try_free(address, request)) return true;
    pool::Failure failure;
    CHECK(core->free(address, request, &failure) == pool::Errc::ok);
    return false;
  }
  void record(const pool::BlockRef& block, StreamHandle stream) const {
    pool::Failure failure;
    if (core->record_stream(block.address, stream, &failure) != pool::Errc::ok)
      testing::fail(__FILE__, __LINE__, "record_stream: " + failure.text);
  }

  std::uint64_t calls(Call call) const { return device->calls()[static_cast<std::size_t>(call)]; }
  std::uint64_t all_calls() const {
    std::uint64_t sum = 0;
    for (const std::uint64_t n : device->calls()) sum += n;
    return sum;
  }
  std::uint64_t path(pool::Path path) const { return core->stats().paths[static_cast<std::size_t>(path)]; }
  void audit() const { CHECK_EQ(core->audit(), std::string()); }

  std::shared_ptr<pool::Core> core;
};

}  // namespace streampool::testing
