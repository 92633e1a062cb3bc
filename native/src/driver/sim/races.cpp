// See races.hpp.
#include "races.hpp"

#include <algorithm>
#include <iterator>

namespace streampool::driver::sim {
namespace {

constexpr std::uint64_t kSweepFloor = 4096;       // accesses; below it a sweep is not worth its time
constexpr std::uint64_t kHistoryCap = 4'000'000;  // a program that never waits: beyond this all is forgotten
constexpr std::size_t kSeenCap = 256;             // accesses of other sites kept for the same bytes, about
constexpr std::size_t kRaceCap = 10'000;          // pairs kept until somebody takes them

bool same_site(const Site& a, const Site& b) {
  return &a == &b || (a.stack == b.stack && a.stream == b.stream && a.label == b.label);
}

RaceSide side(const Site& site, bool write) { return {write, site.label, site.stream, site.stream_name, site.stack}; }

void add_to_key(std::string& key, const Site& site, bool write) {
  key += write ? 'w' : 'r';
  key += std::to_string(site.stream) + ':' + std::to_string(site.stack) + ':' + site.label + '\n';
}

}  // namespace

History::Segments::iterator History::split(Segments::iterator segment, std::uint64_t at) {
  Segment upper = segment->second;
  seen_count_ += upper.seen.size();
  segment->second.end = at;
  return segments_.emplace_hint(std::next(segment), at, std::move(upper));
}

void History::report(int device, const Place& place, std::uint64_t begin, std::uint64_t end, const Seen& old,
                     const Seen& now) {
  std::string key;
  add_to_key(key, *old.site, old.write);
  add_to_key(key, *now.site, now.write);
  const Address address = place.address + (begin - place.key);
  // Without stacks nothing tells two pieces of work of one stream apart but where they touch.
  if (old.site->stack == 0 && now.site->stack == 0) key += std::to_string(place.address);
  const auto [known, fresh] = known_.try_emplace(std::move(key), Known{races_.size(), old.tick, now.tick});
  if (!fresh) {
    Known& last = known->second;
    Race& race = races_[last.index];
    // The history may have cut what is one overlap of the same two accesses.
    const bool same = last.old == old.tick && last.now == now.tick;
    if (same && race.address + race.size == address) {
      race.size += end - begin;
    } else if (!same) {
      ++race.count;
    }
    last.old = old.tick;
    last.now = now.tick;
    return;
  }
  if (races_.size() >= kRaceCap) {
    known_.erase(known);
    return;
  }
  races_.push_back({device, address, end - begin, side(*old.site, old.write), side(*now.site, now.write), 1});
}

void History::add(Segment& segment, const Seen& now, const Clock& clock) {
  for (Seen& old : segment.seen) {
    if (old.slot == now.slot && old.write == now.write && same_site(*old.site, *now.site)) {
      old = now;
      return;
    }
  }
  if (segment.seen.size() >= kSeenCap) {
    // Whoever races with one of these races with this access too, which is enough to be heard of.
    seen_count_ -= std::erase_if(
        segment.seen, [&](const Seen& old) { return old.tick <= clock.at(old.slot) && (now.write || !old.write); });
  }
  segment.seen.push_back(now);
  ++seen_count_;
}

void History::access(int device, const Place& place, bool write, Slot slot, Tick tick,
                     const std::shared_ptr<const Site>& site, const Clock& clock, const HostClock& host,
                     bool remember) {
  const Seen now{slot, tick, write, site};
  const std::uint64_t begin = place.key;
  const std::uint64_t end = place.key + place.size;
  auto segment = segments_.upper_bound(begin);
  if (segment != segments_.begin() && std::prev(segment)->second.end > begin) {
    --segment;
    if (remember && segment->first < begin) segment = split(segment, begin);
  }
  std::uint64_t from = begin;
  while (from < end) {
    if (segment == segments_.end() || segment->first >= end) {
      if (remember) segments_.emplace_hint(segment, from, Segment{end, {now}}), ++seen_count_;
      return;
    }
    if (segment->first > from) {
      if (remember) segments_.emplace_hint(segment, from, Segment{segment->first, {now}}), ++seen_count_;
      from = segment->first;
    }
    if (remember && segment->second.end > end) split(segment, end);
    Segment& here = segment->second;
    seen_count_ -= std::erase_if(here.seen, [&](const Seen& old) { return old.tick <= host.at(old.slot); });
    const std::uint64_t to = std::min(end, here.end);
    for (const Seen& old : here.seen)
      if ((old.write || write) && old.tick > clock.at(old.slot)) report(device, place, from, to, old, now);
    if (remember) add(here, now, clock);
    from = here.end;
    ++segment;
  }
}

std::vector<Race> History::take() {
  known_.clear();
  return std::exchange(races_, {});
}

void History::maybe_sweep(const HostClock& host) {
  if (seen_count_ < sweep_at_) return;
  sweep(host);
  if (seen_count_ > kHistoryCap) {
    segments_.clear();
    seen_count_ = 0;
  }
  sweep_at_ = std::max(kSweepFloor, 2 * seen_count_);
}

void History::sweep(const HostClock& host) {
  seen_count_ = 0;
  for (auto segment = segments_.begin(); segment != segments_.end();) {
    auto& seen = segment->second.seen;
    std::erase_if(seen, [&](const Seen& old) { return old.tick <= host.at(old.slot); });
    seen_count_ += seen.size();
    segment = seen.empty() ? segments_.erase(segment) : std::next(segment);
  }
}

}  // namespace streampool::driver::sim
