// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

namespace ortrain::python {

void init_errors(nanobind::module_& module);
void init_graph(nanobind::module_& module);
void init_training(nanobind::module_& module);
void init_checkpoint(nanobind::module_& module);  // after init_training
void init_device(nanobind::module_& module);
void init_session(nanobind::module_& module);
void init_external(nanobind::module_& module);
void init_packing(nanobind::module_& module);
void init_module_guard(nanobind::module_& module);
void init_code_recorder(nanobind::module_& module);
void init_registry(nanobind::module_& module);
void init_onnx_io(nanobind::module_& module);  // after init_graph
void init_environment(nanobind::module_& module);
void init_gradient_norm(nanobind::module_& module);
void init_optimizer(nanobind::module_& module);
void init_extension(nanobind::module_& module);

}  // namespace ortrain::python
