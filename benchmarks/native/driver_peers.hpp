// The driver's own allocators, through the driver API, which is the cheaper of its two faces.
#pragma once

#include <memory>
#include <vector>

#include "driver_api.hpp"
#include "serve.hpp"

namespace bench {

class DriverPeer {
 public:
  using Stream = DriverApi::Handle;
  explicit DriverPeer(const Arguments& arguments) : api_(arguments.ordinal()) {
    for (int i = 0; i < arguments.streams; ++i) streams_.push_back(api_.create_stream());
    free_at_start_ = api_.free_bytes();
  }
  Stream stream(int i) const { return streams_.at(static_cast<std::size_t>(i)); }
  void enter_thread() const { api_.enter_thread(); }
  void settle() const { api_.synchronize(); }
  std::int64_t held() const { return free_at_start_ - api_.free_bytes(); }
  std::string version() const { return api_.version(); }

 protected:
  using Address = unsigned long long;  // CUdeviceptr
  DriverApi api_;
  std::vector<Stream> streams_;
  std::int64_t free_at_start_ = 0;
};

// cudaMallocAsync. Option threshold=max keeps what was freed; without it, a synchronisation gives it back.
class DriverPool : public DriverPeer {
 public:
  explicit DriverPool(const Arguments& arguments) : DriverPeer(arguments) {
    constexpr int kReleaseThreshold = 4;  // CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    api_.find(alloc_, "cuMemAllocAsync");
    api_.find(free_, "cuMemFreeAsync");
    DriverApi::check(api_.call<int(DriverApi::Handle*, int)>("cuDeviceGetDefaultMemPool")(&pool_, api_.device()),
                     "cuDeviceGetDefaultMemPool");
    std::uint64_t threshold = arguments.options == "threshold=max" ? ~std::uint64_t{0} : 0;
    DriverApi::check(
        api_.call<int(DriverApi::Handle, int, void*)>("cuMemPoolSetAttribute")(pool_, kReleaseThreshold, &threshold),
        "cuMemPoolSetAttribute");
  }
  void restart() const {
    settle();
    DriverApi::check(api_.call<int(DriverApi::Handle, std::size_t)>("cuMemPoolTrimTo")(pool_, 0), "cuMemPoolTrimTo");
  }
  void* alloc(std::size_t size, Stream stream) const {
    Address out = 0;
    DriverApi::check(alloc_(&out, size, stream), "cuMemAllocAsync");
    return reinterpret_cast<void*>(out);
  }
  void free(void* pointer, std::size_t, Stream stream) const {
    DriverApi::check(free_(reinterpret_cast<Address>(pointer), stream), "cuMemFreeAsync");
  }

 private:
  int (*alloc_)(Address*, std::size_t, Stream) = nullptr;
  int (*free_)(Address, Stream) = nullptr;
  DriverApi::Handle pool_ = nullptr;
};

// cudaMalloc and cudaFree.
class DriverMalloc : public DriverPeer {
 public:
  explicit DriverMalloc(const Arguments& arguments) : DriverPeer(arguments) {
    api_.find(alloc_, "cuMemAlloc_v2");
    api_.find(free_, "cuMemFree_v2");
  }
  void restart() const { settle(); }
  void* alloc(std::size_t size, Stream) const {
    Address out = 0;
    DriverApi::check(alloc_(&out, size), "cuMemAlloc");
    return reinterpret_cast<void*>(out);
  }
  void free(void* pointer, std::size_t, Stream) const {
    DriverApi::check(free_(reinterpret_cast<Address>(pointer)), "cuMemFree");
  }

 private:
  int (*alloc_)(Address*, std::size_t) = nullptr;
  int (*free_)(Address) = nullptr;
};

}  // namespace bench
