// What the worker that ships in the wheel asks of the CUDA driver itself: found at run time, so that neither a toolkit
// nor a header is needed, and nothing of it where there is no GPU. Declares the few functions by hand.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace bench {

class DriverApi {
 public:
  using Handle = void*;

  // Opens the library and makes the device's primary context current.
  explicit DriverApi(int ordinal) {
    library_ = dlopen("libcuda.so.1", RTLD_NOW);
    if (library_ == nullptr) throw std::runtime_error("there is no CUDA driver here (libcuda.so.1)");
    check(call<int(unsigned)>("cuInit")(0), "cuInit");
    check(call<int(int*, int)>("cuDeviceGet")(&device_, ordinal), "cuDeviceGet");
    check(call<int(Handle*, int)>("cuDevicePrimaryCtxRetain")(&context_, device_), "cuDevicePrimaryCtxRetain");
    find(set_current_, "cuCtxSetCurrent");
    find(mem_info_, "cuMemGetInfo_v2");
    find(synchronize_, "cuCtxSynchronize");
    enter_thread();
  }

  template <typename Signature>
  void find(Signature*& out, const char* name) const {
    out = reinterpret_cast<Signature*>(dlsym(library_, name));
    if (out == nullptr) throw std::runtime_error(std::string("this driver has no ") + name);
  }
  static void check(int code, const char* name) {
    if (code != 0) throw std::runtime_error(std::string(name) + " failed with error " + std::to_string(code));
  }

  int device() const { return device_; }
  void enter_thread() const { check(set_current_(context_), "cuCtxSetCurrent"); }
  void synchronize() const { check(synchronize_(), "cuCtxSynchronize"); }
  std::int64_t free_bytes() const {
    std::size_t free = 0, total = 0;
    check(mem_info_(&free, &total), "cuMemGetInfo");
    return static_cast<std::int64_t>(free);
  }
  Handle create_stream() const {
    constexpr unsigned kNonBlocking = 1;
    Handle stream = nullptr;
    check(call<int(Handle*, unsigned)>("cuStreamCreate")(&stream, kNonBlocking), "cuStreamCreate");
    return stream;
  }
  std::string version() const {
    int number = 0;
    check(call<int(int*)>("cuDriverGetVersion")(&number), "cuDriverGetVersion");
    return "CUDA driver " + std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
  }

  template <typename Signature>
  Signature* call(const char* name) const {
    Signature* function = nullptr;
    find(function, name);
    return function;
  }

 private:
  void* library_ = nullptr;
  int device_ = 0;
  Handle context_ = nullptr;
  int (*set_current_)(Handle) = nullptr;
  int (*mem_info_)(std::size_t*, std::size_t*) = nullptr;
  int (*synchronize_)() = nullptr;
};

}  // namespace bench
