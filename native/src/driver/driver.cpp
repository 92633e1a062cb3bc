// What all drivers share: names, texts, counters, the ending, and the choice of a device by name. Imports cuda/ and
// sim/.
#include "driver.hpp"

#include <charconv>
#include <shared_mutex>
#include <utility>

#include "cuda/errors.hpp"
#include "cuda/open.hpp"
#include "sim/machine.hpp"

namespace streampool::driver {

std::atomic<Ending> g_ending{Ending::no};

namespace {

struct NumberText {
  int number;
  const char* name;
  const char* text;
};
// The simulated device's own numbers; CUDA's are in cuda/errors.cpp.
constexpr NumberText kNumbers[] = {
    {-1, "SIM_DEAD_HANDLE", "a stream or event handle that was destroyed or never created (a crash on hardware)"},
    {-2, "SIM_DEADLOCK", "the host waits for work that can never run: a gate is shut, and nobody else may open it"},
    {-3, "SIM_INTERRUPTED", "the wait was interrupted"},
};

// "cuda:3" is ("cuda", 3); "cuda" alone is device 0. False: neither.
bool parse_ordinal(std::string_view device, std::string_view family, int* ordinal) {
  if (!device.starts_with(family)) return false;
  device.remove_prefix(family.size());
  *ordinal = 0;
  if (device.empty()) return true;
  if (device.front() != ':') return false;
  device.remove_prefix(1);
  const char* end = device.data() + device.size();
  const auto [stop, problem] = std::from_chars(device.data(), end, *ordinal);
  return problem == std::errc() && stop == end && *ordinal >= 0;
}

}  // namespace

std::string_view code_name(Code code) {
  switch (code) {
    case Code::ok: return "ok";
    case Code::not_ready: return "not_ready";
    case Code::out_of_memory: return "out_of_memory";
    case Code::capturing: return "capturing";
    case Code::not_supported: return "not_supported";
    case Code::invalid: return "invalid";
    case Code::lost: return "lost";
    case Code::gone: return "gone";
    case Code::failed: return "failed";
  }
  return "?";
}

std::string describe(const Status& status) {
  const std::string call = status.call != nullptr ? std::string(status.call) + ": " : std::string();
  if (status.number == 0) return call + std::string(code_name(status.code));
  for (const NumberText& row : kNumbers)
    if (row.number == status.number) return call + row.name + " (" + std::to_string(row.number) + "): " + row.text;
  return call + cuda::error_name(status.number) + " (" + std::to_string(status.number) +
         "): " + cuda::error_text(status.number);
}

std::array<std::uint64_t, kCallCount> Driver::calls() const {
  std::array<std::uint64_t, kCallCount> all{};
  for (std::size_t i = 0; i < kCallCount; ++i) all[i] = counts_[i].load(std::memory_order_relaxed);
  return all;
}

CallTimes& Driver::call_times() const {
  CallTimes* times = times_.load(std::memory_order_acquire);
  if (times == nullptr) times_.store(times = &call_times_of(name()), std::memory_order_release);
  return *times;
}

std::shared_ptr<Driver> open(std::string_view device, OpenError* kind, std::string* error) {
  int ordinal = 0;
  if (parse_ordinal(device, "sim", &ordinal)) return sim::open(ordinal, kind, error);
  if (parse_ordinal(device, "cuda", &ordinal)) return cuda::open(ordinal, kind, error);
  if (device == "auto") {
    OpenError why = OpenError::none;
    std::string text;
    if (cuda::device_count(&why, &text) > 0) return cuda::open(0, kind, error);
    if (why == OpenError::none || why == OpenError::no_library || why == OpenError::no_device) {
      return sim::open(0, kind, error);
    }
    *kind = why;  // a GPU that should work and does not: never hidden
    *error = std::move(text);
    return nullptr;
  }
  *kind = OpenError::bad_name;
  *error =
      "no device is called '" + std::string(device) + "': use \"cuda:N\", \"sim:N\", \"cuda\", \"sim\" or \"auto\"";
  return nullptr;
}

void Driver::pattern_start(PatternJob* job) {
  job->verified = job->verify.empty();
  if (!job->verified) {
    job->status = pattern_verify(job->kind, job->verify, job->key, &job->found);
    if (!job->status.ok()) return;
    job->verified = true;
  }
  if (!job->fill.empty()) job->status = pattern_fill(job->kind, job->fill, job->key);
}

bool Driver::pattern_finish(PatternJob*, bool) { return true; }

Ending ending() noexcept { return ending_now(); }
void set_ending(Ending ending) noexcept { g_ending.store(ending, std::memory_order_release); }

Status record_uncaptured(Driver& driver, StreamHandle stream, std::optional<StreamHandle> waiter, EventHandle* event,
                         bool* captured) {
  const std::shared_lock gate(driver.captures().gate());  // whoever declares a capture from here on waits for us
  const auto ask = [&](StreamHandle of) {
    CaptureState state;
    const Status status = driver.stream_is_capturing(of, &state);
    *captured = *captured || state.capturing || status.code == Code::capturing;
    return status;
  };
  *event = 0;
  *captured = false;
  Status status = ask(stream);
  if (status.ok() && !*captured && waiter) status = ask(*waiter);
  if (!status.ok() || *captured) return status;
  EventHandle made = 0;
  status = driver.event_create(&made);
  if (!status.ok()) return status;
  status = driver.event_record(made, stream);
  if (status.ok()) status = ask(stream);
  if (status.ok() && !*captured && waiter) status = ask(*waiter);
  if (status.ok() && !*captured && waiter) status = driver.stream_wait_event(*waiter, made);
  *captured = *captured || status.code == Code::capturing;
  if (status.ok() && !*captured)
    *event = made;
  else
    driver.event_destroy(made);
  return status;
}

Status Driver::stream_identity(StreamHandle stream, CaptureState* capture, std::uint64_t* id) {
  const Status status = stream_is_capturing(stream, capture);
  return status.ok() && !capture->capturing ? stream_id(stream, id) : status;
}

}  // namespace streampool::driver
