// The inside of one generation of the simulated machine: queued work as a graph of nodes, streams, events, captures and
// the two schedulers. Nobody outside sim/ includes this. Imports machine.hpp, memory.hpp, races.hpp.
//
// Locks: `mutex` guards everything here; memory has its own, and neither is held while the other is taken, while a
// queued body runs, or while anything of a caller is destroyed (bodies leave through `trash`).
// Invariant of a node: it is done, or running, or in `ready`, or `blockers` > 0 and each of them will be taken away by
// a node that is not done, by a gate, or by `drop_work`.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "clocks.hpp"
#include "machine.hpp"
#include "memory.hpp"
#include "races.hpp"

namespace streampool::driver::sim {

struct DeviceState;
struct Stream;
using StreamPtr = std::shared_ptr<Stream>;
using NodePtr = std::shared_ptr<Node>;

// CUresult values that the simulated device answers with, and its own (negative).
enum Number : int {
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kDeinitialized = 4,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kNotReady = 600,
  kIllegalAddress = 700,
  kContextDestroyed = 709,
  kNotPermitted = 800,
  kNotSupported = 801,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901,
  kCaptureUnmatched = 903,
  kCaptureUnjoined = 904,
  kCaptureIsolation = 905,
  kCaptureImplicit = 906,
  kCapturedEvent = 907,
  kUnknown = 999,
  kDeadHandle = -1,
  kDeadlock = -2,
  kInterrupted = -3,
};

// The graph that a set of streams is recording. Nothing of it runs.
struct Capture {
  std::uint64_t id = 0;
  std::shared_ptr<Graph> graph;  // null: it ended
  bool valid = true;
  std::weak_ptr<Stream> origin;
  std::vector<std::weak_ptr<Stream>> members;
  std::map<std::uint64_t, std::uint64_t> last_work;  // by stream id: what must have come back at the end
};
using CapturePtr = std::shared_ptr<Capture>;

// A piece of work, or a mark (a record, a wait, a context event) that runs nothing.
struct Node : std::enable_shared_from_this<Node> {
  bool task = false;
  bool done = false;
  bool at_gate = false;  // one of its blockers is its gate
  int blockers = 0;
  DeviceState* device = nullptr;
  StreamPtr stream;  // null: a mark over several streams
  std::vector<NodePtr> dependents;
  std::shared_ptr<Gate> gate;
  std::function<void()> body;
  bool foreign = false;  // the body is a caller's: it may take any lock of theirs, and the GIL
  std::vector<Access> accesses;
  std::string label;
};

struct Stream {
  std::uint64_t id = 0;
  StreamHandle handle = 0;
  DeviceState* device = nullptr;
  bool blocking = false;
  bool legacy = false;
  bool destroyed = false;
  std::uint64_t thread = 0;  // of a per-thread default stream
  std::string name;
  NodePtr tail;  // the last node, while it is not done
  Clock clock;   // of the last node
  Slot slot = 0;
  CapturePtr capture;
  std::map<std::uint64_t, std::uint64_t> captured;  // what of the capture this stream is ordered after, by stream id
};

// What one record covers. An event points to its latest; waits and queries hold the one they found.
struct Recording {
  NodePtr node;
  Clock clock;
  CapturePtr capture;
  std::map<std::uint64_t, std::uint64_t> captured;
};

struct Event {
  DeviceState* device = nullptr;
  std::shared_ptr<Recording> recording;  // null: never recorded, queries as done
};

struct FailRule {
  Call call{};
  std::uint64_t skip = 0;
  std::uint64_t times = 0;
  Code code{};
};

struct DeviceState {
  int ordinal = 0;
  std::atomic<int> lost{0};  // the sticky error's number
  std::atomic<bool> gone{false};
  std::atomic<bool> has_rules{false};
  std::vector<FailRule> rules;
  std::atomic<bool> has_before{false};
  std::vector<std::pair<Call, std::function<void()>>> before;  // of each call the first is next
  StreamPtr legacy;
  Slot private_slot = 0;                       // the debugger's private stream
  std::map<std::uint64_t, StreamPtr> streams;  // by id: live ones, and destroyed ones that are not done
  std::map<std::uint64_t, StreamPtr> per_thread;
  Clock retired;  // of destroyed streams that are done
  Clock retired_blocking;
  std::unordered_set<Node*> gated;
  std::uint64_t pending = 0;
  std::uint64_t live_streams = 0;
  std::uint64_t live_events = 0;
  std::string fault;
};

// Handle values are small and the last one given back is the next one given out, as the driver does it.
template <typename T>
class HandleTable {
 public:
  explicit HandleTable(std::uintptr_t first) : next_(first) {}
  std::uintptr_t add(T value) {
    std::uintptr_t handle = 0;
    if (free_.empty()) {
      handle = next_;
      next_ += kStep;
    } else {
      handle = free_.back();
      free_.pop_back();
    }
    live_.emplace(handle, std::move(value));
    return handle;
  }
  T* find(std::uintptr_t handle) {
    const auto found = live_.find(handle);
    return found == live_.end() ? nullptr : &found->second;
  }
  void remove(std::uintptr_t handle) {
    live_.erase(handle);
    free_.push_back(handle);
  }

 private:
  static constexpr std::uintptr_t kStep = 16;
  std::uintptr_t next_;
  std::vector<std::uintptr_t> free_;
  std::unordered_map<std::uintptr_t, T> live_;
};

using Lock = std::unique_lock<std::mutex>;
// What must be destroyed outside the lock: declare it before the lock.
using Trash = std::vector<std::function<void()>>;

enum class Waited : std::uint8_t { done, interrupted, deadlock, lost };

class Machine : public std::enable_shared_from_this<Machine> {
 public:
  explicit Machine(const Config& configuration);
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  const Config config;
  Memory memory;
  std::mutex mutex;
  History history;
  HostClock host;
  HandleTable<StreamPtr> streams{0x5000};
  HandleTable<std::shared_ptr<Event>> events{0xE000};
  std::vector<std::unique_ptr<DeviceState>> devices;
  std::uint64_t captures = 0;  // begun so far; their ids

  bool seeded() const { return config.scheduler == Scheduler::seeded; }
  bool dead() const { return dead_.load(std::memory_order_acquire); }
  void die();  // the generation ends: pending work is dropped

  // Streams. `find_stream` answers null for a dead handle (and has noted the trap).
  StreamPtr find_stream(DeviceState& device, StreamHandle handle, Call call);
  std::shared_ptr<Event> find_event(EventHandle handle, Call call);
  StreamPtr make_stream(DeviceState& device, bool blocking, std::string name);
  void destroy_stream(StreamHandle handle, const StreamPtr& stream, Trash& trash);
  void end_inner(const StreamPtr& stream);  // of a stream without a handle
  void trap(const std::string& text);
  std::vector<std::string> take_traps();

  // Queueing. `enqueue` gives a node its place in the stream: after its tail and what the legacy stream demands.
  NodePtr new_node(DeviceState& device, const StreamPtr& stream);
  void depend(const NodePtr& node, const NodePtr& on);
  void enqueue(const NodePtr& node);
  void start(const NodePtr& node, Trash& trash);  // all blockers but the last are known: take the last
  void order_after_all(const NodePtr& node, DeviceState& device, Clock* clock, bool blocking_only);
  void hold_at_gate(const NodePtr& node, std::shared_ptr<Gate> gate);
  void open_gate(const NodePtr& node);
  // The race check of accesses that a stream makes next, and of those that the host or the debugger makes now.
  void touch(Stream& stream, const std::vector<std::pair<Place, bool>>& places, const std::string& label,
             std::uint32_t stack);
  Tick touch_private(DeviceState& device, const std::vector<std::pair<Place, bool>>& places, const std::string& label,
                     std::uint32_t stack, bool remember);

  // Running. In `seeded` mode `run_some` runs up to a small random number of pieces.
  bool step(Lock& lock, bool foreign);
  void run_some(Lock& lock, bool foreign, std::uint64_t most = 2);
  template <typename Done>
  Waited wait(Lock& lock, const DeviceState* device, const Interrupt& interrupt, Done done);
  bool settled() const { return ready_.empty() && running_ == 0; }
  void fault(DeviceState& device, int number, std::string text, Trash& trash);

  // Captures.
  void invalidate(const CapturePtr& capture) { capture->valid = false; }
  bool kill_captures(const DeviceState& device);
  bool blocking_capture(const DeviceState& device, bool kill);  // a blocking stream captures
  void join_capture(const StreamPtr& stream, const CapturePtr& capture);
  void end_capture(const CapturePtr& capture, Trash& trash);

  double now() const;
  void advance(double seconds);
  void sleep(Lock& lock, double seconds);

  static bool in_body();  // this thread is inside a queued body

 private:
  using Clocks = std::chrono::steady_clock;

  void make_ready(const NodePtr& node);
  void complete(const NodePtr& node, Trash& trash);
  void finish_marks(Trash& trash);
  void execute(const NodePtr& node);
  void run_ready(Lock& lock, std::size_t index);
  void maybe_hire();
  void work();
  void drop_work(DeviceState& device, Trash& trash);
  Slot take_slot();
  void retire_stream(Stream& stream);
  void prune_per_thread(DeviceState& device);

  std::atomic<bool> dead_{false};
  std::deque<NodePtr> ready_;
  std::vector<NodePtr> forced_;  // scratch of drop_work
  std::vector<NodePtr> marks_;   // `threads`: marks whose blockers are gone, completed before the lock is left
  std::uint64_t running_ = 0;
  std::uint64_t running_foreign_ = 0;  // of those, bodies that may block
  std::uint64_t idle_ = 0;
  std::uint64_t workers_ = 0;
  std::uint64_t waiters_ = 0;
  std::condition_variable work_;
  std::condition_variable changed_;
  std::mt19937_64 random_;
  std::uint64_t next_stream_id_ = 1;
  Slot next_slot_ = 1;
  std::vector<std::pair<Slot, Tick>> retiring_;  // slots of destroyed streams and their last tick
  std::vector<Tick> ticks_;                      // by slot: never goes back, whoever has the slot
  std::vector<std::string> traps_;
  Clocks::time_point started_ = Clocks::now();
  std::atomic<double> offset_{0};
};

// Waits until `done()`; the lock is left while waiting. A sticky error of `device` ends every wait.
template <typename Done>
Waited Machine::wait(Lock& lock, const DeviceState* device, const Interrupt& interrupt, Done done) {
  constexpr auto kAskEvery = std::chrono::milliseconds(50);
  auto asked = Clocks::now();
  ++waiters_;
  const auto leave = [this](Waited result) {
    --waiters_;
    return result;
  };
  while (true) {
    if (dead() || (device != nullptr && device->lost.load() != 0)) return leave(Waited::lost);
    if (done()) return leave(Waited::done);
    if (interrupt && Clocks::now() - asked >= kAskEvery) {
      lock.unlock();
      const bool stop = interrupt();
      lock.lock();
      asked = Clocks::now();
      if (stop) return leave(Waited::interrupted);
      continue;
    }
    if (seeded()) {
      if (step(lock, true)) continue;
      if (running_ == 0) return leave(Waited::deadlock);
    }
    if (interrupt) {
      changed_.wait_for(lock, kAskEvery);
    } else {
      changed_.wait(lock);
    }
  }
}

}  // namespace streampool::driver::sim
