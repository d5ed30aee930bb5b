// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "ortrain/base/flags.h"
#include "ortrain/base/log.h"
#include "ortrain/cpu/target.h"
#include "python/src/init.h"

namespace nb = nanobind;

namespace ortrain::python {
namespace {

nb::dict build_info() {
  nb::dict info;
  info["compiler"] = std::string("gcc ") + __VERSION__;
#ifdef NDEBUG
  info["assertions"] = false;
#else
  info["assertions"] = true;
#endif
  return info;
}

}  // namespace

void init_environment(nb::module_& module) {
  module.def("build_info", &build_info);
  module.def("flags", [] {
    nb::list result;
    for (const Flag& flag : all_flags()) {
      result.append(nb::make_tuple(std::string(flag.name), std::string(flag.default_value),
                                   std::string(flag.help)));
    }
    return result;
  });
  // Lines of the categories that ORTRAIN_LOG names go to `sink(category, line)`.
  const auto set_sink = [](nb::object sink) {
    if (sink.is_none()) {
      set_log_sink(nullptr);
      return;
    }
    // Leaked on purpose: a line may be logged while the interpreter shuts down.
    auto* held = new nb::object(std::move(sink));
    // The interpreter's lock serializes the calls, and may be held by who logs.
    set_log_sink(
        [held](std::string_view category, std::string_view line) {
          if (!Py_IsInitialized()) return;
          nb::gil_scoped_acquire gil;
          (*held)(std::string(category), std::string(line));
        },
        true);
  };
  module.def("set_log_sink", set_sink, nb::arg("sink").none());
  module.def("simd_target", [] { return std::string(cpu::simd_target_name()); });
  module.def("gemm_backend", [] { return std::string(cpu::gemm_backend_name()); });
}

}  // namespace ortrain::python
