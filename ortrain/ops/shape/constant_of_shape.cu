// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "ortrain/gpu/strided_copy.h"
#include "ortrain/ir/tensor_data.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

uint64_t bits_of(const TensorData& element) {
  uint64_t bits = 0;
  std::memcpy(&bits, element.data(), size_of(element.dtype()));
  return bits;
}

KernelFn make_constant_of_shape(NodeSpec& spec) {
  const bool given = spec.node().attributes.contains("value");
  const TensorData value = given ? spec.attrs().tensor("value") : TensorData::scalar(DType::f32, 0);
  return [bits = bits_of(value), size = size_of(value.dtype()),
          count = spec.output(0).numel()](const KernelArgs& args) {
    fill_elements(args.out[0], count, size, bits, args.stream);
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

// The plan's constants are elsewhere: this is one that no pass folded.
KernelFn make_constant(NodeSpec& spec, Device& device) {
  const TensorData value = constant_of(spec);
  const PlacedConstants placed = place_constants(device, {value});
  return [from = placed.addresses[0], block = placed.block,
          bytes = static_cast<int64_t>(value.bytes())](const KernelArgs& args) {
    copy_bytes(from, args.out[0], bytes, args.stream);
  };
}

template <int kSize>
__global__ void __launch_bounds__(kItemThreads)
    eye(int64_t count, int64_t columns, int64_t k, typename WordOf<8>::type one_bits,
        void* address) {
  using Word = typename WordOf<kSize>::type;
  Word* out = static_cast<Word*>(address);
  const Word one = static_cast<Word>(one_bits);
  for_each_item(count, [&](int64_t i) {
    const int64_t row = i / columns;
    out[i] = i - row * columns - row == k ? one : static_cast<Word>(0);
  });
}

KernelFn make_eye_like(NodeSpec& spec) {
  const TensorSpec& output = spec.output(0);
  return [count = output.numel(), columns = output.dims[1], k = spec.attrs().int_("k"),
          one = bits_of(TensorData::scalar(output.dtype, 1.0)),
          size = size_of(output.dtype)](const KernelArgs& args) {
    const auto run = [&](auto bytes) {
      launch(eye<decltype(bytes)::value>, items(count), args.stream, count, columns, k, one,
             args.out[0]);
    };
    switch (size) {
      case 1:
        return run(std::integral_constant<int, 1>());
      case 2:
        return run(std::integral_constant<int, 2>());
      case 4:
        return run(std::integral_constant<int, 4>());
      default:
        return run(std::integral_constant<int, 8>());
    }
  };
}

}  // namespace

void register_constant_of_shape(KernelRegistry& registry) {
  Device& device = registry.device();
  registry.add("ConstantOfShape", {{.name = "fill", .make = make_constant_of_shape}});
  registry.add("Constant", {{.name = "copy", .make = [&device](NodeSpec& spec) {
                               return make_constant(spec, device);
                             }}});
  registry.add("EyeLike", {{.name = "diagonal", .make = make_eye_like}});
}

}  // namespace ortrain::gpu
