#include "evidence.hpp"

#include <algorithm>

#include "../driver/pattern.hpp"

namespace streampool::debug {

namespace {

using driver::Mismatch;
using driver::Range;

FaultKind kind_of(Side side) {
  switch (side) {
    case Side::front: return FaultKind::underrun;
    case Side::back: return FaultKind::overrun;
    default: return FaultKind::write_after_free;
  }
}

// The shown bytes: untouched ones before the first bad byte are known without having been read.
void show(const Range& range, const Mismatch& mismatch, std::uint64_t key, Finding* out) {
  const Bytes before = std::min<Bytes>(mismatch.first - range.begin, kShownBefore);
  out->shown_from = mismatch.first - before;
  const Bytes sampled = std::min<Bytes>(mismatch.sample_size, kShownBytes - before);
  for (Bytes i = 0; i < before + sampled; ++i) {
    const std::uint8_t expected = driver::pattern_byte(out->shown_from + i, key);
    out->expected.push_back(expected);
    out->found.push_back(i < before ? expected : mismatch.sample[static_cast<std::size_t>(i - before)]);
  }
}

std::string block_name(const BlockFacts& block) {
  return "block #" + std::to_string(block.serial) + " (" + std::to_string(block.size) + " bytes)";
}

// Which end of a run that crosses blocks it came from: true for the lower one.
bool came_from_below(const Subject& below, const Mismatch& low, const Subject& above, const Mismatch& high) {
  const bool below_held = below.role == Role::held, above_held = above.role == Role::held;
  if (below_held != above_held) return above_held;
  if (below_held) return true;
  const Bytes gap_below = low.first - (below.block->address + below.block->size);
  const Bytes gap_above = above.block->address - 1 - high.last;
  return gap_below <= gap_above;
}

}  // namespace

std::vector<Finding> read_evidence(std::span<const Subject> subjects, std::span<const Range> ranges,
                                   std::span<const Probe> probes, std::vector<Mismatch> mismatches, std::uint64_t key) {
  std::erase_if(mismatches, [&](const Mismatch& m) { return probes[m.range].side == Side::untouched; });
  std::sort(mismatches.begin(), mismatches.end(),
            [](const Mismatch& a, const Mismatch& b) { return a.first < b.first; });

  std::vector<Finding> findings;
  for (std::size_t low = 0; low < mismatches.size();) {
    std::size_t high = low;
    Bytes bad_bytes = mismatches[low].count;
    // A run goes on where the next range begins: up to its last byte on this side, from its first byte on that side.
    while (high + 1 < mismatches.size()) {
      const Mismatch &here = mismatches[high], &next = mismatches[high + 1];
      if (here.last + 1 != next.first) break;
      bad_bytes += next.count;
      ++high;
    }
    const Mismatch &first = mismatches[low], &last = mismatches[high];
    const Probe &below = probes[first.range], &above = probes[last.range];
    const bool one_block = below.subject == above.subject;
    const bool from_below = one_block || came_from_below(subjects[below.subject], first, subjects[above.subject], last);
    const Probe& source = from_below ? below : above;

    Finding finding;
    finding.kind = kind_of(source.side);
    finding.subject = source.subject;
    finding.first = first.first;
    finding.last = last.last;
    finding.bad_bytes = bad_bytes;
    show(ranges[first.range], first, key, &finding);
    if (!one_block) {
      const Probe& other = from_below ? above : below;
      finding.note = "the bad bytes go on into " + block_name(*subjects[other.subject].block) +
                     (from_below ? " above" : " below") + "; its own bytes may be damaged too";
    }
    findings.push_back(std::move(finding));
    low = high + 1;
  }
  return findings;
}

}  // namespace streampool::debug
