// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "python/src/tensor_order.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace ortrain::python {

Dims dims_of(const TensorView& view) { return Dims(view.dims, view.dims + view.rank); }

int64_t numel(const TensorView& view) {
  int64_t count = 1;
  for (int i = 0; i < view.rank; ++i) count *= view.dims[i];
  return count;
}

bool same_dims(const TensorView& a, const TensorView& b) {
  return a.rank == b.rank && std::equal(a.dims, a.dims + a.rank, b.dims);
}

bool is_dense(const TensorView& view) {
  if (is_row_major(view)) return true;
  std::vector<std::pair<int64_t, int64_t>> axes;  // stride, size
  for (int i = 0; i < view.rank; ++i) {
    if (view.dims[i] != 1) axes.emplace_back(view.strides[i], view.dims[i]);
  }
  std::sort(axes.begin(), axes.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : axes) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

bool same_order(const TensorView& dense, const TensorView& other) {
  if (is_row_major(dense)) return is_row_major(other);
  if (other.strides == nullptr) return false;
  for (int i = 0; i < dense.rank; ++i) {
    if (dense.dims[i] != 1 && dense.strides[i] != other.strides[i]) return false;
  }
  return true;
}

nb::object copy_in_order(nb::handle tensor, const TensorView& like) {
  const Dims dims = dims_of(like);
  const Dims order = is_dense(like) && like.strides != nullptr
                         ? Dims(like.strides, like.strides + like.rank)
                         : strides_of(dims);
  nb::list sizes;
  nb::list strides;
  for (int64_t size : dims) sizes.append(size);
  for (int64_t stride : order) strides.append(stride);
  nb::object source = tensor.attr("detach")();
  nb::object copy = nb::module_::import_("torch").attr("empty_strided")(
      sizes, strides, nb::arg("dtype") = source.attr("dtype"),
      nb::arg("device") = source.attr("device"));
  copy.attr("copy_")(source);
  return copy;
}

}  // namespace ortrain::python
