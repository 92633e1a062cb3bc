// driver.hpp for one CUDA device. Imports patterns.hpp and library.hpp.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "../driver.hpp"
#include "library.hpp"
#include "patterns.hpp"
#include "session.hpp"

namespace streampool::driver::cuda {

// Made by open(), which keeps it for the process's life: giving the primary context up could tear down a world that the
// user's own streams live in. So there is nothing to do when it is destroyed, which happens only after it was lost.
class CudaDriver final : public Driver {
 public:
  // Retains the primary context and loads the kernels, if asked to. Null with a sentence when that fails.
  static std::shared_ptr<CudaDriver> create(const Library& library, int ordinal, bool kernels, OpenError* kind,
                                            std::string* error);
  // For a driver that was made without them. Loading waits for work that is under way on the device.
  bool load_kernels(OpenError* kind, std::string* error);

  // A device fault, a reset or the driver's end: no call can succeed any more.
  bool lost() const { return session_.dead.load(std::memory_order_relaxed) != 0; }

  std::string_view name() const override { return name_; }
  int ordinal() const override { return ordinal_; }
  bool simulated() const override { return false; }
  const Capabilities& capabilities() const override { return capabilities_; }
  std::string version() const override { return version_; }
  double now() const override;
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
  Status stream_identity(StreamHandle stream, CaptureState* capture, std::uint64_t* id) override;
  Status stream_owner(StreamHandle stream, std::shared_ptr<Driver>* out) override;
  Status stream_create(StreamHandle* out) override;
  Status stream_destroy(StreamHandle stream) override;
  Status stream_wait_event(StreamHandle stream, EventHandle event) override;

  Status event_create(EventHandle* out) override;
  Status event_destroy(EventHandle event) override;
  Status event_record(EventHandle event, StreamHandle stream) override;
  Status stream_query(StreamHandle stream) override;
  Status event_query(EventHandle event) override;
  Status context_event_record(EventHandle event) override;

  Status fill(StreamHandle stream, Address at, std::uint8_t value, Bytes size) override;
  Status copy(StreamHandle stream, Address to, Address from, Bytes size) override;

  Status pattern_fill(Kind kind, std::span<const Range> ranges, std::uint64_t key) override;
  Status pattern_verify(Kind kind, std::span<const Range> ranges, std::uint64_t key,
                        std::vector<Mismatch>* out) override;
  void pattern_start(PatternJob* job) override;
  bool pattern_finish(PatternJob* job, bool wait) override;

 private:
  CudaDriver(const Library& library, int ordinal);

  // Runs `body(api)` in a Scope, counted as `which`. Where this device lacks it, `able` is false and nothing is called.
  template <typename Body>
  Status run(Call which, bool able, Body&& body);

  MemAllocationProp allocation(const MemoryTraits& traits) const;
  void find_traits();

  const Library& library_;
  const int ordinal_;
  const std::string name_;
  std::string version_;
  Capabilities capabilities_;
  Session session_;
  Patterns patterns_;
  std::mutex loading_;
  bool loaded_ = false;
};

}  // namespace streampool::driver::cuda
