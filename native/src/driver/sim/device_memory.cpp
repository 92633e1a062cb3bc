// The simulated device's calls for memory, and what all calls begin with. See device.hpp.
#include <algorithm>

#include "device.hpp"

namespace streampool::driver::sim {

SimDevice::SimDevice(std::shared_ptr<Machine> machine, int ordinal)
    : machine_(std::move(machine)),
      ordinal_(ordinal),
      state_(*machine_->devices[static_cast<std::size_t>(ordinal)]),
      name_("sim:" + std::to_string(ordinal)) {
  const Config& config = machine_->config;
  capabilities_.virtual_memory = config.virtual_memory;
  capabilities_.managed_memory = config.managed_memory;
  capabilities_.context_events = config.context_events;
  capabilities_.device_memory_on_host = true;
  capabilities_.driver_pools = config.driver_pools;
  capabilities_.export_posix_fd = capabilities_.rdma = config.virtual_memory;  // and no fabric
  for (int other = 0; config.virtual_memory && other < config.devices; ++other)
    if (other != ordinal) capabilities_.peers.push_back(other);
  capabilities_.granularity = kPage;
  capabilities_.total_memory = config.memory;
  // Addresses are scarce here (1 TiB a process), and pools are many in tests.
  capabilities_.address_chunk = std::min<Bytes>(round_up(config.memory, kPage), kGiB);
}

Status SimDevice::fail(Call call, Code code, int number) const {
  return {code, number, kCallNames[static_cast<std::size_t>(call)]};
}

Status SimDevice::enter(Call call) {
  if (ending() != Ending::no) return fail(call, Code::gone, kDeinitialized);
  count(call);
  if (Machine::in_body()) {
    const Lock lock(machine_->mutex);
    machine_->trap(std::string(kCallNames[static_cast<std::size_t>(call)]) + ": called from inside a queued body");
    return fail(call, Code::failed, kNotPermitted);
  }
  if (state_.has_before.load(std::memory_order_relaxed)) run_before(call);
  if (state_.gone.load()) return fail(call, Code::gone, kDeinitialized);
  if (machine_->dead()) return fail(call, Code::lost, kContextDestroyed);
  if (const int number = state_.lost.load(); number != 0) return fail(call, Code::lost, number);
  if (state_.has_rules.load(std::memory_order_relaxed)) return injected(call);
  return {};
}

Status SimDevice::injected(Call call) {
  Trash trash;
  const Lock lock(machine_->mutex);
  for (auto rule = state_.rules.begin(); rule != state_.rules.end(); ++rule) {
    if (rule->call != call) continue;
    if (rule->skip > 0) {
      --rule->skip;
      return {};  // rules of one call follow each other
    }
    const Code code = rule->code;
    if (--rule->times == 0) state_.rules.erase(rule);
    state_.has_rules.store(!state_.rules.empty());
    switch (code) {
      case Code::ok: return {};
      case Code::not_ready: return fail(call, code, kNotReady);
      case Code::out_of_memory: return fail(call, code, kOutOfMemory);
      case Code::capturing: return fail(call, code, kCaptureUnsupported);
      case Code::not_supported: return fail(call, code, kNotSupported);
      case Code::invalid: return fail(call, code, kInvalidValue);
      case Code::lost:
        machine_->fault(state_, kIllegalAddress, "told to fail", trash);
        return fail(call, code, kIllegalAddress);
      case Code::gone: return fail(call, code, kDeinitialized);
      case Code::failed: return fail(call, code, kUnknown);
    }
  }
  return {};
}

void SimDevice::fail_call(Call call, std::uint64_t n, std::uint64_t times, Code code) {
  if (n == 0 || times == 0) return;
  const Lock lock(machine_->mutex);
  state_.rules.push_back({call, n - 1, times, code});
  state_.has_rules.store(true);
}

void SimDevice::clear_failures() {
  const Lock lock(machine_->mutex);
  state_.rules.clear();
  state_.has_rules.store(false);
}

void SimDevice::before_call(Call call, std::function<void()> body) {
  const Lock lock(machine_->mutex);
  state_.before.emplace_back(call, std::move(body));
  state_.has_before.store(true);
}

void SimDevice::run_before(Call call) {
  std::function<void()> body;
  {
    const Lock lock(machine_->mutex);
    const auto next =
        std::find_if(state_.before.begin(), state_.before.end(), [call](const auto& one) { return one.first == call; });
    if (next == state_.before.end()) return;
    body = std::move(next->second);
    state_.before.erase(next);
    state_.has_before.store(!state_.before.empty());
  }
  body();
}

void SimDevice::set_lost(int number) {
  Trash trash;
  const Lock lock(machine_->mutex);
  machine_->fault(state_, number, "declared lost", trash);
}

std::string SimDevice::fault_text() {
  const Lock lock(machine_->mutex);
  return state_.fault;
}

Status SimDevice::from_memory(Call call, Code code) const {
  switch (code) {
    case Code::ok: return {};
    case Code::out_of_memory: return fail(call, code, kOutOfMemory);
    case Code::not_supported: return fail(call, code, kNotSupported);
    case Code::lost: return fail(call, code, kContextDestroyed);
    case Code::failed: return fail(call, code, kUnknown);
    default: return fail(call, Code::invalid, kInvalidValue);
  }
}

void SimDevice::pause(double seconds) {
  if (ending() != Ending::no || machine_->dead()) return;
  Lock lock(machine_->mutex);
  machine_->sleep(lock, seconds);
}

Status SimDevice::mem_alloc(Kind kind, Bytes size, Address* out) {
  const Call call = kind == Kind::device   ? Call::mem_alloc
                    : kind == Kind::pinned ? Call::mem_alloc_host
                                           : Call::mem_alloc_managed;
  if (const Status status = enter(call); !status) return status;
  const Timed timed(*this, call);
  if (kind == Kind::managed && !capabilities_.managed_memory) return fail(call, Code::not_supported, kNotSupported);
  return from_memory(call, machine_->memory.alloc(ordinal_, kind, size, out));
}

Status SimDevice::mem_free(Kind kind, Address address) {
  const Call call = kind == Kind::device   ? Call::mem_free
                    : kind == Kind::pinned ? Call::mem_free_host
                                           : Call::mem_free_managed;
  if (const Status status = enter(call); !status) return status;
  const Timed timed(*this, call);
  if (!machine_->memory.owns(kind, address)) return fail(call, Code::invalid, kInvalidValue);
  // As on hardware: these frees wait for all of the device's work.
  if (const Status status = wait_for_all(call, {}); !status) return status;
  bool in_use = false;
  const Status status = from_memory(call, machine_->memory.free(kind, address, &in_use));
  if (in_use) {
    Trash trash;
    const Lock lock(machine_->mutex);
    machine_->fault(state_, kIllegalAddress, "memory was freed under running work", trash);
  }
  return status;
}

Status SimDevice::mem_info(Bytes* free_bytes, Bytes* total_bytes) {
  if (const Status status = enter(Call::mem_info); !status) return status;
  machine_->memory.info(ordinal_, free_bytes, total_bytes);
  return {};
}

Status SimDevice::address_reserve(Bytes size, Bytes alignment, Address* out) {
  constexpr Call call = Call::address_reserve;
  if (const Status status = enter(call); !status) return status;
  if (!capabilities_.virtual_memory) return fail(call, Code::not_supported, kNotSupported);
  return from_memory(call, machine_->memory.reserve(size, alignment, out));
}

Status SimDevice::address_free(Address address, Bytes size) {
  constexpr Call call = Call::address_free;
  if (const Status status = enter(call); !status) return status;
  return from_memory(call, machine_->memory.unreserve(address, size));
}

Status SimDevice::mem_granularity(const MemoryTraits& traits, Bytes* out) {
  constexpr Call call = Call::mem_granularity;
  if (const Status status = enter(call); !status) return status;
  const std::vector<int>& peers = capabilities_.peers;
  const bool able = capabilities_.virtual_memory && traits.exported != Export::fabric &&
                    std::all_of(traits.peers.begin(), traits.peers.end(),
                                [&](int peer) { return std::find(peers.begin(), peers.end(), peer) != peers.end(); });
  if (!able) return fail(call, Code::not_supported, kNotSupported);
  *out = kPage;
  return {};
}

Status SimDevice::mem_create(Bytes size, const MemoryTraits& traits, MemoryHandle* out) {
  constexpr Call call = Call::mem_create;
  if (const Status status = enter(call); !status) return status;
  const Timed timed(*this, call);
  if (!capabilities_.virtual_memory || traits.exported == Export::fabric)
    return fail(call, Code::not_supported, kNotSupported);
  return from_memory(call, machine_->memory.create(ordinal_, size, out));
}

Status SimDevice::mem_release(MemoryHandle handle) {
  constexpr Call call = Call::mem_release;
  if (const Status status = enter(call); !status) return status;
  const Timed timed(*this, call);
  return from_memory(call, machine_->memory.release(handle));
}

Status SimDevice::mem_map(Address address, Bytes size, MemoryHandle handle) {
  constexpr Call call = Call::mem_map;
  if (const Status status = enter(call); !status) return status;
  const Timed timed(*this, call);
  return from_memory(call, machine_->memory.map(address, size, handle));
}

Status SimDevice::mem_unmap(Address address, Bytes size) {
  constexpr Call call = Call::mem_unmap;
  if (const Status status = enter(call); !status) return status;
  const Timed timed(*this, call);
  bool in_use = false;
  const Status status = from_memory(call, machine_->memory.unmap(address, size, &in_use));
  if (in_use) {
    Trash trash;
    const Lock lock(machine_->mutex);
    machine_->fault(state_, kIllegalAddress, "memory was unmapped under running work", trash);
  }
  return status;
}

Status SimDevice::mem_set_access(Address address, Bytes size, const MemoryTraits& traits) {
  constexpr Call call = Call::mem_set_access;
  if (const Status status = enter(call); !status) return status;
  const Timed timed(*this, call);
  std::vector<int> devices{ordinal_};
  devices.insert(devices.end(), traits.peers.begin(), traits.peers.end());
  return from_memory(call, machine_->memory.set_access(address, size, std::move(devices)));
}

}  // namespace streampool::driver::sim
