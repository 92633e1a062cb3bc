// What the host tells the pattern kernels and what they find: one definition for both sides. Imports nothing.
#pragma once

namespace streampool::driver {

// A run of at most kPieceBytes bytes, the work of one thread block. It lies in pinned memory that both sides see. A
// block reads `size` once, when it starts: the host can call off what has not started by setting it to 0.
struct alignas(16) PatternPiece {
  unsigned long long begin;  // the kernels read these three as one word of 16 bytes
  unsigned int size;
  unsigned int beyond;  // bytes of the same range that follow the piece, at most kSampleBytes: a sample may go on there

  // Found by a check; offsets from `begin`. Left alone where all bytes hold the pattern.
  unsigned int bad;          // how many bytes differ
  unsigned int first;        // the first that does
  unsigned int last;         // the last that does
  unsigned int range;        // which range this is a piece of; for the host
  unsigned char sample[64];  // the bytes from `first` on
};

constexpr unsigned int kPieceBytes = 256u << 10;
constexpr unsigned int kSampleBytes = 64;
constexpr unsigned int kPatternThreads = 128;
static_assert(sizeof(PatternPiece) == 96, "the kernels rely on this layout");

}  // namespace streampool::driver
