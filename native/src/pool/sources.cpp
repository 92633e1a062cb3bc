// What a pool's settings mean on its device: parts become bytes, and the source of segments is one that the device has.
#include <algorithm>

#include "sources.hpp"

namespace streampool::pool {
namespace {

// The option that asks for virtual memory of its own sort, or null.
const char* special(const Options& options) {
  if (options.traits.exported != driver::Export::none) return "export";
  if (options.traits.rdma) return "rdma";
  return options.all_peers || !options.traits.peers.empty() ? "peers" : nullptr;
}

// Only trying says whether such memory can be had: a fabric handle needs more than the device.
driver::Status try_traits(driver::Driver& driver, const driver::MemoryTraits& traits, Bytes* granularity) {
  driver::Status status = driver.mem_granularity(traits, granularity);
  if (!status.ok()) return status;
  driver::MemoryHandle handle = 0;
  status = driver.mem_create(*granularity, traits, &handle);
  return status.ok() ? driver.mem_release(handle) : status;
}

}  // namespace

Errc settle_sources(driver::Driver& driver, Kind kind, Options* options, Failure* failure) {
  const driver::Capabilities& can = driver.capabilities();
  const std::string device(driver.name());
  if (options->limit_part > 0) options->limit = Amount{0, options->limit_part}.of(can.total_memory);
  if (options->release_part > 0) options->release_threshold = Amount{0, options->release_part}.of(can.total_memory);
  const char* asked = special(*options);

  if (kind != Kind::device) {
    if (asked != nullptr)
      return failure->set(Errc::invalid_value, std::string("option '") + asked + "' is about virtual memory, and " +
                                                   std::string(kind_name(kind)) +
                                                   " memory comes in pieces; use kind='device'");
    options->segments = SegmentSource::malloc;
  }
  if (options->segments == SegmentSource::driver && !can.driver_pools)
    return failure->set(Errc::driver, "option 'segments=driver': device " + device +
                                          " has no memory pools of its own; use segments=vmm or segments=malloc");
  if (options->segments == SegmentSource::vmm && !can.virtual_memory) {
    if (asked != nullptr)
      return failure->set(
          Errc::driver, std::string("option '") + asked + "': device " + device + " has no virtual memory management");
    options->segments = SegmentSource::malloc;
  }
  if (asked != nullptr && options->segments != SegmentSource::vmm)
    return failure->set(Errc::invalid_value,
                        std::string("option '") + asked + "' is about virtual memory, and segments=" +
                            std::string(source_word(options->segments)) + " takes none; use segments=vmm");
  options->granularity = can.granularity;
  if (options->all_peers) options->traits.peers = can.peers;
  for (const int peer : options->traits.peers)
    if (std::find(can.peers.begin(), can.peers.end(), peer) == can.peers.end())
      return failure->set(Errc::driver, "option 'peers': device " + std::to_string(peer) +
                                            " cannot be given access to memory of " + device);
  if (asked == nullptr || options->traits.plain()) return Errc::ok;
  const driver::Status status = try_traits(driver, options->traits, &options->granularity);
  if (status.ok()) return Errc::ok;
  failure->lost = status.code == driver::Code::lost;
  return failure->set(Errc::driver, std::string("option '") + asked + "': device " + device +
                                        " cannot make such memory: " + driver::describe(status));
}

}  // namespace streampool::pool
