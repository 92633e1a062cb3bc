// Errors as values: what went wrong at a call, with everything its message needs.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "../base/types.hpp"
#include "../debug/fault.hpp"
#include "../driver/driver.hpp"

namespace streampool::pool {

// One row an error: the code and its word.
// clang-format off
#define STREAMPOOL_ERRORS(X) \
  X(ok) X(invalid_value) X(invalid_size) X(invalid_alignment) X(out_of_memory) X(double_free) X(foreign_free) \
  X(interior_free) X(wrong_pool) X(size_mismatch) X(trampled_record) X(stream) X(capture) X(driver) X(closed) X(forked) \
  X(exiting) X(interrupted) X(internal)
// clang-format on

enum class Errc : std::uint8_t {
#define STREAMPOOL_ROW(name) name,
  STREAMPOOL_ERRORS(STREAMPOOL_ROW)
#undef STREAMPOOL_ROW
};
std::string_view errc_word(Errc code);
// What a misuse of free is among the faults; nothing for other errors.
std::optional<debug::FaultKind> fault_of(Errc code);
// Where it is explained: " (docs/faults/double_free.md)"; empty for other errors.
std::string see_page(Errc code);

// Why an allocation failed (R12).
enum class OomReason : std::uint8_t { driver, limit, fragmentation, pending, capture };
inline constexpr std::size_t kOomReasonCount = 5;
std::string_view oom_reason_word(OomReason reason);

// What live blocks of one call site hold, or of one of its tags; where call stacks are sampled it is what the samples
// stand for.
struct Holder {
  Bytes bytes = 0;
  std::uint64_t blocks = 0;
  debug::StackId stack = 0;
  std::string tag{};          // where it was asked for
  Bytes allocated_bytes = 0;  // of all its allocations so far; counted where call stacks are sampled
  std::uint64_t allocated_blocks = 0;
  double oldest = 0;  // the age of its oldest live block in seconds, from the first look at it on where it has no time
  Bytes aged_bytes = 0;  // of those older than kAged seconds
};
inline constexpr double kAged = 3600;

// The fields of an out-of-memory error, all in bytes. `device_free` is 0 with `device_known` false when the query
// failed too.
struct OomReport {
  Bytes request = 0, alignment = 0;
  std::uint64_t stream = 0;
  std::string device, pool, kind;
  Bytes limit = 0, reserved = 0, in_use = 0, pending = 0, cached = 0, quarantined = 0, largest_free = 0;
  Bytes device_free = 0, device_total = 0;
  Bytes missing =
      0;  // to be freed, or allowed: beyond what limit and device still give, and what lies idle and can move
  bool device_known = false;
  OomReason reason = OomReason::driver;
  std::string driver_error;
  std::vector<Holder> holders;  // by bytes, largest first
  Bytes sample_bytes = 0;       // they are estimates, from one sample in so many bytes; 0: they are exact
};

struct Failure {
  Errc code = Errc::ok;
  std::string text;
  std::unique_ptr<OomReport> oom;
  bool lost = false;     // the device's context is gone for good
  driver::Status cause;  // the driver call that failed, where one did and it is told apart

  Errc set(Errc errc, std::string message) {
    code = errc;
    text = std::move(message);
    return errc;
  }
};

// Not ok in a forked child and while the process exits (R22): then nothing but a free, which is ignored, may be called.
Errc refuse_when_ending(Failure* failure);

// "stream 17", or "capture 3".
std::string stream_text(std::uint64_t id);

std::string hex(Address address);
std::string format_bytes(Bytes bytes);
// The text of an out-of-memory error; never truncated.
std::string describe(const OomReport& report, const std::function<std::string(debug::StackId)>& site = {});

}  // namespace streampool::pool
