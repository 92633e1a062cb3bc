// The inside of Debugger, shared by debugger.cpp (its public face and the waiting) and batch.cpp (one batch of checks).
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "debugger.hpp"
#include "evidence.hpp"
#include "guards.hpp"
#include "quarantine.hpp"

namespace streampool::debug {

struct Debugger::Impl {
  Impl(driver::Driver& driver, Kind memory, Options wanted, Host& pool);

  // What one batch is asked to do.
  struct Round {
    bool ask_all = false;      // ask every waiting block whether its work is done
    bool verify_held = false;  // verify every held block, not only those that leave
    Bytes at_least = 0;        // bytes that should leave the quarantine, beyond what its cap drives out
    const std::vector<BlockFacts>* live = nullptr;  // pinned: their guards are verified, then they are unpinned
    const std::vector<BlockFacts>* busy = nullptr;  // pinned, not verified: what is known of them stays known
  };
  struct Outcome {
    driver::Status status;
    std::uint64_t blocks = 0, bytes = 0, faults = 0;
    Bytes given_back = 0;
  };
  // What a batch verifies: ranges, and for each which block and side it stands for.
  struct Watch {
    std::vector<Subject> subjects;
    std::vector<driver::Range> ranges;
    std::vector<Probe> probes;
    Bytes measured = 0;  // of bodies whose untouched bytes are counted
    void add(Side side, driver::Range range);
    std::uint64_t blocks() const;
  };

  // The right to touch what belongs to the working thread, and to call the driver and the Host. False when another
  // thread has it and `wait` is not set, or when this thread has it already (a call from inside the Host).
  class Turn {
   public:
    Turn(Impl& impl, bool wait);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    explicit operator bool() const { return taken_; }

   private:
    Impl& impl_;
    bool taken_ = false;
  };

  // -- of the thread whose turn it is (batch.cpp) -------------------------------------------------------------------
  // Verify, refill, report, hold, give back: each of the first two one driver call over all blocks of the batch. After
  // a failing call every block is where it was, and what was reported already is not reported again.
  Outcome run(const Round& round);
  // The last step of check(): everything that can be verified, and a list of what cannot. Unpins.
  void check_all(const std::vector<BlockFacts>& live, std::vector<BlockFacts> busy, CheckResult* result);
  void take_in_fresh();
  std::size_t not_done();

  std::deque<Item> take_done(bool all, std::size_t newest);
  void back_to_waiting(std::deque<Item>* items);
  driver::Status failed(driver::Status status);
  Watch watch(const std::deque<Item>& done, std::size_t held, const std::vector<BlockFacts>* live);
  Good count_check(const Watch& watched, const std::vector<driver::Mismatch>& mismatches);
  void remember_live(const std::vector<BlockFacts>& live, const std::vector<BlockFacts>& busy, Good now);
  void publish(std::vector<Fault> found);
  void give_back_oldest(std::size_t most, const Round& round, Outcome* out);

  Quarantine quarantine;
  std::vector<driver::Range> repairs;  // reported, but a fill failed: done before anything else
  std::atomic<bool> dead{false};       // the device or the driver is lost: nothing can be checked any more

  // -- of everybody -----------------------------------------------------------------------------------------------
  void keep(Fault fault);
  Good good_of(std::uint64_t serial) const;  // with the mutex held
  bool is_unguarded(Address address) const;  // with the mutex held

  driver::Driver& device;
  const Kind kind;
  const Options options;
  Host& host;
  const Guards guards;
  const std::uint64_t key;
  std::atomic<bool> due{false};

  mutable std::mutex mutex;  // guards what stands below
  std::condition_variable idle;
  bool working = false;
  std::thread::id worker;
  std::deque<Item> fresh;          // freed since the last batch
  std::vector<Address> unguarded;  // blocks whose guards could not be written, until they are freed
  std::uint32_t freed_since = 0;
  Bytes freed_bytes_since = 0;
  std::vector<Fault> faults;
  std::uint64_t kept_faults = 0;
  Totals totals;
  struct LiveGood {
    std::uint64_t serial;
    Good good;
  };
  std::vector<LiveGood> live_good;  // by serial: of the live blocks of the last check()
};

}  // namespace streampool::debug
