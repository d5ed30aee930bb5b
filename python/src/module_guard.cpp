// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "python/src/attribute_snapshot.h"
#include "python/src/init.h"
#include "python/src/tensor_exchange.h"

namespace nb = nanobind;

namespace ortrain::python {
namespace {

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

// What of a parameter or buffer a graph depends on: its class, type, shape and requires_grad. For
// tensors that the engine does not hold, what Python says of them.
class TensorKind {
 public:
  explicit TensorKind(PyObject* tensor)
      : class_(nb::borrow(reinterpret_cast<PyObject*>(Py_TYPE(tensor)))) {
    if (tensor == Py_None) return;
    requires_grad_ = requires_grad(tensor);
    try {
      const TensorView view = view_of(tensor, "a tensor of the module");
      dtype_ = view.dtype;
      dims_.assign(view.dims, view.dims + view.rank);
    } catch (const std::exception&) {
      described_ = describe(tensor);
    }
  }

  bool fits(PyObject* tensor) const {
    if (reinterpret_cast<PyObject*>(Py_TYPE(tensor)) != class_.ptr()) return false;
    if (tensor == Py_None) return true;
    if (requires_grad(tensor) != requires_grad_) return false;
    if (described_.is_valid()) {
      const int equal = PyObject_RichCompareBool(describe(tensor).ptr(), described_.ptr(), Py_EQ);
      if (equal < 0) PyErr_Clear();
      return equal == 1;
    }
    try {
      const TensorView view = view_of(tensor, "a tensor of the module");
      return view.dtype == dtype_ && view.rank == static_cast<int>(dims_.size()) &&
             std::equal(dims_.begin(), dims_.end(), view.dims);
    } catch (const std::exception&) {
      return false;  // of a kind now that the engine does not hold
    }
  }

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(class_.ptr());
    Py_VISIT(described_.ptr());
    return 0;
  }

 private:
  static bool requires_grad(PyObject* tensor) {
    static PyObject* const name = PyUnicode_InternFromString("requires_grad");
    return attribute(tensor, name).ptr() == Py_True;
  }

  // None stands for what cannot be read.
  static nb::object describe(PyObject* tensor) {
    constexpr std::array<const char*, 4> kNames{"dtype", "shape", "device", "layout"};
    nb::list described;
    for (const char* name : kNames) {
      nb::object value = attribute(tensor, nb::str(name).ptr());
      described.append(value.is_valid() ? std::move(value) : nb::none());
    }
    return described;
  }

  nb::object class_, described_;
  bool requires_grad_ = false;
  DType dtype_ = DType::undefined;
  Dims dims_;
};

// A layer: its class, its attributes, its tables of tensors and layers, its hooks.
class Layer {
 public:
  // The hooks of the root run outside of a graph and count for nothing.
  Layer(nb::handle layer, bool is_root)
      : layer_(nb::borrow(layer)), class_(nb::borrow(layer.type())), is_root_(is_root) {
    const nb::object attributes = attributes_of(layer.ptr());
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t position = 0;
    while (attributes.is_valid() && PyDict_Next(attributes.ptr(), &position, &key, &value) != 0) {
      if (is_table(key, value)) tables_.emplace_back(value, is_one_of(key, kTensors));
    }
  }

  // To be called once the tensors of all layers are known.
  void take_attributes(SnapshotContext& context) {
    const nb::object attributes = attributes_of(layer_.ptr());
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t position = 0;
    while (attributes.is_valid() && PyDict_Next(attributes.ptr(), &position, &key, &value) != 0) {
      Attribute made{Attribute::Compared::nothing, nb::borrow(key), {}, {}, {}};
      if (is_table(key, value)) {
        made.compared = Attribute::Compared::table;
        made.table = nb::borrow(value);
      } else if (PyDict_Check(value) && is_one_of(key, kHooks)) {
        if (!is_root_) made.compared = Attribute::Compared::hooks;
        made.hooks = handles_of(value);
      } else if (!is_one_of(key, kIgnored)) {
        made.compared = Attribute::Compared::value;
        made.value.emplace_back(value, context);
      }
      attributes_.push_back(std::move(made));
    }
  }

  // Appends the tensors that the tables hold now, one per name they held; false where the names or
  // the layers have changed. Runs no Python code.
  bool read_tables(std::vector<PyObject*>& tensors) const {
    return std::all_of(tables_.begin(), tables_.end(),
                       [&](const Table& table) { return table.read(tensors); });
  }

  bool holds(const SlotTensors& tensors) {
    if (layer_.type().ptr() != class_.ptr()) return false;
    const nb::object now = attributes_of(layer_.ptr());
    if (!now.is_valid()) return attributes_.empty();
    if (PyDict_Size(now.ptr()) != static_cast<Py_ssize_t>(attributes_.size())) return false;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t position = 0;
    for (Attribute& known : attributes_) {
      if (PyDict_Next(now.ptr(), &position, &key, &value) == 0 ||
          !is_same_name(key, known.name.ptr())) {
        return false;
      }
      if (!known.holds(value, tensors)) return false;
    }
    return true;
  }

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(layer_.ptr());
    Py_VISIT(class_.ptr());
    for (const Table& table : tables_) {
      if (const int found = table.traverse(visit, arg)) return found;
    }
    for (const Attribute& attribute : attributes_) {
      Py_VISIT(attribute.name.ptr());
      Py_VISIT(attribute.table.ptr());
      for (const AttributeSnapshot& value : attribute.value) {
        if (const int found = value.traverse(visit, arg)) return found;
      }
    }
    return 0;
  }

 private:
  static constexpr std::array<std::string_view, 2> kTensors{"_parameters", "_buffers"};
  static constexpr std::array<std::string_view, 1> kLayers{"_modules"};
  static constexpr std::array<std::string_view, 4> kHooks{"_forward_hooks", "_forward_pre_hooks",
                                                          "_backward_hooks", "_backward_pre_hooks"};
  // By this recurrent layers tell when to list their parameters again; that list is compared.
  static constexpr std::array<std::string_view, 1> kIgnored{"_flat_weight_refs"};

  // Names, and what they stand for where that is a layer.
  class Table {
   public:
    Table(PyObject* dict, bool holds_tensors)
        : dict_(nb::borrow(dict)), holds_tensors_(holds_tensors) {
      PyObject* key = nullptr;
      PyObject* value = nullptr;
      Py_ssize_t position = 0;
      while (PyDict_Next(dict, &position, &key, &value) != 0) {
        names_.push_back(nb::borrow(key));
        if (!holds_tensors) layers_.push_back(nb::borrow(value));
      }
    }

    bool read(std::vector<PyObject*>& tensors) const {
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

    int traverse(visitproc visit, void* arg) const {
      Py_VISIT(dict_.ptr());
      for (const nb::object& name : names_) Py_VISIT(name.ptr());
      for (const nb::object& layer : layers_) Py_VISIT(layer.ptr());
      return 0;
    }

   private:
    nb::object dict_;
    bool holds_tensors_;
    std::vector<nb::object> names_, layers_;
  };

  struct Attribute {
    enum class Compared { value, table, hooks, nothing };

    bool holds(PyObject* now, const SlotTensors& tensors) {
      switch (compared) {
        case Compared::value:
          return value[0].holds(now, tensors);
        case Compared::table:
          return now == table.ptr();
        case Compared::hooks:
          return PyDict_Check(now) && handles_of(now) == hooks;
        case Compared::nothing:
          return true;
      }
      return false;
    }

    Compared compared;
    nb::object name, table;
    std::vector<AttributeSnapshot> value;  // one, where it is the value that is compared
    std::vector<long> hooks;
  };

  // PyTorch gives every hook of a process a number of its own, by which tables hold it.
  static std::vector<long> handles_of(PyObject* table) {
    std::vector<long> handles;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(table, &position, &key, &value) != 0) {
      handles.push_back(PyLong_Check(key) ? PyLong_AsLong(key) : -1);
    }
    return handles;
  }

  static nb::object attributes_of(PyObject* layer) {
    nb::object found = nb::steal(PyObject_GenericGetDict(layer, nullptr));
    if (!found.is_valid()) PyErr_Clear();
    return found;
  }

  static bool is_table(PyObject* key, PyObject* value) {
    return PyDict_Check(value) && (is_one_of(key, kTensors) || is_one_of(key, kLayers));
  }

  nb::object layer_, class_;
  bool is_root_;
  std::vector<Table> tables_;
  std::vector<Attribute> attributes_;
};

// A state of a module, of all that a captured graph depends on: classes, layers, attributes, the
// number of hooks, and of each parameter and buffer its kind and which others are the same tensor.
// Which tensors they are is no part of it: where others of their kind take their place, the guard
// takes them on.
class ModuleGuard {
 public:
  explicit ModuleGuard(nb::list layers) {
    for (nb::handle layer : layers) layers_.emplace_back(layer, layers_.empty());
    std::vector<PyObject*> tensors;
    for (const Layer& layer : layers_) layer.read_tables(tensors);
    tensors_ = SlotTensors(tensors);
    ties_ = tensors_.ties();
    const nb::module_ torch = nb::module_::import_("torch");
    const nb::object module_type = torch.attr("nn").attr("Module");
    const nb::object tensor_type = torch.attr("Tensor");
    SnapshotContext context{module_type.ptr(), tensor_type.ptr(), &tensors_, {}};
    for (Layer& layer : layers_) layer.take_attributes(context);
    for (size_t slot = 0; slot < ties_.size(); ++slot) kinds_.emplace_back(tensors_[slot]);
  }

  bool holds() {
    std::vector<PyObject*> now;
    now.reserve(kinds_.size());
    for (const Layer& layer : layers_) {
      if (!layer.read_tables(now)) return false;
    }
    if (tensors_.are(now)) return holds_with(tensors_);
    SlotTensors taken(now);
    if (taken.ties() != ties_ || !holds_with(taken)) return false;
    std::swap(tensors_, taken);
    return true;
  }

  nb::handle tensors() const { return tensors_.tuple(); }

  // A state that is not the present one need not keep tensors in memory.
  void release_tensors() { const SlotTensors released = std::exchange(tensors_, {}); }

  int traverse(visitproc visit, void* arg) const {
    for (const Layer& layer : layers_) {
      if (const int found = layer.traverse(visit, arg)) return found;
    }
    for (const TensorKind& kind : kinds_) {
      if (const int found = kind.traverse(visit, arg)) return found;
    }
    Py_VISIT(tensors_.tuple().ptr());
    return 0;
  }

  void clear() {
    const std::vector<Layer> layers = std::exchange(layers_, {});
    const std::vector<TensorKind> kinds = std::exchange(kinds_, {});
    release_tensors();
  }

 private:
  bool holds_with(const SlotTensors& tensors) {
    for (Layer& layer : layers_) {
      if (!layer.holds(tensors)) return false;
    }
    for (size_t slot = 0; slot < kinds_.size(); ++slot) {
      if (!kinds_[slot].fits(tensors[slot])) return false;
    }
    return true;
  }

  std::vector<Layer> layers_;
  std::vector<TensorKind> kinds_;
  SlotTensors tensors_;
  std::vector<int64_t> ties_;
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
      .def(nb::init<nb::list>(), nb::arg("layers"))
      .def("holds", &ModuleGuard::holds)
      .def("release_tensors", &ModuleGuard::release_tensors)
      .def_prop_ro("tensors", &ModuleGuard::tensors);
}

}  // namespace ortrain::python
