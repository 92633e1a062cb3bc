// One simulated device: Driver (and more, machine.hpp) over the engine and the memory of its machine.
// The calls are in device_memory.cpp, device_pools.cpp, device_streams.cpp, device_work.cpp. Imports sim/ only.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine.hpp"
#include "machine.hpp"

namespace streampool::driver::sim {

class SimDevice final : public Device {
 public:
  SimDevice(std::shared_ptr<Machine> machine, int ordinal);

  std::string_view name() const override { return name_; }
  int ordinal() const override { return ordinal_; }
  bool simulated() const override { return true; }
  const Capabilities& capabilities() const override { return capabilities_; }
  std::string version() const override { return "simulated"; }
  double now() const override { return machine_->now(); }
  void pause(double seconds) override;

  Status mem_alloc(Kind kind, Bytes size, Address* out) override;
  Status mem_free(Kind kind, Address address) override;
  Status mem_info(Bytes* free_bytes, Bytes* total_bytes) override;
  Status address_reserve(Bytes size, Bytes alignment, Address* out) override;
  Status address_free(Address address, Bytes size) override;
  Status mem_granularity(const MemoryTraits& traits, Bytes* out) override;
  Status mem_create(Bytes size, const MemoryTraits& traits, MemoryHandle* out) override;
  Status mem_release(MemoryHandle handle) override;
  Status mem_map(Address address, Bytes size, MemoryHandle handle) override;
  Status mem_unmap(Address address, Bytes size) override;
  Status mem_set_access(Address address, Bytes size, const MemoryTraits& traits) override;
  Status pool_create(PoolHandle* out) override;
  Status pool_destroy(PoolHandle pool) override;
  Status pool_alloc(PoolHandle pool, StreamHandle stream, Bytes size, Address* out) override;
  Status pool_free(StreamHandle stream, Address address) override;
  Status pool_observe(StreamHandle stream) override;
  Status pool_trim(PoolHandle pool, Bytes keep) override;

  Status stream_is_capturing(StreamHandle stream, CaptureState* out) override;
  Status graph_retain(StreamHandle stream, std::uint64_t capture, void (*ended)(void*), void* object) override;
  Status stream_id(StreamHandle stream, std::uint64_t* out) override;
  Status stream_owner(StreamHandle stream, std::shared_ptr<Driver>* out) override;
  Status stream_create(StreamHandle* out) override { return create_stream(false, {}, out); }
  Status stream_destroy(StreamHandle stream) override;
  Status stream_wait_event(StreamHandle stream, EventHandle event) override;
  Status stream_query(StreamHandle stream) override { return query_stream(stream, false); }
  Status event_create(EventHandle* out) override;
  Status event_destroy(EventHandle event) override;
  Status event_record(EventHandle event, StreamHandle stream) override;
  Status event_query(EventHandle event) override { return query(event, false); }
  Status context_event_record(EventHandle event) override;

  Status fill(StreamHandle stream, Address at, std::uint8_t value, Bytes size) override;
  Status copy(StreamHandle stream, Address to, Address from, Bytes size) override;
  Status pattern_fill(Kind kind, std::span<const Range> ranges, std::uint64_t key) override;
  Status pattern_verify(Kind kind, std::span<const Range> ranges, std::uint64_t key,
                        std::vector<Mismatch>* out) override;

  Status create_stream(bool blocking, std::string name, StreamHandle* out) override;
  Status launch(Work work) override;
  Status stream_synchronize(StreamHandle stream, const Interrupt& interrupt) override;
  Status event_synchronize(EventHandle event, const Interrupt& interrupt) override;
  Status synchronize(const Interrupt& interrupt) override;
  Status poll(EventHandle event) override { return query(event, true); }
  Status poll_stream(StreamHandle stream) override { return query_stream(stream, true); }
  Status begin_capture(StreamHandle stream) override;
  Status end_capture(StreamHandle stream, std::shared_ptr<Graph>* graph) override;
  Status launch_graph(const std::shared_ptr<Graph>& graph, StreamHandle stream) override;
  void host_access(Access access, std::string label, std::uint32_t stack) override;
  void drop_stream(StreamHandle stream) override;
  void drop_event(EventHandle event) override;

  void fail_call(Call call, std::uint64_t n, std::uint64_t times, Code code) override;
  void clear_failures() override;
  void before_call(Call call, std::function<void()> body) override;
  void set_lost(int number) override;
  void set_gone(bool gone) override { state_.gone.store(gone); }
  void set_occupied(Bytes bytes) override { machine_->memory.set_occupied(ordinal_, bytes); }
  std::uint64_t legacy_stream_id() override { return state_.legacy->id; }
  std::uint64_t live_streams() override;
  std::uint64_t live_events() override;
  std::uint64_t pending_work() override;
  Bytes used_memory() override { return machine_->memory.used(ordinal_); }
  std::string fault_text() override;
  std::vector<int> accessors(Address address) override { return machine_->memory.accessors(address); }

 private:
  // Counts the call and says why it cannot be made: gone, lost, inside a queued body, or told to fail.
  Status enter(Call call);
  Status injected(Call call);
  void run_before(Call call);
  Status fail(Call call, Code code, int number) const;
  Status from_memory(Call call, Code code) const;
  Status from_wait(Call call, Waited waited) const;
  Status stream_for_pool(Call call, StreamHandle handle, std::uint64_t* id);
  Status captured_away(Call call, const StreamPtr& stream, int number);

  Status query_stream(StreamHandle stream, bool run_foreign);
  Status query(EventHandle event, bool foreign);
  void destroy_event(EventHandle handle, const std::shared_ptr<Event>& event);
  Status wait_for_all(Call call, const Interrupt& interrupt);
  // Work for a stream, or for the graph that it captures into (then the node is null).
  struct Queued {
    NodePtr node;
    Clock clock;
  };
  Status queue(Call call, Work work, bool foreign, Queued* out);
  // The same, where what counts for the race check is not what must be mapped when the work runs.
  Status queue(Call call, Work work, bool foreign, Queued* out, const std::vector<Access>& touched);
  std::vector<std::pair<Place, bool>> places_of(const std::vector<Access>& accesses) const;
  Status pattern_pass(Call call, std::span<const Range> ranges, bool write, std::uint64_t* ticket, Tick* tick);
  void pattern_done(std::uint64_t ticket, Tick tick);

  const std::shared_ptr<Machine> machine_;
  const int ordinal_;
  DeviceState& state_;
  std::string name_;
  Capabilities capabilities_;
};

}  // namespace streampool::driver::sim
