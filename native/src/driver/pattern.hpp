// What free memory holds in debug mode, byte by byte: a word that depends on the address and on a per-process key, and
// that reads as NaN in fp64, fp32, bf16 and fp16 alike. One definition for the host and for the CUDA kernel.
#pragma once

#if defined(__CUDACC__)
#define STREAMPOOL_BOTH_SIDES __host__ __device__
#else
#define STREAMPOOL_BOTH_SIDES
#endif

namespace streampool::driver {

// The 4-byte word at an address that is a multiple of 4. Each half is 0x[7|F]F F? : sign and low nibble vary, the
// exponent bits are all ones and the mantissa is never zero.
STREAMPOOL_BOTH_SIDES constexpr unsigned int pattern_word(unsigned long long address, unsigned long long key) {
  unsigned long long h = ((address >> 2) ^ key) * 0x9E3779B97F4A7C15ull;
  h ^= h >> 29;
  h *= 0xBF58476D1CE4E5B9ull;
  const unsigned int r = static_cast<unsigned int>(h >> 32);
  return 0x7FF07FF0u | (r & 0x800F800Fu);
}

STREAMPOOL_BOTH_SIDES constexpr unsigned char pattern_byte(unsigned long long address, unsigned long long key) {
  return static_cast<unsigned char>(pattern_word(address & ~3ull, key) >>
                                    (8u * static_cast<unsigned int>(address & 3ull)));
}

}  // namespace streampool::driver
