// The CUDA driver on a stand-in library: opening, errors, the frame around each call, cutting and collecting patterns.
// Needs no GPU. May import driver/ and what tests share.
#include <cstring>
#include <vector>

#include "cuda_stub.hpp"
#include "driver/cuda/errors.hpp"
#include "driver/cuda/library.hpp"
#include "driver/cuda/patterns.hpp"
#include "driver/pattern.hpp"

namespace streampool {
namespace {

using driver::CaptureState;
using driver::Code;
using driver::Mismatch;
using driver::OpenError;
using driver::Range;
using driver::Status;
using testing::Opened;
using testing::Stub;

constexpr std::uint64_t kKey = 0x1234567890ABCDEFull;

// STREAMPOOL_LIBCUDA names `path` while this lives.
struct OtherLibrary {
  explicit OtherLibrary(const std::string& path) { setenv("STREAMPOOL_LIBCUDA", path.c_str(), 1); }
  ~OtherLibrary() { unsetenv("STREAMPOOL_LIBCUDA"); }
};

// The thread's context and capture mode, as the library sees them.
struct Thread {
  using GetCurrent = int (*)(void**);
  using Push = int (*)(void*);
  using Pop = int (*)(void**);
  using Exchange = int (*)(int*);

  explicit Thread(Stub& stub)
      : get(stub.function<GetCurrent>("cuCtxGetCurrent")),
        push(stub.function<Push>("cuCtxPushCurrent")),
        pop(stub.function<Pop>("cuCtxPopCurrent")),
        exchange(stub.function<Exchange>("cuThreadExchangeStreamCaptureMode")) {}

  void* current() const {
    void* out = nullptr;
    get(&out);
    return out;
  }
  int mode() const {
    int now = 2;
    exchange(&now);
    int back = now;
    exchange(&back);
    return now;
  }

  GetCurrent get;
  Push push;
  Pop pop;
  Exchange exchange;
};

void check_code(const Status& status, Code code, int number, const char* call) {
  CHECK_EQ(status.number, number);
  CHECK(status.code == code);
  CHECK(status.call != nullptr);
  CHECK_EQ(std::string(status.call), std::string(call));
}

STREAMPOOL_TEST("cuda: a machine without libcuda says no_library and what to do") {
  const OtherLibrary library("/nowhere/libcuda.so.1");
  const Opened opened;
  CHECK(!opened.driver);
  CHECK(opened.kind == OpenError::no_library);
  CHECK(opened.says("cuda:0 was asked for"));
  CHECK(opened.says("Install the NVIDIA driver, or use sim:0"));
  OpenError kind = OpenError::none;
  std::string error;
  CHECK_EQ(driver::cuda::device_count(&kind, &error), 0);
  CHECK(kind == OpenError::no_library);
}

STREAMPOOL_TEST("cuda: a library that cannot be loaded is broken, not absent") {
  const auto file = std::filesystem::temp_directory_path() / "streampool-not-a-library.so";
  std::ofstream(file) << "this is no library";
  const OtherLibrary library(file.string());
  const Opened opened;
  std::filesystem::remove(file);
  CHECK(!opened.driver);
  CHECK(opened.kind == OpenError::broken);
}

STREAMPOOL_TEST("cuda: a library that is no CUDA driver is broken") {
  const OtherLibrary library("libm.so.6");
  const Opened opened;
  CHECK(opened.kind == OpenError::broken);
  CHECK(opened.says("has no cuInit"));
}

STREAMPOOL_TEST("cuda: a driver without a device says no_device, by cuInit or by the count") {
  Stub stub;
  stub->init_result = 100;
  CHECK(Opened().kind == OpenError::no_device);
  stub->version = 11080;  // an old driver on a machine without a GPU is no reason to complain about its age
  CHECK(Opened().kind == OpenError::no_device);
  stub->version = 13000;
  stub->init_result = 0;
  stub->devices = 0;
  const Opened opened;
  CHECK(opened.kind == OpenError::no_device);
  CHECK(opened.says("CUDA_VISIBLE_DEVICES"));
}

STREAMPOOL_TEST("cuda: a driver older than CUDA 12.0 is refused with its version and the one needed") {
  Stub stub;
  stub->version = 11080;
  const Opened opened;
  CHECK(!opened.driver);
  CHECK(opened.kind == OpenError::too_old);
  CHECK(opened.says("CUDA 11.8"));
  CHECK(opened.says("CUDA 12.0 or newer is needed"));
}

STREAMPOOL_TEST("cuda: a driver that lacks a required function is too old and the sentence names it") {
  Stub stub;
  stub->missing = "cuStreamGetId";
  const Opened opened;
  CHECK(opened.kind == OpenError::too_old);
  CHECK(opened.says("cuStreamGetId"));
  CHECK(opened.says("CUDA 13.0"));
}

STREAMPOOL_TEST("cuda: a driver that does not start is broken, with its error's name, text and advice") {
  Stub stub;
  for (const int number : {999, 803, 804, 802, 3, 34}) {
    stub->init_result = number;
    const Opened opened;
    CHECK(!opened.driver);
    CHECK(opened.kind == OpenError::broken);
    CHECK(opened.says(driver::cuda::error_name(number)));
    CHECK(opened.says(driver::cuda::error_text(number)));
    CHECK(*driver::cuda::error_advice(number) != '\0');
    CHECK(opened.says(driver::cuda::error_advice(number)));
  }
}

STREAMPOOL_TEST("cuda: every step of opening that fails is broken and gives the primary context back") {
  for (const char* call : {"cuDeviceGet", "cuDeviceGetCount", "cuDeviceGetAttribute", "cuDeviceTotalMem", "cuCtxGetId",
                           "cuDevicePrimaryCtxRetain", "cuCtxGetCurrent", "cuCtxPushCurrent", "cuModuleLoadDataEx",
                           "cuThreadExchangeStreamCaptureMode", "cuModuleGetFunction", "cuStreamCreate",
                           "cuMemHostAlloc", "cuMemHostGetDevicePointer", "cuLaunchKernel"}) {
    Stub stub;
    stub->failing = call;
    stub->failing_result = 999;
    const Opened opened;
    if (opened.driver || opened.kind != OpenError::broken) testing::fail(__FILE__, __LINE__, call);
    CHECK_EQ(stub->retained, 0);
    CHECK_EQ(stub->live, 0);
    stub->failing = "";
    CHECK(Opened().driver != nullptr);  // and it can be tried again
  }
}

STREAMPOOL_TEST("cuda: an ordinal beyond the last device says which there are") {
  Stub stub;
  stub->devices = 2;
  const Opened opened(2);
  CHECK(opened.kind == OpenError::no_device);
  CHECK(opened.says("cuda:2 was asked for"));
  CHECK(opened.says("cuda:0 to cuda:1"));
  CHECK(!Opened(-1).driver);
}

STREAMPOOL_TEST("cuda: one driver a device, named and described") {
  Stub stub;
  stub->devices = 2;
  const Opened a, b, c(1);
  CHECK(a.driver && a.kind == OpenError::none && a.error.empty());
  CHECK(a.driver == b.driver);
  CHECK(a.driver != c.driver);
  CHECK_EQ(a.driver->name(), "cuda:0");
  CHECK_EQ(c.driver->name(), "cuda:1");
  CHECK_EQ(c.driver->ordinal(), 1);
  CHECK(!a.driver->simulated());
  CHECK_EQ(a.driver->version().rfind("CUDA 13.0", 0), std::size_t{0});
  const auto& can = a.driver->capabilities();
  CHECK(can.virtual_memory && can.managed_memory && can.context_events && !can.device_memory_on_host);
  CHECK_EQ(can.granularity, 2 * kMiB);
  CHECK_EQ(can.total_memory, 80 * kGiB);
  CHECK_EQ(can.address_chunk, 120 * kGiB);
  CHECK(!stub->ptds_asked);
}

STREAMPOOL_TEST("cuda: an optional function that is missing turns its capability off") {
  {
    Stub stub;
    stub->version = 12000;  // no cuCtxRecordEvent before 12.5
    const Opened opened;
    CHECK(opened.driver != nullptr);
    CHECK(!opened.driver->capabilities().context_events);
    driver::EventHandle event = 0;
    CHECK(opened.driver->event_create(&event).ok());
    check_code(opened.driver->context_event_record(event), Code::not_supported, 801, "context_event_record");
    CHECK(opened.driver->event_destroy(event).ok());
  }
  Stub stub;
  stub->missing = "cuMemCreate";
  const Opened opened;
  CHECK(!opened.driver->capabilities().virtual_memory);
  driver::MemoryHandle handle = 0;
  CHECK(opened.driver->mem_create(2 * kMiB, &handle).code == Code::not_supported);
}

STREAMPOOL_TEST("cuda: each call runs in its own context and in relaxed capture mode and restores both") {
  Stub stub;
  const Opened opened;
  const Thread thread(stub);
  driver::Driver& device = *opened.driver;
  int other = 0;
  for (void* before : {static_cast<void*>(nullptr), static_cast<void*>(&other)}) {
    if (before) thread.push(before);
    for (const int mode : {0, 1, 2}) {
      int was = mode;
      thread.exchange(&was);
      Address at = 0;
      CHECK(device.mem_alloc(Kind::device, 1024, &at).ok());
      CHECK(thread.current() == before);
      CHECK_EQ(thread.mode(), mode);
      CHECK(device.mem_free(Kind::device, at).ok());
      stub->failing = "cuMemAlloc";
      stub->failing_result = 2;
      check_code(device.mem_alloc(Kind::device, 1024, &at), Code::out_of_memory, 2, "mem_alloc");
      CHECK_EQ(at, Address{0});
      stub->failing = "cuCtxPushCurrent";
      stub->failing_result = 999;
      CHECK(!device.mem_alloc(Kind::device, 1024, &at).ok());
      stub->failing = "";
      CHECK(thread.current() == before);
      CHECK_EQ(thread.mode(), mode);
      thread.exchange(&was);
    }
    if (before) thread.pop(&before);
  }
  CHECK_EQ(stub->strict_calls, 0);
}

STREAMPOOL_TEST("cuda: every method makes its call, counted under its name") {
  Stub stub;
  const Opened opened;
  driver::Driver& device = *opened.driver;
  const auto live = stub->live;
  for (const Kind kind : {Kind::device, Kind::pinned, Kind::managed}) {
    Address at = 0;
    CHECK(device.mem_alloc(kind, 4096, &at).ok());
    CHECK(at != 0);
    CHECK(device.fill(0, at, 7, 4096).ok());
    CHECK(device.copy(0, at + 2048, at, 100).ok());
    CHECK_EQ(int{reinterpret_cast<unsigned char*>(at)[2100]}, 7);
    CHECK(device.mem_free(kind, at).ok());
  }
  Bytes free_bytes = 0, total = 0;
  CHECK(device.mem_info(&free_bytes, &total).ok());
  CHECK(free_bytes == 79 * kGiB && total == 80 * kGiB);

  Address range = 0;
  driver::MemoryHandle handle = 0;
  CHECK(device.address_reserve(8 * kMiB, 0, &range).ok());
  CHECK(device.mem_create(2 * kMiB, &handle).ok());
  CHECK(device.mem_map(range, 2 * kMiB, handle).ok());
  CHECK(device.mem_set_access(range, 2 * kMiB).ok());
  CHECK(device.fill(0, range, 1, 2 * kMiB).ok());
  CHECK(device.mem_unmap(range, 2 * kMiB).ok());
  CHECK(device.mem_release(handle).ok());
  CHECK(device.address_free(range, 8 * kMiB).ok());

  driver::StreamHandle stream = 0;
  driver::EventHandle event = 0;
  std::uint64_t id = 0;
  CaptureState state;
  CHECK(device.stream_create(&stream).ok());
  driver::PoolHandle pool = 0;
  Address piece = 0;
  CHECK(device.pool_create(&pool).ok());
  CHECK_EQ(stub->release_threshold, ~std::uint64_t{0});
  CHECK(device.pool_alloc(pool, stream, 4 * kMiB, &piece).ok());
  CHECK(piece != 0 && stub->last_stream == stream);
  CHECK(device.pool_free(stream, piece).ok());
  stub->busy = true;
  CHECK(device.pool_observe(stream).code == Code::not_ready);
  stub->busy = false;
  CHECK(device.pool_observe(stream).ok());
  CHECK(device.pool_trim(pool, 0).ok());
  CHECK(device.pool_destroy(pool).ok());
  Bytes granularity = 0;
  CHECK(device.mem_granularity({.exported = driver::Export::posix_fd}, &granularity).ok());
  CHECK_EQ(granularity, 2 * kMiB);
  CHECK(device.stream_id(stream, &id).ok() && id != 0);
  CHECK(device.stream_is_capturing(stream, &state).ok() && !state.capturing);
  CHECK(device.event_create(&event).ok());
  CHECK(device.event_record(event, stream).ok());
  CHECK(device.event_query(event).ok());
  CHECK(device.stream_wait_event(stream, event).ok());
  CHECK(device.context_event_record(event).ok());
  stub.function<void (*)(std::uintptr_t, bool)>("stub_set_capturing")(stream, true);
  CHECK(device.stream_is_capturing(stream, &state).ok());
  CHECK(state.capturing && state.id == 77);
  check_code(device.stream_id(stream, &id), Code::capturing, 900, "stream_id");
  int ended = 0;
  const auto end_one = [](void* object) { ++*static_cast<int*>(object); };
  stub->invalidated = true;
  CHECK(device.stream_is_capturing(stream, &state).ok() && state.capturing && state.id == 0);
  check_code(device.graph_retain(stream, 77, end_one, &ended), Code::capturing, 901, "graph_retain");
  stub->invalidated = false;
  check_code(device.graph_retain(stream, 78, end_one, &ended), Code::capturing, 901, "graph_retain");  // another's id
  stub->failing_result = 999;
  for (const char* call : {"cuStreamGetCaptureInfo", "cuUserObjectCreate", "cuGraphRetainUserObject"}) {
    stub->failing = call;
    CHECK_EQ(device.graph_retain(stream, 77, end_one, &ended).number, 999);
    CHECK_EQ(stub->user_objects, 0);  // and nothing is left of it
  }
  stub->failing = "";
  for (int i = 0; i < 2; ++i) CHECK(device.graph_retain(stream, 77, end_one, &ended).ok());
  CHECK_EQ(ended, 0);
  CHECK_EQ(stub->user_objects, 2);
  CHECK_EQ(stub->strict_calls.load(), 0);
  stub.function<void (*)()>("stub_end_graph")();
  CHECK_EQ(ended, 2);
  CHECK_EQ(stub->user_objects, 0);
  CHECK(device.event_destroy(event).ok());
  CHECK(device.stream_destroy(stream).ok());
  CHECK_EQ(stub->live, live);

  const auto calls = device.calls();
  const auto count = [&](driver::Call call) { return calls[static_cast<std::size_t>(call)]; };
  using enum driver::Call;
  for (const auto call :
       {mem_alloc,     mem_free,        mem_alloc_host, mem_free_host,        mem_alloc_managed, mem_free_managed,
        mem_info,      address_reserve, address_free,   mem_create,           mem_release,       mem_map,
        mem_unmap,     mem_set_access,  stream_create,  stream_destroy,       stream_wait_event, event_create,
        event_destroy, event_record,    event_query,    context_event_record, pool_create,       pool_alloc,
        pool_free,     pool_trim,       pool_destroy,   mem_granularity})
    CHECK_EQ(count(call), std::uint64_t{1});
  CHECK_EQ(count(fill), std::uint64_t{4});
  CHECK_EQ(count(stream_id), std::uint64_t{2});
  CHECK_EQ(count(stream_synchronize) + count(event_synchronize), std::uint64_t{0});
}

STREAMPOOL_TEST("cuda: memory is made and mapped with what a pool asks for, and refused where the device lacks it") {
  Stub stub;
  stub->devices = 2;
  const Opened opened;
  driver::Driver& device = *opened.driver;
  const driver::Capabilities& can = device.capabilities();
  CHECK(can.export_posix_fd && can.export_fabric && can.rdma && can.driver_pools);
  CHECK(can.peers == std::vector<int>{1});
  const driver::MemoryTraits traits{.exported = driver::Export::fabric, .rdma = true, .peers = {1}};
  driver::MemoryHandle handle = 0;
  Address range = 0;
  CHECK(device.mem_create(2 * kMiB, traits, &handle).ok());
  CHECK_EQ(stub->last_handle_types, driver::cuda::kHandleFabric);
  CHECK_EQ(stub->last_rdma, 1);
  CHECK(device.address_reserve(2 * kMiB, 0, &range).ok());
  CHECK(device.mem_map(range, 2 * kMiB, handle).ok());
  CHECK(device.mem_set_access(range, 2 * kMiB, traits).ok());
  CHECK_EQ(stub->last_access_count, 2);
  CHECK(device.mem_unmap(range, 2 * kMiB).ok());
  CHECK(device.mem_release(handle).ok());
  CHECK(device.mem_create(2 * kMiB, &handle).ok());
  CHECK_EQ(stub->last_handle_types, driver::cuda::kHandleNone);
  CHECK_EQ(stub->last_rdma, 0);
  CHECK(device.mem_release(handle).ok());
  Bytes granularity = 0;
  check_code(device.mem_granularity({.peers = {2}}, &granularity), Code::not_supported, 801, "mem_granularity");

  Stub poor;
  poor->missing = "cuMemFreeAsync";
  const Opened other;
  driver::PoolHandle pool = 0;
  CHECK(!other.driver->capabilities().driver_pools);
  check_code(other.driver->pool_create(&pool), Code::not_supported, 801, "pool_create");
}

STREAMPOOL_TEST("cuda: a driver's pool that cannot keep its memory is not made") {
  Stub stub;
  const Opened opened;
  const std::int64_t live = stub->live;
  stub->failing = "cuMemPoolSetAttribute";
  stub->failing_result = 1;
  driver::PoolHandle pool = 0;
  CHECK(opened.driver->pool_create(&pool).code == Code::invalid);
  CHECK_EQ(stub->live, live);
}

STREAMPOOL_TEST("cuda: handle 0 is passed on as the legacy stream, the per-thread handle as it is") {
  Stub stub;
  const Opened opened;
  CaptureState state;
  CHECK(opened.driver->stream_is_capturing(driver::kDefaultStream, &state).ok());
  CHECK_EQ(stub->last_stream, driver::kLegacyStream);
  CHECK(opened.driver->stream_is_capturing(driver::kPerThreadStream, &state).ok());
  CHECK_EQ(stub->last_stream, driver::kPerThreadStream);
}

STREAMPOOL_TEST("cuda: error numbers become what a caller may do about them") {
  using driver::cuda::code_of;
  CHECK(code_of(0) == Code::ok);
  CHECK(code_of(1) == Code::invalid && code_of(400) == Code::invalid);
  CHECK(code_of(2) == Code::out_of_memory);
  CHECK(code_of(3) == Code::gone && code_of(4) == Code::gone);
  CHECK(code_of(600) == Code::not_ready && code_of(801) == Code::not_supported);
  for (int number = 900; number <= 908; ++number) CHECK(code_of(number) == Code::capturing);
  for (const int number : {201, 214, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719})
    CHECK(code_of(number) == Code::lost);
  for (const int number : {701, 720, 800, 909, 999, 12345}) CHECK(code_of(number) == Code::failed);
  CHECK_EQ(std::string(driver::cuda::error_name(700)), "CUDA_ERROR_ILLEGAL_ADDRESS");
  CHECK_EQ(std::string(driver::cuda::error_name(12345)), "CUDA error 12345");
  CHECK_EQ(std::string(driver::cuda::error_text(2)), "out of memory");
}

STREAMPOOL_TEST("cuda: after a device fault no further call reaches the driver, and opening makes a new one") {
  Stub stub;
  const Opened opened;
  Address at = 0;
  CHECK(opened.driver->mem_alloc(Kind::device, 256, &at).ok());
  stub->failing = "cuEventQuery";
  stub->failing_result = 700;
  driver::EventHandle event = 0;
  CHECK(opened.driver->event_create(&event).ok());
  check_code(opened.driver->event_query(event), Code::lost, 700, "event_query");
  const int calls = stub->calls;
  check_code(opened.driver->mem_free(Kind::device, at), Code::lost, 700, "mem_free");
  check_code(opened.driver->event_destroy(event), Code::lost, 700, "event_destroy");
  std::vector<Mismatch> found;
  const Range range{at, 256};
  CHECK(opened.driver->pattern_verify(Kind::device, {&range, 1}, kKey, &found).code == Code::lost);
  CHECK_EQ(stub->calls, calls);
  const Opened again;
  CHECK(again.driver && again.driver != opened.driver);
}

STREAMPOOL_TEST("cuda: a device fault is noticed where virtual memory is asked for, though those calls do not tell") {
  Stub stub;
  const Opened opened;
  driver::MemoryHandle handle = 0;
  CHECK(opened.driver->mem_create(2 * kMiB, &handle).ok());
  const auto live = stub->live;
  stub->failing = "cuStreamQuery";
  stub->failing_result = 600;
  driver::MemoryHandle second = 0;
  CHECK(opened.driver->mem_create(2 * kMiB, &second).ok());  // a job on the private stream is no fault
  CHECK(opened.driver->mem_release(second).ok());
  stub->failing_result = 700;
  check_code(opened.driver->mem_create(2 * kMiB, &second), Code::lost, 700, "mem_create");
  CHECK_EQ(second, driver::MemoryHandle{0});
  CHECK_EQ(stub->live, live);
  check_code(opened.driver->mem_release(handle), Code::lost, 700, "mem_release");
}

STREAMPOOL_TEST("cuda: after a context reset events and memory of the old context are never touched") {
  Stub stub;
  const Opened opened;
  driver::EventHandle event = 0;
  CHECK(opened.driver->event_create(&event).ok());
  ++stub->generation;
  const int calls = stub->calls;
  check_code(opened.driver->event_query(event), Code::lost, 709, "event_query");
  --stub->generation;  // dead is dead
  check_code(opened.driver->event_destroy(event), Code::lost, 709, "event_destroy");
  CHECK_EQ(stub->calls, calls);
}

STREAMPOOL_TEST("cuda: an error about another context does not end this device") {
  Stub stub;
  const Opened opened;
  stub->failing = "cuStreamGetId";
  std::uint64_t id = 0;
  for (const int number : {709, 201}) {
    stub->failing_result = number;
    check_code(opened.driver->stream_id(2, &id), Code::invalid, number, "stream_id");
  }
  stub->failing = "";
  CHECK(opened.driver->stream_id(2, &id).ok());
}

STREAMPOOL_TEST("cuda: while the process is ending every call answers gone without touching the driver") {
  Stub stub;
  const Opened opened;
  Address at = 0;
  CHECK(opened.driver->mem_alloc(Kind::device, 256, &at).ok());
  const int calls = stub->calls;
  for (const auto why : {driver::Ending::exiting, driver::Ending::forked}) {
    driver::set_ending(why);
    const Status freed = opened.driver->mem_free(Kind::device, at);
    CaptureState state;
    const Status asked = opened.driver->stream_is_capturing(0, &state);
    const Opened late;
    driver::set_ending(driver::Ending::no);
    CHECK(freed.code == Code::gone && asked.code == Code::gone);
    CHECK(!late.driver);
    if (why == driver::Ending::forked) CHECK(late.says("spawn"));
  }
  CHECK_EQ(stub->calls, calls);
}

}  // namespace
}  // namespace streampool
