// The simulated device's queued work: launches, fills, copies, the debugger's pattern. See device.hpp.
#include <sys/uio.h>
#include <unistd.h>

#include <cstring>

#include "device.hpp"
#include "graph.hpp"
#include "host_pointer.hpp"
#include "pattern_loops.hpp"

namespace streampool::driver::sim {
namespace {

// Between pageable host memory, whose addresses nobody vouches for, and a buffer of ours. False: a bad address.
bool host_transfer(Address pageable, std::uint8_t* ours, Bytes size, bool write) {
  while (size > 0) {
    const Bytes some = std::min(size, kGiB);
    const iovec local{ours, some};
    const iovec remote{host_pointer(pageable), some};
    const ssize_t moved = write ? process_vm_writev(getpid(), &local, 1, &remote, 1, 0)
                                : process_vm_readv(getpid(), &local, 1, &remote, 1, 0);
    if (moved < 0 && (errno == ENOSYS || errno == EPERM)) {  // forbidden here: trust the caller
      if (write)
        std::memcpy(host_pointer(pageable), ours, some);
      else
        std::memcpy(ours, host_pointer(pageable), some);
    } else if (moved <= 0) {
      return false;
    }
    const Bytes done = moved > 0 ? static_cast<Bytes>(moved) : some;
    pageable += done;
    ours += done;
    size -= done;
  }
  return true;
}

}  // namespace

std::vector<std::pair<Place, bool>> SimDevice::places_of(const std::vector<Access>& accesses) const {
  std::vector<std::pair<Place, bool>> all;
  if (!machine_->config.check_races) return all;
  std::vector<Place> places;
  for (const Access& access : accesses) {
    places.clear();
    machine_->memory.places(access, &places);
    for (const Place& place : places) all.emplace_back(place, access.write);
  }
  return all;
}

Status SimDevice::queue(Call call, Work work, bool foreign, Queued* out) {
  const std::vector<Access> touched = work.accesses;
  return queue(call, std::move(work), foreign, out, touched);
}

Status SimDevice::queue(Call call, Work work, bool foreign, Queued* out, const std::vector<Access>& touched) {
  const auto places = places_of(touched);
  Trash trash;
  const Lock lock(machine_->mutex);
  const StreamPtr stream = machine_->find_stream(state_, work.stream, call);
  if (!stream) return fail(call, Code::failed, kDeadHandle);
  if (stream->device != &state_) return fail(call, Code::invalid, kInvalidHandle);
  if (stream->legacy && machine_->blocking_capture(state_, true)) {
    return fail(call, Code::capturing, kCaptureImplicit);
  }
  if (const CapturePtr& capture = stream->capture) {
    if (!capture->valid) return fail(call, Code::capturing, kCaptureInvalidated);
    Graph::Piece piece;
    piece.after.assign(stream->captured.begin(), stream->captured.end());
    piece.stream = stream->id;
    piece.number = stream->captured[stream->id] = ++capture->last_work[stream->id];
    piece.device = &state_;
    piece.stream_name = stream->name;
    if (work.body) piece.body = std::make_shared<std::function<void()>>(std::move(work.body));
    piece.foreign = foreign;
    piece.accesses = std::move(work.accesses);
    piece.touched = touched;
    piece.label = std::move(work.label);
    piece.stack = work.stack;
    piece.gate = std::move(work.gate);
    capture->graph->pieces.push_back(std::move(piece));
    return {};
  }
  const NodePtr node = machine_->new_node(state_, stream);
  node->task = true;
  node->foreign = foreign;
  node->body = std::move(work.body);
  node->accesses = std::move(work.accesses);
  node->label = work.label;
  machine_->enqueue(node);
  machine_->touch(*stream, places, work.label, work.stack);
  if (work.gate) machine_->hold_at_gate(node, std::move(work.gate));
  if (out != nullptr) *out = {node, stream->clock};
  machine_->start(node, trash);
  return {};
}

Status SimDevice::launch(Work work) {
  if (const Status status = enter(Call::launch); !status) return status;
  const bool foreign = static_cast<bool>(work.body);
  return queue(Call::launch, std::move(work), foreign, nullptr);
}

Status SimDevice::fill(StreamHandle stream, Address at, std::uint8_t value, Bytes size) {
  if (const Status status = enter(Call::fill); !status) return status;
  if (size == 0) return {};
  Work work{.stream = stream, .label = "fill"};
  work.body = [=] { std::memset(host_pointer(at), value, size); };
  work.accesses = {writes(at, size)};
  return queue(Call::fill, std::move(work), false, nullptr);
}

// Pageable host memory is read before the call returns and written before it returns, as the driver does it.
Status SimDevice::copy(StreamHandle stream, Address to, Address from, Bytes size) {
  constexpr Call call = Call::copy;
  if (const Status status = enter(call); !status) return status;
  if (size == 0) return {};
  const bool to_ours = machine_->memory.known(to);
  const bool from_ours = machine_->memory.known(from);
  Work work{.stream = stream, .label = "copy"};
  if (to_ours && from_ours) {
    work.body = [=] { std::memmove(host_pointer(to), host_pointer(from), size); };
    work.accesses = {reads(from, size), writes(to, size)};
    return queue(call, std::move(work), false, nullptr);
  }
  const auto staging = std::make_shared<std::vector<std::uint8_t>>(size);
  if (!from_ours && !host_transfer(from, staging->data(), size, false)) return fail(call, Code::invalid, kInvalidValue);
  if (to_ours) {
    work.body = [=] { std::memcpy(host_pointer(to), staging->data(), size); };
    work.accesses = {writes(to, size)};
    return queue(call, std::move(work), false, nullptr);
  }
  if (from_ours) {
    work.body = [=] { std::memcpy(staging->data(), host_pointer(from), size); };
    work.accesses = {reads(from, size)};
  }
  Queued queued;
  if (const Status status = queue(call, std::move(work), false, &queued); !status) return status;
  if (!queued.node) return {};  // captured
  {
    Lock lock(machine_->mutex);
    const Waited waited = machine_->wait(lock, &state_, {}, [&] { return queued.node->done; });
    if (waited != Waited::done) return from_wait(call, waited);
    queued.clock.give_to(machine_->host);
  }
  return host_transfer(to, staging->data(), size, true) ? Status{} : fail(call, Code::invalid, kInvalidValue);
}

void SimDevice::host_access(Access access, std::string label, std::uint32_t stack) {
  if (ending() != Ending::no || machine_->dead() || access.size == 0) return;
  const auto places = places_of({access});
  const Lock lock(machine_->mutex);
  const Tick tick = machine_->touch_private(state_, places, label.empty() ? "host" : label, stack, false);
  machine_->host.raise(state_.private_slot, tick);
}

// The pattern runs at once, on the caller's thread: its private stream waits for nobody. For the race check it is work
// that comes after what the host has seen done, and that the host sees done when the call returns.
Status SimDevice::pattern_pass(Call call, std::span<const Range> ranges, bool write, std::uint64_t* ticket,
                               Tick* tick) {
  if (const Status status = enter(call); !status) return status;
  std::vector<Access> accesses;
  accesses.reserve(ranges.size());
  for (const Range& range : ranges)
    if (range.size != 0) accesses.push_back({range.begin, range.size, write});
  const auto places = places_of(accesses);
  {
    const Lock lock(machine_->mutex);
    *tick = machine_->touch_private(state_, places, "streampool pattern", 0, true);
  }
  if (const Access* bad = machine_->memory.enter(accesses, ticket)) {
    Trash trash;
    const Lock lock(machine_->mutex);
    machine_->fault(state_, kIllegalAddress,
                    "the pattern reached " + std::to_string(bad->size) + " bytes at " + std::to_string(bad->begin) +
                        ", which are not mapped",
                    trash);
    return fail(call, Code::lost, kIllegalAddress);
  }
  return {};
}

void SimDevice::pattern_done(std::uint64_t ticket, Tick tick) {
  machine_->memory.leave(ticket);
  const Lock lock(machine_->mutex);
  machine_->host.raise(state_.private_slot, tick);
}

Status SimDevice::pattern_fill(Kind /*kind*/, std::span<const Range> ranges, std::uint64_t key) {
  std::uint64_t ticket = 0;
  Tick tick = 0;
  if (const Status status = pattern_pass(Call::pattern_fill, ranges, true, &ticket, &tick); !status) return status;
  for (const Range& range : ranges) write_pattern(range, key);
  pattern_done(ticket, tick);
  return {};
}

Status SimDevice::pattern_verify(Kind /*kind*/, std::span<const Range> ranges, std::uint64_t key,
                                 std::vector<Mismatch>* out) {
  std::uint64_t ticket = 0;
  Tick tick = 0;
  if (const Status status = pattern_pass(Call::pattern_verify, ranges, false, &ticket, &tick); !status) return status;
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    Mismatch found;
    found.range = static_cast<std::uint32_t>(i);
    if (!check_pattern(ranges[i], key, &found)) out->push_back(found);
  }
  pattern_done(ticket, tick);
  return {};
}

}  // namespace streampool::driver::sim
