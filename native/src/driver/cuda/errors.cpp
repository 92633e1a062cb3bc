// The one table of CUDA's error numbers. Imports errors.hpp only.
#include "errors.hpp"

#include <array>
#include <cstdio>

namespace streampool::driver::cuda {
namespace {

struct Row {
  int number;
  Code code;
  const char* name;
  const char* text;
};

// `lost` is for errors after which every later call in the context fails: a fault on the device, a context that is
// gone. What merely looks serious (a launch that asks for too much, a peer that is not there) is `failed`.
constexpr Row kRows[] = {
    {0, Code::ok, "CUDA_SUCCESS", "no error"},
    {1, Code::invalid, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, Code::out_of_memory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, Code::gone, "CUDA_ERROR_NOT_INITIALIZED", "the driver is not initialised in this process"},
    {4, Code::gone, "CUDA_ERROR_DEINITIALIZED", "the driver is shutting down"},
    {34, Code::failed, "CUDA_ERROR_STUB_LIBRARY", "the library is the toolkit's stub, not a driver"},
    {46, Code::failed, "CUDA_ERROR_DEVICE_UNAVAILABLE", "the device is busy or unavailable"},
    {100, Code::failed, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, Code::invalid, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {102, Code::failed, "CUDA_ERROR_DEVICE_NOT_LICENSED", "the device has no licence"},
    {200, Code::failed, "CUDA_ERROR_INVALID_IMAGE", "the device kernel image is invalid"},
    {201, Code::lost, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {205, Code::failed, "CUDA_ERROR_MAP_FAILED", "mapping failed"},
    {206, Code::failed, "CUDA_ERROR_UNMAP_FAILED", "unmapping failed"},
    {208, Code::invalid, "CUDA_ERROR_ALREADY_MAPPED", "the resource is already mapped"},
    {209, Code::not_supported, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image for this device"},
    {211, Code::invalid, "CUDA_ERROR_NOT_MAPPED", "the resource is not mapped"},
    {214, Code::lost, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error"},
    {218, Code::failed, "CUDA_ERROR_INVALID_PTX", "a PTX compilation failed"},
    {220, Code::lost, "CUDA_ERROR_NVLINK_UNCORRECTABLE", "uncorrectable NVLink error"},
    {221, Code::failed, "CUDA_ERROR_JIT_COMPILER_NOT_FOUND", "the PTX compiler library is not found"},
    {222, Code::failed, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the PTX is newer than the driver"},
    {223, Code::failed, "CUDA_ERROR_JIT_COMPILATION_DISABLED", "PTX compilation is switched off"},
    {226, Code::lost, "CUDA_ERROR_CONTAINED", "a contained memory error ended the context"},
    {304, Code::failed, "CUDA_ERROR_OPERATING_SYSTEM", "an operating system call failed"},
    {400, Code::invalid, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {401, Code::failed, "CUDA_ERROR_ILLEGAL_STATE", "the object is in a state that does not allow this"},
    {500, Code::not_supported, "CUDA_ERROR_NOT_FOUND", "the symbol is not found"},
    {600, Code::not_ready, "CUDA_ERROR_NOT_READY", "the work is not done yet"},
    {700, Code::lost, "CUDA_ERROR_ILLEGAL_ADDRESS", "a kernel or copy met an illegal address"},
    {701, Code::failed, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources asked for a launch"},
    {702, Code::lost, "CUDA_ERROR_LAUNCH_TIMEOUT", "a kernel ran too long and was ended"},
    {708, Code::failed, "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE", "the primary context is already active"},
    {709, Code::lost, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "the context was destroyed or reset"},
    {710, Code::lost, "CUDA_ERROR_ASSERT", "a device-side assert fired"},
    {712, Code::invalid, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "the host memory is already registered"},
    {713, Code::invalid, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "the host memory is not registered"},
    {714, Code::lost, "CUDA_ERROR_HARDWARE_STACK_ERROR", "a kernel's stack was corrupted or overflowed"},
    {715, Code::lost, "CUDA_ERROR_ILLEGAL_INSTRUCTION", "a kernel met an illegal instruction"},
    {716, Code::lost, "CUDA_ERROR_MISALIGNED_ADDRESS", "a kernel used a misaligned address"},
    {717, Code::lost, "CUDA_ERROR_INVALID_ADDRESS_SPACE", "a kernel used an address of the wrong space"},
    {718, Code::lost, "CUDA_ERROR_INVALID_PC", "a kernel's program counter left its address space"},
    {719, Code::lost, "CUDA_ERROR_LAUNCH_FAILED", "a kernel failed"},
    {720, Code::failed, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", "too many blocks in a cooperative launch"},
    {721, Code::lost, "CUDA_ERROR_TENSOR_MEMORY_LEAK", "a kernel left tensor memory behind"},
    {800, Code::failed, "CUDA_ERROR_NOT_PERMITTED", "the operation is not permitted"},
    {801, Code::not_supported, "CUDA_ERROR_NOT_SUPPORTED", "the operation is not supported"},
    {802, Code::failed, "CUDA_ERROR_SYSTEM_NOT_READY", "the system is not ready"},
    {803, Code::failed, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "kernel driver and driver library do not match"},
    {804, Code::failed, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", "forward compatibility is not supported here"},
    {805, Code::failed, "CUDA_ERROR_MPS_CONNECTION_FAILED", "the MPS server cannot be reached"},
    {806, Code::failed, "CUDA_ERROR_MPS_RPC_FAILURE", "a call to the MPS server failed"},
    {807, Code::failed, "CUDA_ERROR_MPS_SERVER_NOT_READY", "the MPS server is not ready"},
    {810, Code::lost, "CUDA_ERROR_MPS_CLIENT_TERMINATED", "the MPS client was ended by its server"},
    {900, Code::capturing, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "not permitted while a stream is capturing"},
    {901, Code::capturing, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "the capture was invalidated earlier"},
    {902, Code::capturing, "CUDA_ERROR_STREAM_CAPTURE_MERGE", "this would merge two captures"},
    {903, Code::capturing, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "the capture was not begun in this stream"},
    {904, Code::capturing, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "the capture has a stream that was not joined"},
    {905, Code::capturing, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "a dependency would leave the capture"},
    {906, Code::capturing, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "a capture depends on the legacy stream"},
    {907, Code::capturing, "CUDA_ERROR_CAPTURED_EVENT", "the event was last recorded in a capturing stream"},
    {908, Code::capturing, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "the capture belongs to another thread"},
    {909, Code::failed, "CUDA_ERROR_TIMEOUT", "the wait ran out of time"},
    {999, Code::failed, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const Row* find(int number) {
  for (const Row& row : kRows)
    if (row.number == number) return &row;
  return nullptr;
}

}  // namespace

const char* error_name(int number) {
  if (const Row* row = find(number)) return row->name;
  thread_local std::array<char, 32> text;
  std::snprintf(text.data(), text.size(), "CUDA error %d", number);
  return text.data();
}

const char* error_text(int number) {
  const Row* row = find(number);
  return row ? row->text : "unknown error";
}

const char* error_advice(int number) {
  switch (number) {
    case 3: return "A forked child cannot use CUDA: start worker processes with the spawn method.";
    case 34: return "LD_LIBRARY_PATH leads to the CUDA toolkit's stubs folder: take it out.";
    case 46: return "Another process holds the device in exclusive mode, or it needs a reset: see nvidia-smi.";
    case 221: return "Install the driver's PTX compiler library (libnvidia-ptxjitcompiler) that belongs to the driver.";
    case 223: return "Unset CUDA_DISABLE_PTX_JIT: our kernels are PTX.";
    case 802: return "On machines with NVSwitch the fabric manager service must be running.";
    case 803: return "The driver was updated while loaded: reboot, or give the container the host's libcuda.";
    case 804: return "Take the CUDA compatibility package's libcuda out of LD_LIBRARY_PATH.";
    case 805:
    case 806:
    case 807: return "Look at the MPS control daemon.";
    case 999:
      return "Often the nvidia_uvm kernel module or the /dev/nvidia* files are missing: does nvidia-smi work here?";
    default:
      return code_of(number) == Code::lost
                 ? "An earlier fault ended the device's context in this process: start it again."
                 : "";
  }
}

Code code_of(int number) {
  if (number >= 900 && number <= 908) return Code::capturing;
  const Row* row = find(number);
  return row ? row->code : Code::failed;
}

}  // namespace streampool::driver::cuda
