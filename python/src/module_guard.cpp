// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "python/src/init.h"
#include "python/src/tensor_exchange.h"

namespace nb = nanobind;

namespace ortrain::python {
namespace {

// Numbers, flags and names: what a capture bakes in.
bool is_baked_in(PyObject* value) {
  const PyTypeObject* type = Py_TYPE(value);
  return type == &PyBool_Type || type == &PyLong_Type || type == &PyFloat_Type ||
         type == &PyUnicode_Type || type == &PyComplex_Type;
}

template <size_t kCount>
bool is_one_of(PyObject* key, const std::array<std::string_view, kCount>& names) {
  Py_ssize_t size = 0;
  const char* text = PyUnicode_Check(key) ? PyUnicode_AsUTF8AndSize(key, &size) : nullptr;
  if (text == nullptr) {
    PyErr_Clear();
    return false;
  }
  const std::string_view name(text, static_cast<size_t>(size));
  return std::find(names.begin(), names.end(), name) != names.end();
}

// The dictionary of an object as it was. Holding what it compares keeps addresses from being used
// again.
class Dictionary {
 public:
  enum class Kind {
    every_value,  // a table of tensors or layers: the same objects
    attributes,   // of a layer: equal numbers, flags and names, the same tables, as many hooks
  };

  Dictionary(nb::object dict, Kind kind) : dict_(std::move(dict)), kind_(kind) {
    static constexpr std::array<std::string_view, 3> kTables{"_parameters", "_buffers",
                                                             "_modules"};
    static constexpr std::array<std::string_view, 4> kHooks{
        "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"};
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(dict_.ptr(), &position, &key, &value) != 0) {
      Entry entry{nb::borrow(key), {}, Compared::nothing, 0};
      if (kind_ == Kind::every_value) {
        entry.compared = Compared::identity;
      } else if (PyDict_Check(value) && is_one_of(key, kTables)) {
        entry.compared = Compared::identity;
        tables_.emplace_back(nb::borrow(value), Kind::every_value);
      } else if (PyDict_Check(value) && is_one_of(key, kHooks)) {
        entry.compared = Compared::size;
        entry.size = PyDict_Size(value);
      } else if (is_baked_in(value)) {
        entry.compared = Compared::equality;
      }
      if (entry.compared != Compared::nothing) entry.value = nb::borrow(value);
      entries_.push_back(std::move(entry));
    }
  }

  bool holds() {
    if (PyDict_Size(dict_.ptr()) != static_cast<Py_ssize_t>(entries_.size())) return false;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t position = 0;
    for (Entry& entry : entries_) {
      if (PyDict_Next(dict_.ptr(), &position, &key, &value) == 0 || key != entry.key.ptr() ||
          !same(entry, value)) {
        return false;
      }
    }
    return std::all_of(tables_.begin(), tables_.end(),
                       [](Dictionary& table) { return table.holds(); });
  }

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(dict_.ptr());
    for (const Entry& entry : entries_) {
      Py_VISIT(entry.key.ptr());
      Py_VISIT(entry.value.ptr());
    }
    for (const Dictionary& table : tables_) {
      if (const int found = table.traverse(visit, arg)) return found;
    }
    return 0;
  }

 private:
  enum class Compared { nothing, identity, equality, size };
  struct Entry {
    nb::object key, value;
    Compared compared;
    Py_ssize_t size;
  };

  static bool same(Entry& entry, PyObject* value) {
    switch (entry.compared) {
      case Compared::nothing: return !is_baked_in(value);
      case Compared::identity: return value == entry.value.ptr();
      case Compared::size:
        return value == entry.value.ptr() && PyDict_Size(value) == entry.size;
      case Compared::equality: break;
    }
    PyObject* before = entry.value.ptr();
    if (value == before) return true;
    if (Py_TYPE(value) != Py_TYPE(before)) return false;
    const int equal = PyObject_RichCompareBool(before, value, Py_EQ);
    if (equal < 0) PyErr_Clear();
    if (equal != 1) return false;
    entry.value = nb::borrow(value);
    return true;
  }

  nb::object dict_;
  Kind kind_;
  std::vector<Entry> entries_;
  std::vector<Dictionary> tables_;
};

// Tells whether anything of a module that a captured graph depends on has changed: attributes that
// are numbers, flags or names, layers, parameters and buffers by identity, the number of hooks, and
// of each tensor its type, shape and requires_grad.
class ModuleGuard {
 public:
  ModuleGuard(nb::list attributes, nb::list tensors) {
    for (nb::handle dict : attributes) {
      parts_.emplace_back(nb::borrow(dict), Dictionary::Kind::attributes);
    }
    for (nb::handle tensor : tensors) {
      if (tensor.is_none()) continue;
      const TensorView view = view_of(tensor, "a tensor of the module");
      tensors_.push_back({nb::borrow(tensor), requires_grad(tensor), view.dtype,
                          Dims(view.dims, view.dims + view.rank)});
    }
  }

  bool holds() {
    for (Dictionary& part : parts_) {
      if (!part.holds()) return false;
    }
    return std::all_of(tensors_.begin(), tensors_.end(),
                       [](const Tensor& tensor) { return is_as_before(tensor); });
  }

  int traverse(visitproc visit, void* arg) const {
    for (const Dictionary& part : parts_) {
      if (const int found = part.traverse(visit, arg)) return found;
    }
    for (const Tensor& tensor : tensors_) Py_VISIT(tensor.object.ptr());
    return 0;
  }

  void clear() {
    const std::vector<Dictionary> parts = std::exchange(parts_, {});
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

  std::vector<Dictionary> parts_;
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
      .def(nb::init<nb::list, nb::list>(), nb::arg("attributes"), nb::arg("tensors"))
      .def("holds", &ModuleGuard::holds);
}

}  // namespace ortrain::python
