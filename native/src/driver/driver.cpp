// What all drivers share: names, texts, counters, the ending, and the choice of a device by name. Imports cuda/ and
// sim/.
#include "driver.hpp"

#include <charconv>
#include <utility>

#include "cuda/open.hpp"
#include "sim/machine.hpp"

namespace streampool::driver {
namespace {

std::atomic<Ending> current_ending{Ending::no};

struct NumberText {
  int number;
  const char* name;
  const char* text;
};
// The driver's own numbers that a pool may meet; negative ones are the simulated device's.
constexpr NumberText kNumbers[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {4, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {34, "CUDA_ERROR_STUB_LIBRARY", "the library is a stub"},
    {35, "CUDA_ERROR_INSUFFICIENT_DRIVER", "the driver is older than what is asked of it"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "the device is busy or unavailable"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {218, "CUDA_ERROR_INVALID_PTX", "a PTX compilation failed"},
    {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the PTX was made for a newer driver"},
    {304, "CUDA_ERROR_OPERATING_SYSTEM", "an operating system call failed"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {702, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {710, "CUDA_ERROR_ASSERT", "device-side assert triggered"},
    {714, "CUDA_ERROR_HARDWARE_STACK_ERROR", "hardware stack error"},
    {715, "CUDA_ERROR_ILLEGAL_INSTRUCTION", "an illegal instruction was encountered"},
    {716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {717, "CUDA_ERROR_INVALID_ADDRESS_SPACE", "operation not supported on this address space"},
    {718, "CUDA_ERROR_INVALID_PC", "invalid program counter"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {800, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {802, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "unsupported display driver / CUDA driver combination"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
    {902, "CUDA_ERROR_STREAM_CAPTURE_MERGE", "operation would result in a merge of separate capture sequences"},
    {903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not ended in the same stream as it began"},
    {904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"},
    {905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work in another stream"},
    {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "operation would make the legacy stream depend on a capturing one"},
    {907, "CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream"},
    {908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "capture was begun by another thread"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
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
  for (const NumberText& row : kNumbers) {
    if (row.number != status.number || (status.number == 0 && !status.ok())) continue;
    return std::string(row.name) + " (" + std::to_string(row.number) + "): " + row.text;
  }
  if (status.number == 0) return std::string(code_name(status.code));
  return "driver error (" + std::to_string(status.number) + "): " + std::string(code_name(status.code));
}

std::array<std::uint64_t, kCallCount> Driver::calls() const {
  std::array<std::uint64_t, kCallCount> all{};
  for (std::size_t i = 0; i < kCallCount; ++i) all[i] = counts_[i].load(std::memory_order_relaxed);
  return all;
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

Ending ending() noexcept { return current_ending.load(std::memory_order_acquire); }
void set_ending(Ending ending) noexcept { current_ending.store(ending, std::memory_order_release); }

}  // namespace streampool::driver
