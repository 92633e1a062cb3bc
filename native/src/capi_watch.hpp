// Pools that are made through the C ABI, for whoever watches the process (streampool run). Imports the pool.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "pool/core.hpp"
#include "pool/options.hpp"

namespace streampool::capi {

struct Watched {
  std::shared_ptr<pool::Core> core;
  pool::OptionMap options;  // all, as they were resolved
};

// Pools made from here on are kept until somebody takes them, also beyond their end: what was found in them is told
// later. `mode`: theirs, whatever the program asks for; empty: as it asks.
void watch_pools(std::string mode);
// No pool is kept any more, nor are those that nobody took.
void forget_pools();
std::vector<Watched> take_pools();

// The C ABI's part.
std::string watched_mode();
void note_pool(const std::shared_ptr<pool::Core>& core, pool::OptionMap options);

}  // namespace streampool::capi
