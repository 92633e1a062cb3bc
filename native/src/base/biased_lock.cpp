// See biased_lock.hpp.
#include "biased_lock.hpp"

#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <mutex>
#include <new>
#include <vector>

#include "spin_wait.hpp"

namespace streampool {
namespace {

// So many times in a row one thread must have taken a lock before it is biased to it; doubled each time the bias was
// taken away lately, so that what biasing can cost stays small beside what was done since.
constexpr std::uint32_t kFirstStreak = 16;
constexpr std::uint8_t kMaxLost = 12;
// So often in a row who takes the bias away gives it back, and after so long a peace that is forgotten.
constexpr std::uint8_t kGivenBack = 8;
constexpr std::int64_t kPeace = 10;  // milliseconds

LockSeat g_no_seat;

struct Seats {
  std::mutex mutex;
  std::vector<LockSeat*> free;
};
Seats& seats() {
  static Seats* all = new Seats;  // never destroyed: threads end late
  return *all;
}

// Gives the thread a seat, and hands it on when the thread ends.
struct SeatHolder {
  SeatHolder() {
    Seats& all = seats();
    const std::lock_guard lock(all.mutex);
    if (all.free.empty()) {
      LockSeat* fresh = new (std::nothrow) LockSeat;
      if (fresh != nullptr) g_lock_seat = fresh;
      return;
    }
    g_lock_seat = all.free.back();
    all.free.pop_back();
  }
  ~SeatHolder() {
    LockSeat* seat = g_lock_seat;
    if (seat == &g_no_seat) return;
    g_lock_seat = &g_no_seat;
    seat->threads.fetch_add(1, std::memory_order_relaxed);
    Seats& all = seats();
    const std::lock_guard lock(all.mutex);
    all.free.push_back(seat);
  }
};

// Once: after its end a thread gets no other seat. Allocates.
void sit_down() {
  thread_local SeatHolder holder;
  (void)holder;
}

long barrier(int command) { return syscall(SYS_membarrier, command, 0, 0); }

// Every other thread of the process has passed a full barrier when this returns.
void all_pass_a_barrier() {
  if (barrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED) == 0) return;
  // It worked before: without it two threads could be inside.
  if (barrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) == 0 && barrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED) == 0) return;
  std::fputs("streampool: membarrier(2) is refused since a while, and locks depend on it\n", stderr);
  std::abort();
}

std::int64_t milliseconds() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1000 + now.tv_nsec / 1000000;
}

}  // namespace

constinit thread_local LockSeat* g_lock_seat __attribute__((tls_model("initial-exec"))) = &g_no_seat;

bool BiasedLock::prepare() noexcept {
  static const bool works = [] {
    const long commands = barrier(MEMBARRIER_CMD_QUERY);
    return commands >= 0 && (commands & MEMBARRIER_CMD_PRIVATE_EXPEDITED) != 0 &&
           barrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) == 0;
  }();
  return works;
}

void BiasedLock::lock_plain() noexcept {
  if (g_lock_seat == &g_no_seat && prepare()) sit_down();
  LockSeat& seat = *g_lock_seat;
  if (!take()) {
    waiting_.fetch_add(1, std::memory_order_relaxed);
    for (SpinWait wait; !take();) wait(waiting_.load(std::memory_order_relaxed));
    waiting_.fetch_sub(1, std::memory_order_relaxed);
  }
  take_bias_away(seat);
  consider_bias(seat);
}

// Holding `taken_`: afterwards nobody is inside, nor gets in without it.
void BiasedLock::take_bias_away(const LockSeat& seat) noexcept {
  LockSeat* owner = owner_.load(std::memory_order_relaxed);
  // The thread's own bias, when it is inside another lock or waited for a visitor: it does not come in twice.
  if (owner == nullptr || owner == &seat) return;
  owner_.store(nullptr, std::memory_order_seq_cst);
  all_pass_a_barrier();
  for (SpinWait wait; owner->inside.load(std::memory_order_acquire) == this;) wait();
  // Its thread has ended: nobody is disturbed by that.
  if (owner->threads.load(std::memory_order_relaxed) != owner_thread_) return;
  const std::int64_t now = milliseconds();
  if (now - lost_at_ >= kPeace) lost_ = 0;
  lost_at_ = now;
  if (lost_ < kMaxLost) ++lost_;
  if (lost_ <= kGivenBack) former_ = owner;
}

// Holding `taken_`: a lock that one thread takes again and again becomes that thread's.
void BiasedLock::consider_bias(LockSeat& seat) noexcept {
  if (&seat == &g_no_seat) return;
  if (last_ != &seat) {
    last_ = &seat;
    streak_ = 0;
  }
  if (++streak_ < kFirstStreak << lost_) return;
  streak_ = 0;
  former_ = nullptr;
  owner_thread_ = seat.threads.load(std::memory_order_relaxed);
  owner_.store(&seat, std::memory_order_release);
}

}  // namespace streampool
