// See biased_lock.hpp.
#include "biased_lock.hpp"

#include <linux/membarrier.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <vector>

namespace streampool {
namespace {

// So many times in a row one thread must have taken a lock before it is biased to it; doubled each time the bias is
// taken away, so that what biasing can cost stays small beside what was done since.
constexpr std::uint32_t kFirstStreak = 16;
constexpr std::uint8_t kMaxLost = 16;
constexpr int kSpins = 64;

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
    Seats& all = seats();
    const std::lock_guard lock(all.mutex);
    all.free.push_back(seat);
  }
};

void sit_down() {
  thread_local SeatHolder holder;
  (void)holder;
}

bool barrier_works() {
  static const bool works = [] {
    const long commands = syscall(SYS_membarrier, MEMBARRIER_CMD_QUERY, 0, 0);
    return commands >= 0 && (commands & MEMBARRIER_CMD_PRIVATE_EXPEDITED) != 0 &&
           syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) == 0;
  }();
  return works;
}

void wait_a_little(int* spins) {
  if (++*spins < kSpins) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
    return;
  }
  *spins = 0;
  sched_yield();
}

}  // namespace

LockSeat g_no_seat;
constinit thread_local LockSeat* g_lock_seat __attribute__((tls_model("initial-exec"))) = &g_no_seat;

void BiasedLock::lock_plain(LockSeat& seat) noexcept {
  for (int spins = 0; !take();) wait_a_little(&spins);
  take_bias_away(seat);
  consider_bias(seat);
}

// Holding `taken_`: afterwards nobody is inside, nor gets in without it.
void BiasedLock::take_bias_away(const LockSeat& seat) noexcept {
  LockSeat* owner = owner_.load(std::memory_order_relaxed);
  if (owner == nullptr) return;
  owner_.store(nullptr, std::memory_order_seq_cst);
  // The thread's own bias, when it is inside another lock by bias already: program order is enough.
  if (owner == &seat) return;
  syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0);
  for (int spins = 0; owner->inside.load(std::memory_order_acquire) == this;) wait_a_little(&spins);
  lost_ = std::min<std::uint8_t>(static_cast<std::uint8_t>(lost_ + 1), kMaxLost);
  streak_ = 0;
  last_ = nullptr;
}

// Holding `taken_`: a lock that one thread takes again and again becomes that thread's.
void BiasedLock::consider_bias(LockSeat& seat) noexcept {
  if (last_ != &seat) {
    last_ = &seat;
    streak_ = 0;
  }
  if (++streak_ < kFirstStreak << lost_) return;
  streak_ = 0;
  if (&seat == &g_no_seat) {
    static thread_local bool sat = false;  // once: after its end a thread gets no other seat
    if (!sat) {
      sat = true;
      sit_down();
      last_ = g_lock_seat;
    }
  }
  if (g_lock_seat != &g_no_seat && barrier_works()) owner_.store(g_lock_seat, std::memory_order_release);
}

}  // namespace streampool
