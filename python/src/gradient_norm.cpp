// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <nanobind/nanobind.h>

#include <vector>

#include "ortrain/base/error.h"
#include "ortrain/cpu/optimizer.h"
#include "python/src/init.h"
#include "python/src/tensor_exchange.h"

namespace nb = nanobind;

namespace ortrain::python {
namespace {

double norm_of(const nb::list& list) {
  std::vector<BorrowedTensor> held;
  std::vector<cpu::OptimizerTensor> tensors;
  for (nb::handle item : list) {
    const size_t index = held.size();
    held.push_back(borrow(item, str("tensor ", index)));
    const BorrowedTensor& tensor = held.back();
    if (!is_float(tensor.dtype)) {
      throw DTypeError(str("tensor ", index, " is ", name_of(tensor.dtype),
                           ", expected float32, float64, bfloat16 or float16"));
    }
    // The step reads gradients through the same description, which it does not write.
    tensors.push_back({.size = num_elements(tensor.dims),
                       .param = {},
                       .grad = {const_cast<void*>(tensor.data), cpu::storage_of(tensor.dtype)},
                       .states = {}});
  }
  nb::gil_scoped_release release;
  cpu::TensorBlocks blocks;
  blocks.assign(tensors);
  return cpu::gradient_norm(tensors, blocks);
}

}  // namespace

void init_gradient_norm(nb::module_& module) {
  module.def("gradient_norm", &norm_of, nb::arg("tensors"),
             "The 2-norm of all elements of the tensors together, added up in float64; NaN and "
             "infinity show.");
}

}  // namespace ortrain::python
