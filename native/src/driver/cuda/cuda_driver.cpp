// Every method of driver.hpp as one call of the CUDA driver inside a Scope. See cuda_driver.hpp.
#include "cuda_driver.hpp"

#include <time.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>

#include "errors.hpp"
#include "open.hpp"

namespace streampool::driver::cuda {
namespace {

// How much address space to reserve in one piece: more than the device holds, so that a fragmented range still has
// room. Reserving costs microseconds and no memory.
constexpr Bytes address_chunk(Bytes total) { return round_up(total + total / 2, kGiB); }

// 0 would mean the legacy stream too, but the name that stays right in every variant of the interface is 1.
Stream to_stream(StreamHandle handle) {
  return reinterpret_cast<Stream>(handle == kDefaultStream ? kLegacyStream : handle);
}

// Why a device could not be opened.
void explain(Result result, const std::string& what, OpenError* kind, std::string* error) {
  if (kind) *kind = OpenError::broken;
  if (!error) return;
  *error = what + " gave " + error_name(result) + " (" + std::to_string(result) + "): " + error_text(result) + ".";
  if (*error_advice(result)) *error += std::string(" ") + error_advice(result);
}

Event to_event(EventHandle handle) { return reinterpret_cast<Event>(handle); }
MemoryPool to_pool(PoolHandle handle) { return reinterpret_cast<MemoryPool>(handle); }

Call alloc_call(Kind kind) {
  return kind == Kind::device ? Call::mem_alloc : kind == Kind::pinned ? Call::mem_alloc_host : Call::mem_alloc_managed;
}

Call free_call(Kind kind) {
  return kind == Kind::device ? Call::mem_free : kind == Kind::pinned ? Call::mem_free_host : Call::mem_free_managed;
}

}  // namespace

CudaDriver::CudaDriver(const Library& library, int ordinal)
    : library_(library), ordinal_(ordinal), name_("cuda:" + std::to_string(ordinal)) {
  version_ = "CUDA " + version_text(library.version);
  if (const std::string text = kernel_driver_version(); !text.empty()) version_ += ", driver " + text;
}

std::shared_ptr<CudaDriver> CudaDriver::create(const Library& library, int ordinal, bool kernels, OpenError* kind,
                                               std::string* error) {
  const Api& api = library.api;
  std::shared_ptr<CudaDriver> made(new CudaDriver(library, ordinal));
  CudaDriver& self = *made;
  Session& session = self.session_;
  const auto failed = [&](Result result, const std::string& what) {
    explain(result, what, kind, error);
    return nullptr;
  };

  session.api = &api;
  if (const Result r = api.cuDeviceGet(&session.device, ordinal)) return failed(r, "cuDeviceGet");
  int managed = 0, virtual_memory = 0;
  std::size_t total = 0;
  if (const Result r = api.cuDeviceGetAttribute(&managed, kAttributeManagedMemory, session.device))
    return failed(r, "cuDeviceGetAttribute");
  if (const Result r = api.cuDeviceGetAttribute(&virtual_memory, kAttributeVirtualMemory, session.device))
    return failed(r, "cuDeviceGetAttribute");
  if (const Result r = api.cuDeviceTotalMem(&total, session.device)) return failed(r, "cuDeviceTotalMem");
  if (const Result r = api.cuDevicePrimaryCtxRetain(&session.context, session.device))
    return failed(r, "cuDevicePrimaryCtxRetain");

  const bool whole = api.cuMemAddressReserve && api.cuMemAddressFree && api.cuMemCreate && api.cuMemRelease &&
                     api.cuMemMap && api.cuMemUnmap && api.cuMemSetAccess && api.cuMemGetAllocationGranularity;
  Capabilities& can = self.capabilities_;
  can.virtual_memory = virtual_memory && whole;
  can.managed_memory = managed && api.cuMemAllocManaged;
  can.context_events = api.cuCtxRecordEvent != nullptr;
  can.total_memory = total;
  can.address_chunk = address_chunk(total);
  self.find_traits();

  Result result = kSuccess;
  std::string what;
  unsigned long long generation = 0;
  if ((result = api.cuCtxGetId(session.context, &generation)) != kSuccess) {
    what = "cuCtxGetId";
  } else {
    session.generation = generation;
    const Scope scope(session);
    result = scope.result();
    what = "making the device's context current";
    if (result == kSuccess && can.virtual_memory) {
      std::size_t granularity = 0;
      const MemAllocationProp prop = self.allocation({});
      if (api.cuMemGetAllocationGranularity(&granularity, &prop, kGranularityMinimum) == kSuccess && granularity > 0)
        can.granularity = granularity;
      else
        can.virtual_memory = false;
    }
  }
  if (result != kSuccess) {
    api.cuDevicePrimaryCtxRelease(session.device);
    return failed(result, what);
  }
  if (kernels && !self.load_kernels(kind, error)) {
    api.cuDevicePrimaryCtxRelease(session.device);
    return nullptr;
  }
  if (kind) *kind = OpenError::none;
  if (error) error->clear();
  return made;
}

bool CudaDriver::load_kernels(OpenError* kind, std::string* error) {
  const std::lock_guard lock(loading_);
  if (loaded_) return true;
  const Scope scope(session_);
  Result result = scope.result();
  std::string what = "making the device's context current";
  if (result == kSuccess) result = patterns_.start(session_, &what);
  loaded_ = result == kSuccess;
  if (!loaded_) explain(result, what, kind, error);
  return loaded_;
}

template <typename Body>
Status CudaDriver::run(Call which, bool able, Body&& body) {
  const Scope scope(session_);
  if (scope.result() != kSuccess) return session_.status(which, scope.result());
  if (!able) return session_.status(which, kNotSupported);
  count(which);
  const Timed timed(*this, which);
  return session_.status(which, body(library_.api));
}

// What else this device can do with memory. A question that fails is answered with no.
void CudaDriver::find_traits() {
  const Api& api = library_.api;
  const auto has = [&](int attribute) {
    int value = 0;
    return api.cuDeviceGetAttribute(&value, attribute, session_.device) == kSuccess && value != 0;
  };
  Capabilities& can = capabilities_;
  can.driver_pools = has(kAttributeMemoryPools) && api.cuMemPoolCreate && api.cuMemPoolDestroy &&
                     api.cuMemPoolSetAttribute && api.cuMemPoolTrimTo && api.cuMemAllocFromPoolAsync &&
                     api.cuMemFreeAsync;
  if (!can.virtual_memory) return;
  can.export_posix_fd = has(kAttributePosixFd);
  can.export_fabric = has(kAttributeFabric);
  can.rdma = has(kAttributeRdma);
  int devices = 0;
  if (!api.cuDeviceCanAccessPeer || api.cuDeviceGetCount(&devices) != kSuccess) return;
  for (int ordinal = 0; ordinal < devices; ++ordinal) {
    Device other = 0;
    int can_access = 0;
    if (ordinal != ordinal_ && api.cuDeviceGet(&other, ordinal) == kSuccess &&
        api.cuDeviceCanAccessPeer(&can_access, other, session_.device) == kSuccess && can_access != 0)
      can.peers.push_back(ordinal);
  }
}

MemAllocationProp CudaDriver::allocation(const MemoryTraits& traits) const {
  MemAllocationProp prop{};
  prop.type = kAllocationPinned;
  prop.location = {kLocationDevice, session_.device};
  prop.handle_types = traits.exported == Export::posix_fd ? kHandlePosixFd
                      : traits.exported == Export::fabric ? kHandleFabric
                                                          : kHandleNone;
  prop.rdma_capable = traits.rdma ? 1 : 0;
  return prop;
}

double CudaDriver::now() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void CudaDriver::pause(double seconds) {
  if (!(seconds > 0)) {
    std::this_thread::yield();
    return;
  }
  seconds = std::min(seconds, 3600.0);  // whoever waits looks again; also keeps the conversion below in range
  timespec left{static_cast<time_t>(seconds), 0};
  left.tv_nsec = static_cast<long>((seconds - static_cast<double>(left.tv_sec)) * 1e9);
  nanosleep(&left, nullptr);  // a signal ends it early, so that Ctrl-C is seen (R24)
}

Status CudaDriver::mem_alloc(Kind kind, Bytes size, Address* out) {
  *out = 0;
  const bool able = kind != Kind::managed || capabilities_.managed_memory;
  return run(alloc_call(kind), able, [&](const Api& api) -> Result {
    if (kind == Kind::device) return api.cuMemAlloc(out, size);
    if (kind == Kind::managed) return api.cuMemAllocManaged(out, size, kAttachGlobal);
    void* memory = nullptr;
    const Result result = api.cuMemHostAlloc(&memory, size, kHostAllocPortable);
    if (result == kSuccess) *out = reinterpret_cast<Address>(memory);
    return result;
  });
}

Status CudaDriver::mem_free(Kind kind, Address address) {
  return run(free_call(kind), true, [&](const Api& api) {
    return kind == Kind::pinned ? api.cuMemFreeHost(reinterpret_cast<void*>(address)) : api.cuMemFree(address);
  });
}

Status CudaDriver::mem_info(Bytes* free_bytes, Bytes* total_bytes) {
  *free_bytes = *total_bytes = 0;
  return run(Call::mem_info, true, [&](const Api& api) {
    std::size_t free_size = 0, total_size = 0;
    const Result result = api.cuMemGetInfo(&free_size, &total_size);
    *free_bytes = free_size;
    *total_bytes = total_size;
    return result;
  });
}

Status CudaDriver::address_reserve(Bytes size, Bytes alignment, Address* out) {
  *out = 0;
  return run(Call::address_reserve, capabilities_.virtual_memory,
             [&](const Api& api) { return api.cuMemAddressReserve(out, size, alignment, 0, 0); });
}

Status CudaDriver::address_free(Address address, Bytes size) {
  return run(Call::address_free, capabilities_.virtual_memory,
             [&](const Api& api) { return api.cuMemAddressFree(address, size); });
}

Status CudaDriver::mem_granularity(const MemoryTraits& traits, Bytes* out) {
  const Capabilities& can = capabilities_;
  *out = can.granularity;
  const bool reachable = std::all_of(traits.peers.begin(), traits.peers.end(), [&](int peer) {
    return std::find(can.peers.begin(), can.peers.end(), peer) != can.peers.end();
  });
  const bool able = can.virtual_memory && reachable && (!traits.rdma || can.rdma) &&
                    (traits.exported != Export::posix_fd || can.export_posix_fd) &&
                    (traits.exported != Export::fabric || can.export_fabric);
  const MemAllocationProp prop = allocation(traits);
  return run(Call::mem_granularity, able, [&](const Api& api) {
    std::size_t granularity = 0;
    const Result result = api.cuMemGetAllocationGranularity(&granularity, &prop, kGranularityMinimum);
    if (result == kSuccess && granularity > 0) *out = granularity;
    return result;
  });
}

Status CudaDriver::mem_create(Bytes size, const MemoryTraits& traits, MemoryHandle* out) {
  *out = 0;
  const MemAllocationProp prop = allocation(traits);
  return run(Call::mem_create, capabilities_.virtual_memory, [&](const Api& api) -> Result {
    // The calls of virtual memory go on succeeding after a fault of the device, and give memory that nobody can use.
    if (const Result lost = patterns_.device_error()) return lost;
    return api.cuMemCreate(out, size, &prop, 0);
  });
}

Status CudaDriver::mem_release(MemoryHandle handle) {
  return run(Call::mem_release, capabilities_.virtual_memory, [&](const Api& api) { return api.cuMemRelease(handle); });
}

Status CudaDriver::mem_map(Address address, Bytes size, MemoryHandle handle) {
  return run(Call::mem_map, capabilities_.virtual_memory,
             [&](const Api& api) { return api.cuMemMap(address, size, 0, handle, 0); });
}

Status CudaDriver::mem_unmap(Address address, Bytes size) {
  return run(Call::mem_unmap, capabilities_.virtual_memory,
             [&](const Api& api) { return api.cuMemUnmap(address, size); });
}

Status CudaDriver::mem_set_access(Address address, Bytes size, const MemoryTraits& traits) {
  return run(Call::mem_set_access, capabilities_.virtual_memory, [&](const Api& api) -> Result {
    std::vector<MemAccessDesc> access{{{kLocationDevice, session_.device}, kAccessReadWrite}};
    for (const int peer : traits.peers) {
      Device device = 0;
      if (const Result r = api.cuDeviceGet(&device, peer)) return r;
      access.push_back({{kLocationDevice, device}, kAccessReadWrite});
    }
    return api.cuMemSetAccess(address, size, access.data(), access.size());
  });
}

Status CudaDriver::pool_create(PoolHandle* out) {
  *out = 0;
  return run(Call::pool_create, capabilities_.driver_pools, [&](const Api& api) -> Result {
    MemPoolProps props{};
    props.type = kAllocationPinned;
    props.location = {kLocationDevice, session_.device};
    MemoryPool pool = nullptr;
    if (const Result r = api.cuMemPoolCreate(&pool, &props)) return r;
    std::uint64_t keep_all = ~std::uint64_t{0};  // else each synchronisation gives memory back
    if (const Result r = api.cuMemPoolSetAttribute(pool, kPoolReleaseThreshold, &keep_all)) {
      api.cuMemPoolDestroy(pool);
      return r;
    }
    *out = reinterpret_cast<PoolHandle>(pool);
    return kSuccess;
  });
}

Status CudaDriver::pool_destroy(PoolHandle pool) {
  return run(Call::pool_destroy, capabilities_.driver_pools,
             [&](const Api& api) { return api.cuMemPoolDestroy(to_pool(pool)); });
}

Status CudaDriver::pool_alloc(PoolHandle pool, StreamHandle stream, Bytes size, Address* out) {
  *out = 0;
  return run(Call::pool_alloc, capabilities_.driver_pools,
             [&](const Api& api) { return api.cuMemAllocFromPoolAsync(out, size, to_pool(pool), to_stream(stream)); });
}

Status CudaDriver::pool_free(StreamHandle stream, Address address) {
  return run(Call::pool_free, capabilities_.driver_pools,
             [&](const Api& api) { return api.cuMemFreeAsync(address, to_stream(stream)); });
}

// Seen on an H200: after a query that said "done" a trim gives nothing back, after a synchronisation it does. One that
// comes after such a query returns at once.
Status CudaDriver::pool_observe(StreamHandle stream) {
  return run(Call::pool_observe, capabilities_.driver_pools, [&](const Api& api) {
    const Result result = api.cuStreamQuery(to_stream(stream));
    return result == kSuccess ? api.cuStreamSynchronize(to_stream(stream)) : result;
  });
}

Status CudaDriver::pool_trim(PoolHandle pool, Bytes keep) {
  return run(Call::pool_trim, capabilities_.driver_pools,
             [&](const Api& api) { return api.cuMemPoolTrimTo(to_pool(pool), keep); });
}

Status CudaDriver::stream_is_capturing(StreamHandle stream, CaptureState* out) {
  *out = {};
  return run(Call::stream_is_capturing, true, [&](const Api& api) {
    int state = kCaptureStatusNone;
    const Result result = api.cuStreamIsCapturing(to_stream(stream), &state);
    if (result != kSuccess || state == kCaptureStatusNone) return result;
    out->capturing = true;
    // The capture's id, which harms nothing to ask either. An invalidated capture has none: it stays 0.
    if (api.cuStreamGetCaptureInfo) {
      std::uint64_t id = 0;
      if (api.cuStreamGetCaptureInfo(to_stream(stream), &state, &id, nullptr, nullptr, nullptr) == kSuccess &&
          state == kCaptureStatusActive)
        out->id = id;
    }
    return result;
  });
}

// A user object of the graph, as the driver's documentation has it for what must live as long as a graph's launches.
Status CudaDriver::graph_retain(StreamHandle stream, std::uint64_t capture, void (*ended)(void*), void* object) {
  struct Retained {
    void (*ended)(void*);
    void* object;
    static void destroy(void* self) {
      const std::unique_ptr<Retained> retained(static_cast<Retained*>(self));
      if (retained->ended != nullptr) retained->ended(retained->object);
    }
  };
  const Api& functions = *session_.api;
  const bool able = functions.cuStreamGetCaptureInfo && functions.cuUserObjectCreate && functions.cuUserObjectRelease &&
                    functions.cuGraphRetainUserObject;
  return run(Call::graph_retain, able, [&](const Api& api) -> Result {
    int state = kCaptureStatusNone;
    std::uint64_t id = 0;
    Graph graph = nullptr;
    Result result = api.cuStreamGetCaptureInfo(to_stream(stream), &state, &id, &graph, nullptr, nullptr);
    if (result != kSuccess) return result;
    if (state != kCaptureStatusActive || id != capture || graph == nullptr) return kCaptureInvalidated;
    auto retained = std::make_unique<Retained>(Retained{ended, object});
    UserObject held = nullptr;
    result = api.cuUserObjectCreate(&held, retained.get(), &Retained::destroy, 1, kUserObjectNoDestructorSync);
    if (result != kSuccess) return result;
    Retained* const theirs = retained.release();
    result = api.cuGraphRetainUserObject(graph, held, 1, kGraphUserObjectMove);
    if (result == kSuccess) return result;
    theirs->ended = nullptr;
    api.cuUserObjectRelease(held, 1);
    return result;
  });
}

Status CudaDriver::stream_id(StreamHandle stream, std::uint64_t* out) {
  *out = 0;
  return run(Call::stream_id, true, [&](const Api& api) {
    unsigned long long id = 0;
    const Result result = api.cuStreamGetId(to_stream(stream), &id);
    if (result == kSuccess) *out = id;
    return result;
  });
}

Status CudaDriver::stream_identity(StreamHandle stream, CaptureState* capture, std::uint64_t* id) {
  // On every call that names a stream which is not lasting, so without the frame of other calls: these two need no
  // current context for a handle of its own, and no capture of another thread forbids them. Pools count them: one
  // counter for all threads would cost as much as the calls.
  const Api& api = *session_.api;
  const bool has_handle = !is_legacy(stream) && stream != kPerThreadStream;
  if (has_handle && session_.alive()) {
    int state = kCaptureStatusNone;
    unsigned long long number = 0;
    if (api.cuStreamIsCapturing(to_stream(stream), &state) == kSuccess && state == kCaptureStatusNone &&
        api.cuStreamGetId(to_stream(stream), &number) == kSuccess) {
      *capture = {};
      *id = number;
      return {};
    }
  }
  return Driver::stream_identity(stream, capture, id);
}

Status CudaDriver::stream_owner(StreamHandle stream, std::shared_ptr<Driver>* out) {
  *out = shared_from_this();
  Context context = session_.context;
  Device device = session_.device;
  const Status status = run(Call::stream_owner, true, [&](const Api& api) -> Result {
    // Where the driver cannot say, nobody is refused.
    if (!api.cuStreamGetCtx) return kSuccess;
    if (const Result r = api.cuStreamGetCtx(to_stream(stream), &context)) return r;
    if (context == session_.context) return kSuccess;
    if (const Result r = api.cuCtxPushCurrent(context)) return r;
    const Result r = api.cuCtxGetDevice(&device);
    Context theirs = nullptr;
    api.cuCtxPopCurrent(&theirs);
    return r;
  });
  if (!status.ok() || context == session_.context) return status;
  const std::shared_ptr<CudaDriver> peer = device_driver(device);
  *out = peer && peer->session_.context == context ? peer : nullptr;
  return status;
}

Status CudaDriver::stream_create(StreamHandle* out) {
  *out = 0;
  return run(Call::stream_create, true, [&](const Api& api) {
    Stream stream = nullptr;
    const Result result = api.cuStreamCreate(&stream, kStreamNonBlocking);
    if (result == kSuccess) *out = reinterpret_cast<StreamHandle>(stream);
    return result;
  });
}

Status CudaDriver::stream_destroy(StreamHandle stream) {
  return run(Call::stream_destroy, true, [&](const Api& api) { return api.cuStreamDestroy(to_stream(stream)); });
}

Status CudaDriver::stream_wait_event(StreamHandle stream, EventHandle event) {
  return run(Call::stream_wait_event, true,
             [&](const Api& api) { return api.cuStreamWaitEvent(to_stream(stream), to_event(event), 0); });
}

Status CudaDriver::event_create(EventHandle* out) {
  *out = 0;
  return run(Call::event_create, true, [&](const Api& api) {
    Event event = nullptr;
    const Result result = api.cuEventCreate(&event, kEventDisableTiming);
    if (result == kSuccess) *out = reinterpret_cast<EventHandle>(event);
    return result;
  });
}

Status CudaDriver::event_destroy(EventHandle event) {
  return run(Call::event_destroy, true, [&](const Api& api) { return api.cuEventDestroy(to_event(event)); });
}

Status CudaDriver::event_record(EventHandle event, StreamHandle stream) {
  return run(Call::event_record, true,
             [&](const Api& api) { return api.cuEventRecord(to_event(event), to_stream(stream)); });
}

Status CudaDriver::stream_query(StreamHandle stream) {
  return run(Call::stream_query, true, [&](const Api& api) { return api.cuStreamQuery(to_stream(stream)); });
}

Status CudaDriver::event_query(EventHandle event) {
  return run(Call::event_query, true, [&](const Api& api) { return api.cuEventQuery(to_event(event)); });
}

Status CudaDriver::context_event_record(EventHandle event) {
  return run(Call::context_event_record, capabilities_.context_events,
             [&](const Api& api) { return api.cuCtxRecordEvent(session_.context, to_event(event)); });
}

Status CudaDriver::fill(StreamHandle stream, Address at, std::uint8_t value, Bytes size) {
  if (size == 0) return {};
  return run(Call::fill, true, [&](const Api& api) { return api.cuMemsetD8Async(at, value, size, to_stream(stream)); });
}

Status CudaDriver::copy(StreamHandle stream, Address to, Address from, Bytes size) {
  if (size == 0) return {};
  return run(Call::copy, true, [&](const Api& api) { return api.cuMemcpyAsync(to, from, size, to_stream(stream)); });
}

Status CudaDriver::pattern_fill(Kind kind, std::span<const Range> ranges, std::uint64_t key) {
  return run(Call::pattern_fill, true, [&](const Api&) {
    if (kind != Kind::pinned) return patterns_.fill(ranges, key);
    fill_on_host(ranges, key);
    return kSuccess;
  });
}

Status CudaDriver::pattern_verify(Kind kind, std::span<const Range> ranges, std::uint64_t key,
                                  std::vector<Mismatch>* out) {
  out->clear();
  return run(Call::pattern_verify, true, [&](const Api&) {
    if (kind != Kind::pinned) return patterns_.verify(ranges, key, out);
    verify_on_host(ranges, key, out);
    return kSuccess;
  });
}

void CudaDriver::pattern_start(PatternJob* job) {
  if (job->kind == Kind::pinned) return Driver::pattern_start(job);
  bool queued = false;
  // Counted as what it does first.
  const Call call = job->verify.empty() ? Call::pattern_fill : Call::pattern_verify;
  const Status status = run(call, true, [&](const Api&) {
    Result result = kSuccess;
    queued = patterns_.start_job(job, &result);
    return result;
  });
  if (!status.ok()) {
    job->status = status;
    job->verified = false;
  } else if (!queued) {
    Driver::pattern_start(job);
  }
}

bool CudaDriver::pattern_finish(PatternJob* job, bool wait) {
  if (job->ticket == 0) return true;
  bool done = true;
  const Status status = run(Call::pattern_finish, true, [&](const Api&) {
    Result result = kSuccess;
    done = patterns_.finish_job(job, wait, &result);
    return done ? result : kSuccess;
  });
  // A device that is lost has nothing under way any more.
  if (!status.ok()) job->status = status;
  return done || !status.ok();
}

}  // namespace streampool::driver::cuda
