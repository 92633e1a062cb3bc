// A thread that stays inside the lock of a stream's heap, as one that the system took off its processor there. For
// tests of who waits for that lock, and how.
//
// The thread allocates and frees on the stream until the lock is its own; a signal then interrupts it again and again,
// until it is inside, where the handler keeps it. It lets go when told, and by itself after kLongest: then `timed_out`.
#pragma once

#include <pthread.h>

#include <atomic>
#include <csignal>
#include <ctime>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "base/biased_lock.hpp"
#include "pool/core.hpp"
#include "pool/thread_cache.hpp"

namespace streampool::testing {

class LockHolder {
 public:
  LockHolder(const std::string& pool_name, driver::StreamHandle stream) : stream_(stream) {
    for (const auto& core : pool::Core::all())
      if (core->name() == pool_name) core_ = core;
    if (core_ == nullptr) throw std::invalid_argument("there is no pool of that name");
    if (!BiasedLock::prepare()) throw std::runtime_error("locks are never anybody's own here: no membarrier(2)");
    current_.store(this);
    struct sigaction action{};
    action.sa_handler = &LockHolder::on_signal;
    action.sa_flags = SA_RESTART;
    sigaction(SIGUSR2, &action, &before_);
    thread_ = std::thread([this] { pairs(); });
    for (int tries = 0; !inside_.load(); ++tries) {
      if (tries == kTries) {
        release();
        throw std::runtime_error("the thread was never found inside the lock");
      }
      pthread_kill(thread_.native_handle(), SIGUSR2);
      pause(50'000);
    }
  }
  LockHolder(const LockHolder&) = delete;
  LockHolder& operator=(const LockHolder&) = delete;
  ~LockHolder() { release(); }

  void release() {
    if (!thread_.joinable()) return;
    stop_.store(true);
    go_.store(true);
    thread_.join();
    sigaction(SIGUSR2, &before_, nullptr);
    current_.store(nullptr);
    core_.reset();
  }
  bool timed_out() const { return timed_out_.load(); }

 private:
  static constexpr int kTries = 100000;
  static constexpr std::time_t kLongest = 10;  // seconds

  static void pause(long nanoseconds) {
    const timespec time{.tv_sec = 0, .tv_nsec = nanoseconds};
    nanosleep(&time, nullptr);
  }
  // Only what a signal's handler may do.
  static void on_signal(int) {
    LockHolder* self = current_.load();
    if (self == nullptr || self->inside_.load()) return;
    const pool::ThreadCache& cache = pool::thread_cache();
    const bool here = cache.handle == self->stream_ && cache.heap != nullptr &&
                      g_lock_seat->inside.load() == &cache.heap->stream.lock;
    if (!here) return;  // in no lock, or in another stream's
    self->inside_.store(true);
    timespec begin{}, now{};
    clock_gettime(CLOCK_MONOTONIC, &begin);
    while (!self->go_.load()) {
      pause(1'000'000);
      clock_gettime(CLOCK_MONOTONIC, &now);
      if (now.tv_sec - begin.tv_sec < kLongest) continue;
      self->timed_out_.store(true);
      return;
    }
  }
  void pairs() {
    pool::AllocRequest request;
    request.size = 4096;
    request.stream = stream_;
    request.raw = true;
    pool::FreeRequest by;
    by.stream = stream_;
    pool::Failure ignored;
    while (!stop_.load()) {
      pool::BlockRef block;
      if (!core_->try_allocate(request, &block) && core_->allocate(request, &block, &ignored) != pool::Errc::ok) return;
      if (!core_->try_free(block.address, by)) core_->free(block.address, by, &ignored);
    }
  }

  static inline std::atomic<LockHolder*> current_{nullptr};
  driver::StreamHandle stream_;
  std::shared_ptr<pool::Core> core_;
  std::atomic<bool> inside_{false}, go_{false}, stop_{false}, timed_out_{false};
  struct sigaction before_{};
  std::thread thread_;
};

}  // namespace streampool::testing
