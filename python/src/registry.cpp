// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "ortrain/base/error.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/passes/pipeline.h"
#include "ortrain/runtime/kernel_registry.h"
#include "ortrain/testing/harness.h"
#include "python/src/attribute_conversion.h"
#include "python/src/device.h"
#include "python/src/init.h"
#include "python/src/tensor_exchange.h"

namespace nb = nanobind;

namespace ortrain::python {
namespace {

constexpr DType kListedTypes[] = {DType::f32, DType::f64, DType::f16,    DType::bf16, DType::i8,
                                  DType::i16, DType::i32, DType::i64,    DType::u8,   DType::u16,
                                  DType::u32, DType::u64, DType::boolean};

nb::list type_names(DTypeSet types) {
  nb::list result;
  for (DType type : kListedTypes) {
    if (types.contains(type)) result.append(std::string(name_of(type)));
  }
  return result;
}

const char* name_of_gradient(Differentiability differentiability) {
  switch (differentiability) {
    case Differentiability::rule:
      return "yes";
    case Differentiability::none:
      return "none by definition";
    case Differentiability::missing:
      return "missing";
  }
  return "";
}

const char* name_of_precision(Precision precision) {
  switch (precision) {
    case Precision::promote:
      return "promote";
    case Precision::allow:
      return "allow";
    case Precision::deny:
      return "deny";
    case Precision::keep:
      return "keep";
  }
  return "";
}

std::string full_name(const OpDef& def) {
  return def.domain.empty() ? def.name : def.domain + "::" + def.name;
}

nb::list list_ops() {
  nb::list result;
  for (const OpDef* def : op_registry().all()) {
    nb::dict row;
    row["name"] = def->name;
    row["domain"] = def->domain;
    row["since"] = def->since;
    row["summary"] = def->summary;
    row["gradient"] = name_of_gradient(def->differentiability());
    row["precision"] = name_of_precision(def->precision);
    nb::dict types;
    for (const auto& [variable, set] : def->types) types[variable.c_str()] = type_names(set);
    row["types"] = types;
    nb::list kernels;
    for (const Kernel& kernel : cpu_kernels().find(def->domain, def->name)) {
      kernels.append(nb::make_tuple(kernel.name, type_names(kernel.types)));
    }
    row["kernels"] = kernels;
    const std::string full = full_name(*def);
    int cases = 0;
    for (const testing::OpCase& op_case : testing::all_cases().all()) {
      if (op_case.op == full) ++cases;
    }
    row["cases"] = cases;
    result.append(row);
  }
  return result;
}

nb::list list_composites() {
  nb::list result;
  for (const bool earlier : {false, true}) {
    const OpRegistry& registry = op_registry();
    for (const OpDef* def : earlier ? registry.earlier() : registry.composites()) {
      nb::dict row;
      row["name"] = def->name;
      row["domain"] = def->domain;
      row["since"] = def->since;
      row["until"] = def->until;
      row["summary"] = def->summary;
      result.append(row);
    }
  }
  return result;
}

const testing::OpCase& case_at(size_t index) {
  const auto& cases = testing::all_cases().all();
  if (index >= cases.size()) throw IndexError(str("there is no case ", index));
  return cases[index];
}

nb::list list_cases() {
  nb::list result;
  for (const testing::OpCase& op_case : testing::all_cases().all()) {
    nb::dict row;
    row["op"] = op_case.op;
    row["name"] = op_case.name;
    row["refusal"] = op_case.refusal.has_value();
    row["outputs"] = op_case.outputs;
    row["tolerance"] = op_case.tolerance;
    nb::list types;
    for (DType type : testing::types_under_test(op_case)) types.append(std::string(name_of(type)));
    row["types"] = types;
    row["has_gradient_check"] = testing::has_gradient_check(op_case);
    result.append(row);
  }
  return result;
}

nb::dict row_dict(const testing::CheckRow& row) {
  nb::dict result;
  result["name"] = row.name;
  result["kernel"] = row.kernel;
  result["type"] = std::string(name_of(row.type));
  result["passed"] = row.passed;
  result["refused"] = row.refused;
  result["difference"] = row.difference;
  result["message"] = row.message;
  return result;
}

// What a device runs an operator with, best first: {"Softmax": ["lines", "host"]}.
nb::dict list_kernels(const std::string& device) {
  const KernelRegistry& kernels = *find_device(device).kernels;
  nb::dict result;
  for (const OpDef* def : op_registry().all()) {
    nb::list names;
    for (const Kernel& kernel : kernels.find(def->domain, def->name)) names.append(kernel.name);
    result[full_name(*def).c_str()] = names;
  }
  return result;
}

// Inputs, attributes and outputs of one case, for a check against an outside reference.
nb::dict run_case(size_t index, const std::string& type, const std::string& kernel,
                  const std::string& device) {
  const testing::OpCase& op_case = case_at(index);
  const std::optional<DType> dtype = dtype_from_name(type);
  if (!dtype) throw DTypeError(str("'", type, "' is no element type"));
  const std::vector<TensorData> inputs = testing::make_inputs(op_case, *dtype);
  const std::vector<TensorData> outputs =
      testing::run_kernel(op_case, inputs, kernel, *find_device(device).kernels);
  nb::dict result;
  nb::list input_list;
  for (const TensorData& input : inputs) input_list.append(to_python(input));
  nb::list output_list;
  for (const TensorData& output : outputs) output_list.append(to_python(output));
  nb::dict attributes;
  for (const auto& [name, attribute] : op_case.attributes) {
    attributes[name.c_str()] = to_python(attribute);
  }
  result["inputs"] = input_list;
  result["outputs"] = output_list;
  result["attributes"] = attributes;
  return result;
}

}  // namespace

void init_registry(nb::module_& module) {
  module.def("composites", &list_composites);
  module.def("ops", &list_ops);
  module.def("passes", [] {
    nb::list result;
    for (const PassInfo& pass : all_passes()) {
      result.append(nb::make_tuple(pass.name, pass.stage, pass.summary));
    }
    return result;
  });
  module.def("op_cases", &list_cases);
  module.def("device_kernels", &list_kernels, nb::arg("device"));
  module.def("run_case", &run_case, nb::arg("index"), nb::arg("type"), nb::arg("kernel") = "",
             nb::arg("device") = "cpu");
  // `device` names whose kernels are checked; the reference is always the CPU's.
  module.def(
      "check_case",
      [](size_t index, const std::string& device) {
        nb::list rows;
        for (const testing::CheckRow& row :
             testing::check_kernels(case_at(index), *find_device(device).kernels)) {
          rows.append(row_dict(row));
        }
        return rows;
      },
      nb::arg("index"), nb::arg("device") = "cpu");
  module.def(
      "check_case_gradient",
      [](size_t index, const std::string& device) {
        return row_dict(testing::check_gradient(case_at(index), *find_device(device).kernels));
      },
      nb::arg("index"), nb::arg("device") = "cpu");
}

}  // namespace ortrain::python
