// The seam: everything the pool needs of a device, and nothing else. `cuda/` and `sim/` implement it, and nobody above
// this folder knows which one it talks to. Imports base/ only.
//
// Rules every implementation keeps:
//  * Each call makes its own context current and restores the caller's (also on error), and runs in relaxed capture
//  mode.
//  * No call keeps an error for a later one: after a call returned, the driver's "last error" is what it was before.
//  * No call blocks for the device's work unless its comment says so.
//  * No call throws; no call takes the GIL.
//  * Once the driver is going down (exit, `gone`) every call returns Code::gone without touching the driver.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "../base/types.hpp"
#include "call_times.hpp"
#include "captures.hpp"

namespace streampool::driver {

using StreamHandle = std::uintptr_t;  // CUstream
using EventHandle = std::uintptr_t;   // CUevent
using MemoryHandle = std::uint64_t;   // CUmemGenericAllocationHandle
using PoolHandle = std::uintptr_t;    // CUmemoryPool

// The handles with a fixed meaning. 0 and 1 both name the legacy default stream of the device.
inline constexpr StreamHandle kDefaultStream = 0;
inline constexpr StreamHandle kLegacyStream = 1;
inline constexpr StreamHandle kPerThreadStream = 2;
constexpr bool is_legacy(StreamHandle s) { return s == kDefaultStream || s == kLegacyStream; }

// What a caller may do about it, not which number the driver gave (that is in Status::number).
enum class Code : std::uint8_t {
  ok,
  not_ready,      // a query: the work is not done yet
  out_of_memory,  // the driver refused memory (or mappings, or address space)
  capturing,      // 900, 905, 906, 907 and kin: a capture is in the way; means "not done", nothing happened
  not_supported,  // this driver or device lacks it
  invalid,        // bad argument or handle
  lost,           // sticky: a device fault or a context reset, every later call fails too
  gone,           // the driver is being torn down, or the process was forked
  failed          // anything else
};

std::string_view code_name(Code code);

struct Status {
  Code code = Code::ok;
  int number = 0;              // the driver's own error number (CUresult), 0 for ok
  const char* call = nullptr;  // which call failed: a name of kCallNames

  constexpr bool ok() const { return code == Code::ok; }
  constexpr explicit operator bool() const { return ok(); }
};

// Which call failed, with the driver's name and text for its error: "mem_create: CUDA_ERROR_OUT_OF_MEMORY (2): out of
// memory".
std::string describe(const Status& status);

// One row a call: the names under which calls are counted (`calls()`) and made to fail (`fail_call`).
// clang-format off
#define STREAMPOOL_DRIVER_CALLS(X) \
  X(mem_alloc) X(mem_free) X(mem_alloc_host) X(mem_free_host) X(mem_alloc_managed) X(mem_free_managed) \
  X(mem_info) X(address_reserve) X(address_free) X(mem_create) X(mem_release) X(mem_map) X(mem_unmap) \
  X(mem_granularity) X(mem_set_access) X(pool_create) X(pool_destroy) X(pool_alloc) X(pool_free) X(pool_observe) X(pool_trim) \
  X(stream_is_capturing) X(graph_retain) X(stream_id) X(stream_owner) X(stream_create) X(stream_destroy) \
  X(stream_wait_event) X(stream_query) X(stream_synchronize) X(event_create) X(event_destroy) X(event_record) \
  X(event_query) X(event_synchronize) X(context_event_record) X(fill) X(copy) X(pattern_fill) \
  X(pattern_verify) X(pattern_finish) X(launch) X(stream_begin_capture) X(stream_end_capture) X(graph_launch)
// clang-format on

enum class Call : std::uint8_t {
#define STREAMPOOL_ROW(name) name,
  STREAMPOOL_DRIVER_CALLS(STREAMPOOL_ROW)
#undef STREAMPOOL_ROW
      count_
};
inline constexpr std::size_t kCallCount = static_cast<std::size_t>(Call::count_);
inline constexpr std::array<const char*, kCallCount> kCallNames = {
#define STREAMPOOL_ROW(name) #name,
    STREAMPOOL_DRIVER_CALLS(STREAMPOOL_ROW)
#undef STREAMPOOL_ROW
};

// What sort of memory work a call is; count_: none.
constexpr MemoryWork memory_work(Call call) {
  switch (call) {
    case Call::mem_alloc:
    case Call::mem_alloc_host:
    case Call::mem_alloc_managed:
    case Call::mem_create:
    case Call::pool_alloc: return MemoryWork::alloc;
    case Call::mem_map:
    case Call::mem_set_access: return MemoryWork::map;
    case Call::mem_unmap: return MemoryWork::unmap;
    case Call::mem_free:
    case Call::mem_free_host:
    case Call::mem_free_managed:
    case Call::mem_release:
    case Call::pool_free:
    case Call::pool_trim: return MemoryWork::free;
    default: return MemoryWork::count_;
  }
}

struct Capabilities {
  bool virtual_memory = false;  // address_reserve, mem_create, mem_map, …
  bool managed_memory = false;
  bool context_events = false;         // context_event_record (CUDA 12.5 and newer)
  bool device_memory_on_host = false;  // the simulated device: NumPy may view device memory
  bool driver_pools = false;           // pool_create, pool_alloc, …
  bool export_posix_fd = false;        // MemoryTraits that virtual memory can have
  bool export_fabric = false;
  bool rdma = false;
  std::vector<int> peers{};      // devices that can be given access to this one's memory, by ordinal
  Bytes granularity = 2 * kMiB;  // of virtual memory
  Bytes total_memory = 0;        // of the device
  Bytes address_chunk = 0;       // how much address space to reserve in one piece, when it can be had
};

// How the handles of virtual memory may be given to other processes.
enum class Export : std::uint8_t { none, posix_fd, fabric };

// What virtual memory is made with, fixed for its life.
struct MemoryTraits {
  Export exported = Export::none;
  bool rdma = false;         // network cards may reach it (GPUDirect RDMA)
  std::vector<int> peers{};  // other devices that may reach it, by ordinal

  bool plain() const { return exported == Export::none && !rdma && peers.empty(); }
};

struct CaptureState {
  bool capturing = false;
  std::uint64_t id = 0;  // the capture's id, where the driver gives it
};

// A run of bytes to fill or to check with the pattern of pattern.hpp.
struct Range {
  Address begin = 0;
  Bytes size = 0;
};

// The first and the last byte of a Range that do not hold the pattern, and the bytes found from `first` on.
struct Mismatch {
  std::uint32_t range = 0;  // index into the ranges given
  Address first = 0;
  Address last = 0;
  Bytes count = 0;  // how many bytes differ
  std::uint8_t sample_size = 0;
  std::array<std::uint8_t, 64> sample{};
};

// One batch of the debugger's work, done in this order: ranges are verified, then others are filled. Lives, at one
// place, from its start until it is finished; what is in it belongs to the driver meanwhile.
struct PatternJob {
  Kind kind = Kind::device;
  std::uint64_t key = 0;
  std::vector<Range> verify{};
  std::vector<Range> fill{};
  // What came of it, once it is finished.
  Status status{};
  bool verified = false;  // `found` says everything about `verify`; a failure came after it
  std::vector<Mismatch> found{};
  std::uint32_t ticket = 0;  // the driver's own
};

// One device and its context. Thread-safe. Kept alive by everyone who may still call it, native holders without
// Python's help (shared_from_this), so that the last one may be any thread.
class Driver : public std::enable_shared_from_this<Driver> {
 public:
  virtual ~Driver() = default;

  virtual std::string_view name() const = 0;  // "cuda:0", "sim:0"
  virtual int ordinal() const = 0;
  virtual bool simulated() const = 0;
  virtual const Capabilities& capabilities() const = 0;
  virtual std::string version() const = 0;  // "CUDA 13.0, driver 580.159", "simulated"

  // Seconds since some start, on the clock that ages, epochs and time-outs are measured with.
  virtual double now() const = 0;
  // Let time pass while waiting for the device: sleeps, or runs simulated work. Holds no lock, touches no stream.
  virtual void pause(double seconds) = 0;

  // Memory in one piece. Freeing any of it may block until all of the device's work is done.
  virtual Status mem_alloc(Kind kind, Bytes size, Address* out) = 0;
  virtual Status mem_free(Kind kind, Address address) = 0;
  virtual Status mem_info(Bytes* free_bytes, Bytes* total_bytes) = 0;

  // Virtual memory. A handle is mapped and unmapped only whole. None of these waits for work.
  virtual Status address_reserve(Bytes size, Bytes alignment, Address* out) = 0;
  virtual Status address_free(Address address, Bytes size) = 0;
  // What memory with these traits is made in multiples of; not_supported where this device cannot make it.
  virtual Status mem_granularity(const MemoryTraits& traits, Bytes* out) = 0;
  virtual Status mem_create(Bytes size, const MemoryTraits& traits, MemoryHandle* out) = 0;
  Status mem_create(Bytes size, MemoryHandle* out) { return mem_create(size, MemoryTraits{}, out); }
  virtual Status mem_release(MemoryHandle handle) = 0;
  virtual Status mem_map(Address address, Bytes size, MemoryHandle handle) = 0;
  virtual Status mem_unmap(Address address, Bytes size) = 0;
  // Read and write, by this device and the traits' peers.
  virtual Status mem_set_access(Address address, Bytes size, const MemoryTraits& traits) = 0;
  Status mem_set_access(Address address, Bytes size) { return mem_set_access(address, size, MemoryTraits{}); }

  // A pool of the driver's own. Its allocations and frees take place in the order of a stream: memory may be touched by
  // what comes after its allocation and before its free there. What is freed stays in the pool until a trim. No call
  // waits. A destroyed pool goes when its last allocation is freed.
  virtual Status pool_create(PoolHandle* out) = 0;
  virtual Status pool_destroy(PoolHandle pool) = 0;
  virtual Status pool_alloc(PoolHandle pool, StreamHandle stream, Bytes size, Address* out) = 0;
  virtual Status pool_free(StreamHandle stream, Address address) = 0;
  // The host takes note of frees that have taken place in the stream's order, without which their memory neither goes
  // back nor elsewhere. Does not wait: not_ready, and nothing noted, while the stream has work to do.
  virtual Status pool_observe(StreamHandle stream) = 0;
  // Gives back what is free and noted, as long as `keep` bytes stay in the pool.
  virtual Status pool_trim(PoolHandle pool, Bytes keep) = 0;

  // Streams. `stream_is_capturing` harms nothing on a live handle; asking the id of a capturing stream kills its
  // capture.
  virtual Status stream_is_capturing(StreamHandle stream, CaptureState* out) = 0;
  // The graph that `stream` captures into holds `object`, and so does every graph that is made of it. Once the last of
  // them is gone, and what was launched of them is done, `ended(object)` is called, once, by a thread of the driver's:
  // it makes no driver call and waits for nobody. `capture` is the id that stream_is_capturing gave. Harms no capture.
  // Where the status is not ok nothing is held, and `ended` is not called.
  virtual Status graph_retain(StreamHandle stream, std::uint64_t capture, void (*ended)(void*), void* object) = 0;
  virtual Status stream_id(StreamHandle stream, std::uint64_t* out) = 0;
  // Both in one, in the order that harms nothing: the id only of a stream that is not capturing.
  virtual Status stream_identity(StreamHandle stream, CaptureState* capture, std::uint64_t* id);
  // The driver of the context that the stream lives in: this one, another device's, or null for a context that is no
  // device's primary one. Asked once for each stream that is new to a pool.
  virtual Status stream_owner(StreamHandle stream, std::shared_ptr<Driver>* out) = 0;
  virtual Status stream_create(StreamHandle* out) = 0;  // non-blocking: waits for nobody, nobody waits for it
  virtual Status stream_destroy(StreamHandle stream) = 0;
  virtual Status stream_wait_event(StreamHandle stream, EventHandle event) = 0;
  // ok: nothing is left to do on it; not_ready; or an error (which means: not done). Kills the capture of a capturing
  // one.
  virtual Status stream_query(StreamHandle stream) = 0;

  // Events, without timing. A query never blocks.
  virtual Status event_create(EventHandle* out) = 0;
  virtual Status event_destroy(EventHandle event) = 0;
  virtual Status event_record(EventHandle event, StreamHandle stream) = 0;
  virtual Status event_query(EventHandle event) = 0;  // ok, not_ready, or an error (which means: not done)
  // Covers everything queued in the context so far, destroyed streams' work too. Kills captures that are under way.
  virtual Status context_event_record(EventHandle event) = 0;

  // Work queued on a stream.
  virtual Status fill(StreamHandle stream, Address at, std::uint8_t value, Bytes size) = 0;
  virtual Status copy(StreamHandle stream, Address to, Address from, Bytes size) = 0;

  // The debugger's work. Runs on a private non-blocking stream that waits for nobody and for which nobody waits, over
  // ranges that nothing uses; returns when that stream is done. `key` is the process's pattern key. `kind` says how the
  // memory is reached (host-visible memory may be checked from the host).
  virtual Status pattern_fill(Kind kind, std::span<const Range> ranges, std::uint64_t key) = 0;
  virtual Status pattern_verify(Kind kind, std::span<const Range> ranges, std::uint64_t key,
                                std::vector<Mismatch>* out) = 0;
  // The same as one job. A driver that can queues it and returns at once: then nothing may use what the job touches
  // until it is finished. `pattern_finish` says whether it is; with `wait` it waits, as long as the two calls above do,
  // and the answer is yes, if only because the job was called off (not ready).
  virtual void pattern_start(PatternJob* job);
  virtual bool pattern_finish(PatternJob* job, bool wait);

  // Of this context, for all pools of it.
  Captures& captures() { return captures_; }

  // How often each call was made, from whatever side. `calls()[Call::mem_create]`.
  std::array<std::uint64_t, kCallCount> calls() const;
  // How long the calls for memory took, on the host's own clock, simulated or not.
  CallTimes& call_times() const;

 protected:
  // Times a call for memory from here to its end; other calls cost a comparison.
  class Timed {
   public:
    Timed(const Driver& driver, Call call) : driver_(driver), work_(memory_work(call)) {
      if (work_ != MemoryWork::count_) begin_ = std::chrono::steady_clock::now();
    }
    Timed(const Timed&) = delete;
    Timed& operator=(const Timed&) = delete;
    ~Timed() {
      if (work_ == MemoryWork::count_) return;
      const auto passed = std::chrono::steady_clock::now() - begin_;
      driver_.call_times().add(
          work_, static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(passed).count()));
    }

   private:
    const Driver& driver_;
    const MemoryWork work_;
    std::chrono::steady_clock::time_point begin_{};
  };
  void count(Call call) { counts_[static_cast<std::size_t>(call)].fetch_add(1, std::memory_order_relaxed); }

 private:
  std::array<std::atomic<std::uint64_t>, kCallCount> counts_{};
  Captures captures_;
  mutable std::atomic<CallTimes*> times_{nullptr};
};

// Opens "cuda:N", "sim:N", "cuda", "sim" or "auto" (a GPU where there is one, else sim:0; a broken driver is an error
// and never hidden by falling back). One Driver a device and process. On failure null, with a sentence in `error` that
// says what was asked for, what is wrong and what to do.
enum class OpenError : std::uint8_t { none, no_library, too_old, broken, no_device, bad_name };
std::shared_ptr<Driver> open(std::string_view device, OpenError* kind, std::string* error);

// Records a new event on a stream that is in no capture, and makes `waiter` wait for it where one is given, which is in
// none either. A capture may begin right after a stream was asked: one that is declared meanwhile waits (the gate is
// held), and for others the stream is asked again after the record, since an event that a capture recorded may be
// neither queried nor waited for outside of it. `captured`: one of the two captures, there is no event, and nobody was
// made to wait.
Status record_uncaptured(Driver& driver, StreamHandle stream, std::optional<StreamHandle> waiter, EventHandle* event,
                         bool* captured);

// Told once by whoever knows: the process is exiting, or is a forked child. From then on every call answers `gone`.
enum class Ending : std::uint8_t { no, exiting, forked };
extern std::atomic<Ending> g_ending __attribute__((visibility("hidden")));
inline Ending ending_now() noexcept { return g_ending.load(std::memory_order_acquire); }  // inside the core only
Ending ending() noexcept;
void set_ending(Ending ending) noexcept;

}  // namespace streampool::driver
