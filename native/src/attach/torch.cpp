#include "torch.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "../debug/capture.hpp"
#include "../driver/driver.hpp"
#include "../pool/fast.hpp"
#include "torch_error.hpp"

namespace streampool::attach::torch {

using driver::StreamHandle;
using pool::Core;
using pool::Errc;
using pool::Failure;

constexpr int kSampledDepth = 32;  // Python frames of a sampled allocation

// Handles of lasting streams: added under the state's lock, looked up without any. PyTorch has 32 of each priority on a
// device; what finds no place here is served as any other stream.
class LastingStreams {
 public:
  bool has(StreamHandle stream) const {
    if (driver::is_legacy(stream)) return true;
    for (std::size_t at = start(stream), i = 0; i < kPlaces; ++i, at = (at + 1) % kPlaces) {
      const StreamHandle found = places_[at].load(std::memory_order_acquire);
      if (found == stream) return true;
      if (found == 0) return false;
    }
    return false;
  }
  void add(StreamHandle stream) {
    if (has(stream) || count_ >= kPlaces / 2) return;
    std::size_t at = start(stream);
    while (places_[at].load(std::memory_order_relaxed) != 0) at = (at + 1) % kPlaces;
    places_[at].store(stream, std::memory_order_release);
    ++count_;
  }

 private:
  static constexpr std::size_t kPlaces = 1024;
  static std::size_t start(StreamHandle stream) { return (stream >> 4) * 0x9E3779B97F4A7C15ull >> 54; }
  std::array<std::atomic<StreamHandle>, kPlaces> places_{};
  std::size_t count_ = 0;
};

using PoolId = std::pair<std::uint64_t, std::uint64_t>;

// The captures that PyTorch has declared on a device and not yet ended.
class Captures {
 public:
  bool any() const { return count_.load(std::memory_order_acquire) != 0; }
  void begin(PoolId id, std::function<bool(void*)> filter) {
    const std::lock_guard lock(mutex_);
    open_.push_back(std::make_shared<Open>(Open{id, std::move(filter)}));
    count_.store(open_.size(), std::memory_order_release);
  }
  // A stream of each capture is noted when it first allocates: PyTorch's end does not name one. The filter asks the
  // runtime, so it is called without the lock.
  void note(StreamHandle stream) {
    std::vector<std::shared_ptr<Open>> unknown;
    {
      const std::lock_guard lock(mutex_);
      for (const auto& one : open_)
        if (one->stream == 0) unknown.push_back(one);
    }
    for (const auto& one : unknown) {
      const Asking asking(*this, *one);
      if (asking.may() && one->filter(reinterpret_cast<void*>(stream))) asking.note(stream);
    }
  }
  // False: there is none. `stream` is 0 where none is known. The filter may refer to what goes after the end: nobody is
  // in it when this returns, nor will be.
  bool end(PoolId id, StreamHandle* stream) {
    std::unique_lock lock(mutex_);
    const auto last = std::find_if(open_.rbegin(), open_.rend(), [&](const auto& open) { return open->id == id; });
    if (last == open_.rend()) return false;
    const std::shared_ptr<Open> ended = *last;
    open_.erase(std::next(last).base());
    count_.store(open_.size(), std::memory_order_release);
    ended->over = true;
    asked_.wait(lock, [&] { return ended->asking == 0; });
    *stream = ended->stream;
    return true;
  }

 private:
  struct Open {
    PoolId id;
    const std::function<bool(void*)> filter;
    StreamHandle stream = 0;
    int asking = 0;  // calls of the filter in progress
    bool over = false;
  };
  // One call of a filter.
  class Asking {
   public:
    Asking(Captures& captures, Open& open) : captures_(captures), open_(open) {
      const std::lock_guard lock(captures_.mutex_);
      may_ = !open_.over;
      if (may_) ++open_.asking;
    }
    ~Asking() {
      const std::lock_guard lock(captures_.mutex_);
      if (may_ && --open_.asking == 0) captures_.asked_.notify_all();
    }
    Asking(const Asking&) = delete;
    Asking& operator=(const Asking&) = delete;
    bool may() const { return may_; }
    void note(StreamHandle stream) const {
      const std::lock_guard lock(captures_.mutex_);
      open_.stream = stream;
    }

   private:
    Captures& captures_;
    Open& open_;
    bool may_ = false;
  };
  std::mutex mutex_;
  std::condition_variable asked_;
  std::vector<std::shared_ptr<Open>> open_;
  std::atomic<std::size_t> count_{0};
};

// What serves one device. Not destroyed while PyTorch may call: its tensors outlive everything.
struct Place {
  explicit Place(std::shared_ptr<Core> pool) : core(std::move(pool)) {}
  const std::shared_ptr<Core> core;
  Captures captures;
  LastingStreams lasting;
};

struct State {
  std::mutex mutex;  // guards all but `places`, which are set once
  Settings settings;
  std::array<std::atomic<Place*>, kMaxDevices> places{};
  std::array<std::vector<StreamHandle>, kMaxDevices> streams;  // of devices that have no place yet
  std::array<double, kMaxDevices> fractions{};                 // of the device's memory; 0: all
  Problems problems;
};
State& state() {
  static State* const s = new State;
  return *s;
}

bool in_range(int device) { return device >= 0 && device < kMaxDevices; }

Place* place_at(int device) {
  return in_range(device) ? state().places[static_cast<std::size_t>(device)].load(std::memory_order_acquire) : nullptr;
}

void note_problem(const char* verb, const Failure& failure) {
  if (driver::ending() != driver::Ending::no) return;  // nothing is wrong with a free that comes too late
  State& s = state();
  std::lock_guard lock(s.mutex);
  if (s.problems.count++ == 0) s.problems.first = std::string(verb) + ": " + failure.text;
}

void set_fraction(const State& s, std::size_t device, Core& core) {
  const double part = s.fractions[device];
  if (part <= 0) return;
  const Bytes total = core.driver().capabilities().total_memory;
  const Bytes limit = core.options().limit;  // 0: none
  const Bytes most = part >= 1 ? limit : std::max<Bytes>(pool::Amount{0, part}.of(total), 1);
  core.set_limit(limit == 0 ? most : std::min(limit, most));
}

void register_lasting(Place& place, StreamHandle stream) {
  Failure failure;
  if (place.core->register_stream(stream, &failure) == Errc::ok) place.lasting.add(stream);
}

// Under the state's lock.
Place* put_place(State& s, int device, std::shared_ptr<Core> core) {
  const auto at = static_cast<std::size_t>(device);
  Place* const place = new Place(std::move(core));
  set_fraction(s, at, *place->core);
  for (const StreamHandle stream : std::exchange(s.streams[at], {})) register_lasting(*place, stream);
  s.places[at].store(place, std::memory_order_release);
  return place;
}

// The pool of a device, made where there is none yet. Throws where it cannot be.
Place& place_for(int device) {
  if (Place* const place = place_at(device)) [[likely]]
    return *place;
  if (!in_range(device)) throw std::runtime_error("streampool: no device " + std::to_string(device));
  State& s = state();
  std::lock_guard lock(s.mutex);
  if (Place* const place = place_at(device)) return *place;
  std::string error;
  driver::OpenError kind = driver::OpenError::none;
  auto opened = driver::open(s.settings.family + ":" + std::to_string(device), &kind, &error);
  if (!opened) throw std::runtime_error("streampool: " + error);
  pool::Options options;
  pool::OptionMap given = s.settings.options;
  if (given.empty() && !pool::resolve_options({}, "", &given, &error)) throw std::runtime_error("streampool: " + error);
  if (!pool::to_options(given, &options, &error)) throw std::runtime_error("streampool: " + error);
  Failure failure;
  auto core = Core::create(std::move(opened), Kind::device, s.settings.name, options, &failure);
  if (!core) throw std::runtime_error("streampool: " + failure.text);
  core->hooks() = s.settings.hooks;
  return *put_place(s, device, std::move(core));
}

[[noreturn]] void throw_failure(const Failure& failure) {
  if (failure.code == Errc::out_of_memory) throw_torch_out_of_memory(failure.text);
  throw std::runtime_error("streampool: " + failure.text);
}

debug::StackId stack_of(const Core& core) {
  return debug::capture(core.options().stack_depth, core.options().native_depth);
}

[[gnu::noinline]] void* allocate_in_full(Place& place, std::size_t size, StreamHandle stream) {
  Core& core = *place.core;
  Failure failure;
  if (place.captures.any()) place.captures.note(stream);
  pool::AllocRequest request;
  request.size = size;
  request.stream = stream;
  request.raw = request.owned = true;
  if (core.options().stack_depth + core.options().native_depth != 0) request.stack = stack_of(core);
  if (core.sample_is_due(size)) {
    request.sample = pool::AllocRequest::Sample::yes;
    if (request.stack == 0) request.stack = debug::capture(kSampledDepth, 0);
  } else {
    request.sample = pool::AllocRequest::Sample::no;
  }
  pool::BlockRef block;
  if (core.allocate(request, &block, &failure) != Errc::ok) throw_failure(failure);
  return reinterpret_cast<void*>(block.address);
}

[[gnu::noinline]] void free_in_full(Place& place, void* ptr, StreamHandle stream) noexcept try {
  if (driver::ending() != driver::Ending::no) return;
  const Address address = reinterpret_cast<Address>(ptr);
  Core& core = *place.core;
  pool::FreeRequest request;
  if (core.debugging()) request.stack = stack_of(core);
  // Only a lasting stream's handle is sure to be alive. Otherwise the block's own streams order it, without a driver
  // call.
  if (place.lasting.has(stream)) request.stream = stream;
  Failure failure;
  Errc errc = core.free(address, request, &failure);
  if (request.stream.has_value() && (errc == Errc::capture || errc == Errc::stream)) {
    request.stream.reset();
    failure = Failure();
    errc = core.free(address, request, &failure);
  }
  if (errc != Errc::ok) note_problem("a free", failure);
} catch (...) {
}

void configure(Settings settings) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  s.settings = std::move(settings);
}

bool give_pool(int device, std::shared_ptr<Core> core) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  if (!in_range(device) || place_at(device) != nullptr) return false;
  put_place(s, device, std::move(core));
  return true;
}

std::shared_ptr<Core> take_back(int device) {
  if (!in_range(device)) return nullptr;
  State& s = state();
  std::lock_guard lock(s.mutex);
  const std::unique_ptr<Place> place(s.places[static_cast<std::size_t>(device)].exchange(nullptr));
  return place == nullptr ? nullptr : place->core;
}

std::vector<Served> served() {
  std::vector<Served> all;
  for (int device = 0; device < kMaxDevices; ++device)
    if (Place* const place = place_at(device)) all.push_back({device, place->core});
  return all;
}

void add_lasting_stream(int device, StreamHandle stream) {
  if (!in_range(device) || stream <= driver::kPerThreadStream) return;
  State& s = state();
  std::lock_guard lock(s.mutex);
  if (Place* const place = place_at(device)) {
    if (!place->lasting.has(stream)) register_lasting(*place, stream);
    return;
  }
  auto& waiting = s.streams[static_cast<std::size_t>(device)];
  if (std::find(waiting.begin(), waiting.end(), stream) == waiting.end()) waiting.push_back(stream);
}

Problems problems() {
  State& s = state();
  std::lock_guard lock(s.mutex);
  return s.problems;
}

}  // namespace streampool::attach::torch

// -- what PyTorch calls -----------------------------------------------------------------------------------------------

namespace torch_memory = streampool::attach::torch;
using streampool::Address;
using streampool::Bytes;

namespace {

streampool::driver::StreamHandle handle_of(sp_stream stream) {
  return reinterpret_cast<streampool::driver::StreamHandle>(stream);
}

}  // namespace

extern "C" {

void* sp_torch_alloc(size_t size, int device, sp_stream stream) {
  torch_memory::Place& place = torch_memory::place_for(device);
  if (!place.captures.any()) [[likely]] {
    streampool::pool::BlockRef block;
    const auto fast = place.core->fast_allocate(size, handle_of(stream),
                                                streampool::pool::kRawBlock | streampool::pool::kOwned, 0, &block);
    if (fast != streampool::pool::Core::Fast::no) [[likely]] {
      if (fast == streampool::pool::Core::Fast::raise) place.core->finish();
      return reinterpret_cast<void*>(block.address);
    }
  }
  return torch_memory::allocate_in_full(place, size, handle_of(stream));
}

void sp_torch_free(void* ptr, size_t, int device, sp_stream stream) {
  torch_memory::Place* const place = torch_memory::place_at(device);
  if (ptr == nullptr || place == nullptr) return;
  if (!place->captures.any() && place->lasting.has(handle_of(stream))) [[likely]] {
    const auto fast = place->core->fast_free(reinterpret_cast<Address>(ptr), handle_of(stream));
    if (fast == streampool::pool::Core::Fast::raise) place->core->finish();
    if (fast != streampool::pool::Core::Fast::no) return;
  }
  torch_memory::free_in_full(*place, ptr, handle_of(stream));
}

void sp_torch_record_stream(void* ptr, sp_stream stream) {
  const Address address = reinterpret_cast<Address>(ptr);
  streampool::pool::Failure failure;
  for (int device = 0; device < torch_memory::kMaxDevices; ++device) {
    torch_memory::Place* const place = torch_memory::place_at(device);
    if (place == nullptr) continue;
    failure = {};
    if (place->core->record_stream(address, handle_of(stream), &failure) == streampool::pool::Errc::ok) return;
    // No pool's, or another's: the next one is asked.
    if (failure.code != streampool::pool::Errc::wrong_pool) break;
  }
  if (failure.code != streampool::pool::Errc::ok) torch_memory::note_problem("record_stream", failure);
}

void sp_torch_init(int) {}

void sp_torch_reset(void) {
  for (const auto& served : torch_memory::served()) served.core->trim(0);
}

void sp_torch_memory_fraction(double fraction, int device) {
  if (!torch_memory::in_range(device)) return;
  torch_memory::State& s = torch_memory::state();
  std::lock_guard lock(s.mutex);
  s.fractions[static_cast<std::size_t>(device)] = fraction;
  if (torch_memory::Place* const place = torch_memory::place_at(device))
    torch_memory::set_fraction(s, static_cast<std::size_t>(device), *place->core);
}

void* sp_torch_base_alloc(void* ptr, size_t* size) {
  Address begin = 0;
  Bytes bytes = 0;
  for (const auto& served : torch_memory::served()) {
    if (!served.core->segment_of(reinterpret_cast<Address>(ptr), &begin, &bytes)) continue;
    if (size != nullptr) *size = bytes;
    return reinterpret_cast<void*>(begin);
  }
  throw std::runtime_error("streampool: no pool has that address");
}

void sp_torch_begin_allocate_to_pool(int device, std::pair<std::uint64_t, std::uint64_t> id,
                                     std::function<bool(void*)> filter) {
  torch_memory::Place& place = torch_memory::place_for(device);
  place.captures.begin(id, std::move(filter));
  place.core->begin_capture();
}

void sp_torch_end_allocate_to_pool(int device, std::pair<std::uint64_t, std::uint64_t> id) {
  torch_memory::Place* const place = torch_memory::place_at(device);
  streampool::driver::StreamHandle stream = 0;
  if (place == nullptr || !place->captures.end(id, &stream)) return;
  streampool::pool::Failure ignored;
  place->core->end_capture(stream, &ignored);
}

void sp_torch_release_pool(int, std::pair<std::uint64_t, std::uint64_t>) {}

}  // extern "C"
