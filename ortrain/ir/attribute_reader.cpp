// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/attribute_reader.h"

#include "ortrain/base/error.h"

namespace ortrain {

const Attribute* AttributeReader::find(const std::string& name) const {
  auto found = node_->attributes.find(name);
  if (found != node_->attributes.end()) return &found->second;
  const FormalAttribute* formal = def_->find_attribute(name);
  return formal != nullptr && formal->has_default ? &formal->default_value : nullptr;
}

template <typename T>
const T& AttributeReader::get(const std::string& name) const {
  const Attribute* attribute = find(name);
  if (attribute == nullptr) {
    throw InvalidModelError(
        str(Graph::context(*node_), "attribute '", name, "' is required and absent"));
  }
  const T* value = std::get_if<T>(attribute);
  if (value == nullptr) {
    throw InvalidModelError(str(Graph::context(*node_), "attribute '", name, "' is of kind ",
                                attribute_kind(*attribute), ", expected ",
                                attribute_kind(Attribute(T{}))));
  }
  return *value;
}

bool AttributeReader::has(const std::string& name) const { return find(name) != nullptr; }
int64_t AttributeReader::int_(const std::string& name) const { return get<int64_t>(name); }
double AttributeReader::float_(const std::string& name) const { return get<double>(name); }
const std::string& AttributeReader::string_(const std::string& name) const {
  return get<std::string>(name);
}
const std::vector<int64_t>& AttributeReader::ints(const std::string& name) const {
  return get<std::vector<int64_t>>(name);
}
const std::vector<double>& AttributeReader::floats(const std::string& name) const {
  return get<std::vector<double>>(name);
}
const std::vector<std::string>& AttributeReader::strings(const std::string& name) const {
  return get<std::vector<std::string>>(name);
}
const TensorData& AttributeReader::tensor(const std::string& name) const {
  return get<TensorData>(name);
}
std::optional<std::vector<int64_t>> AttributeReader::optional_ints(const std::string& name) const {
  if (!has(name)) return std::nullopt;
  return ints(name);
}
std::optional<int64_t> AttributeReader::optional_int(const std::string& name) const {
  if (!has(name)) return std::nullopt;
  return int_(name);
}

}  // namespace ortrain
