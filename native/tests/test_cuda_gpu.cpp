// The CUDA driver on a real GPU: each promise of driver.hpp against the real library. Skipped, with a printed reason,
// where there is no GPU; STREAMPOOL_REQUIRE_GPU=1 makes that a failure. May import driver/ and what tests share.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "cuda_stub.hpp"
#include "driver/cuda/api.hpp"
#include "driver/cuda/library.hpp"
#include "driver/cuda/patterns.hpp"
#include "driver/pattern.hpp"

namespace streampool {
namespace {

namespace cuda = driver::cuda;
using driver::CaptureState;
using driver::Code;
using driver::EventHandle;
using driver::Mismatch;
using driver::OpenError;
using driver::Range;
using driver::StreamHandle;
using testing::Opened;

constexpr std::uint64_t kKey = 0xFEDCBA9876543211ull;
constexpr int kCaptureGlobal = 0;

struct NoGpu {};
using Executable = struct ExecutableTag*;  // CUgraphExec

// cuda:0 and the functions that only tests call. Throws NoGpu where there is none.
struct Gpu {
  Gpu() {
    if (!opened.driver) {
      const bool absent = opened.kind == OpenError::no_library || opened.kind == OpenError::no_device;
      if (!absent || std::getenv("STREAMPOOL_REQUIRE_GPU")) testing::fail(__FILE__, __LINE__, opened.error);
      testing::skip(opened.error.c_str());
      throw NoGpu();
    }
    OpenError kind = OpenError::none;
    library = cuda::load_library(&kind, nullptr);
    resolve(&begin_capture, "cuStreamBeginCapture", 10010);
    resolve(&end_capture, "cuStreamEndCapture", 10000);
    resolve(&destroy_graph, "cuGraphDestroy", 10000);
    resolve(&instantiate, "cuGraphInstantiateWithFlags", 11040);
    resolve(&launch_graph, "cuGraphLaunch", 10000);
    resolve(&destroy_executable, "cuGraphExecDestroy", 10000);
    resolve(&launch_host, "cuLaunchHostFunc", 10000);
    resolve(&set_current, "cuCtxSetCurrent", 4000);
    resolve(&synchronize, "cuStreamSynchronize", 2000);
    resolve(&reset, "cuDevicePrimaryCtxReset", 11000);
    api = &library->api;
    CHECK_EQ(api->cuDevicePrimaryCtxRetain(&context, 0), 0);
    CHECK_EQ(set_current(nullptr), 0);
  }
  ~Gpu() {
    set_current(nullptr);
    api->cuDevicePrimaryCtxRelease(0);
  }
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  driver::Driver* operator->() { return opened.driver.get(); }

  template <typename F>
  void resolve(F* out, const char* name, int version) {
    void* found = nullptr;
    library->get_proc_address(name, &found, version, cuda::kProcAddressLegacyStream, nullptr);
    CHECK(found != nullptr);
    *out = reinterpret_cast<F>(found);
  }

  Address alloc(Kind kind, Bytes size) {
    Address at = 0;
    CHECK(opened.driver->mem_alloc(kind, size, &at).ok());
    return at;
  }

  void finish(StreamHandle stream) {
    set_current(context);
    const int result = synchronize(reinterpret_cast<cuda::Stream>(stream));
    set_current(nullptr);
    CHECK_EQ(result, 0);
  }

  const Opened opened;
  const cuda::Library* library = nullptr;
  const cuda::Api* api = nullptr;
  cuda::Context context = nullptr;
  int (*begin_capture)(cuda::Stream, int) = nullptr;
  int (*end_capture)(cuda::Stream, cuda::Graph*) = nullptr;
  int (*destroy_graph)(cuda::Graph) = nullptr;
  int (*instantiate)(Executable*, cuda::Graph, unsigned long long) = nullptr;
  int (*launch_graph)(Executable, cuda::Stream) = nullptr;
  int (*destroy_executable)(Executable) = nullptr;
  int (*launch_host)(cuda::Stream, void (*)(void*), void*) = nullptr;
  int (*set_current)(cuda::Context) = nullptr;
  int (*synchronize)(cuda::Stream) = nullptr;
  int (*reset)(cuda::Device) = nullptr;
};

// Work that waits until the gate opens, and in no case longer than five seconds.
struct Gate {
  std::atomic<bool> open{false};
  std::atomic<bool> held{false};

  ~Gate() {
    open = true;
    for (int i = 0; i < 6000 && held; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  void hold(Gpu& gpu, StreamHandle stream) {
    gpu.set_current(gpu.context);
    const auto wait = [](void* self) {
      auto* gate = static_cast<Gate*>(self);
      for (int i = 0; i < 5000 && !gate->open; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      gate->held = false;
    };
    held = true;
    const int result = gpu.launch_host(reinterpret_cast<cuda::Stream>(stream), wait, this);
    gpu.set_current(nullptr);
    CHECK_EQ(result, 0);
  }
};

struct TestStream {
  explicit TestStream(Gpu& g) : gpu(g) { CHECK(gpu->stream_create(&handle).ok()); }
  ~TestStream() {
    if (handle) gpu->stream_destroy(handle);
  }
  cuda::Stream raw() const { return reinterpret_cast<cuda::Stream>(handle); }
  Gpu& gpu;
  StreamHandle handle = 0;
};

double seconds_of(const auto& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// A test that needs a GPU: `gpu` is cuda:0.
#define GPU_TEST(sentence) GPU_TEST_2(sentence, STREAMPOOL_TEST_CAT(gpu_test_, __LINE__))
#define GPU_TEST_2(sentence, function) \
  void function(Gpu& gpu);             \
  STREAMPOOL_TEST(sentence) {          \
    try {                              \
      Gpu gpu;                         \
      function(gpu);                   \
    } catch (const NoGpu&) {           \
    }                                  \
  }                                    \
  void function([[maybe_unused]] Gpu& gpu)

GPU_TEST("gpu: the device opens and says what it can do") {
  const auto& can = gpu->capabilities();
  std::printf(
      "gpu: %s, %s, %.1f GiB, granularity %llu KiB, virtual %d, managed %d, context events %d, capture ids %d\n",
      std::string(gpu->name()).c_str(), gpu->version().c_str(),
      static_cast<double>(can.total_memory) / static_cast<double>(kGiB),
      static_cast<unsigned long long>(can.granularity / kKiB), can.virtual_memory, can.managed_memory,
      can.context_events, gpu.api->cuStreamGetCaptureInfo != nullptr);
  CHECK(can.total_memory > 0 && can.address_chunk > can.total_memory);
  CHECK(is_power_of_two(can.granularity));
  OpenError kind = OpenError::none;
  CHECK(cuda::device_count(&kind, nullptr) >= 1);
}

GPU_TEST("gpu: memory of each kind is allocated, filled, copied and freed") {
  TestStream stream(gpu);
  const Address back = gpu.alloc(Kind::pinned, kMiB);
  for (const Kind kind : {Kind::device, Kind::pinned, Kind::managed}) {
    if (kind == Kind::managed && !gpu->capabilities().managed_memory) continue;
    const Address at = gpu.alloc(kind, kMiB);
    CHECK(gpu->fill(stream.handle, at, 0x5A, kMiB).ok());
    CHECK(gpu->fill(stream.handle, at + 77, 0x33, 1).ok());
    CHECK(gpu->copy(stream.handle, back, at, kMiB).ok());
    gpu.finish(stream.handle);
    const auto* bytes = reinterpret_cast<const unsigned char*>(back);
    for (Bytes i = 0; i < kMiB; ++i) CHECK_EQ(int{bytes[i]}, i == 77 ? 0x33 : 0x5A);
    CHECK(gpu->mem_free(kind, at).ok());
  }
  CHECK(gpu->mem_free(Kind::pinned, back).ok());
  Bytes free_bytes = 0, total = 0;
  CHECK(gpu->mem_info(&free_bytes, &total).ok() && free_bytes > 0 && free_bytes <= total);
}

GPU_TEST("gpu: the caller's context and capture mode are as before, after success and after errors") {
  for (const cuda::Context before : {cuda::Context{nullptr}, gpu.context}) {
    gpu.set_current(before);
    for (const int mode : {0, 1, 2}) {
      int was = mode;
      gpu.api->cuThreadExchangeStreamCaptureMode(&was);
      std::uint64_t id = 0;
      CHECK(gpu->stream_id(0, &id).ok());
      Address at = 0;
      const auto refused = gpu->mem_alloc(Kind::device, Bytes{1} << 50, &at);
      CHECK(refused.code == Code::out_of_memory && refused.number == 2 && at == 0);
      CHECK(gpu->mem_free(Kind::device, 0x123456).code == Code::invalid);
      CHECK(gpu->fill(0, 0x123456, 0, 16).code == Code::invalid);
      cuda::Context now = nullptr;
      gpu.api->cuCtxGetCurrent(&now);
      CHECK(now == before);
      int mode_now = was;
      gpu.api->cuThreadExchangeStreamCaptureMode(&mode_now);
      CHECK_EQ(mode_now, mode);
    }
  }
}

GPU_TEST("gpu: virtual memory is mapped, used, unmapped and mapped elsewhere, while work is stuck") {
  if (!gpu->capabilities().virtual_memory) return testing::skip("no virtual memory here");
  const Bytes piece = round_up(4 * kMiB, gpu->capabilities().granularity);
  TestStream stream(gpu), stuck(gpu);
  Address range = 0;
  driver::MemoryHandle first = 0, second = 0;
  const Address back = gpu.alloc(Kind::pinned, piece);
  Gate gate;
  gate.hold(gpu, stuck.handle);
  CHECK(gpu->address_reserve(gpu->capabilities().address_chunk, 0, &range).ok());
  CHECK(gpu->mem_create(piece, &first).ok());
  CHECK(gpu->mem_create(piece, &second).ok());
  CHECK(gpu->mem_map(range, piece, first).ok());
  CHECK(gpu->mem_map(range + piece, piece, second).ok());
  CHECK(gpu->mem_set_access(range, 2 * piece).ok());
  CHECK(gpu->fill(stream.handle, range, 0x11, piece).ok());
  CHECK(gpu->fill(stream.handle, range + piece, 0x22, piece).ok());
  gpu.finish(stream.handle);
  CHECK(gpu->mem_unmap(range, piece).ok());
  CHECK(gpu->mem_map(range + 5 * piece, piece, first).ok());
  CHECK(gpu->mem_set_access(range + 5 * piece, piece).ok());
  CHECK(gpu->copy(stream.handle, back, range + 5 * piece, piece).ok());
  gpu.finish(stream.handle);
  CHECK_EQ(int{reinterpret_cast<const unsigned char*>(back)[piece - 1]}, 0x11);
  CHECK(gpu->mem_unmap(range + piece, piece).ok());
  CHECK(gpu->mem_unmap(range + 5 * piece, piece).ok());
  CHECK(gpu->mem_release(first).ok());
  CHECK(gpu->mem_release(second).ok());
  CHECK(gpu->address_free(range, gpu->capabilities().address_chunk).ok());
  CHECK(!gate.open);
  gate.open = true;
  gpu.finish(stuck.handle);
  CHECK(gpu->mem_free(Kind::pinned, back).ok());
}

GPU_TEST("gpu: a mapping that does not fit is refused and nothing is lost") {
  if (!gpu->capabilities().virtual_memory) return testing::skip("no virtual memory here");
  driver::MemoryHandle handle = 0;
  const auto big = round_up(2 * gpu->capabilities().total_memory, gpu->capabilities().granularity);
  CHECK(gpu->mem_create(big, &handle).code == Code::out_of_memory);
  CHECK(gpu->mem_create(12345, &handle).code == Code::invalid);
  CHECK(gpu->mem_create(gpu->capabilities().granularity, &handle).ok());
  CHECK(gpu->mem_release(handle).ok());
}

GPU_TEST("gpu: per-thread default streams of two threads differ, the legacy stream is one") {
  std::uint64_t here = 0, there = 0, zero = 0, one = 0, legacy_there = 0;
  CHECK(gpu->stream_id(driver::kPerThreadStream, &here).ok());
  CHECK(gpu->stream_id(driver::kDefaultStream, &zero).ok());
  CHECK(gpu->stream_id(driver::kLegacyStream, &one).ok());
  bool good = false;
  std::thread([&] {
    good = gpu->stream_id(driver::kPerThreadStream, &there).ok() && gpu->stream_id(0, &legacy_there).ok();
  }).join();
  CHECK(good);
  CHECK(here != there);
  CHECK(zero == one && zero == legacy_there && zero != here);
}

GPU_TEST("gpu: a destroyed stream's id is not given to the next stream, even where the handle is") {
  std::uint64_t first = 0, second = 0;
  {
    TestStream a(gpu);
    CHECK(gpu->stream_id(a.handle, &first).ok());
  }
  TestStream b(gpu);
  CHECK(gpu->stream_id(b.handle, &second).ok());
  CHECK(first != second);
}

GPU_TEST("gpu: events are not ready while work is stuck and ready after it, through a wait edge too") {
  TestStream a(gpu), b(gpu);
  EventHandle in_a = 0, in_b = 0;
  CHECK(gpu->event_create(&in_a).ok() && gpu->event_create(&in_b).ok());
  Gate gate;
  gate.hold(gpu, a.handle);
  CHECK(gpu->event_record(in_a, a.handle).ok());
  CHECK(gpu->stream_wait_event(b.handle, in_a).ok());
  CHECK(gpu->event_record(in_b, b.handle).ok());
  CHECK(gpu->event_query(in_a).code == Code::not_ready);
  CHECK(gpu->event_query(in_b).code == Code::not_ready);
  gate.open = true;
  gpu.finish(b.handle);
  CHECK(gpu->event_query(in_a).ok() && gpu->event_query(in_b).ok());
  CHECK(gpu->event_destroy(in_a).ok() && gpu->event_destroy(in_b).ok());
}

GPU_TEST("gpu: a context event covers the work of a stream that was destroyed") {
  if (!gpu->capabilities().context_events) return testing::skip("no context events in this driver");
  EventHandle event = 0;
  CHECK(gpu->event_create(&event).ok());
  Gate gate;
  {
    TestStream gone(gpu);
    gate.hold(gpu, gone.handle);
  }
  CHECK(gpu->context_event_record(event).ok());
  CHECK(gpu->event_query(event).code == Code::not_ready);
  gate.open = true;
  for (int i = 0; i < 6000 && !gpu->event_query(event).ok(); ++i) gpu->pause(0.001);
  CHECK(gpu->event_query(event).ok());
  CHECK(gpu->event_destroy(event).ok());
}

// Begins a capture in `stream`, runs `body`, and says whether the capture was still good at its end.
bool survives_capture(Gpu& gpu, cuda::Stream stream, const auto& body) {
  gpu.set_current(gpu.context);
  CHECK_EQ(gpu.begin_capture(stream, kCaptureGlobal), 0);
  gpu.set_current(nullptr);
  body();
  gpu.set_current(gpu.context);
  cuda::Graph graph = nullptr;
  const int result = gpu.end_capture(stream, &graph);
  if (result == 0 && graph) gpu.destroy_graph(graph);
  gpu.set_current(nullptr);
  return result == 0;
}

GPU_TEST("gpu: calls that are allowed during a capture in global mode leave it whole, on any thread") {
  TestStream captured(gpu), other(gpu);
  EventHandle old = 0;
  CHECK(gpu->event_create(&old).ok());
  CHECK(gpu->event_record(old, other.handle).ok());
  const Address at = gpu.alloc(Kind::device, 4096);
  const auto body = [&] {
    CaptureState state;
    CHECK(gpu->stream_is_capturing(captured.handle, &state).ok());
    CHECK(state.capturing && state.id != 0);
    CHECK(gpu->stream_is_capturing(other.handle, &state).ok() && !state.capturing && state.id == 0);
    std::uint64_t id = 0;
    CHECK(gpu->stream_id(other.handle, &id).ok());
    CHECK(gpu->event_query(old).ok());
    CHECK(gpu->event_record(old, other.handle).ok());
    Address more = 0;
    CHECK(gpu->mem_alloc(Kind::device, 4096, &more).ok());
    CHECK(gpu->mem_free(Kind::device, more).ok());
    const Range range{at, 4096};
    std::vector<Mismatch> found;
    CHECK(gpu->pattern_fill(Kind::device, {&range, 1}, kKey).ok());
    CHECK(gpu->pattern_verify(Kind::device, {&range, 1}, kKey, &found).ok() && found.empty());
  };
  CHECK(survives_capture(gpu, captured.raw(), body));
  std::string failure;
  CHECK(survives_capture(gpu, captured.raw(), [&] {
    std::thread([&] {
      try {
        body();
      } catch (const std::exception& error) {
        failure = error.what();
      }
    }).join();
  }));
  CHECK_EQ(failure, "");
  CHECK(gpu->mem_free(Kind::device, at).ok());
  CHECK(gpu->event_destroy(old).ok());
}

GPU_TEST(
    "gpu: what a graph retains ends once the graph, what was made of it and its launches are gone, and no sooner") {
  TestStream captured(gpu);
  const Address at = gpu.alloc(Kind::device, 4096);
  // Freed by a thread of the driver's, at the process's end at the latest.
  static std::atomic<int> ended{0};
  const auto end_one = [](void* count) { ++*static_cast<std::atomic<int>*>(count); };
  const auto ends = [&] {
    for (int i = 0; i < 5000 && ended == 0; ++i) gpu->pause(0.001);
    return ended.exchange(0);
  };
  CaptureState state;
  gpu.set_current(gpu.context);
  CHECK_EQ(gpu.begin_capture(captured.raw(), kCaptureGlobal), 0);
  gpu.set_current(nullptr);
  CHECK(gpu->stream_is_capturing(captured.handle, &state).ok() && state.capturing);
  CHECK(gpu->graph_retain(captured.handle, state.id + 1, end_one, &ended).number == 901);
  CHECK(gpu->graph_retain(captured.handle, state.id, end_one, &ended).ok());
  CHECK(gpu->fill(captured.handle, at, 0x11, 4096).ok());
  gpu.set_current(gpu.context);
  cuda::Graph graph = nullptr;
  Executable executable = nullptr;
  CHECK_EQ(gpu.end_capture(captured.raw(), &graph), 0);
  CHECK_EQ(gpu.instantiate(&executable, graph, 0), 0);
  CHECK_EQ(gpu.destroy_graph(graph), 0);
  CHECK_EQ(gpu.launch_graph(executable, captured.raw()), 0);
  gpu.finish(captured.handle);
  CHECK_EQ(ended.load(), 0);
  {
    Gate gate;
    gate.hold(gpu, captured.handle);
    gpu.set_current(gpu.context);
    CHECK_EQ(gpu.launch_graph(executable, captured.raw()), 0);
    CHECK_EQ(gpu.destroy_executable(executable), 0);
    gpu.set_current(nullptr);
    gpu->pause(0.1);
    CHECK(ended == 0 || !gate.held);
  }
  gpu.finish(captured.handle);
  CHECK_EQ(ends(), 1);

  // A capture that is lost has no graph.
  CHECK(!survives_capture(gpu, captured.raw(), [&] {
    CHECK(gpu->stream_is_capturing(captured.handle, &state).ok());
    CHECK(gpu->graph_retain(captured.handle, state.id, end_one, &ended).ok());
    std::uint64_t id = 0;
    CHECK(gpu->stream_id(captured.handle, &id).code == Code::capturing);
    CHECK(gpu->stream_is_capturing(captured.handle, &state).ok() && state.capturing && state.id == 0);
    CHECK(gpu->graph_retain(captured.handle, state.id, end_one, &ended).code == Code::capturing);
  }));
  CHECK_EQ(ends(), 1);
  CHECK(gpu->mem_free(Kind::device, at).ok());
}

GPU_TEST("gpu: what is illegal in a capture answers capturing, and asking the legacy stream harms nothing") {
  gpu.set_current(gpu.context);
  cuda::Stream blocking = nullptr;
  CHECK_EQ(gpu.api->cuStreamCreate(&blocking, 0), 0);
  gpu.set_current(nullptr);
  const auto handle = reinterpret_cast<StreamHandle>(blocking);
  EventHandle event = 0;
  CHECK(gpu->event_create(&event).ok());
  CHECK(survives_capture(gpu, blocking, [&] {
    CaptureState state;
    const auto status = gpu->stream_is_capturing(driver::kLegacyStream, &state);
    CHECK(status.code == Code::capturing && status.number == 906 && !state.capturing);
  }));
  CHECK(!survives_capture(gpu, blocking, [&] {
    std::uint64_t id = 0;
    CHECK(gpu->stream_id(handle, &id).code == Code::capturing);
    CaptureState state;
    CHECK(gpu->stream_is_capturing(handle, &state).ok() && state.capturing);  // lost, but not ended yet
  }));
  CHECK(!survives_capture(gpu, blocking,
                          [&] { CHECK(gpu->event_record(event, driver::kLegacyStream).code == Code::capturing); }));
  CHECK(gpu->event_destroy(event).ok());
  CHECK(gpu->stream_destroy(handle).ok());
}

GPU_TEST("gpu: the kernels write exactly the host's pattern, for sizes 1 to 5000 at any offset, and find each byte") {
  std::uint64_t random = 88172645463325252ull;
  const auto next = [&](std::uint64_t below) {
    random ^= random << 13;
    random ^= random >> 7;
    random ^= random << 17;
    return random % below;
  };
  std::vector<Range> ranges;
  Bytes end = 0;
  for (Bytes size = 1; size <= 5000; ++size) {
    end += 1 + next(40);
    ranges.push_back({end, size});
    end += size;
  }
  end += 64;
  for (const Kind kind : {Kind::device, Kind::managed, Kind::pinned}) {
    if (kind == Kind::managed && !gpu->capabilities().managed_memory) continue;
    TestStream stream(gpu);
    const Address at = gpu.alloc(kind, end), back = gpu.alloc(Kind::pinned, end);
    CHECK(gpu->fill(stream.handle, at, 0, end).ok());
    gpu.finish(stream.handle);
    auto there = ranges;
    for (Range& range : there) range.begin += at;
    CHECK(gpu->pattern_fill(kind, there, kKey).ok());
    CHECK(gpu->copy(stream.handle, back, at, end).ok());
    gpu.finish(stream.handle);
    std::vector<unsigned char> expected(end, 0);
    for (const Range& range : ranges)
      for (Bytes i = 0; i < range.size; ++i)
        expected[range.begin + i] = driver::pattern_byte(at + range.begin + i, kKey);
    CHECK_EQ(std::memcmp(expected.data(), reinterpret_cast<void*>(back), end), 0);
    std::vector<Mismatch> found;
    CHECK(gpu->pattern_verify(kind, there, kKey, &found).ok());
    CHECK(found.empty());

    for (const int where : {0, 1, 2}) {
      std::vector<Address> planted;
      for (const Range& range : there) {
        planted.push_back(range.begin + (where == 0 ? 0 : where == 1 ? range.size / 2 : range.size - 1));
        CHECK(gpu->fill(stream.handle, planted.back(), 0, 1).ok());  // no byte of the pattern is 0
      }
      gpu.finish(stream.handle);
      CHECK(gpu->pattern_verify(kind, there, kKey, &found).ok());
      std::size_t at_finding = 0;
      for (std::size_t i = 0; i < there.size(); ++i) {
        CHECK(at_finding < found.size());
        const Mismatch& one = found[at_finding++];
        CHECK(one.range == i && one.first == planted[i] && one.last == planted[i] && one.count == 1);
        const Bytes left = there[i].begin + there[i].size - planted[i];
        CHECK_EQ(Bytes{one.sample_size}, left < 64 ? left : 64);
        CHECK_EQ(int{one.sample[0]}, 0);
        for (Bytes k = 1; k < one.sample_size; ++k)
          CHECK_EQ(int{one.sample[k]}, int{driver::pattern_byte(planted[i] + k, kKey)});
      }
      CHECK_EQ(at_finding, found.size());
      CHECK(gpu->pattern_fill(kind, there, kKey).ok());
    }
    CHECK(gpu->mem_free(kind, at).ok());
    CHECK(gpu->mem_free(Kind::pinned, back).ok());
  }
}

GPU_TEST("gpu: a gibibyte is filled and checked at the speed of memory") {
  const Address at = gpu.alloc(Kind::device, kGiB + 7);
  const Range range{at + 3, kGiB};
  std::vector<Mismatch> found;
  CHECK(gpu->pattern_fill(Kind::device, {&range, 1}, kKey).ok());
  const double filled = seconds_of([&] { CHECK(gpu->pattern_fill(Kind::device, {&range, 1}, kKey).ok()); });
  CHECK(gpu->pattern_verify(Kind::device, {&range, 1}, kKey, &found).ok());
  const double checked = seconds_of([&] { CHECK(gpu->pattern_verify(Kind::device, {&range, 1}, kKey, &found).ok()); });
  CHECK(found.empty());
  std::printf("gpu: 1 GiB: fill %.0f GB/s, check %.0f GB/s\n", 1.073741824 / filled, 1.073741824 / checked);
  TestStream stream(gpu);
  const std::vector<Bytes> hit = {0, kGiB / 2 + 13, kGiB - 1};
  for (const Bytes offset : hit) {
    const std::uint8_t wrong = static_cast<std::uint8_t>(driver::pattern_byte(range.begin + offset, kKey) ^ 0xFF);
    CHECK(gpu->fill(stream.handle, range.begin + offset, wrong, 1).ok());
  }
  gpu.finish(stream.handle);
  CHECK(gpu->pattern_verify(Kind::device, {&range, 1}, kKey, &found).ok());
  CHECK_EQ(found.size(), std::size_t{1});
  CHECK(found[0].first == range.begin && found[0].last == range.begin + kGiB - 1 && found[0].count == 3);
  CHECK(gpu->mem_free(Kind::device, at).ok());
}

// Keeps a multiprocessor's threads busy for a given time, then ends.
constexpr char kSpinPtx[] = R"ptx(
.version 8.0
.target sm_52
.address_size 64
.visible .entry spin(.param .u64 nanoseconds)
{
  .reg .pred %again;
  .reg .u64 %begin, %now, %limit;
  ld.param.u64 %limit, [nanoseconds];
  mov.u64 %begin, %globaltimer;
loop:
  mov.u64 %now, %globaltimer;
  sub.u64 %now, %now, %begin;
  setp.lt.u64 %again, %now, %limit;
  @%again bra loop;
  ret;
}
)ptx";

GPU_TEST("gpu: a fill that finds no room on a full device is called off in time and never happens later") {
  constexpr int kMultiprocessors = 16;  // the attribute's number
  int multiprocessors = 0;
  CHECK_EQ(gpu.api->cuDeviceGetAttribute(&multiprocessors, kMultiprocessors, 0), 0);
  cuda::Session session;
  session.api = gpu.api;
  session.context = gpu.context;
  unsigned long long generation = 0;
  CHECK_EQ(gpu.api->cuCtxGetId(gpu.context, &generation), 0);
  session.generation = generation;
  TestStream busy(gpu), stream(gpu);
  const Bytes size = 64 * kMiB;
  const Address at = gpu.alloc(Kind::device, size), back = gpu.alloc(Kind::pinned, size);
  const Range range{at, size};
  CHECK(gpu->fill(stream.handle, at, 0, size).ok());
  gpu.finish(stream.handle);

  int full = 0, later = 0;
  double waited = 0;
  {
    const cuda::Scope scope(session);
    cuda::Patterns patterns(0.1);
    std::string error;
    CHECK_EQ(patterns.start(session, &error), 0);
    cuda::Module module = nullptr;
    cuda::Function spin = nullptr;
    CHECK_EQ(gpu.api->cuModuleLoadDataEx(&module, kSpinPtx, 0, nullptr, nullptr), 0);
    CHECK_EQ(gpu.api->cuModuleGetFunction(&spin, module, "spin"), 0);
    unsigned long long nanoseconds = 1'000'000'000;
    void* parameters[] = {&nanoseconds};
    // Two blocks of 1024 threads fill a multiprocessor.
    CHECK_EQ(gpu.api->cuLaunchKernel(spin, 2 * static_cast<unsigned>(multiprocessors), 1, 1, 1024, 1, 1, 0, busy.raw(),
                                     parameters, nullptr),
             0);
    waited = seconds_of([&] { full = patterns.fill({&range, 1}, kKey); });
    gpu.synchronize(busy.raw());
    std::vector<Mismatch> found;
    later = patterns.verify({&range, 1}, kKey, &found);
    CHECK_EQ(found.size(), std::size_t{1});
    patterns.stop();
  }
  std::printf("gpu: on a full device a fill gave %d after %.2f s\n", full, waited);
  CHECK_EQ(full, 600);
  CHECK_EQ(later, 0);
  CHECK(gpu->copy(stream.handle, back, at, size).ok());
  gpu.finish(stream.handle);
  const auto* bytes = reinterpret_cast<const unsigned char*>(back);
  for (Bytes i = 0; i < size; ++i)
    if (bytes[i] != 0) testing::fail(__FILE__, __LINE__, "the fill that was called off happened");
  CHECK(gpu->mem_free(Kind::device, at).ok());
  CHECK(gpu->mem_free(Kind::pinned, back).ok());
}

GPU_TEST("gpu: what calls cost is printed") {
  TestStream stream(gpu);
  EventHandle event = 0;
  CHECK(gpu->event_create(&event).ok());
  constexpr int kRounds = 100000;
  const auto print = [&](const char* what, int rounds, const auto& body) {
    const double seconds = seconds_of([&] {
      for (int i = 0; i < rounds; ++i) body();
    });
    std::printf("gpu: %-44s %8.1f ns\n", what, seconds / rounds * 1e9);
  };
  CaptureState state;
  std::uint64_t id = 0;
  bool good = true;
  for (const bool current : {false, true}) {
    gpu.set_current(current ? gpu.context : nullptr);
    const char* with = current ? ", context current" : ", no context current";
    const auto name = [&](const char* call) { return std::string(call) + with; };
    print(name("is_capturing").c_str(), kRounds, [&] { good &= gpu->stream_is_capturing(stream.handle, &state).ok(); });
    print(name("stream_id").c_str(), kRounds, [&] { good &= gpu->stream_id(stream.handle, &id).ok(); });
    print(name("event_record").c_str(), kRounds, [&] { good &= gpu->event_record(event, stream.handle).ok(); });
    print(name("event_query").c_str(), kRounds, [&] { (void)gpu->event_query(event); });
  }
  unsigned long long generation = 0;
  print("cuCtxGetId alone", kRounds, [&] { gpu.api->cuCtxGetId(gpu.context, &generation); });
  cuda::Context now = nullptr;
  print("cuCtxGetCurrent alone", kRounds, [&] { gpu.api->cuCtxGetCurrent(&now); });
  int mode = 2;
  print("exchange of the capture mode alone", kRounds, [&] { gpu.api->cuThreadExchangeStreamCaptureMode(&mode); });
  int off = 0;
  print("cuStreamIsCapturing alone", kRounds, [&] { gpu.api->cuStreamIsCapturing(stream.raw(), &off); });
  gpu.set_current(nullptr);
  print("push and pop of the context alone", kRounds, [&] {
    gpu.api->cuCtxPushCurrent(gpu.context);
    gpu.api->cuCtxPopCurrent(&now);
  });
  print("set and unset of the context alone", kRounds, [&] {
    gpu.set_current(gpu.context);
    gpu.set_current(nullptr);
  });
  const Address at = gpu.alloc(Kind::device, 16 * kMiB);
  for (const std::size_t blocks : {1, 1024, 16384}) {
    std::vector<Range> ranges;
    for (std::size_t i = 0; i < blocks; ++i) ranges.push_back({at + i * 1024 + 5, 64});
    std::vector<Mismatch> found;
    good &= gpu->pattern_fill(Kind::device, ranges, kKey).ok();
    const std::string what = "check of " + std::to_string(blocks) + " ranges of 64 bytes";
    print(what.c_str(), 100, [&] { good &= gpu->pattern_verify(Kind::device, ranges, kKey, &found).ok(); });
    CHECK(found.empty());
  }
  CHECK(gpu->mem_free(Kind::device, at).ok());
  CHECK(gpu->event_destroy(event).ok());
  CHECK(good);
}

// The last two end the device's context for the whole process, so they stand last and run in a process of their own
// where other tests of the same process need the device (tests/test_native.py gives every GPU test one).

GPU_TEST("gpu: a reset of the context is noticed, old handles are left alone, a new open works") {
  EventHandle event = 0;
  CHECK(gpu->event_create(&event).ok());
  const Address at = gpu.alloc(Kind::device, 4096);
  CHECK_EQ(gpu.reset(0), 0);
  CHECK(gpu->event_query(event).code == Code::lost);
  CHECK(gpu->mem_free(Kind::device, at).code == Code::lost);
  CHECK(gpu->event_destroy(event).code == Code::lost);
  const Opened again;
  if (!again.driver) testing::fail(__FILE__, __LINE__, again.error);
  CHECK(again.driver != gpu.opened.driver);
  Address fresh = 0;
  CHECK(again.driver->mem_alloc(Kind::device, 4096, &fresh).ok());
  CHECK(again.driver->mem_free(Kind::device, fresh).ok());
}

GPU_TEST("gpu: a fault on the device is noticed at the next call and later frees are harmless") {
  const Address at = gpu.alloc(Kind::device, 4096);
  Address range = 0;
  CHECK(gpu->address_reserve(gpu->capabilities().granularity, 0, &range).ok());
  const Range unmapped{range, 4096};
  const auto status = gpu->pattern_fill(Kind::device, {&unmapped, 1}, kKey);
  CHECK(status.code == Code::lost && status.number == 700);
  CHECK(gpu->mem_free(Kind::device, at).code == Code::lost);
  const Opened again;
  CHECK(again.driver != nullptr || (again.kind == OpenError::broken && again.says("start it again")));
}

}  // namespace
}  // namespace streampool
