// Our own small declarations of the CUDA driver interface: what the driver below calls, no more. So no CUDA header is
// needed to build. Imports nothing of ours.
//
// Layouts and numbers are fixed by the driver's ABI: cuGetProcAddress hands out the function that keeps the prototype
// of the version that is asked for, whatever the driver's own version is.
#pragma once

#include <cstddef>
#include <cstdint>

namespace streampool::driver::cuda {

using Result = int;                   // CUresult
using Device = int;                   // CUdevice
using DevicePtr = std::uint64_t;      // CUdeviceptr
using GenericHandle = std::uint64_t;  // CUmemGenericAllocationHandle
using Context = struct ContextTag*;
using Module = struct ModuleTag*;
using Function = struct FunctionTag*;
using Stream = struct StreamTag*;
using Event = struct EventTag*;
using Graph = struct GraphTag*;
using UserObject = struct UserObjectTag*;
using MemoryPool = struct MemoryPoolTag*;

inline constexpr Result kSuccess = 0;
inline constexpr Result kInvalidValue = 1;
inline constexpr Result kNotInitialized = 3;
inline constexpr Result kDeinitialized = 4;
inline constexpr Result kNoDevice = 100;
inline constexpr Result kInvalidContext = 201;
inline constexpr Result kNotReady = 600;
inline constexpr Result kContextIsDestroyed = 709;
inline constexpr Result kNotSupported = 801;
inline constexpr Result kCaptureInvalidated = 901;

inline constexpr int kOldestVersion = 12000;  // CUDA 12.0: cuStreamGetId, cuCtxGetId

inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kHostAllocPortable = 1;
inline constexpr unsigned kHostAllocDeviceMap = 2;
inline constexpr unsigned kAttachGlobal = 1;
inline constexpr int kCaptureModeRelaxed = 2;
inline constexpr int kCaptureStatusNone = 0;
inline constexpr int kCaptureStatusActive = 1;  // 2: invalidated
inline constexpr std::uint64_t kProcAddressLegacyStream = 1;

inline constexpr int kAttributeManagedMemory = 83;
inline constexpr int kAttributeVirtualMemory = 102;
inline constexpr int kAttributePosixFd = 103;
inline constexpr int kAttributeRdma = 110;  // for virtual memory
inline constexpr int kAttributeMemoryPools = 115;
inline constexpr int kAttributeFabric = 128;

struct MemLocation {
  std::uint32_t type;  // kLocationDevice
  std::int32_t id;
};
inline constexpr std::uint32_t kLocationDevice = 1;

struct MemAllocationProp {
  std::uint32_t type;          // kAllocationPinned
  std::uint32_t handle_types;  // kHandle…
  MemLocation location;
  void* win32_meta_data;
  std::uint8_t compression;
  std::uint8_t rdma_capable;
  std::uint16_t usage;
  std::uint8_t reserved[4];
};
inline constexpr std::uint32_t kAllocationPinned = 1;
inline constexpr std::uint32_t kHandleNone = 0;
inline constexpr std::uint32_t kHandlePosixFd = 1;
inline constexpr std::uint32_t kHandleFabric = 8;
inline constexpr int kGranularityMinimum = 0;
static_assert(sizeof(MemAllocationProp) == 32);

struct MemAccessDesc {
  MemLocation location;
  std::uint32_t flags;  // kAccessReadWrite
};
inline constexpr std::uint32_t kAccessReadWrite = 3;
static_assert(sizeof(MemAccessDesc) == 12);

struct MemPoolProps {
  std::uint32_t type;          // kAllocationPinned
  std::uint32_t handle_types;  // kHandleNone
  MemLocation location;
  void* win32_security;
  std::size_t max_size;  // 0: whatever the device has
  std::uint16_t usage;
  std::uint8_t reserved[54];
};
inline constexpr int kPoolReleaseThreshold = 4;
static_assert(sizeof(MemPoolProps) == 88);

inline constexpr unsigned kUserObjectNoDestructorSync = 1;
inline constexpr unsigned kGraphUserObjectMove = 1;

// One row a function: base name, the CUDA version whose prototype this is, whether we can do without, its parameters.
// clang-format off
#define STREAMPOOL_CUDA_FUNCTIONS(X)                                                                                   \
  X(cuInit, 2000, required, (unsigned))                                                                                \
  X(cuDriverGetVersion, 2020, required, (int*))                                                                        \
  X(cuDeviceGetCount, 2000, required, (int*))                                                                          \
  X(cuDeviceGet, 2000, required, (Device*, int))                                                                       \
  X(cuDeviceGetAttribute, 2000, required, (int*, int, Device))                                                         \
  X(cuDeviceTotalMem, 3020, required, (std::size_t*, Device))                                                          \
  X(cuDevicePrimaryCtxRetain, 7000, required, (Context*, Device))                                                      \
  X(cuDevicePrimaryCtxRelease, 11000, required, (Device))                                                              \
  X(cuCtxGetCurrent, 4000, required, (Context*))                                                                       \
  X(cuCtxPushCurrent, 4000, required, (Context))                                                                       \
  X(cuCtxPopCurrent, 4000, required, (Context*))                                                                       \
  X(cuCtxGetDevice, 2000, required, (Device*))                                                                         \
  X(cuCtxGetId, 12000, required, (Context, unsigned long long*))                                                       \
  X(cuCtxRecordEvent, 12050, optional, (Context, Event))                                                               \
  X(cuThreadExchangeStreamCaptureMode, 10010, required, (int*))                                                        \
  X(cuMemGetInfo, 3020, required, (std::size_t*, std::size_t*))                                                        \
  X(cuMemAlloc, 3020, required, (DevicePtr*, std::size_t))                                                             \
  X(cuMemFree, 3020, required, (DevicePtr))                                                                            \
  X(cuMemHostAlloc, 2020, required, (void**, std::size_t, unsigned))                                                   \
  X(cuMemFreeHost, 2000, required, (void*))                                                                            \
  X(cuMemHostGetDevicePointer, 3020, required, (DevicePtr*, void*, unsigned))                                          \
  X(cuMemAllocManaged, 6000, optional, (DevicePtr*, std::size_t, unsigned))                                            \
  X(cuMemAddressReserve, 10020, optional, (DevicePtr*, std::size_t, std::size_t, DevicePtr, unsigned long long))       \
  X(cuMemAddressFree, 10020, optional, (DevicePtr, std::size_t))                                                       \
  X(cuMemCreate, 10020, optional, (GenericHandle*, std::size_t, const MemAllocationProp*, unsigned long long))         \
  X(cuMemRelease, 10020, optional, (GenericHandle))                                                                    \
  X(cuMemMap, 10020, optional, (DevicePtr, std::size_t, std::size_t, GenericHandle, unsigned long long))               \
  X(cuMemUnmap, 10020, optional, (DevicePtr, std::size_t))                                                             \
  X(cuMemSetAccess, 10020, optional, (DevicePtr, std::size_t, const MemAccessDesc*, std::size_t))                      \
  X(cuMemGetAllocationGranularity, 10020, optional, (std::size_t*, const MemAllocationProp*, int))                     \
  X(cuDeviceCanAccessPeer, 4000, optional, (int*, Device, Device))                                                     \
  X(cuMemPoolCreate, 11020, optional, (MemoryPool*, const MemPoolProps*))                                              \
  X(cuMemPoolDestroy, 11020, optional, (MemoryPool))                                                                   \
  X(cuMemPoolSetAttribute, 11020, optional, (MemoryPool, int, void*))                                                  \
  X(cuMemPoolTrimTo, 11020, optional, (MemoryPool, std::size_t))                                                       \
  X(cuMemAllocFromPoolAsync, 11020, optional, (DevicePtr*, std::size_t, MemoryPool, Stream))                           \
  X(cuMemFreeAsync, 11020, optional, (DevicePtr, Stream))                                                              \
  X(cuStreamCreate, 2000, required, (Stream*, unsigned))                                                               \
  X(cuStreamDestroy, 4000, required, (Stream))                                                                         \
  X(cuStreamQuery, 2000, required, (Stream))                                                                           \
  X(cuStreamSynchronize, 2000, required, (Stream))                                                                      \
  X(cuStreamIsCapturing, 10000, required, (Stream, int*))                                                              \
  X(cuStreamGetCaptureInfo, 11030, optional,                                                                           \
    (Stream, int*, std::uint64_t*, Graph*, const void**, std::size_t*))                                                \
  X(cuUserObjectCreate, 11030, optional, (UserObject*, void*, void (*)(void*), unsigned, unsigned))                     \
  X(cuUserObjectRelease, 11030, optional, (UserObject, unsigned))                                                       \
  X(cuGraphRetainUserObject, 11030, optional, (Graph, UserObject, unsigned, unsigned))                                  \
  X(cuStreamGetId, 12000, required, (Stream, unsigned long long*))                                                     \
  X(cuStreamGetCtx, 9020, optional, (Stream, Context*))                                                                \
  X(cuStreamWaitEvent, 3020, required, (Stream, Event, unsigned))                                                      \
  X(cuEventCreate, 2000, required, (Event*, unsigned))                                                                 \
  X(cuEventDestroy, 4000, required, (Event))                                                                           \
  X(cuEventRecord, 2000, required, (Event, Stream))                                                                    \
  X(cuEventQuery, 2000, required, (Event))                                                                             \
  X(cuMemsetD8Async, 3020, required, (DevicePtr, unsigned char, std::size_t, Stream))                                  \
  X(cuMemcpyAsync, 4000, required, (DevicePtr, DevicePtr, std::size_t, Stream))                                        \
  X(cuModuleLoadDataEx, 2010, required, (Module*, const void*, unsigned, int*, void**))                                \
  X(cuModuleUnload, 2000, required, (Module))                                                                          \
  X(cuModuleGetFunction, 2000, required, (Function*, Module, const char*))                                             \
  X(cuLaunchKernel, 4000, required,                                                                                    \
    (Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**, void**))
// clang-format on

// The functions that were found, under their own names. An optional one that this driver lacks is null.
struct Api {
#define STREAMPOOL_CUDA_MEMBER(name, version, need, parameters) Result(*name) parameters = nullptr;
  STREAMPOOL_CUDA_FUNCTIONS(STREAMPOOL_CUDA_MEMBER)
#undef STREAMPOOL_CUDA_MEMBER
};

// cuGetProcAddress as of CUDA 12.0, the only name that is looked up by hand.
using GetProcAddress = Result (*)(const char*, void**, int, std::uint64_t, int*);

}  // namespace streampool::driver::cuda
