#include "pulse.hpp"

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "core.hpp"

namespace streampool::pool {
namespace {

static_assert(index(Column::failures) - index(Column::paths) == kPathCount);
static_assert(index(Column::misuses) - index(Column::failures) == kOomReasonCount);
static_assert(index(Column::sizes) - index(Column::misuses) == kMisuses);

struct Key {
  std::string device, pool;
  Kind kind = Kind::device;
  auto operator<=>(const Key&) const = default;
};

// Who is there, what those that are gone had counted, and what was sampled. Its mutex is held for reading and adding
// numbers only. Leaked on purpose (R22).
struct Book {
  std::mutex mutex;
  std::map<Core*, Key> live;
  std::map<Key, PulseRow> gone;                           // counters alone
  std::map<std::string, std::vector<std::string>> names;  // of each device, in the order in which they came
  struct Device {
    std::weak_ptr<driver::Driver> driver;
    DevicePulse last;
  };
  std::map<std::string, Device> devices;
  std::uint64_t others = 0;

  void forget(const std::string& device) {
    names.erase(device);
    std::erase_if(gone, [&](const auto& row) { return row.first.device == device; });
    devices[device] = Device{};
  }
};
Book& book() {
  static Book* b = new Book;
  return *b;
}

std::string plain(const std::string& name) {
  constexpr std::size_t kLongest = 64;
  std::string out = name.substr(0, kLongest);
  for (char& c : out) {
    const bool good =
        (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.' || c == '-';
    if (!good) c = '_';
  }
  return out.empty() ? "_" : out;
}

}  // namespace

observe::EventRing& events() {
  static auto* ring = new observe::EventRing;
  return *ring;
}

observe::EventTail& last_events() {
  static auto* tail = new observe::EventTail;
  return *tail;
}

void Core::tell(observe::EventKind kind, std::uint64_t number, std::uint64_t more, std::string_view reason) const {
  observe::Event event;
  event.kind = kind;
  event.memory = kind_;
  observe::Event::put(event.device, driver_->name());
  observe::Event::put(event.pool, name_);
  observe::Event::put(event.reason, reason);
  event.number = number;
  event.more = more;
  event.at = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  events().push(event);
  last_events().push(event);
}

const std::vector<ColumnInfo>& columns() {
  static const auto* all = [] {
    using Sort = ColumnInfo::Sort;
    auto* out = new std::vector<ColumnInfo>;
#define STREAMPOOL_ROW(name) out->push_back({#name, Sort::gauge});
    STREAMPOOL_GAUGES(STREAMPOOL_ROW)
#undef STREAMPOOL_ROW
#define STREAMPOOL_ROW(name) out->push_back({#name, Sort::highest});
    STREAMPOOL_HIGHEST(STREAMPOOL_ROW)
#undef STREAMPOOL_ROW
#define STREAMPOOL_ROW(name) out->push_back({#name, Sort::tally});
    STREAMPOOL_TALLIES(STREAMPOOL_ROW)
#undef STREAMPOOL_ROW
    for (const char* word : path_words()) out->push_back({std::string("path_") + word, Sort::tally});
    for (std::size_t i = 0; i < kOomReasonCount; ++i)
      out->push_back({"failed_" + std::string(oom_reason_word(static_cast<OomReason>(i))), Sort::tally});
    for (std::size_t i = 0; i < kMisuses; ++i)
      out->push_back(
          {"misuse_" + std::string(errc_word(static_cast<Errc>(static_cast<std::size_t>(Errc::double_free) + i))),
           Sort::tally});
    for (std::size_t i = 0; i < observe::kSizeBounds; ++i)
      out->push_back({"size_" + std::to_string(observe::size_bound(i)), Sort::tally});
    out->push_back({"size_larger", Sort::tally});
    out->push_back({"size_sum", Sort::tally});
    return out;
  }();
  return *all;
}

void PulseRow::add(const PulseRow& other) {
  const std::vector<ColumnInfo>& all = columns();
  for (std::size_t i = 0; i < kColumns; ++i)
    values[i] =
        all[i].sort == ColumnInfo::Sort::highest ? std::max(values[i], other.values[i]) : values[i] + other.values[i];
  live = live || other.live;
  unlimited = unlimited || other.unlimited;
  sized = sized || other.sized;
  limit += other.limit;
}

void pulse_begin(Core& core) {
  Book& b = book();
  std::string name = plain(core.name());
  std::shared_ptr<driver::Driver> driver = core.shared_driver();
  const std::string device(driver->name());
  const Bytes total = driver->capabilities().total_memory;
  const std::string version = driver->version();
  const bool simulated = driver->simulated();
  std::lock_guard lock(b.mutex);
  Book::Device& entry = b.devices[device];
  if (simulated && entry.driver.lock() != driver) b.forget(device);  // another machine's device of that name
  std::vector<std::string>& names = b.names[device];
  if (std::find(names.begin(), names.end(), name) == names.end()) {
    if (names.size() < kMostNames) {
      names.push_back(name);
    } else {
      ++b.others;
      name = kOtherName;
    }
  }
  b.live[&core] = Key{device, name, core.kind()};
  entry.driver = std::move(driver);
  entry.last.name = device;
  entry.last.version = version;
  entry.last.simulated = simulated;
  entry.last.total_memory = total;
}

void pulse_end(Core& core) {
  if (driver::ending() == driver::Ending::forked) return;  // the parent's lock may be held for ever here
  Book& b = book();
  std::lock_guard lock(b.mutex);
  const auto found = b.live.find(&core);
  if (found == b.live.end()) return;  // it was never whole
  PulseRow last = core.pulse();
  for (std::size_t i = 0; i < kColumns; ++i)
    if (columns()[i].sort != ColumnInfo::Sort::tally) last.values[i] = 0;
  last.live = last.unlimited = false;
  last.limit = 0;
  b.gone[found->second].add(last);
  b.live.erase(found);
}

Pulse read_pulse(Rows of) {
  Pulse pulse;
  if (driver::ending() == driver::Ending::forked) return pulse;
  const auto push = [&pulse](const Key& key, PulseRow row) {
    row.device = key.device;
    row.pool = key.pool;
    row.kind = kind_name(key.kind);
    pulse.rows.push_back(std::move(row));
  };
  Book& b = book();
  std::lock_guard lock(b.mutex);
  std::map<Key, PulseRow> rows;
  if (of == Rows::names) rows = b.gone;
  std::map<std::string, double> clocks;
  for (const auto& [core, key] : b.live) {
    if (of == Rows::names)
      rows[key].add(core->pulse());
    else
      push({key.device, core->name(), key.kind}, core->pulse());
    if (!clocks.contains(key.device)) clocks[key.device] = core->driver().now();
  }
  for (auto& [key, row] : rows) push(key, std::move(row));
  for (const auto& [name, entry] : b.devices) {
    DevicePulse device = entry.last;
    if (const auto clock = clocks.find(name); clock != clocks.end()) device.now = clock->second;
    const driver::CallTimes& times = driver::call_times_of(name);
    for (std::size_t i = 0; i < driver::kMemoryWorkCount; ++i) device.call_times[i] = times.work[i].read();
    pulse.devices.push_back(std::move(device));
  }
  pulse.other_names = b.others;
  pulse.dropped_events = events().dropped();
  return pulse;
}

bool sample_devices() {
  if (driver::ending() != driver::Ending::no) return true;
  Book& b = book();
  bool all_answered = true;
  for (const auto& core : Core::all()) core->look();
  std::vector<std::pair<std::string, std::shared_ptr<driver::Driver>>> devices;
  {
    std::lock_guard lock(b.mutex);
    for (const auto& [name, entry] : b.devices)
      if (auto driver = entry.driver.lock()) devices.emplace_back(name, std::move(driver));
  }
  for (const auto& [name, driver] : devices) {
    Bytes free = 0, total = 0;
    if (!driver->mem_info(&free, &total).ok()) {
      all_answered = false;
      continue;
    }
    const double now = driver->now();
    std::lock_guard lock(b.mutex);
    DevicePulse& last = b.devices[name].last;
    last.free = free;
    last.total = total;
    last.sampled_at = now;
  }
  return all_answered;
}

// Looks at fences, as each miss does, and takes in slots that waited for them: what is complete is not pending any
// more.
void Core::look() {
  if (driver::ending() != driver::Ending::no || closed() || lost_.load(std::memory_order_acquire)) return;
  poll_all(false);
  streams_.for_each([this](Heap& heap) {
    if (heap.waiting_bytes.load(std::memory_order_relaxed) == 0) return;
    std::lock_guard lock(heap.stream.lock);
    for (unsigned cls = 0; cls < kClassLists; ++cls)
      if (!heap.classes[cls].waiting.empty()) collect_waiting(heap, cls, true);
  });
}

// Under no lock of this pool's but the one that guards the list of threads.
PulseRow Core::pulse() {
  PulseRow row;
  const observe::Totals t = bank_->totals();
  // Reserved last: what the parts are taken from.
  Bytes waiting_slots = 0, waiting = 0, own = 0, own_slots = 0, indexed = 0, largest = 0;
  std::uint64_t busy = 0;
  const auto extents = [&](const placement::FreeIndex& index) {
    const Bytes bytes = index.free_bytes();
    indexed += bytes;
    largest = std::max(largest, index.largest());
    return bytes;
  };
  const bool strict = host_visible(kind_) && !options_.stream_ordered;  // then nobody may take what is not complete
  extents(common_);
  waiting += extents(mixed_);
  streams_.for_each_made([&](const Heap& heap) {
    const Bytes bytes = extents(heap.extents);
    waiting_slots += heap.waiting_bytes.load(std::memory_order_relaxed);
    if (heap.stream.idle()) return;
    ++busy;
    own += bytes;
    // How much of its slabs and quick lists is free, only their lock would tell: never more than all of them.
    const Bytes slabs = heap.slab_bytes.load(std::memory_order_relaxed);
    if (slabs != 0 || ordinary_) own_slots += slabs + QuickLists::kMaxBytes;
  });
  const debug::Debugger::Pulse debug = debugger_ != nullptr ? debugger_->pulse() : debug::Debugger::Pulse{};
  const Bytes reserved = reserved_.load(std::memory_order_acquire);
  Bytes left = reserved;
  const auto part = [&left](Bytes bytes) {
    bytes = std::min(bytes, left);
    left -= bytes;
    return bytes;
  };
  row[Column::reserved] = reserved;
  row[Column::requested] = part(static_cast<Bytes>(t.in_use));
  row[Column::guards] = part(static_cast<Bytes>(t.guards));
  const Bytes gross = static_cast<Bytes>(t.gross);
  row[Column::rounding] = part(gross - std::min(gross, static_cast<Bytes>(t.in_use + t.guards)));
  row[Column::quarantined] = part(debug.quarantined_bytes);
  // Free slots and quick lists: what is neither live nor in an index.
  const Bytes slots = left - std::min(left, indexed);
  waiting += std::min(waiting_slots, slots);
  own += std::min(own_slots, slots - std::min(waiting_slots, slots));
  row[Column::pending_waiting] = part(strict ? waiting + own : waiting);
  row[Column::pending_own] = part(strict ? 0 : own);
  row[Column::cached] = left;
  row[Column::largest_free] = std::min(largest, reserved);
  row[Column::requested_peak] = static_cast<Bytes>(t.peak);
  row[Column::requested_recent_peak] = recent_peak(static_cast<Bytes>(t.recent));
  row[Column::reserved_peak] = std::max(reserved, reserved_peak_.load(std::memory_order_acquire));
  row[Column::live_blocks] = t.allocations - std::min(t.allocations, t.frees);
  row[Column::streams] = streams_.known();
  row[Column::busy_streams] = busy;
  row.live = !closed() || reserved != 0 || gross != 0;
  row[Column::live_pools] = row.live ? 1 : 0;
  if (debugger_ != nullptr) row[Column::quarantine_limit] = row.live ? options_.debug.quarantine_bytes : 0;
  if (page_guards_ != nullptr) row[Column::page_guarded] = page_guards_->bytes();
  if (options_.debug.track)
    row[Column::debug_host] = (row[Column::live_blocks] + debug.quarantined_blocks) * sizeof(BlockExtra);
  row.limit = limit();
  row.unlimited = row.live && limit() == 0;
  if (!row.live) row.limit = 0;

  row[Column::allocations] = t.allocations;
  row[Column::frees] = t.frees;
  row[Column::allocated_bytes] = t.allocated_bytes;
  row[Column::freed_bytes] = t.allocated_bytes - std::min(t.allocated_bytes, static_cast<Bytes>(t.in_use));
  row[Column::trimmed_bytes] = trimmed_.load(std::memory_order_relaxed);
  row[Column::moved_handles] = handles_moved_.load(std::memory_order_relaxed);
  row[Column::waits_on_host] = host_waits_.load(std::memory_order_relaxed);
  const order::FenceCounts& f = fences_.counts();
  row[Column::wait_edges] = f.waits.load(std::memory_order_relaxed);
  row[Column::context_events] = f.context_events.load(std::memory_order_relaxed);
  row[Column::fences] = f.recorded.load(std::memory_order_relaxed);
  row[Column::fences_failed] = f.record_failed.load(std::memory_order_relaxed);
  row[Column::polls] = f.polled.load(std::memory_order_relaxed);
  row[Column::legacy_fences] = legacy_fences_.load(std::memory_order_relaxed);
  row[Column::stream_lookups] = streams_.lookups() + t.lookups;
  row[Column::refused_limit] = refused_limit_.load(std::memory_order_relaxed);
  row[Column::refused_driver] = refused_driver_.load(std::memory_order_relaxed);
  row[Column::faults] = debug.faults;
  row[Column::trampled] = trampled_.load(std::memory_order_relaxed);
  std::uint64_t others = 0;
  for (std::size_t i = 1; i < kPathCount; ++i)
    others += row.values[index(Column::paths) + i] = paths_[i].load(std::memory_order_relaxed);
  row[Column::paths] = t.allocations - std::min(t.allocations, others);
  for (std::size_t i = 0; i < kOomReasonCount; ++i)
    row.values[index(Column::failures) + i] = failures_[i].load(std::memory_order_relaxed);
  for (std::size_t i = 0; i < kMisuses; ++i)
    row.values[index(Column::misuses) + i] = misuses_[i].load(std::memory_order_relaxed);
  for (std::size_t i = 0; i < observe::kSizeBuckets; ++i) row.values[index(Column::sizes) + i] = t.sizes.counts[i];
  row.values[index(Column::sizes) + observe::kSizeBuckets] = t.sizes.sum;
  row.sized = !ordinary_ || sampler_.mean() != 0;
  return row;
}

// The highest of the window under way and of the last full one. A window ends when somebody looks after its time: so
// every peak is seen by whoever looks at least that often, and a look takes nothing away from the next one.
Bytes Core::recent_peak(Bytes running) {
  const double now = driver_->now();
  std::lock_guard lock(window_mutex_);
  if (now - window_began_ >= kWindow) {
    last_window_peak_ = static_cast<Bytes>(bank_->end_window());
    window_began_ = now;
    running = last_window_peak_;
  }
  return std::max(running, last_window_peak_);
}

}  // namespace streampool::pool
