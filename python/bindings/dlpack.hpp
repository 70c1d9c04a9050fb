// The part of the DLPack 1.x binary interface that tensors cross: layouts only, no framework's header.
// https://dmlc.github.io/dlpack
#pragma once

#include <cstdint>

namespace deep_ep::dlpack {

enum DeviceType : std::int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3 };
struct Device {
  DeviceType type;
  std::int32_t index;
};

enum TypeCode : std::uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBfloat = 4,
  kComplex = 5,
  kBool = 6,
  kFloat8E4m3fn = 10,
  kFloat8E4m3fnuz = 11,
  kFloat8E5m2 = 12,
  kFloat8E5m2fnuz = 13,
  kFloat8E8m0fnu = 14,
};
struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
  bool operator==(const DataType&) const = default;
};

struct TensorInfo {  // DLTensor
  void* data;
  Device device;
  std::int32_t dims;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

struct ManagedTensor {  // DLManagedTensor: what a capsule named "dltensor" holds
  TensorInfo tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

struct ManagedTensorVersioned {  // DLManagedTensorVersioned
  Version version;
  void* context;
  void (*deleter)(ManagedTensorVersioned*);
  std::uint64_t flags;
  TensorInfo tensor;
};

/// DLPackExchangeAPI: a table of C functions of a framework, for tensors without Python calls. Results other than 0
/// mean that a Python exception is set.
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  int (*allocate)(TensorInfo*, ManagedTensorVersioned**, void*, void (*)(void*, const char*, const char*));
  int (*managed_from_object)(void* object, ManagedTensorVersioned** out);
  int (*managed_to_object)(ManagedTensorVersioned* tensor, void** out);
  int (*info_from_object)(void* object, TensorInfo* out);  ///< borrows; may be missing
  int (*current_stream)(DeviceType type, std::int32_t index, void** out);
};

}  // namespace deep_ep::dlpack
