// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/cpu/strided_copy.h"
#include "ortrain/ir/tensor_data.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

KernelFn make_constant_of_shape(NodeSpec& spec) {
  const bool given = spec.node().attributes.contains("value");
  TensorData value = given ? spec.attrs().tensor("value") : TensorData::scalar(DType::f32, 0.0);
  return [value = std::move(value), count = spec.output(0).numel()](const KernelArgs& args) {
    fill_elements(args.out[0], count, size_of(value.dtype()), value.data());
  };
}

TensorData constant_of(const NodeSpec& spec) {
  const AttributeReader attrs = spec.attrs();
  const std::string& form = spec.node().attributes.begin()->first;
  if (form == "value") return attrs.tensor("value");
  if (form == "value_int") return TensorData::int_scalar(DType::i64, attrs.int_("value_int"));
  if (form == "value_ints") return TensorData::int64s(attrs.ints("value_ints"));
  if (form == "value_float") return TensorData::scalar(DType::f32, attrs.float_("value_float"));
  const std::vector<double>& values = attrs.floats("value_floats");
  return TensorData::from_values(DType::f32, {static_cast<int64_t>(values.size())},
                                 std::vector<float>(values.begin(), values.end()));
}

KernelFn make_constant(NodeSpec& spec) {
  return [value = constant_of(spec)](const KernelArgs& args) {
    if (value.bytes() != 0) std::memcpy(args.out[0], value.data(), value.bytes());
  };
}

KernelFn make_eye_like(NodeSpec& spec) {
  const int64_t rows = spec.output(0).dims[0];
  const int64_t columns = spec.output(0).dims[1];
  const int64_t k = spec.attrs().int_("k");
  // The diagonal's first element, and how many there are.
  int64_t first_row = 0, first_column = 0;
  int64_t count = 0;
  if (k > -rows && k < columns) {
    first_row = k < 0 ? -k : 0;
    first_column = k > 0 ? k : 0;
    count = std::min(rows - first_row, columns - first_column);
  }
  const size_t size = size_of(spec.output(0).dtype);
  const TensorData zero = TensorData::scalar(spec.output(0).dtype, 0.0);
  const TensorData one = TensorData::scalar(spec.output(0).dtype, 1.0);
  return [=, total = spec.output(0).numel()](const KernelArgs& args) {
    fill_elements(args.out[0], total, size, zero.data());
    std::byte* out = args.output<std::byte>(0);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = (first_row + i) * columns + first_column + i;
      std::memcpy(out + static_cast<size_t>(at) * size, one.data(), size);
    }
  };
}

}  // namespace

void register_constant_of_shape(KernelRegistry& registry);
void register_constant_of_shape(KernelRegistry& registry) {
  registry.add("ConstantOfShape", {{.name = "ref", .make = make_constant_of_shape}});
  registry.add("Constant", {{.name = "ref", .make = make_constant}});
  registry.add("EyeLike", {{.name = "ref", .make = make_eye_like}});
}

}  // namespace ortrain::cpu
