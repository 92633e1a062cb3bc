// See engine.hpp: streams, queueing, and the happens-before clocks. Running is in scheduler.cpp.
#include "engine.hpp"

#include <cstdio>
#include <cstdlib>

namespace streampool::driver::sim {
namespace {

constexpr std::size_t kTrapCap = 1000;         // texts kept until somebody takes them
constexpr std::size_t kPerThreadPruneAt = 32;  // per-thread streams before those of ended threads are looked for

// Serial numbers of host threads, and which of them still run. Left alone at exit: threads end after static objects.
struct Threads {
  std::mutex mutex;
  std::uint64_t next = 1;
  std::unordered_set<std::uint64_t> alive;
};
Threads& threads() {
  static Threads* const all = new Threads;  // never destroyed
  return *all;
}
struct ThreadSerial {
  std::uint64_t value = 0;
  ThreadSerial() {
    const std::lock_guard lock(threads().mutex);
    value = threads().next++;
    threads().alive.insert(value);
  }
  ThreadSerial(const ThreadSerial&) = delete;
  ThreadSerial& operator=(const ThreadSerial&) = delete;
  ~ThreadSerial() {
    const std::lock_guard lock(threads().mutex);
    threads().alive.erase(value);
  }
};
std::uint64_t thread_serial() {
  thread_local const ThreadSerial serial;
  return serial.value;
}
bool thread_alive(std::uint64_t serial) {
  const std::lock_guard lock(threads().mutex);
  return threads().alive.contains(serial);
}

std::string hex(std::uintptr_t value) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%zx", static_cast<std::size_t>(value));
  return text;
}

}  // namespace

Machine::Machine(const Config& configuration)
    : config(configuration),
      memory(configuration.devices, configuration.memory, configuration.host_memory),
      random_(configuration.seed) {
  ticks_.resize(1, 0);
  for (int i = 0; i < config.devices; ++i) {
    auto device = std::make_unique<DeviceState>();
    device->ordinal = i;
    auto legacy = std::make_shared<Stream>();
    legacy->id = next_stream_id_++;
    legacy->handle = kLegacyStream;
    legacy->device = device.get();
    legacy->legacy = true;
    legacy->name = "legacy default stream";
    legacy->slot = take_slot();
    device->legacy = legacy;
    device->private_slot = take_slot();
    device->streams.emplace(legacy->id, std::move(legacy));
    devices.push_back(std::move(device));
  }
}

void Machine::trap(const std::string& text) {
  if (config.abort_on_trap) {
    std::fprintf(stderr, "streampool simulated device: %s\n", text.c_str());
    std::abort();
  }
  if (traps_.size() < kTrapCap) traps_.push_back(text);
}

std::vector<std::string> Machine::take_traps() { return std::exchange(traps_, {}); }

StreamPtr Machine::find_stream(DeviceState& device, StreamHandle handle, Call call) {
  if (is_legacy(handle)) return device.legacy;
  if (handle == kPerThreadStream) {
    const std::uint64_t thread = thread_serial();
    if (const auto found = device.per_thread.find(thread); found != device.per_thread.end()) return found->second;
    if (device.per_thread.size() >= kPerThreadPruneAt) prune_per_thread(device);
    StreamPtr stream = make_stream(device, true, "per-thread default stream of thread " + std::to_string(thread));
    stream->handle = kPerThreadStream;
    stream->thread = thread;
    device.per_thread.emplace(thread, stream);
    return stream;
  }
  if (const StreamPtr* found = streams.find(handle)) return *found;
  trap(std::string(kCallNames[static_cast<std::size_t>(call)]) + ": stream handle " + hex(handle) +
       " is dead or was never created");
  return nullptr;
}

std::shared_ptr<Event> Machine::find_event(EventHandle handle, Call call) {
  if (const auto* found = events.find(handle)) return *found;
  trap(std::string(kCallNames[static_cast<std::size_t>(call)]) + ": event handle " + hex(handle) +
       " is dead or was never created");
  return nullptr;
}

StreamPtr Machine::make_stream(DeviceState& device, bool blocking, std::string name) {
  auto stream = std::make_shared<Stream>();
  stream->id = next_stream_id_++;
  stream->device = &device;
  stream->blocking = blocking;
  stream->name = name.empty() ? "stream " + std::to_string(stream->id) : std::move(name);
  stream->slot = take_slot();
  device.streams.emplace(stream->id, stream);
  return stream;
}

void Machine::destroy_stream(StreamHandle handle, const StreamPtr& stream, Trash& trash) {
  if (stream->capture) {
    invalidate(stream->capture);
    if (stream->capture->origin.lock() == stream) end_capture(stream->capture, trash);
  }
  streams.remove(handle);
  --stream->device->live_streams;
  end_inner(stream);
}

void Machine::end_inner(const StreamPtr& stream) {
  stream->destroyed = true;
  if (!stream->tail) retire_stream(*stream);
}

void Machine::retire_stream(Stream& stream) {
  DeviceState& device = *stream.device;
  device.retired.join(stream.clock, host);
  if (stream.blocking) device.retired_blocking.join(stream.clock, host);
  retiring_.emplace_back(stream.slot, ticks_[stream.slot]);
  device.streams.erase(stream.id);
}

void Machine::prune_per_thread(DeviceState& device) {
  for (auto one = device.per_thread.begin(); one != device.per_thread.end();) {
    if (thread_alive(one->first)) {
      ++one;
      continue;
    }
    const StreamPtr stream = one->second;
    one = device.per_thread.erase(one);
    stream->destroyed = true;
    if (!stream->tail) retire_stream(*stream);
  }
}

// A slot may be given to another stream once the host's clock covers all that its former stream did.
Slot Machine::take_slot() {
  constexpr std::size_t kLookAt = 16;
  for (std::size_t i = 0; i < std::min(kLookAt, retiring_.size()); ++i) {
    const auto [slot, tick] = retiring_[i];
    const bool covered = tick <= host.at(slot);
    std::swap(retiring_[i], retiring_.back());
    if (!covered) continue;  // another one comes to its place for the next time
    retiring_.pop_back();
    return slot;
  }
  ticks_.push_back(0);
  return next_slot_++;
}

NodePtr Machine::new_node(DeviceState& device, const StreamPtr& stream) {
  auto node = std::make_shared<Node>();
  node->device = &device;
  node->stream = stream;
  node->blockers = 1;  // until start()
  if (stream) ++device.pending;
  return node;
}

void Machine::depend(const NodePtr& node, const NodePtr& on) {
  if (!on || on->done) return;
  on->dependents.push_back(node);
  ++node->blockers;
}

void Machine::enqueue(const NodePtr& node) {
  Stream& stream = *node->stream;
  DeviceState& device = *node->device;
  depend(node, stream.tail);
  if (stream.legacy) {
    for (const auto& entry : device.streams) {
      if (!entry.second->blocking) continue;
      depend(node, entry.second->tail);
      stream.clock.join(entry.second->clock, host);
    }
    stream.clock.join(device.retired_blocking, host);
  } else if (stream.blocking) {
    depend(node, device.legacy->tail);
    stream.clock.join(device.legacy->clock, host);
  }
  stream.tail = node;
}

void Machine::order_after_all(const NodePtr& node, DeviceState& device, Clock* clock, bool blocking_only) {
  for (const auto& entry : device.streams) {
    const Stream& stream = *entry.second;
    if (blocking_only && !stream.blocking && !stream.legacy) continue;
    depend(node, stream.tail);
    clock->join(stream.clock, host);
  }
  clock->join(blocking_only ? device.retired_blocking : device.retired, host);
}

void Machine::touch(Stream& stream, const std::vector<std::pair<Place, bool>>& places, const std::string& label,
                    std::uint32_t stack) {
  if (!config.check_races || places.empty()) return;
  const Tick tick = ++ticks_[stream.slot];
  stream.clock.prune(host);
  stream.clock.raise(stream.slot, tick);
  auto site = std::make_shared<Site>(Site{label, stream.id, stream.name, stack});
  for (const auto& [place, write] : places)
    history.access(stream.device->ordinal, place, write, stream.slot, tick, site, stream.clock, host, true);
  history.maybe_sweep(host);
}

Tick Machine::touch_private(DeviceState& device, const std::vector<std::pair<Place, bool>>& places,
                            const std::string& label, std::uint32_t stack, bool remember) {
  const Tick tick = ++ticks_[device.private_slot];
  if (!config.check_races) return tick;
  const Clock nothing_but_the_host;
  auto site = std::make_shared<Site>(Site{label, 0, "host", stack});
  for (const auto& [place, write] : places)
    history.access(device.ordinal, place, write, device.private_slot, tick, site, nothing_but_the_host, host, remember);
  history.maybe_sweep(host);
  return tick;
}

bool Machine::blocking_capture(const DeviceState& device, bool kill) {
  bool found = false;
  for (const auto& entry : device.streams) {
    const Stream& stream = *entry.second;
    if (!stream.blocking || !stream.capture || !stream.capture->valid) continue;
    found = true;
    if (kill) invalidate(stream.capture);
  }
  return found;
}

bool Machine::kill_captures(const DeviceState& device) {
  bool found = false;
  for (const auto& entry : device.streams) {
    const Stream& stream = *entry.second;
    if (!stream.capture || !stream.capture->valid) continue;
    found = true;
    invalidate(stream.capture);
  }
  return found;
}

void Machine::join_capture(const StreamPtr& stream, const CapturePtr& capture) {
  if (stream->capture == capture) return;
  stream->capture = capture;
  stream->captured.clear();
  capture->members.push_back(stream);
}

void Machine::end_capture(const CapturePtr& capture, Trash& trash) {
  // Whose work and objects are callers' own.
  trash.push_back([graph = std::exchange(capture->graph, nullptr)] {});
  for (const auto& member : capture->members) {
    const StreamPtr stream = member.lock();
    if (!stream || stream->capture != capture) continue;
    stream->capture = nullptr;
    stream->captured.clear();
  }
}

}  // namespace streampool::driver::sim
