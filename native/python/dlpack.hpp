// The structures of DLPack 1.x, as its header lays them out (dmlc/dlpack, dlpack.h): an interface between libraries
// that never includes anybody's header.
#pragma once

#include <cstdint>

namespace streampool::python::dlpack {

enum DeviceType : std::int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };

struct Device {
  std::int32_t type;
  std::int32_t id;
};

struct DataType {
  std::uint8_t code;  // 1: unsigned integers
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements
  std::uint64_t byte_offset;
};

struct Managed {  // before 1.0
  Tensor tensor;
  void* context;
  void (*deleter)(Managed*);
};

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

struct ManagedVersioned {
  Version version;
  void* context;
  void (*deleter)(ManagedVersioned*);
  std::uint64_t flags;
  Tensor tensor;
};

inline constexpr Version kVersion{1, 0};  // what is here has not changed since
inline constexpr const char* kName = "dltensor";
inline constexpr const char* kNameVersioned = "dltensor_versioned";

}  // namespace streampool::python::dlpack
