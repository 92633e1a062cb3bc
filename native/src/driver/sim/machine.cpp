// The process's one machine: configuration before first use, generations, gates. See machine.hpp.
#include "machine.hpp"

#include <pthread.h>

#include "device.hpp"
#include "engine.hpp"

namespace streampool::driver::sim {
namespace {

// Never destroyed: worker threads and late finalizers may look here while the process exits.
struct Registry {
  std::mutex mutex;
  Config config;
  std::shared_ptr<Machine> machine;
  std::vector<std::shared_ptr<Device>> devices;
};
Registry& registry() {
  static Registry* const all = new Registry;
  return *all;
}

std::shared_ptr<Machine> machine_of(Registry& all) {
  if (all.machine) return all.machine;
  static std::once_flag told;
  std::call_once(told, [] { pthread_atfork(nullptr, nullptr, [] { set_ending(Ending::forked); }); });
  all.machine = std::make_shared<Machine>(all.config);
  for (int i = 0; i < all.config.devices; ++i) all.devices.push_back(std::make_shared<SimDevice>(all.machine, i));
  return all.machine;
}

// Null when the process is ending: a forked child may find any lock held by a thread that it does not have.
std::shared_ptr<Machine> machine_of_now() {
  if (ending() != Ending::no) return nullptr;
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  return machine_of(all);
}

}  // namespace

bool configure(const Config& config, std::string* error) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  if (all.machine) {
    *error = "the simulated machine is in use already: configure it before the first use, or call reset() first";
    return false;
  }
  if (config.devices < 0 || config.devices > 64) {
    *error = "devices must be 0 to 64, not " + std::to_string(config.devices);
    return false;
  }
  if (config.memory < kPage || config.memory > kAddressBudget) {
    *error = "memory must be 2 MiB to 1 TiB a device, not " + std::to_string(config.memory) + " bytes";
    return false;
  }
  all.config = config;
  return true;
}

void reset() {
  if (ending() != Ending::no) return;
  Registry& all = registry();
  std::shared_ptr<Machine> machine;
  std::vector<std::shared_ptr<Device>> devices;
  {
    const std::lock_guard lock(all.mutex);
    machine = std::exchange(all.machine, nullptr);
    devices = std::exchange(all.devices, {});
    all.config = Config{};
  }
  if (machine) machine->die();
}

bool in_use() {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  return all.machine != nullptr;
}

Config config() {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  return all.config;
}

std::shared_ptr<Device> device(int ordinal, std::string* error) {
  if (ending() != Ending::no) {
    if (error != nullptr)
      *error = ending() == Ending::forked
                   ? "the simulated machine does not survive fork: start the child with the spawn method"
                   : "the simulated machine is gone: the process is exiting";
    return nullptr;
  }
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  if (ordinal < 0 || ordinal >= all.config.devices) {
    if (error != nullptr)
      *error = "there is no device sim:" + std::to_string(ordinal) + ": the simulated machine has " +
               std::to_string(all.config.devices) + " (streampool.sim.configure(devices=...) before first use)";
    return nullptr;
  }
  machine_of(all);
  return all.devices[static_cast<std::size_t>(ordinal)];
}

int device_count() { return config().devices; }

std::shared_ptr<Driver> open(int ordinal, OpenError* kind, std::string* error) {
  std::shared_ptr<Driver> found = device(ordinal, error);
  *kind = found ? OpenError::none : OpenError::no_device;
  return found;
}

bool settle(const Interrupt& interrupt) {
  const std::shared_ptr<Machine> machine = machine_of_now();
  if (!machine) return true;
  Lock lock(machine->mutex);
  if (Machine::in_body()) {
    machine->trap("settle: called from inside a queued body");
    return true;
  }
  if (machine->seeded()) {  // nobody else opens a gate: what cannot run now stays
    while (machine->step(lock, true)) {
    }
    if (machine->settled()) return true;
  }
  return machine->wait(lock, nullptr, interrupt, [&] { return machine->settled(); }) != Waited::interrupted;
}

std::vector<Race> races() {
  const std::shared_ptr<Machine> machine = machine_of_now();
  if (!machine) return {};
  const Lock lock(machine->mutex);
  return machine->history.take();
}

std::vector<std::string> traps() {
  const std::shared_ptr<Machine> machine = machine_of_now();
  if (!machine) return {};
  const Lock lock(machine->mutex);
  return machine->take_traps();
}

std::uint64_t history_size() {
  const std::shared_ptr<Machine> machine = machine_of_now();
  if (!machine) return 0;
  const Lock lock(machine->mutex);
  return machine->history.size();
}

double clock_now() {
  const std::shared_ptr<Machine> machine = machine_of_now();
  return machine ? machine->now() : 0;
}

void clock_advance(double seconds) {
  if (const std::shared_ptr<Machine> machine = machine_of_now()) machine->advance(seconds);
}

bool Gate::add(const std::shared_ptr<Machine>& machine, const std::shared_ptr<Node>& node) {
  const std::lock_guard lock(mutex_);
  if (open_) return false;
  waiting_.emplace_back(machine, node);
  return true;
}

void Gate::open() {
  if (ending() == Ending::forked) return;
  std::vector<std::pair<std::weak_ptr<Machine>, std::shared_ptr<Node>>> waiting;
  {
    const std::lock_guard lock(mutex_);
    if (open_) return;
    open_ = true;
    waiting.swap(waiting_);
  }
  for (const auto& [weak, node] : waiting)
    if (const std::shared_ptr<Machine> machine = weak.lock()) machine->open_gate(node);
}

bool Gate::is_open() const {
  const std::lock_guard lock(mutex_);
  return open_;
}

}  // namespace streampool::driver::sim
