// A stand-in for libcuda.so.1 without a GPU, for tests of the CUDA driver: memory is host memory, streams do their work
// at once, and the pattern kernels are imitated. Just strict enough to notice a wrong context, capture mode or
// prototype.
#include "stub.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../../src/driver/cuda/api.hpp"
#include "../../src/driver/cuda/pattern_piece.hpp"
#include "../../src/driver/pattern.hpp"

namespace cuda = streampool::driver::cuda;
using streampool::driver::pattern_byte;
using streampool::driver::PatternPiece;
using streampool::testing::StubState;

extern "C" {
StubState stub_state;
}

namespace {

constexpr std::size_t kPage = std::size_t{2} << 20;
int primary_context;  // its address is the handle
thread_local std::vector<cuda::Context> context_stack;
thread_local int capture_mode = 0;  // global, as a thread starts
std::uint64_t next_id = 10;
std::map<cuda::Stream, std::uint64_t> streams;
std::map<cuda::Stream, bool> capturing;
std::vector<cuda::UserObject> retained;  // by the one graph

std::mutex things_mutex;
// Everything handed out, so that what a lost device leaves behind is not taken for a leak. Never destroyed.
std::set<void*>& things = *new std::set<void*>;

void* remember(void* thing) {
  const std::lock_guard lock(things_mutex);
  things.insert(thing);
  ++stub_state.live;
  return thing;
}

void forget(void* thing) {
  const std::lock_guard lock(things_mutex);
  things.erase(thing);
  --stub_state.live;
}

struct Launch {
  std::string kernel;
  PatternPiece* pieces;
  unsigned count;
  unsigned long long key;
};
std::vector<Launch> waiting;

void end_user_object(cuda::UserObject object) {
  const std::unique_ptr<std::pair<void (*)(void*), void*>> held(
      reinterpret_cast<std::pair<void (*)(void*), void*>*>(object));
  held->first(held->second);
  --stub_state.user_objects;
}

cuda::Context primary() { return reinterpret_cast<cuda::Context>(&primary_context); }

cuda::Result fails(const char* name) {
  return std::strcmp(stub_state.failing, name) == 0 ? stub_state.failing_result : cuda::kSuccess;
}

// How every call begins that needs a context.
cuda::Result begin(const char* name) {
  ++stub_state.calls;
  if (capture_mode != cuda::kCaptureModeRelaxed) ++stub_state.strict_calls;
  if (context_stack.empty() || context_stack.back() != primary()) return cuda::kInvalidContext;
  return fails(name);
}

cuda::Result begin(const char* name, cuda::Stream stream) {
  stub_state.last_stream = reinterpret_cast<std::uintptr_t>(stream);
  return begin(name);
}

void run(const Launch& launch) {
  for (unsigned i = 0; i < launch.count; ++i) {
    PatternPiece& piece = launch.pieces[i];
    auto* bytes = reinterpret_cast<unsigned char*>(piece.begin);
    for (unsigned at = 0; at < piece.size; ++at) {
      const unsigned char expected = pattern_byte(piece.begin + at, launch.key);
      if (launch.kernel == "streampool_pattern_fill") {
        bytes[at] = expected;
      } else if (bytes[at] != expected) {
        if (piece.bad++ == 0) piece.first = at;
        piece.last = at;
      }
    }
    if (piece.bad == 0) continue;
    const unsigned left = piece.size - piece.first + piece.beyond;
    std::memcpy(piece.sample, bytes + piece.first, left < sizeof piece.sample ? left : sizeof piece.sample);
  }
}

}  // namespace

#define STUB_BEGIN(...) \
  if (const cuda::Result r = begin(__VA_ARGS__)) return r

extern "C" {

cuda::Result cuInit(unsigned) { return stub_state.init_result; }

cuda::Result cuDriverGetVersion(int* out) {
  *out = stub_state.version;
  return cuda::kSuccess;
}

cuda::Result cuDeviceGetCount(int* out) {
  *out = stub_state.devices;
  return fails("cuDeviceGetCount");
}

cuda::Result cuDeviceGet(cuda::Device* out, int ordinal) {
  *out = ordinal;
  return ordinal < stub_state.devices ? fails("cuDeviceGet") : 101;
}

cuda::Result cuDeviceGetAttribute(int* out, int, cuda::Device) {
  *out = 1;
  return fails("cuDeviceGetAttribute");
}

cuda::Result cuDeviceTotalMem(std::size_t* out, cuda::Device) {
  *out = std::size_t{80} << 30;
  return fails("cuDeviceTotalMem");
}

cuda::Result cuDevicePrimaryCtxRetain(cuda::Context* out, cuda::Device) {
  if (const cuda::Result r = fails("cuDevicePrimaryCtxRetain")) return r;
  ++stub_state.retained;
  *out = primary();
  return cuda::kSuccess;
}

cuda::Result cuDevicePrimaryCtxRelease(cuda::Device) {
  --stub_state.retained;
  return cuda::kSuccess;
}

cuda::Result cuCtxGetCurrent(cuda::Context* out) {
  *out = context_stack.empty() ? nullptr : context_stack.back();
  return fails("cuCtxGetCurrent");
}

cuda::Result cuCtxPushCurrent(cuda::Context context) {
  if (const cuda::Result r = fails("cuCtxPushCurrent")) return r;
  context_stack.push_back(context);
  return cuda::kSuccess;
}

cuda::Result cuCtxPopCurrent(cuda::Context* out) {
  if (context_stack.empty()) return cuda::kInvalidContext;
  *out = context_stack.back();
  context_stack.pop_back();
  return cuda::kSuccess;
}

cuda::Result cuCtxGetDevice(cuda::Device* out) {
  *out = 0;
  return fails("cuCtxGetDevice");
}

cuda::Result cuCtxGetId(cuda::Context, unsigned long long* out) {
  *out = stub_state.generation;
  return fails("cuCtxGetId");
}

cuda::Result cuThreadExchangeStreamCaptureMode(int* mode) {
  if (const cuda::Result r = fails("cuThreadExchangeStreamCaptureMode")) return r;
  const int before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  return cuda::kSuccess;
}

cuda::Result cuMemGetInfo(std::size_t* free_bytes, std::size_t* total) {
  STUB_BEGIN("cuMemGetInfo");
  *total = std::size_t{80} << 30;
  *free_bytes = std::size_t{79} << 30;
  return cuda::kSuccess;
}

cuda::Result cuMemAlloc(cuda::DevicePtr* out, std::size_t size) {
  STUB_BEGIN("cuMemAlloc");
  *out = reinterpret_cast<cuda::DevicePtr>(remember(std::aligned_alloc(256, (size + 255) / 256 * 256)));
  return cuda::kSuccess;
}

cuda::Result cuMemFree(cuda::DevicePtr at) {
  STUB_BEGIN("cuMemFree");
  forget(reinterpret_cast<void*>(at));
  std::free(reinterpret_cast<void*>(at));
  return cuda::kSuccess;
}

cuda::Result cuMemHostAlloc(void** out, std::size_t size, unsigned flags) {
  STUB_BEGIN("cuMemHostAlloc");
  if ((flags & cuda::kHostAllocPortable) == 0) return cuda::kInvalidValue;
  *out = remember(std::aligned_alloc(4096, (size + 4095) / 4096 * 4096));
  return cuda::kSuccess;
}

cuda::Result cuMemFreeHost(void* at) {
  STUB_BEGIN("cuMemFreeHost");
  forget(at);
  std::free(at);
  return cuda::kSuccess;
}

cuda::Result cuMemHostGetDevicePointer(cuda::DevicePtr* out, void* at, unsigned) {
  STUB_BEGIN("cuMemHostGetDevicePointer");
  *out = reinterpret_cast<cuda::DevicePtr>(at);
  return cuda::kSuccess;
}

cuda::Result cuMemAllocManaged(cuda::DevicePtr* out, std::size_t size, unsigned flags) {
  STUB_BEGIN("cuMemAllocManaged");
  return flags == cuda::kAttachGlobal ? cuMemAlloc(out, size) : cuda::kInvalidValue;
}

cuda::Result cuMemAddressReserve(cuda::DevicePtr* out, std::size_t size, std::size_t, cuda::DevicePtr,
                                 unsigned long long) {
  STUB_BEGIN("cuMemAddressReserve");
  void* at = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return 2;
  *out = reinterpret_cast<cuda::DevicePtr>(at);
  ++stub_state.live;
  return cuda::kSuccess;
}

cuda::Result cuMemAddressFree(cuda::DevicePtr at, std::size_t size) {
  STUB_BEGIN("cuMemAddressFree");
  munmap(reinterpret_cast<void*>(at), size);
  --stub_state.live;
  return cuda::kSuccess;
}

cuda::Result cuMemCreate(cuda::GenericHandle* out, std::size_t size, const cuda::MemAllocationProp* prop,
                         unsigned long long) {
  STUB_BEGIN("cuMemCreate");
  if (size % kPage != 0 || prop->type != cuda::kAllocationPinned || prop->location.type != cuda::kLocationDevice)
    return cuda::kInvalidValue;
  stub_state.last_handle_types = prop->handle_types;
  stub_state.last_rdma = prop->rdma_capable;
  *out = ++next_id;
  ++stub_state.live;
  return cuda::kSuccess;
}

cuda::Result cuMemRelease(cuda::GenericHandle) {
  STUB_BEGIN("cuMemRelease");
  --stub_state.live;
  return cuda::kSuccess;
}

cuda::Result cuMemMap(cuda::DevicePtr, std::size_t, std::size_t offset, cuda::GenericHandle, unsigned long long) {
  STUB_BEGIN("cuMemMap");
  return offset == 0 ? cuda::kSuccess : cuda::kNotSupported;
}

cuda::Result cuMemUnmap(cuda::DevicePtr at, std::size_t size) {
  STUB_BEGIN("cuMemUnmap");
  mprotect(reinterpret_cast<void*>(at), size, PROT_NONE);
  return cuda::kSuccess;
}

cuda::Result cuMemSetAccess(cuda::DevicePtr at, std::size_t size, const cuda::MemAccessDesc* access,
                            std::size_t count) {
  STUB_BEGIN("cuMemSetAccess");
  if (count == 0 || access->flags != cuda::kAccessReadWrite) return cuda::kInvalidValue;
  stub_state.last_access_count = static_cast<int>(count);
  mprotect(reinterpret_cast<void*>(at), size, PROT_READ | PROT_WRITE);
  return cuda::kSuccess;
}

cuda::Result cuMemGetAllocationGranularity(std::size_t* out, const cuda::MemAllocationProp*, int) {
  STUB_BEGIN("cuMemGetAllocationGranularity");
  *out = kPage;
  return cuda::kSuccess;
}

cuda::Result cuDeviceCanAccessPeer(int* out, cuda::Device, cuda::Device) {
  *out = 1;
  return fails("cuDeviceCanAccessPeer");
}

cuda::Result cuMemPoolCreate(cuda::MemoryPool* out, const cuda::MemPoolProps* props) {
  STUB_BEGIN("cuMemPoolCreate");
  if (props->type != cuda::kAllocationPinned || props->location.type != cuda::kLocationDevice)
    return cuda::kInvalidValue;
  *out = reinterpret_cast<cuda::MemoryPool>(remember(new int));
  return cuda::kSuccess;
}

cuda::Result cuMemPoolDestroy(cuda::MemoryPool pool) {
  STUB_BEGIN("cuMemPoolDestroy");
  forget(pool);
  delete reinterpret_cast<int*>(pool);
  return cuda::kSuccess;
}

cuda::Result cuMemPoolSetAttribute(cuda::MemoryPool, int attribute, void* value) {
  STUB_BEGIN("cuMemPoolSetAttribute");
  if (attribute != cuda::kPoolReleaseThreshold) return cuda::kInvalidValue;
  stub_state.release_threshold = *static_cast<std::uint64_t*>(value);
  return cuda::kSuccess;
}

cuda::Result cuMemPoolTrimTo(cuda::MemoryPool, std::size_t) {
  STUB_BEGIN("cuMemPoolTrimTo");
  return cuda::kSuccess;
}

cuda::Result cuMemAllocFromPoolAsync(cuda::DevicePtr* out, std::size_t size, cuda::MemoryPool, cuda::Stream stream) {
  STUB_BEGIN("cuMemAllocFromPoolAsync", stream);
  *out = reinterpret_cast<cuda::DevicePtr>(remember(std::aligned_alloc(512, (size + 511) / 512 * 512)));
  return cuda::kSuccess;
}

cuda::Result cuMemFreeAsync(cuda::DevicePtr at, cuda::Stream stream) {
  STUB_BEGIN("cuMemFreeAsync", stream);
  forget(reinterpret_cast<void*>(at));
  std::free(reinterpret_cast<void*>(at));
  return cuda::kSuccess;
}

cuda::Result cuStreamCreate(cuda::Stream* out, unsigned flags) {
  STUB_BEGIN("cuStreamCreate");
  if (flags != cuda::kStreamNonBlocking) return cuda::kInvalidValue;
  *out = reinterpret_cast<cuda::Stream>(remember(new int));
  streams[*out] = ++next_id;
  return cuda::kSuccess;
}

cuda::Result cuStreamDestroy(cuda::Stream stream) {
  STUB_BEGIN("cuStreamDestroy", stream);
  streams.erase(stream);
  capturing.erase(stream);
  forget(stream);
  delete reinterpret_cast<int*>(stream);
  return cuda::kSuccess;
}

cuda::Result cuStreamQuery(cuda::Stream stream) {
  STUB_BEGIN("cuStreamQuery", stream);
  if (stub_state.busy) return cuda::kNotReady;
  for (const Launch& launch : waiting) run(launch);
  waiting.clear();
  return cuda::kSuccess;
}

cuda::Result cuStreamSynchronize(cuda::Stream stream) {
  STUB_BEGIN("cuStreamSynchronize", stream);
  return stub_state.busy ? cuda::kInvalidValue : cuda::kSuccess;  // it would wait, which the driver never does
}

// What a stream's capture is, as the driver has it.
int capture_state(cuda::Stream stream) { return capturing[stream] ? stub_state.invalidated ? 2 : 1 : 0; }

// A test declares that a stream captures.
void stub_set_capturing(std::uintptr_t stream, bool on) { capturing[reinterpret_cast<cuda::Stream>(stream)] = on; }

cuda::Result cuStreamIsCapturing(cuda::Stream stream, int* out) {
  STUB_BEGIN("cuStreamIsCapturing", stream);
  *out = capture_state(stream);
  return cuda::kSuccess;
}

cuda::Result cuStreamGetCaptureInfo(cuda::Stream stream, int* state, std::uint64_t* id, cuda::Graph* graph,
                                    const void**, std::size_t*) {
  STUB_BEGIN("cuStreamGetCaptureInfo", stream);
  *state = capture_state(stream);
  *id = 77;  // says nothing unless the capture is active
  if (graph != nullptr) *graph = capturing[stream] ? reinterpret_cast<cuda::Graph>(&capturing[stream]) : nullptr;
  return cuda::kSuccess;
}

// One user object, and who holds it: the one who made it, or the graph.
cuda::Result cuUserObjectCreate(cuda::UserObject* out, void* object, void (*destroy)(void*), unsigned count,
                                unsigned flags) {
  STUB_BEGIN("cuUserObjectCreate");
  if (count != 1 || flags != cuda::kUserObjectNoDestructorSync) return cuda::kInvalidValue;
  *out = reinterpret_cast<cuda::UserObject>(new std::pair<void (*)(void*), void*>(destroy, object));
  ++stub_state.user_objects;
  return cuda::kSuccess;
}

cuda::Result cuUserObjectRelease(cuda::UserObject object, unsigned count) {
  STUB_BEGIN("cuUserObjectRelease");
  if (count != 1) return cuda::kInvalidValue;
  end_user_object(object);
  return cuda::kSuccess;
}

cuda::Result cuGraphRetainUserObject(cuda::Graph graph, cuda::UserObject object, unsigned count, unsigned flags) {
  STUB_BEGIN("cuGraphRetainUserObject");
  const bool known = std::any_of(capturing.begin(), capturing.end(), [&](const auto& one) {
    return one.second && reinterpret_cast<cuda::Graph>(const_cast<bool*>(&one.second)) == graph;
  });
  if (!known || count != 1 || flags != cuda::kGraphUserObjectMove) return cuda::kInvalidValue;
  retained.push_back(object);
  return cuda::kSuccess;
}

// The graph, and all that was made of it, is gone.
void stub_end_graph() {
  for (const cuda::UserObject object : std::exchange(retained, {})) end_user_object(object);
}

cuda::Result cuStreamGetId(cuda::Stream stream, unsigned long long* out) {
  STUB_BEGIN("cuStreamGetId", stream);
  if (capturing[stream]) return 900;
  *out = streams.count(stream) ? streams[stream] : reinterpret_cast<std::uintptr_t>(stream);
  return cuda::kSuccess;
}

cuda::Result cuStreamGetCtx(cuda::Stream stream, cuda::Context* out) {
  STUB_BEGIN("cuStreamGetCtx", stream);
  *out = context_stack.empty() ? nullptr : context_stack.back();
  return cuda::kSuccess;
}

cuda::Result cuStreamWaitEvent(cuda::Stream stream, cuda::Event, unsigned) {
  STUB_BEGIN("cuStreamWaitEvent", stream);
  return cuda::kSuccess;
}

cuda::Result cuEventCreate(cuda::Event* out, unsigned flags) {
  STUB_BEGIN("cuEventCreate");
  if (flags != cuda::kEventDisableTiming) return cuda::kInvalidValue;
  *out = reinterpret_cast<cuda::Event>(remember(new int));
  return cuda::kSuccess;
}

cuda::Result cuEventDestroy(cuda::Event event) {
  STUB_BEGIN("cuEventDestroy");
  forget(event);
  delete reinterpret_cast<int*>(event);
  return cuda::kSuccess;
}

// Events behind launches that have not run yet.
std::set<cuda::Event>& behind_launches = *new std::set<cuda::Event>;

cuda::Result cuEventRecord(cuda::Event event, cuda::Stream stream) {
  STUB_BEGIN("cuEventRecord", stream);
  if (!waiting.empty()) behind_launches.insert(event);
  return cuda::kSuccess;
}

cuda::Result cuEventQuery(cuda::Event event) {
  STUB_BEGIN("cuEventQuery");
  if (!behind_launches.contains(event)) return cuda::kSuccess;
  if (stub_state.busy) return cuda::kNotReady;
  behind_launches.erase(event);
  for (const Launch& launch : waiting) run(launch);
  waiting.clear();
  return cuda::kSuccess;
}

cuda::Result cuCtxRecordEvent(cuda::Context context, cuda::Event) {
  STUB_BEGIN("cuCtxRecordEvent");
  return context == primary() ? cuda::kSuccess : cuda::kInvalidContext;
}

cuda::Result cuMemsetD8Async(cuda::DevicePtr at, unsigned char value, std::size_t size, cuda::Stream stream) {
  STUB_BEGIN("cuMemsetD8Async", stream);
  std::memset(reinterpret_cast<void*>(at), value, size);
  return cuda::kSuccess;
}

cuda::Result cuMemcpyAsync(cuda::DevicePtr to, cuda::DevicePtr from, std::size_t size, cuda::Stream stream) {
  STUB_BEGIN("cuMemcpyAsync", stream);
  std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), size);
  return cuda::kSuccess;
}

cuda::Result cuModuleLoadDataEx(cuda::Module* out, const void* image, unsigned, int*, void**) {
  STUB_BEGIN("cuModuleLoadDataEx");
  *out = reinterpret_cast<cuda::Module>(1);
  return std::strstr(static_cast<const char*>(image), ".version 8.0\n.target sm_52\n") ? cuda::kSuccess : 218;
}

cuda::Result cuModuleUnload(cuda::Module) {
  STUB_BEGIN("cuModuleUnload");
  return cuda::kSuccess;
}

cuda::Result cuModuleGetFunction(cuda::Function* out, cuda::Module, const char* name) {
  STUB_BEGIN("cuModuleGetFunction");
  *out = reinterpret_cast<cuda::Function>(const_cast<char*>(name));
  return cuda::kSuccess;
}

cuda::Result cuLaunchKernel(cuda::Function kernel, unsigned grid, unsigned, unsigned, unsigned block, unsigned,
                            unsigned, unsigned, cuda::Stream stream, void** parameters, void**) {
  STUB_BEGIN("cuLaunchKernel", stream);
  if (block != streampool::driver::kPatternThreads) return cuda::kInvalidValue;
  waiting.push_back({reinterpret_cast<const char*>(kernel), *static_cast<PatternPiece**>(parameters[0]), grid,
                     *static_cast<unsigned long long*>(parameters[1])});
  return cuda::kSuccess;
}

cuda::Result cuGetProcAddress_v2(const char* name, void** out, int version, std::uint64_t flags, int* status) {
  static const std::map<std::string, void*> table = {
#define STUB_ROW(function, since, need, parameters) {#function, reinterpret_cast<void*>(&function)},
      STREAMPOOL_CUDA_FUNCTIONS(STUB_ROW)
#undef STUB_ROW
  };
  if (flags != cuda::kProcAddressLegacyStream) stub_state.ptds_asked = true;
  const auto found = table.find(name);
  const bool there =
      found != table.end() && std::strcmp(stub_state.missing, name) != 0 && version <= stub_state.version;
  *out = there ? found->second : nullptr;
  if (status) *status = there ? 0 : 1;
  return there ? cuda::kSuccess : 500;
}
}
