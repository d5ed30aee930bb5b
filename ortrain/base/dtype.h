// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string_view>

namespace ortrain {

// Element types. The numbers are those of onnx.TensorProto.DataType.
enum class DType : uint8_t {
  undefined = 0,
  f32 = 1,
  u8 = 2,
  i8 = 3,
  u16 = 4,
  i16 = 5,
  i32 = 6,
  i64 = 7,
  boolean = 9,
  f16 = 10,
  f64 = 11,
  u32 = 12,
  u64 = 13,
  bf16 = 16,
};

// Bytes of one element; 0 for undefined.
size_t size_of(DType dtype);
// "float32", "bfloat16", "int64", "bool", ...
std::string_view name_of(DType dtype);
std::optional<DType> dtype_from_name(std::string_view name);
// nullopt for ONNX types that the engine does not hold (string, complex, float8, int4).
std::optional<DType> dtype_from_onnx(int64_t code);

bool is_float(DType dtype);
bool is_integer(DType dtype);  // signed and unsigned, without bool
bool is_signed_integer(DType dtype);

// A set of element types, used for type constraints.
class DTypeSet {
 public:
  constexpr DTypeSet() = default;
  constexpr DTypeSet(std::initializer_list<DType> types) {
    for (DType type : types) bits_ |= bit(type);
  }
  constexpr bool contains(DType type) const { return (bits_ & bit(type)) != 0; }
  constexpr bool empty() const { return bits_ == 0; }
  constexpr DTypeSet operator|(DTypeSet other) const { return DTypeSet(bits_ | other.bits_); }
  constexpr DTypeSet operator&(DTypeSet other) const { return DTypeSet(bits_ & other.bits_); }
  constexpr bool operator==(const DTypeSet&) const = default;

 private:
  constexpr explicit DTypeSet(uint32_t bits) : bits_(bits) {}
  static constexpr uint32_t bit(DType type) { return uint32_t{1} << static_cast<unsigned>(type); }
  uint32_t bits_ = 0;
};

inline constexpr DTypeSet kFullFloatTypes{DType::f32, DType::f64};
inline constexpr DTypeSet kFloatTypes{DType::f32, DType::f64, DType::f16, DType::bf16};
inline constexpr DTypeSet kIndexTypes{DType::i32, DType::i64};
inline constexpr DTypeSet kSignedIntegerTypes{DType::i8, DType::i16, DType::i32, DType::i64};
inline constexpr DTypeSet kIntegerTypes{DType::i8, DType::i16, DType::i32, DType::i64,
                                        DType::u8, DType::u16, DType::u32, DType::u64};
inline constexpr DTypeSet kBoolTypes{DType::boolean};
inline constexpr DTypeSet kNumericTypes = kFloatTypes | kIntegerTypes;
inline constexpr DTypeSet kAllTypes = kNumericTypes | kBoolTypes;

}  // namespace ortrain
