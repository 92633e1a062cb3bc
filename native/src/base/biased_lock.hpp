// A short lock that is nearly free for the thread that uses it most.
//
// A lock that one thread takes again and again becomes biased to it: from then on that thread enters with plain stores.
// Another thread that wants it takes the bias away first: it clears `owner_`, makes every running thread of the process
// pass a memory barrier (Linux membarrier(2)), and then sees either that the owner is inside, and waits, or that the
// owner will see that it is the owner no more. So the owner pays no barrier and no locked instruction. Who comes by
// once in a while gives the bias back. Where that happens often, the bias goes, and is the harder to get again the more
// often it was taken away: a lock that threads share soon stays a plain spin lock. After D. Dice, M. Moir, W. Scherer,
// "Quickly reacquirable locks" (2003).
//
// Spins, the less often the more threads wait, then yields; never fair: a ticket lock stalls everybody behind a
// descheduled waiter, and hands the guarded cache lines around at each step. Guards a few
// dozen instructions, never a driver call, a host allocation of unbounded size, a wait or a callback (R9). A thread is
// inside at most one of these locks by bias; the second one it takes in the plain way.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

namespace streampool {

class BiasedLock;

// A thread's place in the protocol. Never given back: a later thread takes it over, and the biases with it.
struct alignas(128) LockSeat {
  std::atomic<const BiasedLock*> inside{nullptr};  // written by its thread alone
  std::atomic<std::uint32_t> threads{0};           // that had it and ended
};

// This thread's seat. Before its first plain lock and after its end a thread has none, which is one that nobody's bias
// names and nobody writes.
extern constinit thread_local LockSeat* g_lock_seat __attribute__((tls_model("initial-exec")));

class BiasedLock {
 public:
  void lock() noexcept {
    LockSeat& seat = *g_lock_seat;
    if (seat.inside.load(std::memory_order_relaxed) != nullptr || !enter(seat)) lock_plain();
  }
  // Also false when another thread has the bias, inside or not.
  bool try_lock() noexcept {
    LockSeat& seat = *g_lock_seat;
    if (seat.inside.load(std::memory_order_relaxed) == nullptr && enter(seat)) return true;
    if (owner_.load(std::memory_order_relaxed) != nullptr || !take()) return false;
    if (owner_.load(std::memory_order_relaxed) == nullptr) return true;
    taken_.store(false, std::memory_order_release);
    return false;
  }
  void unlock() noexcept {
    LockSeat& seat = *g_lock_seat;
    if (seat.inside.load(std::memory_order_relaxed) == this)
      leave(seat);
    else
      unlock_plain();
  }

  // By the thread's bias, with no more than loads and stores. For callers that have its seat at hand and are inside no
  // other lock; leave() is theirs too.
  bool enter(LockSeat& seat) noexcept {
    if (owner_.load(std::memory_order_relaxed) != &seat) return false;
    seat.inside.store(this, std::memory_order_release);
    // The compiler keeps the order; the processor's is the business of whoever takes the bias away.
    std::atomic_signal_fence(std::memory_order_seq_cst);
    if (owner_.load(std::memory_order_acquire) == &seat) [[likely]]
      return true;
    seat.inside.store(nullptr, std::memory_order_release);
    return false;
  }
  // Whether locks can be biased here. Asks the kernel the first time, which takes milliseconds: before any lock is
  // held.
  static bool prepare() noexcept;
  static void leave(LockSeat& seat) noexcept { seat.inside.store(nullptr, std::memory_order_release); }

 private:
  void lock_plain() noexcept;
  void unlock_plain() noexcept {
    // The owner sees with its bias what was done meanwhile.
    if (former_ != nullptr) owner_.store(std::exchange(former_, nullptr), std::memory_order_release);
    taken_.store(false, std::memory_order_release);
  }
  bool take() noexcept {
    return !taken_.load(std::memory_order_relaxed) && !taken_.exchange(true, std::memory_order_acquire);
  }
  void take_bias_away(const LockSeat& seat) noexcept;
  void consider_bias(LockSeat& seat) noexcept;

  std::atomic<LockSeat*> owner_{nullptr};
  std::atomic<bool> taken_{false};
  std::atomic<std::uint16_t> waiting_{0};  // threads
  // Under `taken_`.
  std::uint8_t lost_ = 0;     // how often the bias was taken away lately, up to a bound
  std::int64_t lost_at_ = 0;  // when that was last, in milliseconds
  std::uint32_t streak_ = 0;  // how often in a row `last_` took the lock
  LockSeat* last_ = nullptr;
  LockSeat* former_ = nullptr;      // gets its bias back at the unlock
  std::uint32_t owner_thread_ = 0;  // LockSeat::threads when the owner got it
};

}  // namespace streampool
