// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/onnx_io.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>

#include "ortrain/base/error.h"
#include "ortrain/runtime/block_pool.h"
#include "python/src/init.h"
#include "python/src/tensor_exchange.h"

namespace nb = nanobind;

namespace ortrain::python {
namespace {

LoadOptions load_options(const std::string& initializers, std::vector<std::string> parameter_names,
                         std::optional<std::filesystem::path> external_data_directory,
                         bool allow_links, uint64_t memory_limit) {
  LoadOptions options;
  if (initializers == "parameters") {
    options.initializers = LoadOptions::Initializers::parameters;
  } else if (initializers == "weights") {
    options.initializers = LoadOptions::Initializers::weights;
  } else if (initializers != "constants") {
    throw InvalidModelError(str("initializers is '", initializers,
                                "', expected 'constants', 'parameters' or 'weights'"));
  }
  options.parameter_names = std::move(parameter_names);
  options.external_data_directory = std::move(external_data_directory);
  options.allow_links = allow_links;
  options.memory_limit = memory_limit;
  return options;
}

// A tensor of its own, which the caller may write to.
nb::object to_torch_copy(const TensorData& data) {
  std::shared_ptr<Block> block = BlockPool::host()->tensor(data.bytes());
  if (data.bytes() > 0) std::memcpy(block->data(), data.data(), data.bytes());
  return to_torch(RunOutput{TensorSpec{data.dtype(), data.dims()}, std::move(block)});
}

nb::tuple to_python(OnnxModel model) {
  nb::dict values;
  for (const auto& [target, data] : model.values) values[target.c_str()] = to_torch_copy(data);
  return nb::make_tuple(std::make_shared<Graph>(std::move(model.graph)), values);
}

nb::tuple load(nb::handle source, const std::string& initializers,
               std::vector<std::string> parameter_names,
               std::optional<std::filesystem::path> external_data_directory, bool allow_links,
               uint64_t memory_limit) {
  const LoadOptions options =
      load_options(initializers, std::move(parameter_names), std::move(external_data_directory),
                   allow_links, memory_limit);
  if (nb::isinstance<nb::bytes>(source)) {
    const auto bytes = nb::cast<nb::bytes>(source);
    const std::span<const std::byte> view(static_cast<const std::byte*>(bytes.data()),
                                          bytes.size());
    OnnxModel model;
    {
      nb::gil_scoped_release release;
      model = load_onnx_model_bytes(view, options);
    }
    return to_python(std::move(model));
  }
  const auto path = nb::cast<std::filesystem::path>(source);
  OnnxModel model;
  {
    nb::gil_scoped_release release;
    model = load_onnx_model(path, options);
  }
  return to_python(std::move(model));
}

void save(const Graph& graph, const std::filesystem::path& path, const nb::dict& values,
          std::optional<size_t> external_data_threshold, std::string external_data_file,
          bool lists_initializers) {
  SaveOptions options;
  options.values = copy_to_tensor_data(values);
  options.external_data_threshold = external_data_threshold;
  options.external_data_file = std::move(external_data_file);
  options.lists_initializers = lists_initializers;
  nb::gil_scoped_release release;
  save_onnx(graph, path, options);
}

nb::bytes to_bytes(const Graph& graph, const nb::dict& values) {
  SaveOptions options;
  options.values = copy_to_tensor_data(values);
  std::string bytes;
  {
    nb::gil_scoped_release release;
    bytes = to_onnx_bytes(graph, options);
  }
  return nb::bytes(bytes.data(), bytes.size());
}

}  // namespace

void init_onnx_io(nb::module_& module) {
  module.def("load_onnx_model", &load, nb::arg("source"), nb::kw_only(),
             nb::arg("initializers") = "constants",
             nb::arg("parameter_names") = std::vector<std::string>(),
             nb::arg("external_data_directory") = nb::none(), nb::arg("allow_links") = false,
             nb::arg("memory_limit") = 0,
             "Load a model from a path or bytes: the graph, and the values of its parameters and "
             "buffers as tensors by name.");
  module.def(
      "load_onnx",
      [](nb::handle source) {
        return nb::object(load(source, "constants", {}, std::nullopt, false, 0)[0]);
      },
      nb::arg("source"), "Load the graph of a model from a path or bytes.");
  nb::borrow<nb::class_<Graph>>(module.attr("Graph"))
      .def("save", &save, nb::arg("path"), nb::arg("values") = nb::dict(),
           nb::arg("external_data_threshold") = nb::none(), nb::arg("external_data_file") = "",
           nb::arg("lists_initializers") = true,
           "Write an ONNX model; `values` are tensors by the name of a parameter or buffer.")
      .def("to_onnx_bytes", &to_bytes, nb::arg("values") = nb::dict());
}

}  // namespace ortrain::python
