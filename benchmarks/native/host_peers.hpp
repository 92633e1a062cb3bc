// The allocators of the host: the floor that everybody knows.
#pragma once

#include <dlfcn.h>
#include <gnu/libc-version.h>
#include <malloc.h>

#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>

#include "serve.hpp"

namespace bench {

struct HostPeer {
  using Stream = int;  // none
  Stream stream(int) const { return 0; }
  void enter_thread() const {}
  void settle() const {}
  void restart() const { malloc_trim(0); }
  std::int64_t held() const { return -1; }
  static void* checked(void* pointer) {
    if (pointer == nullptr) throw std::bad_alloc();
    return pointer;
  }
};

struct Glibc : HostPeer {
  void* alloc(std::size_t size, Stream) const { return checked(std::malloc(size)); }
  void free(void* pointer, std::size_t, Stream) const { std::free(pointer); }
  std::string version() const { return gnu_get_libc_version(); }
};

// From the library that the caller found, so that the worker needs it neither to be built nor to start.
class Mimalloc : public HostPeer {
 public:
  explicit Mimalloc(const std::string& library) {
    void* const opened = dlopen(library.c_str(), RTLD_NOW);
    if (opened == nullptr) throw std::runtime_error(dlerror());
    malloc_ = reinterpret_cast<void* (*)(std::size_t)>(dlsym(opened, "mi_malloc"));
    free_ = reinterpret_cast<void (*)(void*)>(dlsym(opened, "mi_free"));
    version_ = reinterpret_cast<int (*)()>(dlsym(opened, "mi_version"));
    if (malloc_ == nullptr || free_ == nullptr || version_ == nullptr)
      throw std::runtime_error(library + " is no mimalloc");
  }
  void* alloc(std::size_t size, Stream) const { return checked(malloc_(size)); }
  void free(void* pointer, std::size_t, Stream) const { free_(pointer); }
  std::string version() const {
    const int number = version_();
    return std::to_string(number / 100) + "." + std::to_string(number / 10 % 10) + "." + std::to_string(number % 10);
  }

 private:
  void* (*malloc_)(std::size_t) = nullptr;
  void (*free_)(void*) = nullptr;
  int (*version_)() = nullptr;
};

}  // namespace bench
