// The simulated device's calls for the driver's own pools. See device.hpp.
//
// An allocation and a free are pieces of work in their stream. Work that touches the memory before the one has run, or
// after the other, faults; and for the race check both are writes, so that whoever is not ordered between them races.
#include "device.hpp"

namespace streampool::driver::sim {

Status SimDevice::pool_create(PoolHandle* out) {
  constexpr Call call = Call::pool_create;
  if (const Status status = enter(call); !status) return status;
  if (!capabilities_.driver_pools) return fail(call, Code::not_supported, kNotSupported);
  *out = machine_->memory.pool_create(ordinal_);
  return {};
}

Status SimDevice::pool_destroy(PoolHandle pool) {
  constexpr Call call = Call::pool_destroy;
  if (const Status status = enter(call); !status) return status;
  return from_memory(call, machine_->memory.pool_destroy(pool));
}

// The id of a live stream of this device that does not capture.
Status SimDevice::stream_for_pool(Call call, StreamHandle handle, std::uint64_t* id) {
  const Lock lock(machine_->mutex);
  const StreamPtr stream = machine_->find_stream(state_, handle, call);
  if (!stream) return fail(call, Code::failed, kDeadHandle);
  if (stream->device != &state_) return fail(call, Code::invalid, kInvalidHandle);
  if (stream->capture) return captured_away(call, stream, kCaptureUnsupported);  // no memory nodes here
  *id = stream->id;
  return {};
}

Status SimDevice::pool_alloc(PoolHandle pool, StreamHandle stream, Bytes size, Address* out) {
  constexpr Call call = Call::pool_alloc;
  if (const Status status = enter(call); !status) return status;
  const Timed timed(*this, call);
  if (!capabilities_.driver_pools) return fail(call, Code::not_supported, kNotSupported);
  std::uint64_t id = 0;
  if (const Status status = stream_for_pool(call, stream, &id); !status) return status;
  Address address = 0;
  Bytes mapped = 0;
  if (const Code code = machine_->memory.pool_take(pool, id, size, &address, &mapped); code != Code::ok)
    return from_memory(call, code);
  Work work{.stream = stream, .label = "allocation from the driver's pool"};
  work.body = [memory = &machine_->memory, address] { memory->pool_ready(address); };
  if (const Status status = queue(call, std::move(work), false, nullptr, {writes(address, mapped)}); !status) {
    std::uint64_t number = 0;
    machine_->memory.pool_give(address, id, &mapped, &number);
    machine_->memory.pool_gone(address, number);
    return status;
  }
  *out = address;
  return {};
}

Status SimDevice::pool_free(StreamHandle stream, Address address) {
  constexpr Call call = Call::pool_free;
  if (const Status status = enter(call); !status) return status;
  const Timed timed(*this, call);
  std::uint64_t id = 0, number = 0;
  if (const Status status = stream_for_pool(call, stream, &id); !status) return status;
  Bytes mapped = 0;
  if (const Code code = machine_->memory.pool_give(address, id, &mapped, &number); code != Code::ok)
    return from_memory(call, code);
  Work work{.stream = stream, .label = "free to the driver's pool"};
  work.body = [memory = &machine_->memory, address, number] { memory->pool_gone(address, number); };
  return queue(call, std::move(work), false, nullptr, {writes(address, mapped)});
}

Status SimDevice::pool_observe(StreamHandle handle) {
  constexpr Call call = Call::pool_observe;
  if (const Status status = enter(call); !status) return status;
  std::uint64_t id = 0;
  {
    const Lock lock(machine_->mutex);
    const StreamPtr stream = machine_->find_stream(state_, handle, call);
    if (!stream) return fail(call, Code::failed, kDeadHandle);
    if (stream->capture) return captured_away(call, stream, kCaptureUnsupported);
    if (stream->tail) return fail(call, Code::not_ready, kNotReady);
    stream->clock.give_to(machine_->host);
    id = stream->id;
  }
  machine_->memory.pool_observe(id);
  return {};
}

Status SimDevice::pool_trim(PoolHandle pool, Bytes keep) {
  constexpr Call call = Call::pool_trim;
  if (const Status status = enter(call); !status) return status;
  const Timed timed(*this, call);
  return from_memory(call, machine_->memory.pool_trim(pool, keep));
}

}  // namespace streampool::driver::sim
