// dlopen and cuGetProcAddress. Every function is asked for by the version of its prototype and with the flag for the
// *legacy* default stream, so that handle 0 never silently means a per-thread stream.
#include "library.hpp"

#include <dlfcn.h>

#include <cctype>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>

#include "errors.hpp"

namespace streampool::driver::cuda {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";
constexpr const char* kUpdate = "Update the NVIDIA driver to 525.60 or newer.";

template <typename F>
F symbol(void* handle, const char* name) {
  return reinterpret_cast<F>(dlsym(handle, name));
}

void explain(OpenError* kind, std::string* error, OpenError which, std::string text) {
  if (kind) *kind = which;
  if (error) *error = std::move(text);
}

// The name of the first required function that is missing, or null.
const char* resolve(GetProcAddress get, Api* api) {
  const char* missing = nullptr;
  constexpr bool required = true, optional = false;
  const auto find = [&](const char* name, int version, bool need) -> void* {
    void* address = nullptr;
    int found = 0;
    const Result result = get(name, &address, version, kProcAddressLegacyStream, &found);
    if (result == kSuccess && address) return address;
    if (need && !missing) missing = name;
    return nullptr;
  };
#define STREAMPOOL_CUDA_RESOLVE(name, version, need, parameters) \
  api->name = reinterpret_cast<Result(*) parameters>(find(#name, version, need));
  STREAMPOOL_CUDA_FUNCTIONS(STREAMPOOL_CUDA_RESOLVE)
#undef STREAMPOOL_CUDA_RESOLVE
  return missing;
}

}  // namespace

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string kernel_driver_version() {
  std::string line;
  if (std::ifstream sys("/sys/module/nvidia/version"); std::getline(sys, line) && !line.empty()) return line;
  std::ifstream proc("/proc/driver/nvidia/version");
  for (std::string word; proc >> word;) {
    // "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build": the word of digits and
    // dots.
    bool number = word.find('.') != std::string::npos;
    for (const char c : word) number = number && (std::isdigit(static_cast<unsigned char>(c)) || c == '.');
    if (number) return word;
  }
  return {};
}

const Library* load_library(OpenError* kind, std::string* error) {
  static std::mutex mutex;
  static auto& loaded = *new std::map<std::string, Library>;  // never destroyed: threads may outlive main
  const char* given = std::getenv("STREAMPOOL_LIBCUDA");
  const std::string path = given && *given ? given : kLibrary;
  const std::lock_guard lock(mutex);

  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    const char* why = dlerror();
    const std::string reason = why ? why : "no reason given";
    // "NAME: cannot open shared object file: No such file or directory" is absence; the same about one of the libraries
    // that it needs, or any other sentence, is a driver that is there and broken.
    const bool absent = reason.rfind(path + ":", 0) == 0 && reason.find("No such file") != std::string::npos;
    if (absent) {
      explain(kind, error, OpenError::no_library,
              "there is no CUDA driver here (" + reason + "). Install the NVIDIA driver, or use sim:0.");
    } else {
      explain(kind, error, OpenError::broken,
              "the CUDA driver library cannot be loaded (" + reason + "). Reinstall the NVIDIA driver.");
    }
    return nullptr;
  }

  // Before anything else: does it start, and is there a device? A machine without one needs no newer driver.
  const auto init = symbol<Result (*)(unsigned)>(handle, "cuInit");
  const auto get_version = symbol<Result (*)(int*)>(handle, "cuDriverGetVersion");
  if (!init || !get_version) {
    explain(kind, error, OpenError::broken,
            path + " is no CUDA driver: it has no " + (init ? "cuDriverGetVersion" : "cuInit") + ".");
    return nullptr;
  }
  const Result started = init(0);
  if (started == kNoDevice) {
    explain(kind, error, OpenError::no_device,
            "the CUDA driver finds no device (CUDA_ERROR_NO_DEVICE, 100). Is a GPU visible to this process, and is "
            "CUDA_VISIBLE_DEVICES as it should be?");
    return nullptr;
  }
  int version = 0;
  if (get_version(&version) != kSuccess) version = 0;
  if (started == kSuccess && version < kOldestVersion) {
    explain(
        kind, error, OpenError::too_old,
        "the CUDA driver here is for CUDA " + version_text(version) + ", and CUDA 12.0 or newer is needed. " + kUpdate);
    return nullptr;
  }
  if (started != kSuccess) {
    std::string text = std::string("the CUDA driver does not start: cuInit gave ") + error_name(started) + " (" +
                       std::to_string(started) + "): " + error_text(started) + ".";
    if (*error_advice(started)) text += std::string(" ") + error_advice(started);
    explain(kind, error, OpenError::broken, std::move(text));
    return nullptr;
  }

  if (const auto known = loaded.find(path); known != loaded.end()) return &known->second;
  Library library;
  library.get_proc_address = symbol<GetProcAddress>(handle, "cuGetProcAddress_v2");
  library.version = version;
  library.path = path;
  const char* missing =
      library.get_proc_address ? resolve(library.get_proc_address, &library.api) : "cuGetProcAddress_v2";
  if (missing) {
    explain(kind, error, OpenError::too_old,
            "the CUDA driver here (CUDA " + version_text(version) + ") has no " + missing +
                ", which every driver for CUDA 12.0 and newer has. " + kUpdate);
    return nullptr;
  }
  return &loaded.emplace(path, std::move(library)).first->second;
}

}  // namespace streampool::driver::cuda
