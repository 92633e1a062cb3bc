#include "capi_watch.hpp"

#include <atomic>
#include <mutex>
#include <utility>

namespace streampool::capi {
namespace {

struct Watch {
  std::atomic<bool> on{false};  // looked at without the lock by programs that nobody watches
  std::mutex mutex;
  std::string mode;
  std::vector<Watched> pools;
};
// Leaked on purpose: a program's own statics may make and end pools after ours are gone (R22).
Watch& watch() {
  static Watch* const one = new Watch;
  return *one;
}

}  // namespace

void watch_pools(std::string mode) {
  const std::lock_guard lock(watch().mutex);
  watch().on = true;
  watch().mode = std::move(mode);
}

void forget_pools() {
  std::vector<Watched> gone;  // pools end when the lock is free again
  const std::lock_guard lock(watch().mutex);
  watch().on = false;
  watch().mode.clear();
  gone.swap(watch().pools);
}

std::vector<Watched> take_pools() {
  const std::lock_guard lock(watch().mutex);
  return std::exchange(watch().pools, {});
}

std::string watched_mode() {
  if (!watch().on) return {};
  const std::lock_guard lock(watch().mutex);
  return watch().mode;
}

void note_pool(const std::shared_ptr<pool::Core>& core, pool::OptionMap options) {
  if (!watch().on) return;
  const std::lock_guard lock(watch().mutex);
  if (watch().on) watch().pools.push_back({core, std::move(options)});
}

}  // namespace streampool::capi
