// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/training/checkpoint.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "ortrain/base/error.h"
#include "python/src/init.h"
#include "python/src/tensor_exchange.h"

namespace nb = nanobind;

namespace ortrain::python {
namespace {

// An int is no float here: each property comes back as what it was.
CheckpointProperties properties_from(const nb::dict& given) {
  CheckpointProperties result;
  for (auto [key, value] : given) {
    const std::string name = nb::cast<std::string>(key);
    if (nb::isinstance<nb::str>(value)) {
      result[name] = nb::cast<std::string>(value);
    } else if (nb::isinstance<nb::float_>(value)) {
      result[name] = nb::cast<double>(value);
    } else if (nb::isinstance<nb::int_>(value) && !nb::isinstance<nb::bool_>(value)) {
      result[name] = nb::cast<int64_t>(value);
    } else {
      throw InvalidModelError(str("property '", name, "' is no int, float or str"));
    }
  }
  return result;
}

}  // namespace

void init_checkpoint(nb::module_& module) {
  nb::class_<Checkpoint>(module, "Checkpoint")
      .def_ro("path", &Checkpoint::path)
      .def_prop_ro("tensors", [](const Checkpoint& c) { return to_torch(c.tensors); })
      .def_prop_ro("optimizer", [](const Checkpoint& c) { return to_torch(c.optimizer); })
      .def_ro("has_optimizer", &Checkpoint::has_optimizer)
      .def_ro("steps", &Checkpoint::steps)
      .def_ro("updates", &Checkpoint::updates)
      .def_ro("learning_rate", &Checkpoint::learning_rate)
      .def_ro("properties", &Checkpoint::properties)
      .def_ro("passed_over", &Checkpoint::passed_over);
  module.def(
      "save_checkpoint",
      [](const std::filesystem::path& folder, TrainingState& state, const nb::dict& properties,
         bool optimizer, size_t keep) {
        const CheckpointProperties kept = properties_from(properties);
        nb::gil_scoped_release release;
        return save_checkpoint(folder, state, kept, {.optimizer = optimizer, .keep = keep});
      },
      nb::arg("folder"), nb::arg("state"), nb::arg("properties") = nb::dict(),
      nb::arg("optimizer") = true, nb::arg("keep") = 2);
  module.def("load_checkpoint", &load_checkpoint, nb::arg("folder"),
             nb::call_guard<nb::gil_scoped_release>());
  module.def("restore_checkpoint", &restore, nb::arg("state"), nb::arg("checkpoint"),
             nb::arg("strict") = true, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace ortrain::python
