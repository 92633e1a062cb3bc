// See engine.hpp: what may run, and who runs it: worker threads, or the host thread that polls, waits, pauses, settles.
#include <csignal>

#include <algorithm>
#include <system_error>
#include <thread>

#include "engine.hpp"

namespace streampool::driver::sim {
namespace {

constexpr std::uint64_t kWorkers = 4;        // for bodies that never block
constexpr std::uint64_t kMostWorkers = 512;  // callers' bodies may block: they get a worker each, up to here

thread_local int body_depth = 0;

std::string describe_access(const Access& access, const Node& node) {
  char text[160];
  std::snprintf(text, sizeof text, "%s of %llu bytes at 0x%llx, which is not mapped, by ",
                access.write ? "write" : "read", static_cast<unsigned long long>(access.size),
                static_cast<unsigned long long>(access.begin));
  return text + (node.label.empty() ? std::string("work") : "'" + node.label + "'") +
         (node.stream ? " on " + node.stream->name : std::string());
}

}  // namespace

bool Machine::in_body() { return body_depth > 0; }

void Machine::start(const NodePtr& node, Trash& trash) {
  if (--node->blockers == 0) make_ready(node);
  finish_marks(trash);
}

void Machine::make_ready(const NodePtr& node) {
  if (!node->task && !seeded()) {
    marks_.push_back(node);
    return;
  }
  ready_.push_back(node);
  if (seeded()) {
    if (waiters_ > 0) changed_.notify_all();  // another thread may wait for something to run
    return;
  }
  if (idle_ > 0) work_.notify_one();
  maybe_hire();
}

// Marks that became ready run nothing and are done at once; theirs may be a long chain, so no recursion.
void Machine::finish_marks(Trash& trash) {
  while (!marks_.empty()) {
    const NodePtr node = std::move(marks_.back());
    marks_.pop_back();
    complete(node, trash);
  }
}

void Machine::complete(const NodePtr& node, Trash& trash) {
  node->done = true;
  if (node->body) trash.push_back(std::exchange(node->body, nullptr));
  node->gate.reset();
  for (const NodePtr& next : std::exchange(node->dependents, {}))
    if (--next->blockers == 0) make_ready(next);
  if (node->stream) {
    const StreamPtr stream = std::exchange(node->stream, nullptr);
    --node->device->pending;
    if (stream->tail == node) {
      stream->tail = nullptr;
      if (stream->destroyed) retire_stream(*stream);
    }
  }
  if (waiters_ > 0) changed_.notify_all();
}

void Machine::open_gate(const NodePtr& node) {
  Trash trash;
  const Lock lock(mutex);
  if (!node->at_gate) return;
  node->at_gate = false;
  node->device->gated.erase(node.get());
  start(node, trash);
}

void Machine::hold_at_gate(const NodePtr& node, std::shared_ptr<Gate> gate) {
  if (!gate->add(shared_from_this(), node)) return;
  node->gate = std::move(gate);
  node->at_gate = true;
  ++node->blockers;
  node->device->gated.insert(node.get());
}

// No lock is held: the body may take any lock of its owner.
void Machine::execute(const NodePtr& node) {
  DeviceState& device = *node->device;
  if (dead() || device.lost.load() != 0 || ending() != Ending::no) return;
  std::uint64_t ticket = 0;
  if (const Access* bad = memory.enter(node->accesses, &ticket)) {
    std::string text = describe_access(*bad, *node);
    Trash trash;
    const Lock lock(mutex);
    fault(device, kIllegalAddress, std::move(text), trash);
    return;
  }
  if (node->body) {
    ++body_depth;
    node->body();
    --body_depth;
  }
  memory.leave(ticket);
}

void Machine::run_ready(Lock& lock, std::size_t index) {
  const NodePtr node = ready_[index];
  ready_.erase(ready_.begin() + static_cast<std::ptrdiff_t>(index));
  {
    Trash trash;
    if (node->task) {
      ++running_;
      if (node->foreign) ++running_foreign_;
      maybe_hire();
      lock.unlock();
      execute(node);
      trash.push_back(std::exchange(node->body, nullptr));
      trash.clear();  // outside the lock, before anybody sees that the work is done
      lock.lock();
      --running_;
      if (node->foreign) --running_foreign_;
    }
    complete(node, trash);
    finish_marks(trash);
    if (trash.empty()) return;
    lock.unlock();
  }
  lock.lock();
}

void Machine::maybe_hire() {
  if (seeded() || ready_.empty() || workers_ >= kMostWorkers) return;
  const bool few = idle_ == 0 && workers_ < kWorkers;
  const bool all_may_block = workers_ <= running_foreign_;
  if (!few && !all_may_block) return;
  // Signals are for the program's own threads. Detached: a worker keeps the machine alive, and ends with the
  // generation.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread([machine = shared_from_this()] { machine->work(); }).detach();
    ++workers_;
  } catch (const std::system_error&) {  // no more threads: those that are there go on
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Machine::work() {
  Lock lock(mutex);
  while (true) {
    while (ready_.empty() && !dead()) {
      ++idle_;
      work_.wait(lock);
      --idle_;
    }
    if (ready_.empty()) break;
    run_ready(lock, 0);
  }
  --workers_;
}

// Runs one piece, picked by the seed. False: nothing can run now. `foreign`: callers' bodies may run on this thread.
bool Machine::step(Lock& lock, bool foreign) {
  if (ready_.empty()) return false;
  std::size_t candidates = ready_.size();
  if (!foreign)
    candidates = static_cast<std::size_t>(
        std::count_if(ready_.begin(), ready_.end(), [](const NodePtr& node) { return !node->foreign; }));
  if (candidates == 0) return false;
  std::size_t pick = static_cast<std::size_t>(random_() % candidates);
  for (std::size_t i = 0; i < ready_.size(); ++i) {
    if (!foreign && ready_[i]->foreign) continue;
    if (pick-- == 0) {
      run_ready(lock, i);
      return true;
    }
  }
  return false;
}

void Machine::run_some(Lock& lock, bool foreign, std::uint64_t most) {
  if (!seeded()) return;
  for (std::uint64_t left = random_() % (most + 1); left > 0 && step(lock, foreign); --left) {
  }
}

// The device takes a sticky error: nothing of what was queued runs any more, and every wait ends.
void Machine::fault(DeviceState& device, int number, std::string text, Trash& trash) {
  if (device.lost.load() != 0) return;
  device.fault = std::move(text);
  device.lost.store(number);
  drop_work(device, trash);
  changed_.notify_all();
}

void Machine::drop_work(DeviceState& device, Trash& trash) {
  for (Node* held : std::exchange(device.gated, {})) {
    // Its gate still holds it, or its stream does.
    held->at_gate = false;
    if (--held->blockers == 0) forced_.push_back(held->shared_from_this());
  }
  for (const NodePtr& node : std::exchange(forced_, {})) make_ready(node);
  while (true) {
    finish_marks(trash);
    const auto found =
        std::find_if(ready_.begin(), ready_.end(), [&](const NodePtr& node) { return node->device == &device; });
    if (found == ready_.end()) return;
    const NodePtr node = *found;
    ready_.erase(found);
    complete(node, trash);
  }
}

void Machine::die() {
  Trash trash;
  const Lock lock(mutex);
  dead_.store(true, std::memory_order_release);
  for (const auto& device : devices) drop_work(*device, trash);
  memory.retire();
  work_.notify_all();
  changed_.notify_all();
}

double Machine::now() const {
  if (seeded()) return offset_.load();
  return std::chrono::duration<double>(Clocks::now() - started_).count() + offset_.load();
}

void Machine::advance(double seconds) {
  const Lock lock(mutex);
  offset_.store(offset_.load() + seconds);
  changed_.notify_all();
}

void Machine::sleep(Lock& lock, double seconds) {
  constexpr std::uint64_t kMostPieces = 8;
  if (seeded()) {
    offset_.store(offset_.load() + seconds);
    run_some(lock, true, kMostPieces);
    return;
  }
  ++waiters_;  // ends early when something was done
  changed_.wait_for(lock, std::chrono::duration<double>(seconds));
  --waiters_;
}

}  // namespace streampool::driver::sim
