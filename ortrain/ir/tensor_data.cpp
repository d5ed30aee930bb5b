// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/tensor_data.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <new>

#include "ortrain/base/byte_count.h"
#include "ortrain/base/dtype_dispatch.h"

namespace ortrain {
namespace {

constexpr size_t kAlignment = 64;

size_t checked_bytes(DType dtype, const Dims& dims) {
  check_extents(dims, size_of(dtype));
  return static_cast<size_t>(num_elements(dims)) * size_of(dtype);
}

// Beyond the floats, where the language leaves it open: the nearest, as IEEE 754 has it.
template <typename C>
C narrowed(double value) {
  if constexpr (std::is_same_v<C, float>) {
    constexpr double kMost = std::numeric_limits<float>::max();
    constexpr double kRoundsToInfinity = 0x1.ffffffp127;
    if (std::isfinite(value) && std::abs(value) > kMost) {
      const double size =
          std::abs(value) < kRoundsToInfinity ? kMost : std::numeric_limits<double>::infinity();
      return static_cast<float>(std::copysign(size, value));
    }
  }
  return static_cast<C>(value);
}

}  // namespace

TensorData::TensorData(DType dtype, Dims dims, const void* data, std::shared_ptr<const void> owner)
    : dtype_(dtype), dims_(std::move(dims)), data_(data), owner_(std::move(owner)) {
  checked_bytes(dtype_, dims_);
}

TensorData TensorData::allocate(DType dtype, Dims dims, void** mutable_data) {
  const size_t bytes = checked_bytes(dtype, dims);
  const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment + kAlignment;
  void* memory = std::aligned_alloc(kAlignment, rounded);
  if (memory == nullptr) {
    throw OutOfMemoryError(str("cannot allocate ", bytes, " bytes for a constant tensor"));
  }
  std::memset(memory, 0, rounded);
  std::shared_ptr<const void> owner(memory, [](const void* p) { std::free(const_cast<void*>(p)); });
  *mutable_data = memory;
  return TensorData(dtype, std::move(dims), memory, std::move(owner));
}

TensorData TensorData::int64s(const std::vector<int64_t>& values) {
  return from_values(DType::i64, {static_cast<int64_t>(values.size())}, values);
}

TensorData TensorData::scalar(DType dtype, double value) {
  void* destination = nullptr;
  TensorData result = allocate(dtype, {}, &destination);
  dispatch_all(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
      // A power of two, so a double exactly, which the largest integer need not be.
      const double end = std::ldexp(1.0, std::numeric_limits<T>::digits);
      const double least = std::is_signed_v<T> ? -end : 0;
      if (!(value >= least && value < end)) {
        throw DTypeError(str(value, " is no ", name_of(dtype)));
      }
    }
    *static_cast<T*>(destination) = static_cast<T>(narrowed<ComputeType<T>>(value));
  });
  return result;
}

TensorData TensorData::int_scalar(DType dtype, int64_t value) {
  return from_ints(dtype, {}, {value});
}

TensorData TensorData::from_ints(DType dtype, Dims dims, const std::vector<int64_t>& values) {
  void* destination = nullptr;
  TensorData result = allocate(dtype, std::move(dims), &destination);
  check(static_cast<int64_t>(values.size()) == result.numel(), "the values do not fill the tensor");
  dispatch_all(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    std::transform(values.begin(), values.end(), static_cast<T*>(destination), [](int64_t value) {
      return static_cast<T>(static_cast<ComputeType<T>>(value));
    });
  });
  return result;
}

bool TensorData::equals(const TensorData& other) const {
  if (dtype_ != other.dtype_ || dims_ != other.dims_) return false;
  const size_t size = bytes();
  return size == 0 || data_ == other.data_ || std::memcmp(data_, other.data_, size) == 0;
}

std::vector<int64_t> TensorData::to_int64s() const {
  if (is_float(dtype_)) {
    throw DTypeError(str("integers are needed, the tensor is ", name_of(dtype_)));
  }
  std::vector<int64_t> result(static_cast<size_t>(numel()));
  dispatch_all(dtype_, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (size_t i = 0; i < result.size(); ++i) {
      result[i] = static_cast<int64_t>(static_cast<ComputeType<T>>(data_as<T>()[i]));
    }
  });
  return result;
}

double TensorData::to_double() const {
  if (numel() != 1) {
    throw ShapeError(str("one element is needed, the tensor has shape ", dims_str(dims_)));
  }
  return dispatch_all(dtype_, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return static_cast<double>(static_cast<ComputeType<T>>(*data_as<T>()));
  });
}

}  // namespace ortrain
