// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>

#include "ortrain/passes/pipeline.h"
#include "ortrain/passes/remove_padding.h"
#include "ortrain/runtime/block_pool.h"
#include "ortrain/runtime/row_packing.h"
#include "python/src/init.h"
#include "python/src/tensor_exchange.h"

namespace nb = nanobind;

namespace ortrain::python {
namespace {

nb::object to_tensor(const std::vector<int64_t>& values) {
  RunOutput output{{DType::i64, {static_cast<int64_t>(values.size())}},
                   BlockPool::host()->tensor(values.size() * sizeof(int64_t))};
  if (!values.empty()) {
    std::memcpy(output.block->data(), values.data(), values.size() * sizeof(int64_t));
  }
  return to_torch(output);
}

nb::object pack(nb::list masks, int64_t batch, int64_t length, const std::vector<int64_t>& picked) {
  std::vector<BorrowedTensor> borrowed;
  std::vector<MaskView> views;
  for (nb::handle mask : masks) {
    borrowed.push_back(borrow(mask, "an attention mask"));
    views.push_back({borrowed.back().data, borrowed.back().dtype, borrowed.back().dims});
  }
  std::optional<RowPacking> made;
  {
    nb::gil_scoped_release release;
    made = pack_rows(views, batch, length, picked);
  }
  if (!made) return nb::none();
  nb::list inputs;
  for (const auto* values : {&made->positions, &made->columns, &made->sequences, &made->offsets}) {
    inputs.append(to_tensor(*values));
  }
  for (const std::vector<int64_t>& places : made->picked) inputs.append(to_tensor(places));
  return nb::make_tuple(made->causal, inputs);
}

}  // namespace

void init_packing(nb::module_& module) {
  module.def(
      "remove_padding",
      [](const Graph& graph, bool causal) -> nb::object {
        if (is_disabled("remove_padding")) return nb::none();
        std::optional<PaddingRemoval> found = remove_padding(graph, causal);
        if (!found) return nb::none();
        nb::dict result;
        result["masks"] = std::make_shared<Graph>(std::move(found->masks));
        result["mask_inputs"] = found->mask_inputs;
        result["packed"] = std::make_shared<Graph>(std::move(found->packed));
        result["picked"] = found->picked;
        result["batch"] = nb::make_tuple(found->batch.input, found->batch.axis);
        result["length"] = nb::make_tuple(found->length.input, found->length.axis);
        return result;
      },
      nb::arg("graph"), nb::arg("causal"));
  module.def("pack_rows", &pack, nb::arg("masks"), nb::arg("batch"), nb::arg("length"),
             nb::arg("picked"));
}

}  // namespace ortrain::python
