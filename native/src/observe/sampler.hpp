// Which allocations keep their call stack in production: each byte is a sample with the same small probability,
// whatever came before it. So the bytes from one sample to the next are drawn from an exponential distribution, a
// thread only counts them down, and a sampled block stands for `weight` bytes, without bias. As Go's and TCMalloc's
// heap profiles do it.
#pragma once

#include <cstdint>

#include "../base/types.hpp"

namespace streampool::observe {

class Sampler {
 public:
  // `mean`: bytes from one sample to the next on average; 0: no samples.
  explicit Sampler(Bytes mean) : mean_(mean) {}
  Bytes mean() const { return mean_; }

  // The bytes after which the next sample is due. `random` is the thread's state, 0 before its first use. The largest
  // number there is where no samples are taken.
  Bytes draw(std::uint64_t* random) const;
  // What a sampled block of `size` bytes stands for: its size over the probability that it was sampled.
  double weight(Bytes size) const;

 private:
  Bytes mean_;
};

}  // namespace streampool::observe
