// The records of blocks with page guards, in a file: a hit ends the device's context, and often the process. One JSON
// object a line, written with one call each, so that what was written is there whatever becomes of the process
// (streampool/page_guards.py reads it). The file is written anew when most of it is history. Thread-safe; a write that
// fails is tried no more. Imports fault and page_guards.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <string>

#include "page_guards.hpp"

namespace streampool::debug {

class GuardRecords {
 public:
  ~GuardRecords();
  // `path`: "%p" in it stands for the process's number; where another pool of this process has the file, "-2" and so on
  // comes before its last dot. What the file held is lost. False with a sentence: it cannot be written.
  bool open(const std::string& path, const std::string& pool, const std::string& device, std::uint64_t seed,
            std::string* error);
  bool is_open() const { return file_ >= 0; }

  void allocated(const BlockFacts& block, const ResolveStack& resolve);
  void used_on(std::uint64_t serial, std::uint64_t stream);
  void freed(const BlockFacts& block, const ResolveStack& resolve);
  void revoked(std::uint64_t serial);
  void dropped(std::uint64_t serial);  // its addresses may be others' from here on
  void named(std::uint64_t stream);    // the pool was called for it, so work may be queued on it
  void idle(std::uint64_t stream);     // everything queued on it so far is done
  void lost(const std::string& error);

 private:
  void write(const std::string& line);
  void keep(std::uint64_t serial, const std::string& line);
  void write_stack(StackId stack, const ResolveStack& resolve);
  void compact();

  std::mutex mutex_;
  std::atomic<int> file_{-1};
  std::string path_, head_;
  Bytes written_ = 0;
  std::map<std::uint64_t, std::string> blocks_;  // the lines of each block that is not dropped
  std::map<std::uint64_t, bool> idle_;           // streams, as last written
  std::map<StackId, std::string> stacks_;
};

}  // namespace streampool::debug
