// See pattern_loops.hpp.
#include "pattern_loops.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "../pattern.hpp"
#include "host_pointer.hpp"

namespace streampool::driver::sim {
namespace {

static_assert(std::endian::native == std::endian::little, "the pattern's words are little-endian");

constexpr Bytes kStep = 8;

std::uint64_t two_words(Address address, std::uint64_t key) {
  return pattern_word(address, key) | static_cast<std::uint64_t>(pattern_word(address + 4, key)) << 32;
}

// The aligned middle of a range: [begin, end) in whole steps.
struct Middle {
  Address begin = 0;
  Address end = 0;
};
Middle middle_of(const Range& range) {
  const Address end = range.begin + range.size;
  Middle middle{round_up(range.begin, kStep), round_down(end, kStep)};
  if (middle.begin >= middle.end) middle = {end, end};
  return middle;
}

void note(Address at, Mismatch* found) {
  if (found->count == 0) found->first = at;
  found->last = at;
  ++found->count;
}

void check_bytes(Address begin, Address end, std::uint64_t key, Mismatch* found) {
  for (Address at = begin; at < end; ++at)
    if (*host_pointer(at) != pattern_byte(at, key)) note(at, found);
}

}  // namespace

void write_pattern(const Range& range, std::uint64_t key) {
  const Middle middle = middle_of(range);
  for (Address at = range.begin; at < middle.begin; ++at) *host_pointer(at) = pattern_byte(at, key);
  for (Address at = middle.begin; at < middle.end; at += kStep) {
    const std::uint64_t words = two_words(at, key);
    std::memcpy(host_pointer(at), &words, kStep);
  }
  for (Address at = middle.end; at < range.begin + range.size; ++at) *host_pointer(at) = pattern_byte(at, key);
}

bool check_pattern(const Range& range, std::uint64_t key, Mismatch* found) {
  const Middle middle = middle_of(range);
  const Address end = range.begin + range.size;
  check_bytes(range.begin, middle.begin, key, found);
  for (Address at = middle.begin; at < middle.end; at += kStep) {
    std::uint64_t words = 0;
    std::memcpy(&words, host_pointer(at), kStep);
    if (words != two_words(at, key)) check_bytes(at, at + kStep, key, found);
  }
  check_bytes(middle.end, end, key, found);
  if (found->count == 0) return true;
  found->sample_size = static_cast<std::uint8_t>(std::min<Bytes>(found->sample.size(), end - found->first));
  std::memcpy(found->sample.data(), host_pointer(found->first), found->sample_size);
  return false;
}

}  // namespace streampool::driver::sim
