// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <type_traits>

#include "ortrain/base/dtype.h"
#include "ortrain/base/error.h"
#include "ortrain/base/half.h"

namespace ortrain {

template <typename T>
struct TypeTag {
  using type = T;
};

// The type to compute in: float for the 16-bit floats, T itself otherwise.
template <typename T>
using ComputeType =
    std::conditional_t<std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>, float, T>;

// Calls body(TypeTag<T>{}) for the float type `dtype`; returns body's result.
template <typename Body>
decltype(auto) dispatch_float(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::f32: return body(TypeTag<float>{});
    case DType::f64: return body(TypeTag<double>{});
    case DType::f16: return body(TypeTag<Float16>{});
    case DType::bf16: return body(TypeTag<BFloat16>{});
    default: throw DTypeError(str("no kernel for element type ", name_of(dtype)));
  }
}

// For index tensors: int32 and int64.
template <typename Body>
decltype(auto) dispatch_index(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::i32: return body(TypeTag<int32_t>{});
    case DType::i64: return body(TypeTag<int64_t>{});
    default: throw DTypeError(str("no kernel for index type ", name_of(dtype)));
  }
}

// For every element type. Eleven instantiations: keep the body small.
template <typename Body>
decltype(auto) dispatch_all(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::f32: return body(TypeTag<float>{});
    case DType::f64: return body(TypeTag<double>{});
    case DType::f16: return body(TypeTag<Float16>{});
    case DType::bf16: return body(TypeTag<BFloat16>{});
    case DType::i8: return body(TypeTag<int8_t>{});
    case DType::i16: return body(TypeTag<int16_t>{});
    case DType::i32: return body(TypeTag<int32_t>{});
    case DType::i64: return body(TypeTag<int64_t>{});
    case DType::u8: return body(TypeTag<uint8_t>{});
    case DType::u16: return body(TypeTag<uint16_t>{});
    case DType::u32: return body(TypeTag<uint32_t>{});
    case DType::u64: return body(TypeTag<uint64_t>{});
    case DType::boolean: return body(TypeTag<bool>{});
    default: throw DTypeError(str("no kernel for element type ", name_of(dtype)));
  }
}

}  // namespace ortrain
