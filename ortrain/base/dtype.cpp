// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/dtype.h"

#include <array>

namespace ortrain {
namespace {

struct DTypeRow {
  DType dtype;
  size_t size;
  std::string_view name;
};

constexpr std::array<DTypeRow, 14> kRows{{
    {DType::undefined, 0, "undefined"},
    {DType::f32, 4, "float32"},
    {DType::u8, 1, "uint8"},
    {DType::i8, 1, "int8"},
    {DType::u16, 2, "uint16"},
    {DType::i16, 2, "int16"},
    {DType::i32, 4, "int32"},
    {DType::i64, 8, "int64"},
    {DType::boolean, 1, "bool"},
    {DType::f16, 2, "float16"},
    {DType::f64, 8, "float64"},
    {DType::u32, 4, "uint32"},
    {DType::u64, 8, "uint64"},
    {DType::bf16, 2, "bfloat16"},
}};

const DTypeRow& row_of(DType dtype) {
  for (const DTypeRow& row : kRows) {
    if (row.dtype == dtype) return row;
  }
  return kRows[0];
}

}  // namespace

size_t size_of(DType dtype) { return row_of(dtype).size; }

std::string_view name_of(DType dtype) { return row_of(dtype).name; }

std::optional<DType> dtype_from_name(std::string_view name) {
  for (const DTypeRow& row : kRows) {
    if (row.name == name && row.dtype != DType::undefined) return row.dtype;
  }
  return std::nullopt;
}

std::optional<DType> dtype_from_onnx(int64_t code) {
  for (const DTypeRow& row : kRows) {
    if (static_cast<int64_t>(row.dtype) == code && code != 0) return row.dtype;
  }
  return std::nullopt;
}

bool is_float(DType dtype) { return kFloatTypes.contains(dtype); }
bool is_integer(DType dtype) { return kIntegerTypes.contains(dtype); }
bool is_signed_integer(DType dtype) { return kSignedIntegerTypes.contains(dtype); }

}  // namespace ortrain
