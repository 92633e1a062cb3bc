// What a thread remembers between two calls: its last pool, the counters it writes there, and its last lasting stream.
#pragma once

#include <cstdint>

#include "../driver/driver.hpp"
#include "../observe/counters.hpp"

namespace streampool::pool {

struct ThreadCache {
  std::uint64_t uid = 0;  // of the pool; never used twice
  observe::ThreadCounters* counters = nullptr;
  std::uint64_t epoch = 0;  // of the pool's stream table when `heap` was found
  driver::StreamHandle handle = ~driver::StreamHandle{0};
  void* heap = nullptr;
};

// One entry: programs that alternate between pools take the slower way.
extern thread_local ThreadCache g_thread_cache __attribute__((tls_model("initial-exec")));
inline ThreadCache& thread_cache() { return g_thread_cache; }

std::uint64_t thread_id();

}  // namespace streampool::pool
