// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "ortrain/base/error.h"
#include "ortrain/runtime/external_functions.h"
#include "python/src/device.h"
#include "python/src/init.h"
#include "python/src/shared_object.h"
#include "python/src/tensor_exchange.h"

namespace nb = nanobind;

namespace ortrain::python {
namespace {

nb::list views_of(std::span<const ExternalTensor> tensors) {
  nb::list result;
  for (const ExternalTensor& tensor : tensors) {
    if (tensor.data == nullptr && tensor.spec.numel() != 0) {
      result.append(nb::none());
    } else {
      result.append(to_torch(tensor.data, tensor.spec, nullptr, place_of(tensor.device)));
    }
  }
  return result;
}

nb::list numbers_of(std::span<const int64_t> numbers) {
  nb::list result;
  for (int64_t number : numbers) result.append(number);
  return result;
}

// Two Python callables. Tensors are views of the run's memory and hold during the call only.
class PythonFunction : public ExternalFunction {
 public:
  PythonFunction(nb::object forward, nb::object backward)
      : forward_(shared(std::move(forward))), backward_(shared(std::move(backward))) {}

  std::shared_ptr<void> forward(std::span<const ExternalTensor> operands,
                                std::span<const ExternalTensor> results,
                                std::span<const int64_t> tracked) const override {
    nb::gil_scoped_acquire lock;
    nb::object kept = (*forward_)(views_of(operands), views_of(results), numbers_of(tracked));
    return tracked.empty() ? nullptr : std::shared_ptr<void>(shared(std::move(kept)));
  }

  void backward(void* kept, std::span<const int64_t> results,
                std::span<const ExternalTensor> incoming, std::span<const int64_t> operands,
                std::span<const ExternalTensor> gradients) const override {
    nb::gil_scoped_acquire lock;
    (*backward_)(*static_cast<nb::object*>(kept), numbers_of(results), views_of(incoming),
                 numbers_of(operands), views_of(gradients));
  }

 private:
  std::shared_ptr<nb::object> forward_;
  std::shared_ptr<nb::object> backward_;
};

}  // namespace

void init_external(nb::module_& module) {
  module.def(
      "add_external_function",
      [](const std::string& key, nb::object forward, nb::object backward) {
        ExternalFunctions::instance().add(
            key, std::make_shared<PythonFunction>(std::move(forward), std::move(backward)));
      },
      nb::arg("key"), nb::arg("forward"), nb::arg("backward"));
  module.def(
      "remove_external_function",
      [](const std::string& key) { ExternalFunctions::instance().remove(key); }, nb::arg("key"));
}

}  // namespace ortrain::python
