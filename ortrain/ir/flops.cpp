// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/flops.h"

namespace ortrain {

double count_of(const TensorSpec& spec) { return static_cast<double>(spec.numel()); }

double extent_from_end(const TensorSpec& spec, size_t from_end) {
  const size_t rank = spec.dims.size();
  return rank < from_end ? 1.0 : static_cast<double>(spec.dims[rank - from_end]);
}

double product_flops(const NodeSpec& spec, const std::string& transposed) {
  const bool trans_a = !transposed.empty() && spec.attrs().int_(transposed) != 0;
  return 2 * count_of(spec.output(0)) * extent_from_end(spec.input(0), trans_a ? 2 : 1);
}

double weight_grad_flops(const NodeSpec& spec) {
  return 2 * count_of(spec.input(0)) * extent_from_end(spec.input(1), 1);
}

}  // namespace ortrain
