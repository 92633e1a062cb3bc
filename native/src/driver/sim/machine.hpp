// The simulated machine as its users see it: configuration, devices, gated work, what went wrong. A real asynchronous
// device in host memory, behind driver.hpp's Driver. The Python face (native/python/sim.cpp) and native tests use this
// header; the pool sees a Driver and nothing else. Imports base/ and driver.hpp.
//
//   sim::configure({.scheduler = sim::Scheduler::seeded, .seed = 7}, &error);   // before first use, or after reset()
//   auto device = sim::device(0);
//   auto gate = std::make_shared<sim::Gate>();
//   device->launch({.stream = s, .accesses = {sim::writes(address, 4096)}, .gate = gate});   // pending until...
//   gate->open();  sim::settle();
//
// A *generation* is one configured machine. reset() ends it: its pending work is dropped, its drivers answer `lost`
// (their memory stays readable while somebody holds a Device of it), and the next use starts a fresh one.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "../../base/types.hpp"
#include "../driver.hpp"

namespace streampool::driver::sim {

class Machine;  // engine.hpp: the inside of a generation
struct Node;

// Who runs the queued work. `threads`: worker threads, concurrently. `seeded`: whoever polls, waits, pauses or settles,
// one piece at a time, in an order that depends on the seed alone (as long as one host thread uses the machine).
enum class Scheduler : std::uint8_t { threads, seeded };

struct Config {
  int devices = 1;
  Bytes memory = 80 * kGiB;         // of each device; host memory is committed only when touched
  Bytes host_memory = 1024 * kGiB;  // how much pinned and managed memory there is, together
  Scheduler scheduler = Scheduler::threads;
  std::uint64_t seed = 0;
  bool virtual_memory = true;
  bool managed_memory = true;
  bool context_events = true;
  bool driver_pools = true;
  bool check_races = true;
  bool abort_on_trap = false;  // a dead handle ends the process, as on hardware
};

// False, with a sentence in `error`, when a machine is in use already or the values make no sense.
bool configure(const Config& config, std::string* error);
void reset();
bool in_use();
Config config();

// Work waits at a shut gate. Opening is final. Nothing of the driver is called.
class Gate {
 public:
  Gate() = default;
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  void open();
  bool is_open() const;

 private:
  friend class Machine;
  bool add(const std::shared_ptr<Machine>& machine, const std::shared_ptr<Node>& node);  // false: it is open

  mutable std::mutex mutex_;
  bool open_ = false;
  std::vector<std::pair<std::weak_ptr<Machine>, std::shared_ptr<Node>>> waiting_;
};

struct Access {
  Address begin = 0;
  Bytes size = 0;
  bool write = false;
};
inline Access reads(Address begin, Bytes size) { return {begin, size, false}; }
inline Access writes(Address begin, Bytes size) { return {begin, size, true}; }

// A piece of work for a stream: a kernel, seen from outside.
struct Work {
  StreamHandle stream = kDefaultStream;
  std::function<void()> body{};    // may be empty; runs outside all locks; must not call a driver (that is a trap)
  std::vector<Access> accesses{};  // what it touches: checked against the mappings when it runs, and for races
  std::shared_ptr<Gate> gate{};    // may be null
  std::string label{};
  std::uint32_t stack = 0;  // whatever the caller wants to find again in a race report
};

struct RaceSide {
  bool write = false;
  std::string label;
  std::uint64_t stream = 0;  // driver id; 0: the host, or the debugger's private stream
  std::string stream_name;
  std::uint32_t stack = 0;
};

// Two accesses to the same bytes, at least one a write, that nothing orders.
struct Race {
  int device = 0;
  Address address = 0;  // of the bytes that both touch, as the later one named them
  Bytes size = 0;
  RaceSide first, second;   // in the order in which they were queued
  std::uint64_t count = 1;  // how often this pair of sites was seen
};

// True: give up waiting. Asked about every 50 ms, outside all locks.
using Interrupt = std::function<bool()>;

class Graph;  // what a capture recorded

class Device : public Driver {
 public:
  // Beyond Driver: what programs do. All but `synchronize` (counted as stream_synchronize) have their own counter.
  virtual Status create_stream(bool blocking, std::string name, StreamHandle* out) = 0;
  virtual Status launch(Work work) = 0;
  virtual Status stream_synchronize(StreamHandle stream, const Interrupt& interrupt = {}) = 0;
  virtual Status event_synchronize(EventHandle event, const Interrupt& interrupt = {}) = 0;
  virtual Status synchronize(const Interrupt& interrupt = {}) = 0;
  // As event_query and stream_query, made by a caller that holds no lock: in `seeded` mode queued bodies may run
  // inside.
  virtual Status poll(EventHandle event) = 0;
  virtual Status poll_stream(StreamHandle stream) = 0;
  virtual Status begin_capture(StreamHandle stream) = 0;
  // The graph is null where something invalidated the capture. The status is ok even then (unless the call itself makes
  // no sense).
  virtual Status end_capture(StreamHandle stream, std::shared_ptr<Graph>* graph) = 0;
  // All of the graph's work after what is queued on the stream; what is queued next comes after all of it. Launches of
  // one graph follow each other. A graph that nobody holds stays until its work is done.
  virtual Status launch_graph(const std::shared_ptr<Graph>& graph, StreamHandle stream) = 0;
  // The host touches memory now. Only for the race check.
  virtual void host_access(Access access, std::string label, std::uint32_t stack) = 0;
  // As stream_destroy and event_destroy, for finalizers: never injected, allowed inside a queued body, and quiet.
  virtual void drop_stream(StreamHandle stream) = 0;
  virtual void drop_event(EventHandle event) = 0;

  // Tests' levers. The n-th next use of a call (1: the next) fails, and `times` - 1 uses after it.
  virtual void fail_call(Call call, std::uint64_t n, std::uint64_t times, Code code) = 0;
  virtual void clear_failures() = 0;
  // Runs `body` once, inside the next use of a call and before it has any effect, on the caller's thread, with none of
  // the machine's locks: what another thread may do at just that moment.
  virtual void before_call(Call call, std::function<void()> body) = 0;
  virtual void set_lost(int number = 700) = 0;  // a sticky error: pending work is dropped
  virtual void set_gone(bool gone) = 0;         // as if the driver were going down
  virtual void set_occupied(Bytes bytes) = 0;   // device memory that other processes hold

  virtual std::uint64_t legacy_stream_id() = 0;
  virtual std::uint64_t live_streams() = 0;  // created and not destroyed
  virtual std::uint64_t live_events() = 0;
  virtual std::uint64_t pending_work() = 0;  // queued and not done
  virtual Bytes used_memory() = 0;           // device memory handed out by this driver
  virtual std::string fault_text() = 0;      // what made the device lost
  // The devices that may reach mapped memory, by ordinal; empty where nothing is mapped or nobody may.
  virtual std::vector<int> accessors(Address address) = 0;
};

// The machine of now; it starts on the first use. Null, with a sentence, for an ordinal that is not there.
std::shared_ptr<Device> device(int ordinal, std::string* error = nullptr);
int device_count();
std::shared_ptr<Driver> open(int ordinal, OpenError* kind, std::string* error);

// Runs everything that can run: what is left waits for a gate. False: interrupted. Orders nothing (host clock
// untouched).
bool settle(const Interrupt& interrupt = {});
bool in_graph();                   // this thread runs a graph's work, which may come again
std::vector<Race> races();         // since the last call
std::vector<std::string> traps();  // since the last call: uses of dead handles and calls from inside queued bodies
std::uint64_t history_size();      // remembered accesses of the race check (tests: it stays bounded)
double clock_now();
void clock_advance(double seconds);

}  // namespace streampool::driver::sim
