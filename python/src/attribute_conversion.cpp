// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "python/src/attribute_conversion.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "ortrain/base/error.h"
#include "python/src/tensor_exchange.h"

namespace nb = nanobind;

namespace ortrain::python {
namespace {

size_t expected_kind(const FormalAttribute* formal) {
  if (formal == nullptr) return SIZE_MAX;
  return formal->has_default ? formal->default_value.index() : static_cast<size_t>(formal->kind);
}

Attribute attribute_from(nb::handle value, const FormalAttribute* formal, const std::string& name) {
  const size_t kind = expected_kind(formal);
  const bool wants_float = kind == static_cast<size_t>(AttributeKind::float_);
  if (nb::isinstance<nb::bool_>(value)) {
    return static_cast<int64_t>(nb::cast<bool>(value));
  }
  if (nb::isinstance<nb::int_>(value)) {
    if (wants_float) return nb::cast<double>(value);
    return nb::cast<int64_t>(value);
  }
  if (nb::isinstance<nb::float_>(value)) return nb::cast<double>(value);
  if (nb::isinstance<nb::str>(value)) return nb::cast<std::string>(value);
  if (nb::isinstance<nb::list>(value) || nb::isinstance<nb::tuple>(value)) {
    if (kind == static_cast<size_t>(AttributeKind::floats)) {
      return nb::cast<std::vector<double>>(value);
    }
    if (kind == static_cast<size_t>(AttributeKind::strings)) {
      return nb::cast<std::vector<std::string>>(value);
    }
    return nb::cast<std::vector<int64_t>>(value);
  }
  return copy_to_tensor_data(value, str("attribute '", name, "'"));
}

}  // namespace

Attributes attributes_from(nb::handle given, const OpDef& def) {
  Attributes attributes;
  for (auto [key, value] : nb::borrow<nb::dict>(given)) {
    const std::string name = nb::cast<std::string>(key);
    attributes.emplace(name, attribute_from(value, def.find_attribute(name), name));
  }
  return attributes;
}

nb::object to_python(const TensorData& tensor) {
  if (!tensor.defined()) return nb::none();
  RunOutput output{{tensor.dtype(), tensor.dims()}, BlockPool::host()->tensor(tensor.bytes())};
  if (tensor.bytes() > 0) std::memcpy(output.block->data(), tensor.data(), tensor.bytes());
  return to_torch(output);
}

nb::object to_python(const Attribute& attribute) {
  return std::visit(
      [](const auto& value) -> nb::object {
        using T = std::decay_t<decltype(value)>;
        if constexpr (std::is_same_v<T, TensorData>) {
          return to_python(value);
        } else {
          return nb::cast(value);
        }
      },
      attribute);
}

nb::list shape_list(const Shape& shape) {
  nb::list result;
  for (const Dim& dim : shape) {
    if (dim.is_constant()) {
      result.append(dim.constant());
    } else {
      result.append(dim.str());
    }
  }
  return result;
}

}  // namespace ortrain::python
