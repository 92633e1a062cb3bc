// Where memory comes from and goes to: the account of what is held, and the choice between the sources (mapped.cpp,
// pieces.cpp). Plans under the extent lock, calls the driver without any lock, then commits; a failing call leaves
// everything as it was (R14).
#include "core.hpp"

namespace streampool::pool {

// `reserved` and its peak are exact at every step, and never above the limit (R19).
bool Core::charge(Bytes bytes) {
  Bytes now = reserved_.load(std::memory_order_relaxed);
  const Bytes most = limit();
  do {
    if (most != 0 && (now > most || bytes > most - now)) return false;
  } while (!reserved_.compare_exchange_weak(now, now + bytes, std::memory_order_acq_rel));
  return true;
}

// What was charged is there. Only now: a growth that the driver refused leaves no peak behind.
void Core::note_peak() {
  const Bytes now = reserved_.load(std::memory_order_acquire);
  Bytes peak = reserved_peak_.load(std::memory_order_relaxed);
  while (peak < now && !reserved_peak_.compare_exchange_weak(peak, now)) {
  }
}

void Core::uncharge(Bytes bytes) { reserved_.fetch_sub(bytes, std::memory_order_acq_rel); }

// What lies idle beside the live blocks, above the slack that growth tolerates.
Bytes Core::idle_above_slack() const {
  const Bytes reserved = reserved_.load(std::memory_order_acquire);
  const Bytes gross = static_cast<Bytes>(bank_->totals().gross);
  return reserved - std::min(reserved, gross + gross / kIdleSlack);
}

Core::Grown Core::grow(Heap* t, const Growth& growth, driver::Status* status) {
  if (growth.bytes == 0) return Grown::failed;
  const Grown grown = source_ == SegmentSource::vmm ? grow_mapped(t, growth, status) : grow_piece(growth, status);
  if (grown == Grown::yes) tell(observe::EventKind::pool_grown, growth.bytes, reserved_.load());
  if (grown == Grown::limit || grown == Grown::refused)
    tell(observe::EventKind::growth_refused, growth.bytes, reserved_.load(),
         grown == Grown::limit ? "limit" : "driver");
  if (grown == Grown::limit) refused_limit_.fetch_add(1, std::memory_order_relaxed);
  if (grown == Grown::refused) refused_driver_.fetch_add(1, std::memory_order_relaxed);
  return grown;
}

// Idle memory that could go back, or elsewhere, without a wait.
Bytes Core::movable_bytes() {
  std::lock_guard lock(extent_lock_);
  Bytes bytes = 0;
  if (source_ == SegmentSource::vmm) {
    for (const IdleHandle& idle : find_idle(0, 0)) bytes += idle.handle.bytes;
  } else {
    for (const auto& segment : segments_)
      if (idle_piece(*segment)) bytes += segment->range->size;
  }
  return bytes;
}

Bytes Core::give_back_idle(Bytes keep, double piece_timeout) {
  if (source_ == SegmentSource::vmm) return give_back_mapped(keep, true);
  return give_back_pieces(keep, piece_timeout);
}

// Pieces that go back only when the device is idle do so only where a wait of `piece_timeout` seconds is all right.
void Core::apply_release_threshold(double piece_timeout) {
  if (options_.release_threshold == 0) return;
  const Bytes busy = static_cast<Bytes>(bank_->totals().gross);
  const Bytes keep = busy + options_.release_threshold;
  if (reserved_.load() <= keep) return;
  if (source_ == SegmentSource::vmm)
    give_back_mapped(keep, false);
  else if (source_ == SegmentSource::driver || piece_timeout > 0)
    give_back_pieces(keep, piece_timeout);
}

}  // namespace streampool::pool
