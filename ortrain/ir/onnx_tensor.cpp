// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/onnx_tensor.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/base/error.h"

// raw_data is little-endian.
static_assert(std::endian::native == std::endian::little);

namespace ortrain {
namespace {

void check_bools(const void* data, size_t count) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  if (std::any_of(bytes, bytes + count, [](unsigned char byte) { return byte > 1; })) {
    throw InvalidModelError("a bool is neither 0 nor 1");
  }
}

// Stored<T>: what a typed field holds for one element of type T.
template <typename T, typename Field>
void copy_elements(const Field& field, void* destination) {
  auto* elements = static_cast<T*>(destination);
  for (size_t i = 0; i < field.size(); ++i) {
    const auto stored = field[i];
    if constexpr (std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>) {
      if (stored < 0 || stored > 0xffff) {
        throw InvalidModelError(str("element ", i, " is ", stored, ", no 16-bit pattern"));
      }
      elements[i].bits = static_cast<uint16_t>(stored);
    } else if constexpr (std::is_integral_v<T>) {
      using Limits = std::numeric_limits<T>;
      if (std::cmp_less(stored, Limits::min()) || std::cmp_greater(stored, Limits::max())) {
        throw InvalidModelError(str("element ", i, " is ", stored, ", out of range"));
      }
      elements[i] = static_cast<T>(stored);
    } else {
      elements[i] = stored;
    }
  }
}

struct FieldCounts {
  size_t floats, int32s, int64s, doubles, uint64s, strings;
  size_t total() const { return floats + int32s + int64s + doubles + uint64s + strings; }
};

FieldCounts count_fields(const onnx::TensorProto& tensor) {
  return {tensor.float_data().size(),  tensor.int32_data().size(),  tensor.int64_data().size(),
          tensor.double_data().size(), tensor.uint64_data().size(), tensor.string_data().size()};
}

size_t count_for(DType dtype, const FieldCounts& counts) {
  switch (dtype) {
    case DType::f32:
      return counts.floats;
    case DType::f64:
      return counts.doubles;
    case DType::i64:
      return counts.int64s;
    case DType::u32:
    case DType::u64:
      return counts.uint64s;
    default:
      return counts.int32s;
  }
}

void copy_field(const onnx::TensorProto& tensor, DType dtype, void* data) {
  switch (dtype) {
    case DType::f32:
      return copy_elements<float>(tensor.float_data(), data);
    case DType::f64:
      return copy_elements<double>(tensor.double_data(), data);
    case DType::i64:
      return copy_elements<int64_t>(tensor.int64_data(), data);
    case DType::u64:
      return copy_elements<uint64_t>(tensor.uint64_data(), data);
    case DType::u32:
      return copy_elements<uint32_t>(tensor.uint64_data(), data);
    case DType::i32:
      return copy_elements<int32_t>(tensor.int32_data(), data);
    case DType::i16:
      return copy_elements<int16_t>(tensor.int32_data(), data);
    case DType::i8:
      return copy_elements<int8_t>(tensor.int32_data(), data);
    case DType::u16:
      return copy_elements<uint16_t>(tensor.int32_data(), data);
    case DType::u8:
      return copy_elements<uint8_t>(tensor.int32_data(), data);
    case DType::f16:
      return copy_elements<Float16>(tensor.int32_data(), data);
    case DType::bf16:
      return copy_elements<BFloat16>(tensor.int32_data(), data);
    case DType::boolean:
      for (int32_t stored : tensor.int32_data()) {
        if (stored != 0 && stored != 1) throw InvalidModelError("a bool is neither 0 nor 1");
      }
      return copy_elements<uint8_t>(tensor.int32_data(), data);
    case DType::undefined:
      break;
  }
  throw InternalError("no field for this element type");
}

Dims dims_of(const onnx::TensorProto& tensor) {
  if (tensor.dims().size() > kMaxRank) {
    throw InvalidModelError(str("rank ", tensor.dims().size(), " is above ", kMaxRank));
  }
  return Dims(tensor.dims().begin(), tensor.dims().end());
}

// Throws when the product leaves int64.
uint64_t bytes_of(DType dtype, const Dims& dims) {
  int64_t bytes = 0;
  if (!__builtin_mul_overflow(num_elements(dims), static_cast<int64_t>(size_of(dtype)), &bytes)) {
    return static_cast<uint64_t>(bytes);
  }
  throw InvalidModelError(str("a tensor of shape ", dims_str(dims), " is too large"));
}

TensorData read_raw(onnx::TensorProto& tensor, DType dtype, const Dims& dims, uint64_t bytes) {
  const std::string& raw = tensor.raw_data();
  if (raw.size() != bytes) {
    throw InvalidModelError(str("raw_data has ", raw.size(), " bytes, ", name_of(dtype),
                                dims_str(dims), " needs ", bytes));
  }
  void* data = nullptr;
  TensorData result = TensorData::allocate(dtype, dims, &data);
  if (bytes > 0) std::memcpy(data, raw.data(), bytes);
  tensor.clear_raw_data();
  return result;
}

TensorData read_field(onnx::TensorProto& tensor, DType dtype, const Dims& dims,
                      const FieldCounts& counts) {
  const size_t count = count_for(dtype, counts);
  const auto numel = static_cast<uint64_t>(num_elements(dims));
  if (count != counts.total() || count != numel) {
    throw InvalidModelError(str(name_of(dtype), dims_str(dims), " needs ", numel,
                                " elements in its own field, which has ", count, " of ",
                                counts.total(), " stored"));
  }
  void* data = nullptr;
  TensorData result = TensorData::allocate(dtype, dims, &data);
  copy_field(tensor, dtype, data);
  return result;
}

}  // namespace

DType dtype_from_model(int32_t code) {
  const std::optional<DType> dtype = dtype_from_onnx(code);
  if (dtype) return *dtype;
  if (onnx::TensorProto::DataType_IsValid(code) && code != onnx::TensorProto::UNDEFINED) {
    throw UnsupportedError(str("element type ", onnx::TensorProto::DataType_Name(code)));
  }
  throw InvalidModelError(str("element type ", code, " does not exist"));
}

TensorData tensor_from_onnx(onnx::TensorProto& tensor, ExternalData& external) {
  const DType dtype = dtype_from_model(tensor.data_type());
  if (tensor.has_segment()) throw UnsupportedError("a tensor in segments");
  const Dims dims = dims_of(tensor);
  const uint64_t bytes = bytes_of(dtype, dims);
  const FieldCounts counts = count_fields(tensor);
  const bool is_external = tensor.data_location() == onnx::TensorProto::EXTERNAL;
  if (!is_external && tensor.external_data_size() > 0) {
    throw InvalidModelError("external data are given, and data_location is another");
  }
  if (static_cast<int>(is_external) + static_cast<int>(tensor.has_raw_data()) +
          static_cast<int>(counts.total() > 0) >
      1) {
    throw InvalidModelError("the contents are given twice");
  }
  TensorData result = is_external             ? external.read(tensor, dtype, dims, bytes)
                      : tensor.has_raw_data() ? read_raw(tensor, dtype, dims, bytes)
                                              : read_field(tensor, dtype, dims, counts);
  if (dtype == DType::boolean) check_bools(result.data(), result.bytes());
  const std::string name = tensor.name();
  tensor = onnx::TensorProto();
  tensor.set_name(name);
  return result;
}

void write_tensor_type(const TensorData& data, onnx::TensorProto& tensor) {
  tensor.set_data_type(static_cast<int32_t>(data.dtype()));
  for (int64_t dim : data.dims()) tensor.add_dims(dim);
}

void write_tensor(const TensorData& data, onnx::TensorProto& tensor) {
  write_tensor_type(data, tensor);
  tensor.set_raw_data(data.data(), data.bytes());
}

}  // namespace ortrain
