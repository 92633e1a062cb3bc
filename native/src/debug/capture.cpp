#include "capture.hpp"

#include <atomic>

#include "../driver/driver.hpp"

namespace streampool::debug {

namespace {
std::atomic<Capture> g_capture{nullptr};
}  // namespace

void set_capture(Capture capture) { g_capture.store(capture, std::memory_order_release); }

StackId capture(int depth, int native_depth) noexcept {
  const Capture taken = g_capture.load(std::memory_order_acquire);
  if (taken == nullptr || depth + native_depth <= 0 || driver::ending() != driver::Ending::no) return 0;
  return taken(depth, native_depth);
}

}  // namespace streampool::debug
