// What peers on the CUDA runtime share: the device, streams, and the bytes that the driver counts as theirs.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "../serve.hpp"

namespace bench {

inline void must(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

class RuntimePeer {
 public:
  using Stream = cudaStream_t;
  explicit RuntimePeer(const Arguments& arguments) : ordinal_(arguments.ordinal()) {
    enter_thread();
    must(cudaFree(nullptr));  // makes the context
    for (int i = 0; i < arguments.streams; ++i) {
      Stream stream = nullptr;
      must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      streams_.push_back(stream);
    }
    free_at_start_ = free_bytes();
  }
  Stream stream(int i) const { return streams_.at(static_cast<std::size_t>(i)); }
  void enter_thread() const { must(cudaSetDevice(ordinal_)); }
  void settle() const { must(cudaDeviceSynchronize()); }
  std::int64_t held() const { return free_at_start_ - free_bytes(); }

 protected:
  int ordinal_;

 private:
  static std::int64_t free_bytes() {
    std::size_t free = 0, total = 0;
    must(cudaMemGetInfo(&free, &total));
    return static_cast<std::int64_t>(free);
  }
  std::vector<Stream> streams_;
  std::int64_t free_at_start_ = 0;
};

}  // namespace bench
