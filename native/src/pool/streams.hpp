// Which stream is it? Identity by driver id (R5), lasting streams, and the right to touch a stream (R6).
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../driver/driver.hpp"
#include "errors.hpp"
#include "events.hpp"
#include "heap.hpp"

namespace streampool::pool {

// A stream that an explicit call named: its heap, and the handle that the caller just vouched for. Holds the heap's
// entry.
class Named {
 public:
  Named() = default;
  Named(Heap* heap, driver::StreamHandle handle, bool counted) : heap_(heap), handle_(handle), counted_(counted) {}
  // As the thread remembers it from `epoch`: not counted, and good only while the epoch is the same, and the heap that
  // of the stream `id` where one is given (Core::stands).
  static Named remembered(Heap* heap, driver::StreamHandle handle, std::uint64_t epoch, std::uint64_t id = 0) {
    Named named(heap, handle, false);
    named.epoch_ = epoch;
    named.id_ = id;
    return named;
  }
  Named(Named&& other) noexcept { swap(other); }
  Named& operator=(Named&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Named() {
    if (counted_) heap_->users.fetch_sub(1, std::memory_order_release);
  }
  Heap* heap() const { return heap_; }
  order::StreamState& stream() const { return heap_->stream; }
  driver::StreamHandle handle() const { return handle_; }
  std::uint64_t epoch() const { return epoch_; }  // 0: it stands by itself
  std::uint64_t id() const { return id_; }
  void count() {
    if (counted_) return;
    heap_->users.fetch_add(1, std::memory_order_seq_cst);
    counted_ = true;
  }
  void stand() { epoch_ = id_ = 0; }

 private:
  void swap(Named& other) {
    std::swap(epoch_, other.epoch_);
    std::swap(id_, other.id_);
    std::swap(heap_, other.heap_);
    std::swap(handle_, other.handle_);
    std::swap(counted_, other.counted_);
  }
  Heap* heap_ = nullptr;
  driver::StreamHandle handle_ = 0;
  bool counted_ = false;
  std::uint64_t epoch_ = 0;
  std::uint64_t id_ = 0;
};

// Beyond what a driver gives, and below captures.
inline constexpr std::uint64_t kAnyStream = kCapturedId - 1;

class StreamTable {
 public:
  // `epoch` changes whenever a remembered (handle -> heap) pair may have become wrong, a capture that begins included.
  StreamTable(driver::Driver& driver, std::atomic<std::uint64_t>& epoch);
  StreamTable(const StreamTable&) = delete;
  StreamTable& operator=(const StreamTable&) = delete;
  ~StreamTable();

  // Finds or makes the heap of a stream. Two driver calls for a stream that is not lasting: "does it capture?", then
  // its id. What a capturing stream is named for belongs to its graph: a heap of its own.
  Errc name(driver::StreamHandle handle, Named* out, Failure* failure);
  // Whether the handle is that of the stream `id`, which does not capture: without a lock or any look at what is known.
  bool is_still(driver::StreamHandle handle, std::uint64_t id);
  // Lasting streams. `forget` leaves a stream whose pending work the caller has just fenced.
  Errc register_stream(driver::StreamHandle handle, Named* out, Failure* failure);
  Errc forget_stream(driver::StreamHandle handle, Failure* failure);
  // Those that were registered, not the legacy stream nor the pool's own; what is outstanding has its fences.
  void forget_all();
  // Stands for any stream: nobody fences it, and only a context event completes its marks. Held for the caller.
  Heap* any_stream() { return find_or_make(kAnyStream, true); }
  // A stream of the pool's own, lasting.
  Heap* adopt(driver::StreamHandle handle, Failure* failure);

  // What threads remember of streams is looked up anew. A shut door stays shut.
  void change_epoch();
  // A capture is declared to all pools of the context; while one is open lasting streams are checked as well.
  void begin_capture() { captures_.begin(); }
  // Refuses a stream that cannot be used, and one that never captures.
  Errc must_capture(driver::StreamHandle handle, Failure* failure);
  // What was seen of the capture that `handle` took part in is over with it (0: not known). False: none was declared.
  bool end_capture(driver::StreamHandle handle);
  // An undeclared capture counts for a second after it was seen, or until its stream is found not capturing: its handle
  // cannot be asked again without its owner.
  bool capture_known() const { return captures_.known(driver_.now()); }
  bool capture_declared() const { return captures_.declared(); }
  // As driver::Captures has it; taken exclusively while a registered handle gets another meaning as well.
  std::shared_mutex& capture_gate() { return captures_.gate(); }

  // Every heap there ever was, without a lock: for who only reads what may be read so.
  template <typename Function>
  void for_each_made(Function function) const {
    for (Heap* heap = made_.load(std::memory_order_acquire); heap != nullptr; heap = heap->made_before) function(*heap);
  }
  // Every heap of the table, held for the call. Called without locks.
  void for_each(const std::function<void(Heap&)>& function);
  std::vector<order::StreamState*> states();
  std::size_t known() const { return known_.load(std::memory_order_relaxed); }

  // Takes entries out of the table whose streams left nothing behind; `empty` says so of a heap, called under its lock.
  void sweep(const std::function<bool(Heap&)>& empty);

  std::uint64_t lookups() const { return lookups_.load(std::memory_order_relaxed); }

 private:
  Heap* find_or_make(std::uint64_t id, bool count, order::Events* events = nullptr);
  order::Events* events_of(std::shared_ptr<driver::Driver> peer);
  Heap* find(std::uint64_t id, bool count);
  Errc identify(driver::StreamHandle handle, bool promised, Named* out, Failure* failure);
  Errc name_captured(driver::StreamHandle handle, std::uint64_t capture, Named* out, Failure* failure);
  Heap* take_entry(std::uint64_t key);
  Errc refuse(driver::StreamHandle handle, const driver::Status& status, Failure* failure) const;

  driver::Driver& driver_;
  driver::Captures& captures_;
  std::atomic<std::uint64_t>& epoch_;
  std::mutex mutex_;  // guards the maps; never held over a driver call
  std::unordered_map<std::uint64_t, Heap*> by_id_;
  std::unordered_map<driver::StreamHandle, Heap*> lasting_;
  std::map<std::pair<std::uint64_t, std::uint64_t>, Heap*> captured_;  // by capture and stream (capture_key)
  std::uint64_t captured_heaps_ = 0;                                   // ever made: their keys in by_id_
  std::vector<std::unique_ptr<DriverEvents>> peers_;                   // one for each peer whose streams were recorded
  std::deque<Heap> store_;
  std::atomic<Heap*> made_{nullptr};  // the newest of them
  std::vector<Heap*> spare_;
  std::atomic<std::uint64_t> lookups_{0};
  std::atomic<std::size_t> known_{0};
};

// Epochs of doors (core.hpp): even, never given out twice.
inline constexpr std::uint64_t kShut = 1;
std::uint64_t new_epoch();

// The legacy stream under one name.
constexpr driver::StreamHandle canonical(driver::StreamHandle handle) {
  return driver::is_legacy(handle) ? driver::kLegacyStream : handle;
}

}  // namespace streampool::pool
