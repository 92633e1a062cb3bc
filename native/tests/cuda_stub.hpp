// For tests of the CUDA driver: a fresh copy of the stub library, and what it pretends. Imports open.hpp and the stub's
// header.
#pragma once

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "driver/cuda/open.hpp"
#include "stub_libcuda/stub.hpp"
#include "test.hpp"

namespace streampool::testing {

// Where the stub library was built: STREAMPOOL_TEST_STUB_LIBCUDA, given by the environment or by the build.
inline std::string stub_library() {
  if (const char* given = std::getenv("STREAMPOOL_TEST_STUB_LIBCUDA")) return given;
#ifdef STREAMPOOL_TEST_STUB_LIBCUDA
  return STREAMPOOL_TEST_STUB_LIBCUDA;
#else
  return {};
#endif
}

// The stub as a library of its own, for one test: a copy under another name, so that nothing is remembered between
// tests. While it lives, STREAMPOOL_LIBCUDA names it.
class Stub {
 public:
  Stub() {
    const std::string built = stub_library();
    if (built.empty() || !std::filesystem::exists(built))
      fail(__FILE__, __LINE__, "no stub library at '" + built + "'");
    static int number = 0;
    folder_ =
        std::filesystem::temp_directory_path() /
        ("streampool-stub-" + std::to_string(reinterpret_cast<std::uintptr_t>(this)) + "-" + std::to_string(++number));
    std::filesystem::create_directories(folder_);
    path_ = (folder_ / "libcuda.so.1").string();
    std::filesystem::copy_file(built, path_, std::filesystem::copy_options::overwrite_existing);
    handle_ = dlopen(path_.c_str(), RTLD_NOW | RTLD_LOCAL);  // never closed: a driver may hold on to it
    if (!handle_) fail(__FILE__, __LINE__, dlerror());
    state_ = static_cast<StubState*>(dlsym(handle_, "stub_state"));
    if (const char* before = std::getenv("STREAMPOOL_LIBCUDA")) before_ = before;
    setenv("STREAMPOOL_LIBCUDA", path_.c_str(), 1);
  }
  ~Stub() {
    if (before_.empty())
      unsetenv("STREAMPOOL_LIBCUDA");
    else
      setenv("STREAMPOOL_LIBCUDA", before_.c_str(), 1);
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  Stub(const Stub&) = delete;
  Stub& operator=(const Stub&) = delete;

  StubState* operator->() { return state_; }

  template <typename F>
  F function(const char* name) {
    return reinterpret_cast<F>(dlsym(handle_, name));
  }

 private:
  std::filesystem::path folder_;
  std::string path_, before_;
  void* handle_ = nullptr;
  StubState* state_ = nullptr;
};

// What opening cuda:N gives.
struct Opened {
  driver::OpenError kind = driver::OpenError::none;
  std::string error;
  std::shared_ptr<driver::Driver> driver;

  explicit Opened(int ordinal = 0) { driver = driver::cuda::open(ordinal, &kind, &error); }
  bool says(const char* words) const { return error.find(words) != std::string::npos; }
};

}  // namespace streampool::testing
