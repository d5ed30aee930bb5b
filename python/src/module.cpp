// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <nanobind/nanobind.h>

#include "python/src/init.h"

NB_MODULE(_core, module) {
  module.doc() = "The Ortrain engine.";
  // Tensors and modules alive at exit are no leaks, and the library never prints.
  nanobind::set_leak_warnings(false);
  ortrain::python::init_errors(module);
  ortrain::python::init_graph(module);
  ortrain::python::init_onnx_io(module);
  ortrain::python::init_device(module);
  ortrain::python::init_session(module);
  ortrain::python::init_training(module);
  ortrain::python::init_checkpoint(module);
  ortrain::python::init_external(module);
  ortrain::python::init_packing(module);
  ortrain::python::init_module_guard(module);
  ortrain::python::init_code_recorder(module);
  ortrain::python::init_registry(module);
  ortrain::python::init_environment(module);
  ortrain::python::init_gradient_norm(module);
  ortrain::python::init_optimizer(module);
  ortrain::python::init_extension(module);
}
