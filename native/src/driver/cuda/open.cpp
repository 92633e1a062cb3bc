// See open.hpp.
#include "open.hpp"

#include <map>
#include <mutex>
#include <utility>

#include "cuda_driver.hpp"
#include "errors.hpp"
#include "library.hpp"

namespace streampool::driver::cuda {
namespace {

// The sentence begins with what was asked for.
std::string asked_for(int ordinal) { return "cuda:" + std::to_string(ordinal) + " was asked for, but "; }

// The number of devices, or -1 with a kind and a sentence.
int count_devices(const Library& library, OpenError* kind, std::string* error) {
  int count = 0;
  const Result result = library.api.cuDeviceGetCount(&count);
  if (result == kSuccess && count > 0) return count;
  if (result == kSuccess || result == kNoDevice) {
    *kind = OpenError::no_device;
    *error = "the CUDA driver finds no device. Is CUDA_VISIBLE_DEVICES as it should be?";
  } else {
    *kind = OpenError::broken;
    *error = std::string("cuDeviceGetCount gave ") + error_name(result) + " (" + std::to_string(result) +
             "): " + error_text(result) + ".";
  }
  return -1;
}

bool refuse_when_ending(OpenError* kind, std::string* error) {
  const Ending now = ending();
  if (now == Ending::no) return false;
  *kind = OpenError::broken;
  *error = now == Ending::forked
               ? "this process was forked from one that used the device: start it with the spawn method instead."
               : "the process is exiting.";
  return true;
}

std::shared_ptr<CudaDriver> open_device(int ordinal, bool kernels, OpenError* kind, std::string* error) {
  if (refuse_when_ending(kind, error)) return nullptr;
  const Library* library = load_library(kind, error);
  if (!library) return nullptr;
  const int devices = count_devices(*library, kind, error);
  if (devices < 0) return nullptr;
  if (ordinal < 0 || ordinal >= devices) {
    *kind = OpenError::no_device;
    *error = devices == 1 ? "there is one CUDA device here: cuda:0."
                          : "there are " + std::to_string(devices) +
                                " CUDA devices here: cuda:0 to cuda:" + std::to_string(devices - 1) + ".";
    return nullptr;
  }

  static std::mutex mutex;
  // Never destroyed: at exit other libraries' streams may still be alive, and so may threads that call us.
  static auto& opened = *new std::map<std::pair<const Library*, int>, std::shared_ptr<CudaDriver>>;
  const std::lock_guard lock(mutex);
  std::shared_ptr<CudaDriver>& slot = opened[{library, ordinal}];
  if (!slot || slot->lost()) slot = CudaDriver::create(*library, ordinal, kernels, kind, error);
  if (slot && kernels && !slot->load_kernels(kind, error)) return nullptr;
  return slot;
}

}  // namespace

std::shared_ptr<Driver> open(int ordinal, OpenError* kind, std::string* error) {
  OpenError why = OpenError::none;
  std::string text;
  std::shared_ptr<CudaDriver> driver = open_device(ordinal, true, &why, &text);
  if (!driver) text = asked_for(ordinal) + text;
  if (kind) *kind = why;
  if (error) *error = std::move(text);
  return driver;
}

std::shared_ptr<CudaDriver> device_driver(int device) {
  OpenError why = OpenError::none;
  std::string text;
  const Library* library = load_library(&why, &text);
  const int devices = library ? count_devices(*library, &why, &text) : 0;
  for (int ordinal = 0; ordinal < devices; ++ordinal) {
    Device found = 0;
    if (library->api.cuDeviceGet(&found, ordinal) == kSuccess && found == device)
      return open_device(ordinal, false, &why, &text);
  }
  return nullptr;
}

int device_count(OpenError* kind, std::string* error) {
  OpenError why = OpenError::none;
  std::string text;
  int devices = -1;
  if (!refuse_when_ending(&why, &text)) {
    if (const Library* library = load_library(&why, &text)) devices = count_devices(*library, &why, &text);
  }
  if (kind) *kind = why;
  if (error) *error = std::move(text);
  return devices < 0 ? 0 : devices;
}

}  // namespace streampool::driver::cuda
