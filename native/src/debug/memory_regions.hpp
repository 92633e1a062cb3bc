// Tells a tool that is attached through NVTX, as compute-sanitizer is, where blocks lie inside the pool's memory: each
// piece of memory is a heap, each live block a region of it, and everything else of a heap may not be touched. The
// tool then reports an access outside of a block, or after its free, at the instruction that makes it.
//
// NVTX's functions live in headers, which load the tool's library when they are first called; this does the same by
// hand, with the few types that are needed. Where no tool is attached there is nothing. Thread-safe. Imports base/.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "../base/types.hpp"

namespace streampool::debug {

class MemoryRegions {
 public:
  // The tool of this process (NVTX_INJECTION64_PATH), asked once; null where there is none that takes regions, and
  // `why` then says so.
  static std::shared_ptr<MemoryRegions> attached(std::string* why = nullptr);
  // Whether that tool is a sanitizer, by the name of its library: others take regions and do nothing with them.
  static bool is_sanitizer();
  // A tool's library by its path.
  static std::shared_ptr<MemoryRegions> load(const std::string& path, std::string* why);
  // From here on the process's tool is this one. For tests.
  static void attach(std::shared_ptr<MemoryRegions> tool);

  void add_heap(Address begin, Bytes size);
  void remove_heap(Address begin);  // before its memory is freed, by which the tool forgets it with its regions
  void add_region(Address begin, Bytes size, const std::string& name);
  void remove_region(Address begin);

 private:
  struct Functions;
  explicit MemoryRegions(std::shared_ptr<const Functions> functions);

  const std::shared_ptr<const Functions> functions_;
  std::mutex mutex_;
  std::map<Address, std::pair<Bytes, void*>> heaps_;  // the tool's handle of each
};

}  // namespace streampool::debug
