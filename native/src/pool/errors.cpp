#include "errors.hpp"

#include <array>
#include <cstdio>

namespace streampool::pool {

std::string_view errc_word(Errc code) {
  static constexpr auto kWords = std::to_array<const char*>({
#define STREAMPOOL_ROW(name) #name,
      STREAMPOOL_ERRORS(STREAMPOOL_ROW)
#undef STREAMPOOL_ROW
  });
  return kWords[static_cast<std::size_t>(code)];
}

std::optional<debug::FaultKind> fault_of(Errc code) {
  switch (code) {
    case Errc::double_free: return debug::FaultKind::double_free;
    case Errc::foreign_free: return debug::FaultKind::foreign_free;
    case Errc::interior_free: return debug::FaultKind::interior_free;
    case Errc::wrong_pool: return debug::FaultKind::wrong_pool_free;
    case Errc::trampled_record: return debug::FaultKind::trampled_record;
    case Errc::size_mismatch: return debug::FaultKind::size_mismatch;
    default: return std::nullopt;
  }
}

std::string see_page(Errc code) {
  const auto kind = fault_of(code);
  return kind ? " (docs/faults/" + std::string(debug::fault_word(*kind)) + ".md)" : std::string();
}

std::string_view oom_reason_word(OomReason reason) {
  switch (reason) {
    case OomReason::driver: return "driver";
    case OomReason::limit: return "limit";
    case OomReason::fragmentation: return "fragmentation";
    case OomReason::pending: return "pending";
    case OomReason::capture: return "capture";
  }
  return "?";
}

Errc refuse_when_ending(Failure* failure) {
  switch (driver::ending()) {
    case driver::Ending::no: return Errc::ok;
    case driver::Ending::forked:
      return failure->set(
          Errc::forked,
          "no pool can be made or used in a forked child: CUDA does not survive a fork. Start processes "
          "with multiprocessing.get_context('spawn')");
    case driver::Ending::exiting:
      return failure->set(Errc::exiting, "the process is exiting: no pool can be made or used any more");
  }
  return Errc::ok;
}

std::string hex(Address address) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(address));
  return text;
}

std::string format_bytes(Bytes bytes) {
  static constexpr const char* kUnits[] = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < kKiB) return std::to_string(bytes) + " bytes";
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  char text[48];
  std::snprintf(text, sizeof text, "%.2f %s", value, kUnits[unit]);
  return text;
}

std::string describe(const OomReport& r, const std::function<std::string(debug::StackId)>& site) {
  const auto both = [](Bytes b) { return format_bytes(b) + " (" + std::to_string(b) + ")"; };
  std::string t = "out of memory: " + both(r.request) + " asked of pool '" + r.pool + "' (" + r.kind + " memory of " +
                  r.device + "), alignment " + std::to_string(r.alignment) + ", stream " + std::to_string(r.stream) +
                  ".\n";
  t += "  reason: " + std::string(oom_reason_word(r.reason));
  switch (r.reason) {
    case OomReason::driver: t += " - the driver gives no more memory"; break;
    case OomReason::limit: t += " - the pool's own limit is reached"; break;
    case OomReason::fragmentation: t += " - enough bytes are free, but not in one piece"; break;
    case OomReason::pending: t += " - enough bytes are freed, but work that may still touch them is not done"; break;
    case OomReason::capture: t += " - a graph capture is under way, so the pool may not grow or wait"; break;
  }
  if (!r.driver_error.empty()) t += "; " + r.driver_error;
  t += "\n  in use " + both(r.in_use) + ", pending " + both(r.pending) + ", cached " + both(r.cached) +
       ", quarantined " + both(r.quarantined) + ", reserved " + both(r.reserved) + "\n";
  t += "  limit " + (r.limit == 0 ? std::string("none") : both(r.limit)) + ", largest free piece " +
       both(r.largest_free);
  t += r.device_known ? ", device free " + both(r.device_free) + " of " + both(r.device_total)
                      : ", device memory unknown (the query failed too)";
  t += "\n";
  if (r.missing != 0)
    t += "  missing " + both(r.missing) + ": beyond what can still be had, and what is free and can move\n";
  if (!r.holders.empty()) {
    t += "  held by";
    if (r.sample_bytes != 0) t += " (estimated: one call stack in " + format_bytes(r.sample_bytes) + " is kept)";
    t += ":\n";
    for (const Holder& h : r.holders) {
      const std::string where = site && h.stack != 0 ? site(h.stack) : std::string();
      t += "    " + both(h.bytes) + " in " + std::to_string(h.blocks) + (h.blocks == 1 ? " block, " : " blocks, ") +
           (!where.empty() ? where
            : h.stack == 0 ? std::string("call site unknown")
                           : "call site " + std::to_string(h.stack)) +
           "\n";
    }
  }
  t += "  try: ";
  switch (r.reason) {
    case OomReason::driver:
      t += "free blocks that are no longer needed, close other users of the device, or pool.trim() other pools";
      break;
    case OomReason::limit: t += "raise limit=, or free blocks that are no longer needed"; break;
    case OomReason::fragmentation:
      t += "free neighbouring blocks, allocate large blocks first, or pool.trim() before large requests";
      break;
    case OomReason::pending:
      t += "synchronise or name the streams that still use freed blocks, or raise wait_timeout=";
      break;
    case OomReason::capture: t += "reserve() before the capture begins"; break;
  }
  return t;
}

}  // namespace streampool::pool
