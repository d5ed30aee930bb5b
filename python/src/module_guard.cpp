// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "python/src/attribute_snapshot.h"
#include "python/src/function_parts.h"
#include "python/src/init.h"
#include "python/src/layer_guard.h"
#include "python/src/table_items.h"
#include "python/src/watched_class.h"
#include "python/src/watched_dict.h"

namespace nb = nanobind;

namespace ortrain::python {
namespace {

// A variable outside of the module: an item of a mapping, or an attribute of an object. A third
// part says what counts of some: "same", which object it is; "stands", that too, but what it holds
// describes it; "items", which table it is and which objects stand in it; "own", which object a
// class itself has under that name; "names", which of the names that are read a class itself has,
// special methods among them: code may ask for one that is not there.
class Variable {
 public:
  explicit Variable(nb::handle described)
      : owner_(nb::borrow(described[0])), name_(nb::borrow(described[1])) {
    if (nb::len(described) <= 2) return;
    const std::string counts = nb::cast<std::string>(nb::object(described[2]));
    names_count_ = counts == "names" && PyType_Check(owner_.ptr());
    if (names_count_) return;
    if (counts == "own") items_of_class_ = dictionary_of_class(owner_);
    const nb::object value = now();
    if (counts == "items" && TableItems::is_table(value)) {
      items_ = TableItems(value);
    } else {
      same_ = value;
      is_named_ = counts != "stands";
    }
  }

  void take(SnapshotContext& context) {
    context.tell("variable", owner_.ptr());
    context.tell("name", name_.ptr());
    if (names_count_) {
      read_ = nb::borrow(context.names);
      same_ = names_of_class();
      for (nb::handle name : nb::iter(same_)) context.tell("key", name.ptr());
    } else if (items_.is_valid()) {
      items_.tell(context);
    } else if (same_.is_valid()) {
      context.tell(is_named_ ? "same" : "stands", same_.ptr());
    } else {
      value_.emplace_back(now().ptr(), context);
    }
  }

  // Those that it names, alone or in a table.
  void append_functions(PartsOfFunctions& functions) const {
    if (items_.is_valid()) {
      items_.append_functions(functions);
    } else if (same_.is_valid() && !names_count_) {
      functions.take(same_);
    }
  }

  // The dictionary, or the class with its bases, that alone can change the value; null where other
  // things can.
  PyObject* holder() const {
    if (names_count_) return owner_.ptr();
    const bool may_change =
        items_.is_valid() || (!value_.empty() && value_[0].may_change_in_place());
    if (may_change) return nullptr;
    if (PyDict_CheckExact(items())) return items();
    if (items_of_class_.is_valid() || !PyType_Check(items())) return nullptr;
    return is_held_by_class(items(), name_.ptr()) ? items() : nullptr;
  }

  bool holds(const Present& present) {
    if (names_count_) return names_of_class().equal(same_);
    const nb::object value = now();
    if (items_.is_valid()) return items_.holds(value);
    return same_.is_valid() ? value.is(same_) : value_[0].holds(value.ptr(), present);
  }

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(owner_.ptr());
    Py_VISIT(name_.ptr());
    Py_VISIT(same_.ptr());
    Py_VISIT(read_.ptr());
    Py_VISIT(items_of_class_.ptr());
    if (const int found = items_.traverse(visit, arg)) return found;
    for (const AttributeSnapshot& value : value_) {
      if (const int found = value.traverse(visit, arg)) return found;
    }
    return 0;
  }

 private:
  PyObject* items() const {
    return items_of_class_.is_valid() ? items_of_class_.ptr() : owner_.ptr();
  }

  // In an order of their own.
  nb::object names_of_class() const {
    static PyObject* const none = PyUnicode_InternFromString("no name at all");
    attribute(owner_.ptr(), none);  // up to 3.11 Python numbers a class when it is asked
    const nb::object held = dictionary_of_class(owner_);
    nb::list names;
    for (nb::handle key : nb::list(held)) {
      if (is_read(read_.ptr(), key.ptr()) || is_special_method(held, key)) names.append(key);
    }
    if (PyList_Sort(names.ptr()) != 0) PyErr_Clear();  // of keys that are no texts
    return names;
  }

  static bool is_special_method(nb::handle held, nb::handle key) {
    if (!PyUnicode_Check(key.ptr()) ||
        PyUnicode_Tailmatch(key.ptr(), special().ptr(), 0, 2, -1) != 1) {
      return false;
    }
    const nb::object value = nb::steal(PyObject_GetItem(held.ptr(), key.ptr()));
    if (!value.is_valid()) PyErr_Clear();
    return value.is_valid() && PyType_GetSlot(Py_TYPE(value.ptr()), Py_tp_descr_get) != nullptr;
  }

  static nb::handle special() {
    static PyObject* const prefix = PyUnicode_InternFromString("__");
    return prefix;
  }

  // The class of `...`, which no variable of the user's holds, where there is none.
  nb::object now() const {
    nb::object value;
    if (PyDict_Check(items())) {
      value = nb::borrow(PyDict_GetItemWithError(items(), name_.ptr()));
      if (!value.is_valid()) PyErr_Clear();
    } else if (items_of_class_.is_valid()) {
      value = nb::steal(PyObject_GetItem(items(), name_.ptr()));
      if (!value.is_valid()) PyErr_Clear();
    } else {
      value = attribute(owner_.ptr(), name_.ptr());
    }
    return value.is_valid() ? value : nb::borrow(reinterpret_cast<PyObject*>(&PyEllipsis_Type));
  }

  nb::object owner_, name_;
  nb::object items_of_class_;             // the owner's, where its bases do not count
  nb::object same_;                       // where nothing else counts
  bool names_count_ = false;              // those of a class, which are then the same
  nb::object read_;                       // of which those count
  bool is_named_ = true;                  // whether it has a name by which another process finds it
  TableItems items_;                      // of a table
  std::vector<AttributeSnapshot> value_;  // one, where more counts
};

// Variables that nothing but a write to one dictionary can change, and others, of which nobody
// tells.
class Variables {
 public:
  void take(nb::list described, SnapshotContext& context) {
    for (nb::handle each : described) {
      Variable variable(each);
      variable.take(context);
      variable.append_functions(functions_);
      group_of(variable.holder()).variables.push_back(std::move(variable));
    }
  }

  bool hold(const Present& present) {
    for (Group& group : groups_) {
      // Read first: comparing may run code that sets one.
      const uint64_t version = group.now();
      if (version != 0 && version == group.version) continue;
      group.version = 0;
      const auto holds = [&](Variable& variable) { return variable.holds(present); };
      if (!std::ranges::all_of(group.variables, holds)) return false;
      group.version = version;
    }
    return functions_.hold();
  }

  int traverse(visitproc visit, void* arg) const {
    for (const Group& group : groups_) {
      if (const int found = group.dictionary.traverse(visit, arg)) return found;
      if (const int found = group.cls.traverse(visit, arg)) return found;
      for (const Variable& variable : group.variables) {
        if (const int found = variable.traverse(visit, arg)) return found;
      }
    }
    return functions_.traverse(visit, arg);
  }

 private:
  struct Group {
    WatchedDict dictionary;  // of null for those that other things can change
    WatchedClass cls;        // whose attributes they are; none where they are items
    std::vector<Variable> variables;
    uint64_t version = 0;  // of the dictionary or the class when they were last compared

    uint64_t now() const { return cls.is_valid() ? cls.version() : dictionary.version(); }
  };

  Group& group_of(PyObject* holder) {
    const auto [found, is_first] = places_.try_emplace(holder, groups_.size());
    if (is_first) {
      const bool is_class = holder != nullptr && PyType_Check(holder);
      groups_.push_back({WatchedDict(is_class ? nullptr : holder),
                         WatchedClass(is_class ? holder : nullptr),
                         {}});
    }
    return groups_[found->second];
  }

  std::vector<Group> groups_;
  PartsOfFunctions functions_;                    // which may change while they stay in place
  std::unordered_map<PyObject*, size_t> places_;  // of the groups, by dictionary or class
};

// What runs the layers: packages replace it in their own classes and in PyTorch's.
class LayerMethods {
 public:
  LayerMethods() = default;
  explicit LayerMethods(nb::list layers) {
    std::unordered_set<PyObject*> seen;
    for (nb::handle layer : layers) {
      if (seen.insert(layer.type().ptr()).second) take(layer.type(), "forward");
    }
    const nb::object module = nb::module_::import_("torch.nn").attr("Module");
    for (const char* name : {"__call__", "_call_impl", "_wrapped_call_impl", "__getattr__"}) {
      take(module, name);
    }
  }

  bool hold() {
    return std::ranges::all_of(methods_, [](Method& method) {
      const uint64_t version = method.watched.version();
      if (version != 0 && version == method.version) return true;
      if (!attribute(method.owner.ptr(), method.name.ptr()).is(method.function)) return false;
      method.version = version;
      return true;
    });
  }

  int traverse(visitproc visit, void* arg) const {
    for (const Method& method : methods_) {
      Py_VISIT(method.owner.ptr());
      Py_VISIT(method.function.ptr());
      if (const int found = method.watched.traverse(visit, arg)) return found;
    }
    return 0;
  }

 private:
  struct Method {
    nb::object owner, name, function;  // no function: the class has none
    WatchedClass watched;              // the owner, where it or a base holds the function
    uint64_t version = 0;              // of the owner when it was last compared
  };

  void take(nb::handle owner, const char* name) {
    nb::object key = nb::steal(PyUnicode_InternFromString(name));
    nb::object function = attribute(owner.ptr(), key.ptr());
    WatchedClass watched(is_held_by_class(owner.ptr(), key.ptr()) ? owner.ptr() : nullptr);
    methods_.push_back(
        {nb::borrow(owner), std::move(key), std::move(function), std::move(watched)});
  }

  std::vector<Method> methods_;
};

// A state of a module, of all that a captured graph depends on: classes, layers, attributes that
// are read, the number of hooks, and of each parameter and buffer its kind and which others are the
// same tensor. Which tensors they are is no part of it: where others of their kind take their
// place, the guard takes them on.
class ModuleGuard {
 public:
  // `comparisons` gets what is compared.
  ModuleGuard(nb::list layers, nb::object names, nb::list variables, nb::list inputs,
              Comparisons* comparisons = nullptr)
      : names_(std::move(names)), inputs_(std::move(inputs)), methods_(layers) {
    for (nb::handle layer : layers) layers_.emplace_back(layer, layers_.empty());
    std::vector<PyObject*> tensors;
    for (const LayerGuard& layer : layers_) layer.read_tables(tensors);
    tensors_ = SlotTensors(tensors);
    ties_ = tensors_.ties();
    const nb::module_ torch = nb::module_::import_("torch");
    const nb::object tensor_type = torch.attr("Tensor");
    std::unordered_set<PyObject*> guarded;
    for (nb::handle layer : layers) guarded.insert(layer.ptr());
    std::unordered_set<PyObject*> given;
    for (nb::handle input : inputs_) {
      given.insert(input.ptr());
      input_kinds_.emplace_back(input.ptr());
    }
    SnapshotContext context{tensor_type.ptr(), &tensors_,  &guarded, names_.ptr(), &given, {}, {},
                            &places_,          comparisons};
    for (LayerGuard& layer : layers_) layer.take_attributes(context);
    variables_.take(std::move(variables), context);
    deep_ = DeepSnapshots(context);
    for (size_t slot = 0; slot < ties_.size(); ++slot) {
      kinds_.emplace_back(tensors_[slot]);
      context.tell("kind", tensors_[slot], static_cast<size_t>(ties_[slot] + 1));
    }
    for (nb::handle input : inputs_) context.tell("kind", input.ptr());
  }

  ModuleGuard(const ModuleGuard&) = delete;
  ModuleGuard& operator=(const ModuleGuard&) = delete;

  bool holds() {
    const Present present{tensors_, places_};
    if (!variables_.hold(present)) return false;
    if (!methods_.hold()) return false;
    for (size_t i = 0; i < input_kinds_.size(); ++i) {
      if (!input_kinds_[i].fits(nb::object(inputs_[i]).ptr())) return false;
    }
    if (is_untouched()) {
      return changing_hold() && deep_.hold(present) && places_.are_distinct() &&
             kinds_fit(tensors_);
    }
    // Read first: comparing may run code that changes one.
    Versions versions = versions_now(std::exchange(versions_, {}));
    changing_.clear();
    const bool is_equal = compares_equal();
    if (!is_equal) versions.numbers.clear();
    std::swap(versions_, versions);
    if (!is_equal) return false;
    for (LayerGuard& layer : layers_) layer.append_changing(changing_);
    return true;
  }

  nb::handle tensors() const { return tensors_.tuple(); }
  nb::handle names() const { return names_; }

  // A state that is not the present one need not keep tensors in memory.
  void release_tensors() {
    // Dropping an object may run code: only once nothing refers to any of them.
    std::vector<nb::object> seen;
    changing_.clear();
    for (LayerGuard& layer : layers_) layer.forget(seen);
    versions_.numbers.clear();
    const SlotTensors released = std::exchange(tensors_, {});
  }

  int traverse(visitproc visit, void* arg) const {
    for (const LayerGuard& layer : layers_) {
      if (const int found = layer.traverse(visit, arg)) return found;
    }
    for (const std::vector<TensorKind>* kinds : {&kinds_, &input_kinds_}) {
      for (const TensorKind& kind : *kinds) {
        if (const int found = kind.traverse(visit, arg)) return found;
      }
    }
    Py_VISIT(inputs_.ptr());
    for (const WatchedDict& dictionary : versions_.dictionaries) {
      if (const int found = dictionary.traverse(visit, arg)) return found;
    }
    if (const int found = variables_.traverse(visit, arg)) return found;
    if (const int found = deep_.traverse(visit, arg)) return found;
    Py_VISIT(names_.ptr());
    Py_VISIT(tensors_.tuple().ptr());
    if (const int found = methods_.traverse(visit, arg)) return found;
    return 0;
  }

  void clear() {
    changing_.clear();
    const std::vector<LayerGuard> layers = std::exchange(layers_, {});
    const std::vector<TensorKind> kinds = std::exchange(kinds_, {});
    const Variables variables = std::exchange(variables_, {});
    const DeepSnapshots deep = std::exchange(deep_, {});
    const std::vector<TensorKind> input_kinds = std::exchange(input_kinds_, {});
    const nb::object inputs = std::exchange(inputs_, nb::list());
    const LayerMethods methods = std::exchange(methods_, {});
    const Versions versions = std::exchange(versions_, {});
    release_tensors();
  }

 private:
  // Dictionaries of all layers, and their versions when the state was last found equal.
  struct Versions {
    std::vector<WatchedDict> dictionaries;
    std::vector<size_t> first;      // of each layer: that of its attributes
    std::vector<uint64_t> numbers;  // none where that cannot be told
  };

  // Those of this moment, of which `before` may know the dictionaries.
  Versions versions_now(Versions before) const {
    if (!WatchedDict::is_told()) return {};
    Versions now = are_in_place(before) ? std::move(before) : Versions();
    if (now.dictionaries.empty()) {
      for (const LayerGuard& layer : layers_) {
        now.first.push_back(now.dictionaries.size());
        layer.append_dictionaries(now.dictionaries);
      }
    }
    now.numbers.clear();
    for (const WatchedDict& dictionary : now.dictionaries) {
      now.numbers.push_back(dictionary.version());
      if (now.numbers.back() != 0) continue;
      now.numbers.clear();
      break;
    }
    return now;
  }

  bool are_in_place(const Versions& versions) const {
    if (versions.dictionaries.empty()) return false;
    for (size_t i = 0; i < layers_.size(); ++i) {
      if (!layers_[i].is_in_place(versions.dictionaries[versions.first[i]].ptr())) return false;
    }
    return true;
  }

  // Whether no attribute, tensor or layer has been set since the last full comparison. False also
  // where that cannot be told.
  bool is_untouched() const {
    if (versions_.numbers.empty() || !are_in_place(versions_)) return false;
    for (size_t i = 0; i < versions_.numbers.size(); ++i) {
      if (versions_.dictionaries[i].version() != versions_.numbers[i]) return false;
    }
    return true;
  }

  bool changing_hold() {
    return std::all_of(changing_.begin(), changing_.end(), [&](const LayerGuard::Changing& it) {
      return it.holds({tensors_, places_});
    });
  }

  // Compares all that the state is made of; takes on tensors that are others of their kind.
  bool compares_equal() {
    std::vector<PyObject*> now;
    now.reserve(kinds_.size());
    for (const LayerGuard& layer : layers_) {
      if (!layer.read_tables(now)) return false;
    }
    if (tensors_.are(now)) return holds_with(tensors_);
    SlotTensors taken(now);
    if (taken.ties() != ties_ || !holds_with(taken)) return false;
    std::swap(tensors_, taken);
    return true;
  }

  bool holds_with(const SlotTensors& tensors) {
    for (LayerGuard& layer : layers_) {
      if (!layer.holds({tensors, places_})) return false;
    }
    return deep_.hold({tensors, places_}) && places_.are_distinct() && kinds_fit(tensors);
  }

  bool kinds_fit(const SlotTensors& tensors) const {
    for (size_t slot = 0; slot < kinds_.size(); ++slot) {
      if (!kinds_[slot].fits(tensors[slot])) return false;
    }
    return true;
  }

  nb::object names_;  // attributes that are read, a set; None for all
  nb::list inputs_;   // tensors outside of the tables, of which only the kind counts
  LayerMethods methods_;
  std::vector<TensorKind> input_kinds_;
  std::vector<LayerGuard> layers_;
  Variables variables_;
  DeepSnapshots deep_;
  std::vector<LayerGuard::Changing> changing_;
  Versions versions_;
  std::vector<TensorKind> kinds_;
  SlotTensors tensors_;
  ContainerPlaces places_;
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
  WatchedDict::start();
  module.def(
      "comparisons",
      [](nb::list layers, nb::object names, nb::list variables, nb::list inputs) {
        Comparisons found;
        const ModuleGuard guard(std::move(layers), std::move(names), std::move(variables),
                                std::move(inputs), &found);
        return found.all();
      },
      nb::arg("layers"), nb::arg("names") = nb::none(), nb::arg("variables") = nb::list(),
      nb::arg("inputs") = nb::list());
  module.def(
      "object_contents",
      [](nb::handle object) {
        nb::list parts;
        for (const nb::object& part : Contents::of(object.ptr()).parts) parts.append(part);
        return parts;
      },
      nb::arg("object"));
  nb::class_<ModuleGuard>(module, "ModuleGuard", nb::type_slots(kSlots))
      .def(
          "__init__",
          [](ModuleGuard* self, nb::list layers, nb::object names, nb::list variables,
             nb::list inputs) {
            new (self) ModuleGuard(std::move(layers), std::move(names), std::move(variables),
                                   std::move(inputs));
          },
          nb::arg("layers"), nb::arg("names") = nb::none(), nb::arg("variables") = nb::list(),
          nb::arg("inputs") = nb::list())
      .def("holds", &ModuleGuard::holds)
      .def("release_tensors", &ModuleGuard::release_tensors)
      .def_prop_ro("names", &ModuleGuard::names)
      .def_prop_ro("tensors", &ModuleGuard::tensors);
}

}  // namespace ortrain::python
