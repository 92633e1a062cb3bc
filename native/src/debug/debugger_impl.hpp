// The inside of Debugger, shared by debugger.cpp (its public face and the waiting) and batch.cpp (one batch of checks).
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <unordered_map>
#include <vector>

#include "debugger.hpp"
#include "evidence.hpp"
#include "guards.hpp"
#include "quarantine.hpp"
#include "scopes.hpp"

namespace streampool::debug {

// No time comes after it.
inline constexpr double kNever = std::numeric_limits<double>::infinity();

struct Debugger::Impl {
  Impl(driver::Driver& driver, Kind memory, Options wanted, Host& pool);

  // What one batch is asked to do.
  struct Round {
    bool fresh = true;                   // take in what was freed since the last batch
    bool freed = true;                   // freed blocks take part
    bool ask_all = false;                // ask every waiting block whether its work is done, and take all that are
    bool verify_held = false;            // verify every held block, not only those that leave
    Bytes at_least = 0;                  // bytes that should leave the quarantine, beyond what its bounds drive out
    std::span<const BlockFacts> live{};  // their guards are verified
  };
  struct Outcome {
    driver::Status status;
    std::uint64_t blocks = 0, bytes = 0, faults = 0;
    Bytes given_back = 0;
    Good now;
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
  // A batch that the driver has. Meanwhile `held` of the oldest held blocks and those in `done` stay where they are.
  struct Batch {
    std::vector<Item> done;
    std::size_t held = 0;
    Round round;
    Watch watched;
    driver::PatternJob job;
    bool started = false;  // the driver has the job
    double time = 0;       // when it was started, and the moment
    Moment moment = 0;
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
  // Verify, refill; then report, hold, give back. After a failing call every block is where it was, and what was
  // reported already is not reported again. At most one batch is under way.
  driver::Status start(const Round& round);
  bool finish(bool wait, Outcome* out);
  Outcome run(const Round& round);
  // The last step of check(): everything that can be verified, and a list of what cannot.
  void check_all(std::span<const BlockFacts> live, std::vector<BlockFacts> busy,
                 const std::function<bool()>& interrupted, CheckResult* result);
  void take_in_fresh();
  std::size_t not_done();

  std::vector<Item> take_fresh();
  std::vector<Item> take_done(bool all, std::vector<Item> newest);
  void back_to_waiting(std::vector<Item>* items);
  driver::Status failed(driver::Status status);
  Bounds bounds() const;
  void plan_next();
  Watch watch(const std::vector<Item>& done, std::size_t held, std::span<const BlockFacts> live);
  Good count_check(const Batch& batch);
  void publish(std::vector<Fault> found);
  void give_back(std::vector<Item> items, Outcome* out);
  std::vector<Item> take_oldest(std::size_t most, const Round& round, Bytes given_back);

  std::optional<Batch> under_way;
  Quarantine quarantine;
  std::vector<driver::Range> repairs;  // reported, but a fill failed: done before anything else
  std::atomic<bool> dead{false};       // the device or the driver is lost: nothing can be checked any more

  // -- of everybody -----------------------------------------------------------------------------------------------
  void keep(Fault fault);
  bool keep_or_count(Fault fault);           // with the mutex held; false: it is only counted
  Good good_of(std::uint64_t serial) const;  // with the mutex held
  bool is_unguarded(Address address) const;  // with the mutex held

  driver::Driver& device;
  const Kind kind;
  const Options options;
  Host& host;
  const Guards guards;
  const std::uint64_t key;
  std::atomic<bool> due{false};
  // As in `totals`, and written with it, under the mutex.
  std::atomic<Bytes> quarantined_now{0};
  std::atomic<std::uint64_t> quarantined_blocks_now{0};
  std::atomic<std::uint64_t> faults_now{0};
  std::atomic<bool> has_faults{false};
  std::atomic<double> next_time{kNever};  // when a batch is due without another free

  mutable std::mutex mutex;  // guards what stands below
  std::condition_variable idle;
  bool working = false;
  std::thread::id worker;
  std::vector<Item> fresh;         // freed since the last batch
  std::vector<Address> unguarded;  // blocks whose guards could not be written, until they are freed
  std::uint32_t freed_since = 0;
  Bytes freed_bytes_since = 0;
  std::vector<Fault> faults;
  std::uint64_t kept_faults = 0;
  // By kind and stacks: how many faults were kept, and which of `faults` counts the rest.
  struct Repeats {
    std::uint32_t kept = 0;
    std::optional<std::size_t> counting;
  };
  std::map<std::array<StackId, 4>, Repeats> repeats;
  Totals totals;
  std::optional<std::unordered_map<StackId, SiteUsage>> usage;  // where untouched bytes are counted
  struct LiveGood {
    std::uint64_t serial;
    Good good;
  };
  std::vector<LiveGood> live_good;  // by serial: of the live blocks of the last check()
};

}  // namespace streampool::debug
