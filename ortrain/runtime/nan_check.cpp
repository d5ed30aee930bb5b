// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/runtime/nan_check.h"

#include <cmath>
#include <vector>

#include "ortrain/base/dtype_dispatch.h"

namespace ortrain {

NanCheck::Found NanCheck::find_nan(const TensorSpec& spec, const void* data) const {
  if (data == nullptr || !spec.defined() || !is_float(spec.dtype)) return {};
  std::vector<char> copied;
  if (!device_->is_host()) {
    copied.resize(spec.bytes());
    device_->download(copied.data(), data, copied.size(), stream_);
    data = copied.data();
  }
  return dispatch_float(spec.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* values = static_cast<const T*>(data);
    const int64_t n = spec.numel();
    Found found;
    for (int64_t i = 0; i < n; ++i) {
      if (!std::isnan(static_cast<ComputeType<T>>(values[i]))) continue;
      if (found.count++ == 0) found.first = i;
    }
    return found;
  });
}

// "3 of float32[2, 3] are NaN, the first at [0, 2]"
std::string NanCheck::described(const TensorSpec& spec, Found found) {
  Dims position(spec.dims.size());
  int64_t rest = found.first;
  for (size_t k = spec.dims.size(); k-- > 0;) {
    position[k] = rest % spec.dims[k];
    rest /= spec.dims[k];
  }
  return str(found.count, " of ", tensor_spec_str(spec), found.count == 1 ? " is" : " are",
             " NaN, the first at ", dims_str(position));
}

void NanCheck::see_input(const Graph& graph, const GraphInput& input, const TensorSpec& spec,
                         const void* data) {
  if (!first_.empty()) return;
  const Found found = find_nan(spec, data);
  if (found.count == 0) return;
  const std::string& name = input.target.empty() ? graph.value(input.value).name : input.target;
  const char* what = input.role == InputRole::gradient ? "the gradient handed in for" : "the input";
  first_ = str(what, " '", name, "': ", described(spec, found));
}

void NanCheck::see_node(const Node& node, std::span<const TensorSpec> specs, void* const* outputs) {
  if (!first_.empty()) return;
  for (size_t k = 0; k < specs.size(); ++k) {
    const Found found = find_nan(specs[k], outputs[k]);
    if (found.count == 0) continue;
    first_ =
        str(Graph::context(node), "in the ", node.phase == Phase::backward ? "backward" : "forward",
            ", output ", k, ": ", described(specs[k], found));
    return;
  }
}

void NanCheck::require_numbers(const GraphOutput& output, const TensorSpec& spec,
                               const void* data) const {
  const Found found = find_nan(spec, data);
  if (found.count == 0) return;
  const std::string what = output.role == OutputRole::gradient
                               ? str("the gradient of '", output.target, "'")
                               : str("the result '", output.name, "'");
  throw NanError(str(what, ": ", described(spec, found), ". The first NaN of this step: ",
                     first_.empty() ? "not seen before" : first_));
}

}  // namespace ortrain
