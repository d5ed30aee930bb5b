// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "python/src/layer_guard.h"

#include <algorithm>
#include <array>
#include <exception>
#include <span>
#include <string_view>
#include <utility>

#include "python/src/tensor_exchange.h"

namespace nb = nanobind;

namespace ortrain::python {
namespace {

constexpr std::array<std::string_view, 2> kTensors{"_parameters", "_buffers"};
constexpr std::array<std::string_view, 1> kLayers{"_modules"};
constexpr std::array<std::string_view, 7> kHooks{
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
};
// By the first of these recurrent layers tell when to list their parameters again; that list is
// compared. The others are for saving and loading.
constexpr std::array<std::string_view, 6> kIgnored{
    "_flat_weight_refs",          "_state_dict_hooks",           "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_non_persistent_buffers_set",
};

bool is_one_of(PyObject* key, std::span<const std::string_view> names) {
  Py_ssize_t size = 0;
  const char* text = PyUnicode_Check(key) ? PyUnicode_AsUTF8AndSize(key, &size) : nullptr;
  if (text == nullptr) {
    PyErr_Clear();
    return false;
  }
  const std::string_view name(text, static_cast<size_t>(size));
  return std::find(names.begin(), names.end(), name) != names.end();
}

// There are seven dictionaries per layer to be asked.
bool is_empty(PyObject* dict) {
#if PY_VERSION_HEX < 0x030C0000
  return reinterpret_cast<PyDictObject*>(dict)->ma_used == 0;
#else
  return PyDict_Size(dict) == 0;
#endif
}

// PyTorch gives every hook of a process a number of its own, by which tables hold it.
std::vector<long> handles_of(PyObject* table) {
  std::vector<long> handles;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t position = 0;
  while (PyDict_Next(table, &position, &key, &value) != 0) {
    handles.push_back(PyLong_Check(key) ? PyLong_AsLong(key) : -1);
  }
  return handles;
}

nb::object attributes_of(PyObject* layer) {
  nb::object found = nb::steal(PyObject_GenericGetDict(layer, nullptr));
  if (!found.is_valid()) PyErr_Clear();
  return found;
}

// Whether the layer's attributes are those that names in code say, as they are by nn.Module.
bool is_read_by_name(PyObject* layer) {
  static PyObject* const object =
      nb::object(nb::module_::import_("builtins").attr("object")).release().ptr();
  static PyObject* const module =
      nb::object(nb::module_::import_("torch").attr("nn").attr("Module")).release().ptr();
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(layer));
  static PyObject* const found = PyUnicode_InternFromString("__getattribute__");
  static PyObject* const missing = PyUnicode_InternFromString("__getattr__");
  return attribute(type, found).is(attribute(object, found)) &&
         attribute(type, missing).is(attribute(module, missing));
}

bool is_table(PyObject* key, PyObject* value) {
  return PyDict_Check(value) && (is_one_of(key, kTensors) || is_one_of(key, kLayers));
}

// None stands for what cannot be read.
nb::object describe(PyObject* tensor) {
  constexpr std::array<const char*, 4> kNames{"dtype", "shape", "device", "layout"};
  nb::list described;
  for (const char* name : kNames) {
    nb::object value = attribute(tensor, nb::str(name).ptr());
    described.append(value.is_valid() ? std::move(value) : nb::none());
  }
  return described;
}

// How torch.Tensor reads `requires_grad`; looking the attribute up costs more than reading it.
struct TensorClasses {
  PyObject* tensor;
  PyObject* parameter;
  PyObject* requires_grad = nullptr;  // the descriptor, where it is one of C
  descrgetfunc read = nullptr;        // its __get__
};

const TensorClasses& tensor_classes() {
  static const TensorClasses classes = [] {
    const nb::module_ torch = nb::module_::import_("torch");
    nb::object tensor = torch.attr("Tensor");
    nb::object parameter = torch.attr("nn").attr("Parameter");
    TensorClasses found{tensor.release().ptr(), parameter.release().ptr()};
    nb::object descriptor = nb::handle(found.tensor).attr("requires_grad");
    if (Py_TYPE(descriptor.ptr()) == &PyGetSetDescr_Type) {
      found.read =
          reinterpret_cast<descrgetfunc>(PyType_GetSlot(&PyGetSetDescr_Type, Py_tp_descr_get));
      found.requires_grad = descriptor.release().ptr();
    }
    return found;
  }();
  return classes;
}

}  // namespace

TensorKind::TensorKind(PyObject* tensor)
    : class_(nb::borrow(reinterpret_cast<PyObject*>(Py_TYPE(tensor)))) {
  if (tensor == Py_None) return;
  const TensorClasses& classes = tensor_classes();
  is_plain_ = class_.is(classes.tensor) || class_.is(classes.parameter);
  requires_grad_ = requires_grad(tensor);
  try {
    const TensorView view = view_anywhere(tensor, "a tensor of the module");
    dtype_ = view.dtype;
    place_ = view.place;
    dims_.assign(view.dims, view.dims + view.rank);
    if (!is_row_major(view)) strides_.assign(view.strides, view.strides + view.rank);
  } catch (const std::exception&) {
    described_ = describe(tensor);
  }
}

bool TensorKind::fits(PyObject* tensor) const {
  if (reinterpret_cast<PyObject*>(Py_TYPE(tensor)) != class_.ptr()) return false;
  if (tensor == Py_None) return true;
  if (requires_grad(tensor) != requires_grad_) return false;
  if (described_.is_valid()) {
    const int equal = PyObject_RichCompareBool(describe(tensor).ptr(), described_.ptr(), Py_EQ);
    if (equal < 0) PyErr_Clear();
    return equal == 1;
  }
  try {
    const TensorView view = view_anywhere(tensor, "a tensor of the module");
    return view.dtype == dtype_ && view.place == place_ &&
           view.rank == static_cast<int>(dims_.size()) &&
           std::equal(dims_.begin(), dims_.end(), view.dims) &&
           (is_row_major(view) ? strides_.empty()
                               : std::equal(strides_.begin(), strides_.end(), view.strides,
                                            view.strides + view.rank));
  } catch (const std::exception&) {
    return false;  // of a kind now that the engine does not hold
  }
}

int TensorKind::traverse(visitproc visit, void* arg) const {
  Py_VISIT(class_.ptr());
  Py_VISIT(described_.ptr());
  return 0;
}

bool TensorKind::requires_grad(PyObject* tensor) const {
  if (const TensorClasses& classes = tensor_classes(); is_plain_ && classes.read != nullptr) {
    const nb::object value = nb::steal(classes.read(classes.requires_grad, tensor, class_.ptr()));
    if (!value.is_valid()) PyErr_Clear();
    return value.ptr() == Py_True;
  }
  static PyObject* const name = PyUnicode_InternFromString("requires_grad");
  return attribute(tensor, name).ptr() == Py_True;
}

LayerGuard::LayerGuard(nb::handle layer, bool is_root)
    : layer_(nb::borrow(layer)), class_(nb::borrow(layer.type())), is_root_(is_root) {
  const nb::object attributes = attributes_of(layer.ptr());
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t position = 0;
  while (attributes.is_valid() && PyDict_Next(attributes.ptr(), &position, &key, &value) != 0) {
    if (is_table(key, value)) tables_.emplace_back(value, is_one_of(key, kTensors));
  }
}

void LayerGuard::take_attributes(SnapshotContext& context) {
  names_ = is_read_by_name(layer_.ptr()) ? names_of(layer_.ptr(), context.names) : nb::none();
  context.tell("layer", layer_.ptr());
  const nb::object attributes = attributes_of(layer_.ptr());
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t position = 0;
  while (attributes.is_valid() && PyDict_Next(attributes.ptr(), &position, &key, &value) != 0) {
    Attribute made{Attribute::Compared::nothing, true, false, {}, {}, {}, {}};
    if (is_table(key, value)) {
      made.compared = Attribute::Compared::table;
      made.table = nb::borrow(value);
      context.tell("name", key);
      context.tell("table", value);
    } else if (PyDict_Check(value) && is_one_of(key, kHooks)) {
      if (!is_root_) {
        made.compared = Attribute::Compared::hooks;
        context.tell("name", key);
        context.tell("hooks", value);
      }
      made.hooks = handles_of(value);
    } else if (!is_read(names_.ptr(), key)) {
      made.is_read = false;
    } else if (!is_one_of(key, kIgnored)) {
      made.compared = Attribute::Compared::value;
      context.tell("name", key);
      made.value.push_back(AttributeSnapshot::of(key, value, context));
    }
    made.may_change =
        made.compared == Attribute::Compared::hooks ||
        (made.compared == Attribute::Compared::value && made.value[0].may_change_in_place());
    const bool is_compared = made.is_read && made.compared != Attribute::Compared::nothing;
    glances_.push_back({nb::borrow(key), nb::borrow(made.constant()), is_compared});
    attributes_.push_back(std::move(made));
  }
}

bool LayerGuard::read_tables(std::vector<PyObject*>& tensors) const {
  return std::all_of(tables_.begin(), tables_.end(),
                     [&](const Table& table) { return table.read(tensors); });
}

bool LayerGuard::holds(const Present& present) {
  if (layer_.type().ptr() != class_.ptr()) return false;
  const nb::object now = attributes_of(layer_.ptr());
  if (!now.is_valid()) return attributes_.empty();
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t position = 0;
  size_t next = 0;
  const auto skip_unread = [&] {
    while (next < attributes_.size() && !attributes_[next].is_read) ++next;
  };
  while (PyDict_Next(now.ptr(), &position, &key, &value) != 0) {
    if (next < glances_.size() && is_same_name(key, glances_[next].name.ptr())) {
      const Glance& glance = glances_[next];
      if (!glance.is_compared || glance.value.is(value)) {
        ++next;
        continue;
      }
      Attribute& known = attributes_[next++];
      // Comparing may run code that drops it.
      const nb::object compared = nb::borrow(value);
      if (!known.holds(compared.ptr(), present)) return false;
      continue;
    }
    // Among those that nobody reads some have come or gone.
    if (!is_read(names_.ptr(), key)) continue;
    skip_unread();
    if (next == attributes_.size() || !is_same_name(key, glances_[next].name.ptr())) return false;
    const nb::object compared = nb::borrow(value);
    if (!attributes_[next++].holds(compared.ptr(), present)) return false;
  }
  skip_unread();
  return next == attributes_.size();
}

void LayerGuard::append_dictionaries(std::vector<WatchedDict>& dictionaries) const {
  dictionaries.emplace_back(attributes_of(layer_.ptr()).ptr());
  for (const Table& table : tables_) dictionaries.emplace_back(table.dict());
}

bool LayerGuard::is_in_place(PyObject* attributes) const {
  return layer_.type().ptr() == class_.ptr() && attributes_of(layer_.ptr()).is(attributes);
}

void LayerGuard::append_changing(std::vector<Changing>& changing) {
  for (Attribute& attribute : attributes_) {
    if (attribute.may_change) changing.emplace_back(attribute);
  }
}

void LayerGuard::forget(std::vector<nb::object>& seen) {
  for (Attribute& attribute : attributes_) {
    if (attribute.seen.is_valid()) seen.push_back(std::exchange(attribute.seen, nb::object()));
  }
}

int LayerGuard::traverse(visitproc visit, void* arg) const {
  Py_VISIT(layer_.ptr());
  Py_VISIT(class_.ptr());
  Py_VISIT(names_.ptr());
  for (const Table& table : tables_) {
    if (const int found = table.traverse(visit, arg)) return found;
  }
  for (const Glance& glance : glances_) {
    Py_VISIT(glance.name.ptr());
    Py_VISIT(glance.value.ptr());
  }
  for (const Attribute& attribute : attributes_) {
    Py_VISIT(attribute.table.ptr());
    Py_VISIT(attribute.seen.ptr());
    for (const AttributeSnapshot& value : attribute.value) {
      if (const int found = value.traverse(visit, arg)) return found;
    }
  }
  return 0;
}

LayerGuard::Table::Table(PyObject* dict, bool holds_tensors)
    : dict_(nb::borrow(dict)), holds_tensors_(holds_tensors) {
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t position = 0;
  while (PyDict_Next(dict, &position, &key, &value) != 0) {
    names_.push_back(nb::borrow(key));
    if (!holds_tensors) layers_.push_back(nb::borrow(value));
  }
}

bool LayerGuard::Table::read(std::vector<PyObject*>& tensors) const {
  if (PyDict_Size(dict_.ptr()) != static_cast<Py_ssize_t>(names_.size())) return false;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t position = 0;
  for (size_t i = 0; i < names_.size(); ++i) {
    if (PyDict_Next(dict_.ptr(), &position, &key, &value) == 0 ||
        !is_same_name(key, names_[i].ptr())) {
      return false;
    }
    if (holds_tensors_) {
      tensors.push_back(value);
    } else if (value != layers_[i].ptr()) {
      return false;
    }
  }
  return true;
}

int LayerGuard::Table::traverse(visitproc visit, void* arg) const {
  Py_VISIT(dict_.ptr());
  for (const nb::object& name : names_) Py_VISIT(name.ptr());
  for (const nb::object& layer : layers_) Py_VISIT(layer.ptr());
  return 0;
}

PyObject* LayerGuard::Attribute::constant() const {
  if (compared == Compared::table) return table.ptr();
  return compared == Compared::value ? value[0].constant() : nullptr;
}

bool LayerGuard::Attribute::holds(PyObject* now, const Present& present) {
  switch (compared) {
    case Compared::value:
      if (!value[0].holds(now, present)) return false;
      break;
    case Compared::table:
      return now == table.ptr();
    case Compared::hooks:
      if (!PyDict_Check(now)) return false;
      if (hooks.empty() ? !is_empty(now) : handles_of(now) != hooks) return false;
      break;
    case Compared::nothing:
      return true;
  }
  if (may_change && !seen.is(now)) seen = nb::borrow(now);
  return true;
}

LayerGuard::Changing::Changing(Attribute& attribute)
    : attribute_(&attribute),
      seen_(attribute.seen.ptr()),
      has_no_hooks_(attribute.compared == Attribute::Compared::hooks && attribute.hooks.empty()) {}

bool LayerGuard::Changing::holds(const Present& present) const {
  return has_no_hooks_ ? is_empty(seen_) : attribute_->holds(seen_, present);
}

}  // namespace ortrain::python
