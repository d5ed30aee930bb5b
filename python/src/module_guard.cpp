// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "python/src/init.h"
#include "python/src/tensor_exchange.h"

namespace nb = nanobind;

namespace ortrain::python {
namespace {

constexpr int kDepth = 6;  // see attribute_key() in python/ortrain/capture/export.py

// Numbers, flags and names: what a capture bakes in.
bool is_baked_in(PyObject* value) {
  const PyTypeObject* type = Py_TYPE(value);
  return value == Py_None || type == &PyBool_Type || type == &PyLong_Type ||
         type == &PyFloat_Type || type == &PyUnicode_Type || type == &PyComplex_Type;
}

nb::object attribute(PyObject* object, const char* name) {
  const nb::object value = nb::steal(PyObject_GetAttrString(object, name));
  if (!value.is_valid()) PyErr_Clear();
  return value;
}

// The layers' classes that attributes are told apart by, and what was seen on the way.
struct Walk {
  PyObject* module_type;
  PyObject* tensor_type;
  const std::unordered_set<PyObject*>* registered;
  std::unordered_set<PyObject*> seen;
};

int64_t version_of(PyObject* tensor) {
  const nb::object version = attribute(tensor, "_version");
  return version.is_valid() ? PyLong_AsLongLong(version.ptr()) : -1;
}

// A value as it was. Holding what it compares keeps addresses from being used again.
class Snapshot {
 public:
  Snapshot(PyObject* value, Walk& walk, int depth = 0) : value_(nb::borrow(value)) {
    if (is_baked_in(value)) {
      kind_ = Kind::equal;
    } else if (PyObject_IsInstance(value, walk.tensor_type) == 1) {
      kind_ = Kind::tensor;
      version_ = walk.registered->count(value) != 0 ? -1 : version_of(value);
    } else if (walk.seen.count(value) != 0 || depth == kDepth ||
               PyObject_IsInstance(value, walk.module_type) == 1) {
      kind_ = Kind::identity;
    } else if (PyTuple_CheckExact(value) || PyList_CheckExact(value)) {
      kind_ = Kind::sequence;
      walk.seen.insert(value);
      const Py_ssize_t size = PySequence_Size(value);
      for (Py_ssize_t i = 0; i < size; ++i) {
        parts_.emplace_back(nb::steal(PySequence_GetItem(value, i)).ptr(), walk, depth + 1);
      }
    } else if (PyDict_CheckExact(value)) {
      take_dictionary(value, walk, depth);
    } else if (const nb::object attributes = attributes_of(value); attributes.is_valid()) {
      kind_ = Kind::object;
      walk.seen.insert(value);
      parts_.emplace_back(attributes.ptr(), walk, depth + 1);
    }
  }

  bool holds(PyObject* now) {
    switch (kind_) {
      case Kind::identity:
        return now == value_.ptr();
      case Kind::tensor:
        return now == value_.ptr() && (version_ < 0 || version_of(now) == version_);
      case Kind::equal:
        return equals(now);
      case Kind::sequence:
        return holds_sequence(now);
      case Kind::dictionary:
        return holds_dictionary(now);
      case Kind::object: {
        if (now != value_.ptr()) return false;
        const nb::object attributes = attributes_of(now);
        return attributes.is_valid() && parts_[0].holds(attributes.ptr());
      }
    }
    return false;
  }

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(value_.ptr());
    for (const nb::object& key : keys_) Py_VISIT(key.ptr());
    for (const Snapshot& part : parts_) {
      if (const int found = part.traverse(visit, arg)) return found;
    }
    return 0;
  }

 private:
  enum class Kind { identity, equal, tensor, sequence, dictionary, object };

  // The attributes of an object that is neither a class nor callable.
  static nb::object attributes_of(PyObject* object) {
    if (PyType_Check(object) || PyCallable_Check(object) != 0) return {};
    const nb::object found = attribute(object, "__dict__");
    return found.is_valid() && PyDict_CheckExact(found.ptr()) ? found : nb::object();
  }

  void take_dictionary(PyObject* dict, Walk& walk, int depth) {
    kind_ = Kind::dictionary;
    walk.seen.insert(dict);
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(dict, &position, &key, &value) != 0) {
      keys_.push_back(nb::borrow(key));
      parts_.emplace_back(value, walk, depth + 1);
    }
  }

  bool equals(PyObject* now) {
    if (now == value_.ptr()) return true;
    if (Py_TYPE(now) != Py_TYPE(value_.ptr())) return false;
    const int equal = PyObject_RichCompareBool(value_.ptr(), now, Py_EQ);
    if (equal < 0) PyErr_Clear();
    if (equal != 1) return false;
    value_ = nb::borrow(now);
    return true;
  }

  bool holds_sequence(PyObject* now) {
    if (Py_TYPE(now) != Py_TYPE(value_.ptr())) return false;
    if (PySequence_Size(now) != static_cast<Py_ssize_t>(parts_.size())) return false;
    for (size_t i = 0; i < parts_.size(); ++i) {
      const nb::object item = nb::steal(PySequence_GetItem(now, static_cast<Py_ssize_t>(i)));
      if (!item.is_valid() || !parts_[i].holds(item.ptr())) {
        PyErr_Clear();
        return false;
      }
    }
    return true;
  }

  bool holds_dictionary(PyObject* now) {
    if (!PyDict_CheckExact(now) || PyDict_Size(now) != static_cast<Py_ssize_t>(keys_.size())) {
      return false;
    }
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t position = 0;
    for (size_t i = 0; i < keys_.size(); ++i) {
      if (PyDict_Next(now, &position, &key, &value) == 0 || key != keys_[i].ptr() ||
          !parts_[i].holds(value)) {
        return false;
      }
    }
    return true;
  }

  nb::object value_;
  Kind kind_ = Kind::identity;
  int64_t version_ = -1;
  std::vector<nb::object> keys_;
  std::vector<Snapshot> parts_;
};

// A layer: its class, its attributes, the objects in its tables, the number of its hooks.
class Layer {
 public:
  Layer(nb::handle layer, Walk& walk) : layer_(nb::borrow(layer)), type_(nb::borrow(layer.type())) {
    dict_ = nb::steal(PyObject_GenericGetDict(layer.ptr(), nullptr));
    if (!dict_.is_valid()) nb::raise_python_error();
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(dict_.ptr(), &position, &key, &value) != 0) {
      Attribute made{nb::borrow(key), nb::borrow(value), {}, {}, -1};
      if (PyDict_Check(value) && is_one_of(key, kTables)) {
        PyObject* name = nullptr;
        PyObject* entry = nullptr;
        Py_ssize_t at = 0;
        while (PyDict_Next(value, &at, &name, &entry) != 0) {
          made.table.emplace_back(nb::borrow(name), nb::borrow(entry));
        }
        made.size = PyDict_Size(value);
      } else if (PyDict_Check(value) && is_one_of(key, kHooks)) {
        made.size = PyDict_Size(value);
      } else {
        made.value.emplace_back(value, walk);
      }
      attributes_.push_back(std::move(made));
    }
  }

  bool holds() {
    if (layer_.type().ptr() != type_.ptr()) return false;
    const nb::object dict = nb::steal(PyObject_GenericGetDict(layer_.ptr(), nullptr));
    if (dict.ptr() != dict_.ptr()) return false;
    if (PyDict_Size(dict.ptr()) != static_cast<Py_ssize_t>(attributes_.size())) return false;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t position = 0;
    for (Attribute& attribute : attributes_) {
      if (PyDict_Next(dict.ptr(), &position, &key, &value) == 0 || key != attribute.key.ptr()) {
        return false;
      }
      if (!attribute.value.empty()) {
        if (!attribute.value[0].holds(value)) return false;
      } else if (!same_table(attribute, value)) {
        return false;
      }
    }
    return true;
  }

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(layer_.ptr());
    Py_VISIT(type_.ptr());
    Py_VISIT(dict_.ptr());
    for (const Attribute& attribute : attributes_) {
      Py_VISIT(attribute.key.ptr());
      Py_VISIT(attribute.object.ptr());
      for (const auto& [name, entry] : attribute.table) {
        Py_VISIT(name.ptr());
        Py_VISIT(entry.ptr());
      }
      for (const Snapshot& value : attribute.value) {
        if (const int found = value.traverse(visit, arg)) return found;
      }
    }
    return 0;
  }

 private:
  static constexpr std::array<std::string_view, 3> kTables{"_parameters", "_buffers", "_modules"};
  static constexpr std::array<std::string_view, 4> kHooks{"_forward_hooks", "_forward_pre_hooks",
                                                          "_backward_hooks", "_backward_pre_hooks"};
  struct Attribute {
    nb::object key, object;
    std::vector<std::pair<nb::object, nb::object>> table;
    std::vector<Snapshot> value;  // one, unless it is a table or holds hooks
    Py_ssize_t size;
  };

  static bool same_table(const Attribute& attribute, PyObject* now) {
    if (now != attribute.object.ptr() || PyDict_Size(now) != attribute.size) return false;
    PyObject* name = nullptr;
    PyObject* entry = nullptr;
    Py_ssize_t position = 0;
    for (const auto& [known_name, known] : attribute.table) {
      if (PyDict_Next(now, &position, &name, &entry) == 0 || name != known_name.ptr() ||
          entry != known.ptr()) {
        return false;
      }
    }
    return true;
  }

  static bool is_one_of(PyObject* key, std::span<const std::string_view> names) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_Check(key) ? PyUnicode_AsUTF8AndSize(key, &size) : nullptr;
    if (text == nullptr) {
      PyErr_Clear();
      return false;
    }
    const std::string_view name(text, static_cast<size_t>(size));
    return std::find(names.begin(), names.end(), name) != names.end();
  }

  nb::object layer_, type_, dict_;
  std::vector<Attribute> attributes_;
};

// Tells whether anything of a module that a captured graph depends on has changed: classes,
// attributes as attribute_key() in python/ortrain/capture/export.py has them, layers, parameters
// and buffers by identity, the number of hooks, and of each tensor its type, shape and
// requires_grad.
class ModuleGuard {
 public:
  ModuleGuard(nb::list layers, nb::list tensors) {
    std::unordered_set<PyObject*> registered;
    for (nb::handle tensor : tensors) registered.insert(tensor.ptr());
    const nb::module_ torch = nb::module_::import_("torch");
    const nb::object module_type = torch.attr("nn").attr("Module");
    const nb::object tensor_type = torch.attr("Tensor");
    Walk walk{module_type.ptr(), tensor_type.ptr(), &registered, {}};
    for (nb::handle layer : layers) parts_.emplace_back(layer, walk);
    for (nb::handle tensor : tensors) {
      if (tensor.is_none()) continue;
      const TensorView view = view_of(tensor, "a tensor of the module");
      tensors_.push_back({nb::borrow(tensor), requires_grad(tensor), view.dtype,
                          Dims(view.dims, view.dims + view.rank)});
    }
  }

  bool holds() {
    for (Layer& part : parts_) {
      if (!part.holds()) return false;
    }
    return std::all_of(tensors_.begin(), tensors_.end(),
                       [](const Tensor& tensor) { return is_as_before(tensor); });
  }

  int traverse(visitproc visit, void* arg) const {
    for (const Layer& part : parts_) {
      if (const int found = part.traverse(visit, arg)) return found;
    }
    for (const Tensor& tensor : tensors_) Py_VISIT(tensor.object.ptr());
    return 0;
  }

  void clear() {
    const std::vector<Layer> parts = std::exchange(parts_, {});
    const std::vector<Tensor> tensors = std::exchange(tensors_, {});
  }

 private:
  struct Tensor {
    nb::object object;
    bool requires_grad;
    DType dtype;
    Dims dims;
  };

  static bool requires_grad(nb::handle tensor) {
    static PyObject* const name = PyUnicode_InternFromString("requires_grad");
    const nb::object value = nb::steal(PyObject_GetAttr(tensor.ptr(), name));
    if (!value.is_valid()) nb::raise_python_error();
    return value.ptr() == Py_True;
  }

  static bool is_as_before(const Tensor& tensor) {
    const TensorView view = view_of(tensor.object, "a tensor of the module");
    return view.dtype == tensor.dtype && view.rank == static_cast<int>(tensor.dims.size()) &&
           std::equal(tensor.dims.begin(), tensor.dims.end(), view.dims) &&
           requires_grad(tensor.object) == tensor.requires_grad;
  }

  std::vector<Layer> parts_;
  std::vector<Tensor> tensors_;
};

int traverse(PyObject* self, visitproc visit, void* arg) {
#if PY_VERSION_HEX >= 0x03090000
  Py_VISIT(Py_TYPE(self));
#endif
  if (!nb::inst_ready(self)) return 0;
  return nb::inst_ptr<ModuleGuard>(self)->traverse(visit, arg);
}

int clear(PyObject* self) {
  nb::inst_ptr<ModuleGuard>(self)->clear();
  return 0;
}

PyType_Slot kSlots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                        {Py_tp_clear, reinterpret_cast<void*>(clear)},
                        {0, nullptr}};

}  // namespace

void init_module_guard(nb::module_& module) {
  nb::class_<ModuleGuard>(module, "ModuleGuard", nb::type_slots(kSlots))
      .def(nb::init<nb::list, nb::list>(), nb::arg("layers"), nb::arg("tensors"))
      .def("holds", &ModuleGuard::holds);
}

}  // namespace ortrain::python
