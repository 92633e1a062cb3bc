// What a thread remembers between two calls: its last pool, the counters it writes there, and its last lasting stream.
#pragma once

#include <cstdint>

#include "../driver/driver.hpp"
#include "../observe/counters.hpp"

namespace streampool::pool {

struct Heap;
struct Slab;
extern Slab g_no_slab;  // holds no address

struct ThreadCache {
  std::uint64_t uid = 0;  // of the pool; never used twice
  observe::ThreadCounters* counters = nullptr;
  std::uint64_t epoch = 1;  // of the pool's door when `heap` was found; no two pools have the same
  driver::StreamHandle handle = ~driver::StreamHandle{0};
  Heap* heap = nullptr;
  std::uint64_t key = 1;    // `epoch` again where the fast path may be taken, else one that fits no door
  Bytes next_sample = 0;    // due when so many bytes have been allocated (observe/sampler.hpp)
  Slab* slab = &g_no_slab;  // where the last fast free was
  // The last stream that was not lasting, in the same epoch: whether it is still the same is asked each time.
  driver::StreamHandle raw_handle = 0;
  std::uint64_t raw_epoch = 1;
  std::uint64_t raw_id = 0;
  Heap* raw_heap = nullptr;
  std::uint64_t random = 0;  // the sampler's
};

// One entry: programs that alternate between pools take the slower way.
extern constinit thread_local ThreadCache g_thread_cache __attribute__((tls_model("initial-exec")));
inline ThreadCache& thread_cache() { return g_thread_cache; }

std::uint64_t thread_id();

}  // namespace streampool::pool
