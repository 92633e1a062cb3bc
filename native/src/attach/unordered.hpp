// Memory for callers that know no streams: a pool's blocks without the order of a stream. What is handed out is touched
// by nobody's queued work any more, so any stream may use it at once; what is freed waits for all that was queued by
// then. Imports the pool.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <vector>

#include "../pool/core.hpp"

namespace streampool::attach {

class Unordered {
 public:
  // Null where no private stream can be had, and where the driver has no events of a whole context (CUDA 12.5).
  static std::unique_ptr<Unordered> create(std::shared_ptr<pool::Core> core, pool::Failure* failure);
  ~Unordered();
  Unordered(const Unordered&) = delete;
  Unordered& operator=(const Unordered&) = delete;

  pool::Errc allocate(Bytes size, debug::StackId stack, Address* out, pool::Failure* failure);
  // What was allocated while a capture is known is only retired: a graph may use it for as long as it lives.
  // A free while a capture is known is kept for later, since what it has to ask the driver would end the capture; so is
  // one that the driver refuses to order. It is done by the next call that can; the block is retired until then.
  pool::Errc free(Address address, debug::StackId stack, pool::Failure* failure);
  pool::Core& core() { return *core_; }

 private:
  Unordered(std::shared_ptr<pool::Core> core, driver::StreamHandle stream) : core_(std::move(core)), stream_(stream) {}
  // `capture` and `driver`: nothing was done. `block`: the one that is meant, where it is known.
  pool::Errc free_now(Address address, const pool::BlockRef* block, debug::StackId stack, pool::Failure* failure);
  void catch_up();

  struct Later {
    pool::BlockRef block;
    debug::StackId stack;
  };
  const std::shared_ptr<pool::Core> core_;
  const driver::StreamHandle stream_;  // private, non-blocking, without any work: the home of the blocks
  std::mutex mutex_;
  std::vector<Later> later_;
  // Allocated while a capture was known. A graph may use it, and which is not known without a stream: it stays.
  std::unordered_set<Address> of_captures_;
  std::atomic<std::size_t> waiting_{0};  // of them
};

}  // namespace streampool::attach
