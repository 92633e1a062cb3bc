// The debugger's two kernels: write the pattern, and check it. Compiled to pattern_ptx.hpp by `make ptx`, never by a
// build. One thread block a piece: byte by byte up to a 16-byte boundary, then 16 bytes at a time, then the last bytes.
#include "pattern.hpp"
#include "pattern_piece.hpp"

using streampool::driver::kPatternThreads;
using streampool::driver::kSampleBytes;
using streampool::driver::pattern_byte;
using streampool::driver::PatternPiece;
using Address = unsigned long long;
using Key = unsigned long long;

namespace {

// Four neighbouring words of pattern_word for one wide multiplication. In ((address >> 2) ^ key) only the two lowest
// bits differ between words i = 0..3 of a 16-byte group, so the products differ by 0..3 times the multiplier.
struct Words {
  static constexpr unsigned long long kFirst = 0x9E3779B97F4A7C15ull;
  static constexpr unsigned long long kSecond = 0xBF58476D1CE4E5B9ull;
  Key key;

  __device__ static unsigned int finish(unsigned long long h) {
    h ^= h >> 29;
    h *= kSecond;
    return 0x7FF07FF0u | (static_cast<unsigned int>(h >> 32) & 0x800F800Fu);
  }

  __device__ uint4 at(Address group) const {
    const unsigned long long base = (((group >> 2) ^ key) & ~3ull) * kFirst;
    const unsigned long long low = key & 3ull;
    return make_uint4(finish(base + low * kFirst), finish(base + (low ^ 1) * kFirst), finish(base + (low ^ 2) * kFirst),
                      finish(base + (low ^ 3) * kFirst));
  }
};

// Where a piece's bytes end, its groups of 16 begin and end; all three parts may be empty.
struct Parts {
  Address begin, middle, middle_end, end;

  __device__ Parts(Address from, unsigned int size) : begin(from), end(from + size) {
    middle = (begin + 15) & ~15ull;
    middle_end = end & ~15ull;
    if (middle >= middle_end) middle = middle_end = end;  // no whole group: all bytes count as the head (fewer than 31)
  }
};

struct Start {
  Address begin;
  unsigned int size, beyond;
};

// One thread reads, so that the whole block sees one `size` even while the host calls the work off; and it reads once,
// since each read of the host's memory is a round trip.
__device__ Start read_piece(const PatternPiece* piece) {
  __shared__ Start start;
  if (threadIdx.x == 0) {
    unsigned long long begin, sizes;
    asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];" : "=l"(begin), "=l"(sizes) : "l"(piece));
    start.begin = begin;
    start.size = static_cast<unsigned int>(sizes);
    start.beyond = static_cast<unsigned int>(sizes >> 32);
  }
  __syncthreads();
  return start;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(128) streampool_pattern_fill(PatternPiece* pieces, Key key) {
  const Start start = read_piece(pieces + blockIdx.x);
  const Parts parts(start.begin, start.size);
  const Words words{key};
  for (Address a = parts.begin + threadIdx.x; a < parts.middle; a += kPatternThreads)
    *reinterpret_cast<unsigned char*>(a) = pattern_byte(a, key);
  for (Address a = parts.middle + threadIdx.x * 16ull; a < parts.middle_end; a += kPatternThreads * 16ull)
    *reinterpret_cast<uint4*>(a) = words.at(a);
  for (Address a = parts.middle_end + threadIdx.x; a < parts.end; a += kPatternThreads)
    *reinterpret_cast<unsigned char*>(a) = pattern_byte(a, key);
}

extern "C" __global__ void __launch_bounds__(128) streampool_pattern_verify(PatternPiece* pieces, Key key) {
  __shared__ unsigned int shared_bad, shared_first, shared_last;
  if (threadIdx.x == 0) {
    shared_bad = 0;
    shared_first = ~0u;
    shared_last = 0;
  }
  const Start start = read_piece(pieces + blockIdx.x);
  const Parts parts(start.begin, start.size);
  const Words words{key};
  unsigned int bad = 0, first = ~0u, last = 0;

  const auto check_byte = [&](Address a, unsigned char found, unsigned char expected) {
    if (found == expected) return;
    const unsigned int offset = static_cast<unsigned int>(a - start.begin);
    ++bad;
    first = min(first, offset);
    last = max(last, offset);
  };
  const auto check_word = [&](Address a, unsigned int found, unsigned int expected) {
    if (found == expected) return;
#pragma unroll 1
    for (unsigned int i = 0; i < 4; ++i)
      check_byte(a + i, static_cast<unsigned char>(found >> (8 * i)), static_cast<unsigned char>(expected >> (8 * i)));
  };

  for (Address a = parts.begin + threadIdx.x; a < parts.middle; a += kPatternThreads)
    check_byte(a, *reinterpret_cast<const unsigned char*>(a), pattern_byte(a, key));
  for (Address a = parts.middle + threadIdx.x * 16ull; a < parts.middle_end; a += kPatternThreads * 16ull) {
    const uint4 found = *reinterpret_cast<const uint4*>(a);
    const uint4 expected = words.at(a);
    const unsigned int differ =
        (found.x ^ expected.x) | (found.y ^ expected.y) | (found.z ^ expected.z) | (found.w ^ expected.w);
    if (differ != 0) {
      check_word(a, found.x, expected.x);
      check_word(a + 4, found.y, expected.y);
      check_word(a + 8, found.z, expected.z);
      check_word(a + 12, found.w, expected.w);
    }
  }
  for (Address a = parts.middle_end + threadIdx.x; a < parts.end; a += kPatternThreads)
    check_byte(a, *reinterpret_cast<const unsigned char*>(a), pattern_byte(a, key));

  if (!__syncthreads_or(bad != 0)) return;
  if (bad != 0) {
    atomicAdd(&shared_bad, bad);
    atomicMin(&shared_first, first);
    atomicMax(&shared_last, last);
  }
  __syncthreads();
  PatternPiece* piece = pieces + blockIdx.x;
  if (threadIdx.x == 0) {
    piece->bad = shared_bad;
    piece->first = shared_first;
    piece->last = shared_last;
  }
  const unsigned int left = start.size - shared_first + start.beyond;
  if (threadIdx.x < min(left, kSampleBytes))
    piece->sample[threadIdx.x] = *reinterpret_cast<const unsigned char*>(start.begin + shared_first + threadIdx.x);
}
