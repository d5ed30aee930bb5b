// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "ortrain/base/dim.h"
#include "ortrain/base/dtype.h"
#include "ortrain/base/error.h"

namespace ortrain {

// An immutable dense row-major tensor in host memory: initializers, constants, tensor attributes.
// Copies share the bytes. Alignment is 64 bytes when the engine allocated it.
class TensorData {
 public:
  TensorData() = default;
  // Takes part in the ownership of `owner`, which keeps `data` alive.
  TensorData(DType dtype, Dims dims, const void* data, std::shared_ptr<const void> owner);

  // A zeroed tensor; `mutable_data` gives the address to fill before it is shared.
  static TensorData allocate(DType dtype, Dims dims, void** mutable_data);

  template <typename T>
  static TensorData from_values(DType dtype, Dims dims, const std::vector<T>& values) {
    void* destination = nullptr;
    TensorData result = allocate(dtype, std::move(dims), &destination);
    check(values.size() * sizeof(T) == result.bytes(), "the values do not fill the tensor");
    if (!values.empty()) std::memcpy(destination, values.data(), result.bytes());
    return result;
  }
  // A one-dimensional int64 tensor.
  static TensorData int64s(const std::vector<int64_t>& values);
  // A scalar of any numeric type, `value` converted.
  static TensorData scalar(DType dtype, double value);
  // Values of any type, each converted.
  static TensorData from_ints(DType dtype, Dims dims, const std::vector<int64_t>& values);
  static TensorData int_scalar(DType dtype, int64_t value);

  DType dtype() const { return dtype_; }
  const Dims& dims() const { return dims_; }
  int64_t numel() const { return num_elements(dims_); }
  size_t bytes() const { return static_cast<size_t>(numel()) * size_of(dtype_); }
  const void* data() const { return data_; }
  template <typename T>
  const T* data_as() const {
    return static_cast<const T*>(data_);
  }
  bool defined() const { return dtype_ != DType::undefined; }

  // Same type, shape and bytes.
  bool equals(const TensorData& other) const;
  // Integer and bool contents widened to int64; throws DTypeError for float tensors.
  std::vector<int64_t> to_int64s() const;
  // A single element as double; throws ShapeError if there is not exactly one.
  double to_double() const;

 private:
  DType dtype_ = DType::undefined;
  Dims dims_;
  const void* data_ = nullptr;
  std::shared_ptr<const void> owner_;
};

}  // namespace ortrain
