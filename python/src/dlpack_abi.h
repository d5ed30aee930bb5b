// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

// The stable C layout of DLPack 1.x (https://dmlc.github.io/dlpack), as far as it is used here, and
// of the exchange table that a tensor class offers as `__dlpack_c_exchange_api__` since 1.3.
namespace ortrain::dlpack {

inline constexpr uint32_t kMajorVersion = 1;
// Types of devices.
inline constexpr int32_t kCpu = 1;
inline constexpr int32_t kCuda = 2;
inline constexpr int32_t kRocm = 10;

struct Version {
  uint32_t major;
  uint32_t minor;
};

struct Device {
  int32_t type;
  int32_t id;
  bool operator==(const Device&) const = default;
};

enum class TypeCode : uint8_t {
  signed_int = 0,
  unsigned_int = 1,
  floating = 2,
  bfloat = 4,
  boolean = 6
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements
  uint64_t byte_offset;
};

struct ManagedTensor {
  Version version;
  void* manager_ctx;
  void (*deleter)(ManagedTensor* self);
  uint64_t flags;
  Tensor tensor;
};

struct ExchangeHeader {
  Version version;
  ExchangeHeader* previous;
};

// Functions return 0, or another value with a Python error set.
struct ExchangeTable {
  ExchangeHeader header;
  int (*allocate)(Tensor* prototype, ManagedTensor** out, void* error_ctx,
                  void (*set_error)(void* error_ctx, const char* kind, const char* message));
  int (*managed_from_object)(void* object, ManagedTensor** out);
  int (*object_from_managed)(ManagedTensor* tensor, void** out_object);
  int (*borrow_from_object)(void* object, Tensor* out);
  int (*current_work_stream)(int32_t device_type, int32_t device_id, void** out_stream);
};

}  // namespace ortrain::dlpack
