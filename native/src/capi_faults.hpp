// What a call of the C ABI does that is told of faults (option on_fault). Imports the pool.
#pragma once

#include <streampool/streampool.h>

#include <mutex>
#include <optional>
#include <string>

#include "pool/core.hpp"

namespace streampool::capi {

// One a pool's handle. Thread-safe; no lock is held while the program's function runs.
class FaultTeller {
 public:
  // The function of on_fault=callback; null: faults are kept until there is one.
  void call(sp_fault_function function, void* user);
  // Tells of the faults that were found and not yet told; gives the text of an error where that is asked for. From
  // inside the function it does nothing.
  std::optional<std::string> tell(sp_pool* handle, pool::Core& core);

 private:
  std::mutex mutex_;
  sp_fault_function function_ = nullptr;
  void* user_ = nullptr;
};

}  // namespace streampool::capi
