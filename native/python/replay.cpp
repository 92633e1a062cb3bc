// Replays a trace in a native loop: each event one alloc or free, nothing queued on the streams.
#include <nanobind/stl/string.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "arguments.hpp"
#include "pool_objects.hpp"
#include "support.hpp"

namespace streampool::python {
namespace {

struct Trace {
  const std::uint8_t* actions = nullptr;
  const std::uint32_t* ids = nullptr;
  const std::uint64_t* sizes = nullptr;
  const std::uint32_t* streams = nullptr;
  std::size_t events = 0;
};

struct Outcome {
  std::uint64_t failures = 0, verify_errors = 0, live_at_end = 0, peak_live = 0;
  std::string first_failure;
};

// Writes a block's number into its first and last bytes and looks for it again before the free.
class Stamps {
 public:
  static constexpr Bytes kEdge = 16;
  explicit Stamps(pool::Core& core)
      : core_(core), direct_(host_visible(core.kind()) || core.driver().capabilities().device_memory_on_host) {
    if (!direct_)
      ready_ = core.driver().mem_alloc(Kind::pinned, 4096, &mailbox_).ok() && core.driver().event_create(&event_).ok();
  }
  ~Stamps() {
    if (direct_) return;
    if (event_ != 0) core_.driver().event_destroy(event_);
    if (mailbox_ != 0) core_.driver().mem_free(Kind::pinned, mailbox_);
  }
  Stamps(const Stamps&) = delete;
  Stamps& operator=(const Stamps&) = delete;

  void put(Address at, Bytes size, std::uint32_t id, driver::StreamHandle stream) {
    const Bytes edge = std::min(size, kEdge);
    const std::uint8_t value = stamp(id);
    if (edge == 0) return;
    if (direct_) {
      std::memset(reinterpret_cast<void*>(at), value, edge);
      std::memset(reinterpret_cast<void*>(at + size - edge), value, edge);
    } else {
      core_.driver().fill(stream, at, value, edge);
      core_.driver().fill(stream, at + size - edge, value, edge);
    }
  }

  bool good(Address at, Bytes size, std::uint32_t id, driver::StreamHandle stream) {
    const Bytes edge = std::min(size, kEdge);
    if (edge == 0) return true;
    const std::uint8_t value = stamp(id);
    if (direct_)
      return all(reinterpret_cast<const std::uint8_t*>(at), edge, value) &&
             all(reinterpret_cast<const std::uint8_t*>(at + size - edge), edge, value);
    if (!ready_) return false;
    driver::Driver& d = core_.driver();
    if (!d.copy(stream, mailbox_, at, edge).ok() || !d.copy(stream, mailbox_ + kEdge, at + size - edge, edge).ok() ||
        !d.event_record(event_, stream).ok())
      return false;
    driver::Status status = d.event_query(event_);
    while (status.code == driver::Code::not_ready) status = d.event_query(event_);
    const auto* box = reinterpret_cast<const std::uint8_t*>(mailbox_);
    return status.ok() && all(box, edge, value) && all(box + kEdge, edge, value);
  }

 private:
  static std::uint8_t stamp(std::uint32_t id) { return static_cast<std::uint8_t>((id * 2654435761u) >> 24); }
  static bool all(const std::uint8_t* at, Bytes size, std::uint8_t value) {
    return std::all_of(at, at + size, [value](std::uint8_t b) { return b == value; });
  }
  pool::Core& core_;
  bool direct_;
  bool ready_ = false;
  Address mailbox_ = 0;
  driver::EventHandle event_ = 0;
};

// One pass over the trace; blocks that live on are freed at its end. `tick` is called now and then and may end it.
template <typename Tick>
Outcome run_pass(pool::Core& core, const Trace& trace, const std::vector<driver::StreamHandle>& handles,
                 std::vector<pool::BlockRef>& blocks, std::vector<std::uint64_t>& sizes, Stamps* stamps,
                 double* ns_per_event, Tick&& tick) {
  Outcome out;
  std::uint64_t live = 0;
  std::vector<std::uint32_t> home(blocks.size(), 0);
  constexpr std::size_t kTickEvery = 4096;
  const auto fail = [&](std::size_t event, pool::Failure& failure) {
    if (out.failures++ == 0) out.first_failure = "event " + std::to_string(event + 1) + ": " + failure.text;
    failure = {};
  };
  pool::Failure failure;
  const auto start = std::chrono::steady_clock::now();
  for (std::size_t i = 0; i < trace.events; ++i) {
    if (i % kTickEvery == 0 && i != 0 && !tick(i)) break;
    const std::uint32_t id = trace.ids[i];
    if (trace.actions[i] != 0) {
      pool::AllocRequest request;
      request.size = trace.sizes[i];
      request.stream = handles[trace.streams[i]];
      request.raw = true;
      if (core.allocate(request, &blocks[id], &failure) != pool::Errc::ok) {
        fail(i, failure);
        blocks[id] = {};
        continue;
      }
      sizes[id] = request.size;
      home[id] = trace.streams[i];
      live += request.size;
      out.peak_live = std::max(out.peak_live, live);
      if (stamps != nullptr) stamps->put(blocks[id].address, sizes[id], id, handles[home[id]]);
    } else {
      pool::BlockRef& block = blocks[id];
      if (block.record == nullptr) continue;  // its allocation failed
      if (stamps != nullptr && !stamps->good(block.address, sizes[id], id, handles[home[id]])) ++out.verify_errors;
      pool::FreeRequest request;
      request.stream = handles[trace.streams[i]];
      if (core.free(block, request, &failure) != pool::Errc::ok) fail(i, failure);
      block = {};
      live -= sizes[id];
    }
  }
  const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - start;
  *ns_per_event = trace.events != 0 ? spent.count() / static_cast<double>(trace.events) : 0;
  out.live_at_end = live;
  for (std::size_t id = 0; id < blocks.size(); ++id) {
    if (blocks[id].record == nullptr) continue;
    if (stamps != nullptr &&
        !stamps->good(blocks[id].address, sizes[id], static_cast<std::uint32_t>(id), handles[home[id]]))
      ++out.verify_errors;
    pool::FreeRequest request;
    request.stream = handles[home[id]];
    core.free(blocks[id], request, &failure);
    blocks[id] = {};
  }
  return out;
}

// A list of streams' handles.
struct Handles {
  static constexpr auto signature() { return nb::detail::const_name("list[int]"); }
  const char* name;
};
constexpr Whole<driver::StreamHandle> kHandle{"a handle", "a number"};
std::vector<driver::StreamHandle> convert(nb::handle given, const Handles& row) {
  std::vector<driver::StreamHandle> handles;
  for (const nb::handle one : items(given, row.name, "a list of handles")) handles.push_back(convert(one, kHandle));
  return handles;
}

constexpr Instance<PyPool> kPool{"pool", "a pool"};
constexpr Builtin<nb::bytes> kActions{"actions", "bytes"};
constexpr Builtin<nb::bytes> kIds{"ids", "bytes"};
constexpr Builtin<nb::bytes> kSizes{"sizes", "bytes"};
constexpr Builtin<nb::bytes> kStreams{"streams", "bytes"};
constexpr Handles kHandles{"handles"};
constexpr Whole<int> kPasses{"passes", "a number of passes", 0, 1'000'000'000};
constexpr Flag kVerify{"verify"};
constexpr Callable kProgress{"progress"};

}  // namespace

void bind_replay(nb::module_& m) {
  m.def(
      "replay",
      [](Given<kPool> pool, Given<kActions> actions, Given<kIds> ids, Given<kSizes> sizes, Given<kStreams> streams,
         Given<kHandles> stream_handles, Given<kPasses> warm_passes, Given<kVerify> verify,
         Given<kProgress> given_progress) {
        const std::shared_ptr<pool::Core> core = pool->core;
        const std::vector<driver::StreamHandle>& handles = *stream_handles;
        const nb::object& progress = *given_progress;
        const int passes = *warm_passes;
        Trace trace;
        trace.events = actions->size();
        if (ids->size() != trace.events * 4 || sizes->size() != trace.events * 8 || streams->size() != trace.events * 4)
          throw nb::value_error("replay: the arrays differ in length");
        trace.actions = static_cast<const std::uint8_t*>(actions->data());
        trace.ids = static_cast<const std::uint32_t*>(ids->data());
        trace.sizes = static_cast<const std::uint64_t*>(sizes->data());
        trace.streams = static_cast<const std::uint32_t*>(streams->data());
        std::size_t blocks = 0;
        for (std::size_t i = 0; i < trace.events; ++i) {
          blocks = std::max<std::size_t>(blocks, std::size_t{trace.ids[i]} + 1);
          if (trace.streams[i] >= handles.size()) throw nb::value_error("replay: a stream index is out of range");
        }
        std::vector<pool::BlockRef> refs(blocks);
        std::vector<std::uint64_t> block_sizes(blocks, 0);
        const int total = 1 + passes + (*verify ? 1 : 0);
        int pass = 0;
        bool stopped = false;
        const auto tick = [&](std::size_t done) {
          WithGil gil;
          if (PyErr_CheckSignals() != 0) return stopped = true, false;
          if (!progress.is_none()) {
            try {
              progress(static_cast<std::size_t>(pass) * trace.events + done,
                       static_cast<std::size_t>(total) * trace.events);
            } catch (nb::python_error& error) {
              error.restore();
              return stopped = true, false;
            }
          }
          return true;
        };
        Outcome first, verified;
        double cold = 0;
        std::vector<double> warm;
        {
          WithoutGil release;
          core->reset_peaks();
          first = run_pass(*core, trace, handles, refs, block_sizes, nullptr, &cold, tick);
          for (int i = 0; i < passes && !stopped; ++i) {
            ++pass;
            double ns = 0;
            const Outcome o = run_pass(*core, trace, handles, refs, block_sizes, nullptr, &ns, tick);
            warm.push_back(ns);
            first.failures += o.failures;
            if (first.first_failure.empty()) first.first_failure = o.first_failure;
          }
          if (*verify && !stopped) {
            ++pass;
            Stamps stamps(*core);
            double ns = 0;
            verified = run_pass(*core, trace, handles, refs, block_sizes, &stamps, &ns, tick);
            first.failures += verified.failures;
            if (first.first_failure.empty()) first.first_failure = verified.first_failure;
          }
        }
        if (stopped) throw nb::python_error();
        std::sort(warm.begin(), warm.end());
        const pool::Stats stats = core->stats();
        nb::dict d;
        d["ns_per_event_cold"] = cold;
        d["ns_per_event"] = warm.empty() ? cold : warm[warm.size() / 2];
        d["peak_live_bytes"] = first.peak_live;
        d["peak_reserved_bytes"] = stats.reserved_peak;
        d["live_at_end_bytes"] = first.live_at_end;
        d["failures"] = first.failures;
        d["first_failure"] = first.first_failure;
        d["verify_errors"] = verified.verify_errors;
        return d;
      },
      parameter<kPool>(), parameter<kActions>(), parameter<kIds>(), parameter<kSizes>(), parameter<kStreams>(),
      parameter<kHandles>(), nb::kw_only(), parameter<kPasses>(), parameter<kVerify>(),
      parameter<kProgress>() = nb::none());
}

}  // namespace streampool::python
