// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/node_spec.h"

#include "ortrain/ir/tensor_data.h"

namespace ortrain {

std::string tensor_spec_str(const TensorSpec& spec) {
  return str(name_of(spec.dtype), dims_str(spec.dims));
}

std::optional<std::vector<int64_t>> NodeSpec::constant_ints(size_t i) const {
  const void* data = constant_input(i);
  if (!has_input(i) || is_float(input(i).dtype)) return std::nullopt;
  if (data == nullptr && input(i).numel() != 0) return std::nullopt;
  return TensorData(input(i).dtype, input(i).dims, data, nullptr).to_int64s();
}

}  // namespace ortrain
