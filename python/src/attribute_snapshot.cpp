// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "python/src/attribute_snapshot.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string_view>
#include <utility>

namespace nb = nanobind;

namespace ortrain::python {
namespace {

constexpr int kDepth = 64;  // of objects within each other; deeper ones get snapshots of their own

int64_t version_of(PyObject* tensor) {
  static PyObject* const name = PyUnicode_InternFromString("_version");
  const nb::object version = attribute(tensor, name);
  if (!version.is_valid() || !PyLong_Check(version.ptr())) return -1;
  return PyLong_AsLongLong(version.ptr());
}

// An object and the class that it says it is of, which is asked for once: of some it is code that
// answers.
class Asked {
 public:
  explicit Asked(PyObject* object) : object_(object) {}

  // As is_instance.
  bool is(PyObject* type) {
    PyTypeObject* const wanted = reinterpret_cast<PyTypeObject*>(type);
    if (PyType_IsSubtype(Py_TYPE(object_), wanted) != 0) return true;
    if (!said_.is_valid()) {
      static PyObject* const name = PyUnicode_InternFromString("__class__");
      said_ = attribute(object_, name);
      if (!said_.is_valid()) said_ = nb::none();
    }
    return PyType_Check(said_.ptr()) &&
           PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(said_.ptr()), wanted) != 0;
  }

 private:
  PyObject* object_;
  nb::object said_;  // once it has been asked
};

bool is_deque(Asked& value) {
  static PyObject* const deque = imported("collections", "deque");
  return value.is(deque);
}

bool is_deque(PyObject* value) {
  Asked asked(value);
  return is_deque(asked);
}

bool is_context_variable(Asked& value) {
  static PyObject* const variable = imported("contextvars", "ContextVar");
  return value.is(variable);
}

// Arrays, and whatever else lies in memory that others may write to.
bool is_buffer(PyObject* value) {
  return PyObject_CheckBuffer(value) != 0 && !PyBytes_CheckExact(value);
}

bool is_weak_reference(Asked& value) {
  static PyObject* const reference = imported("weakref", "ReferenceType");
  return value.is(reference);
}

// Of a mapping that is no dictionary but shows one: a proxy, a view.
bool shows_items(PyObject* value, Asked& asked) {
  static PyObject* const proxy = imported("types", "MappingProxyType");
  return asked.is(proxy) || PyDictViewSet_Check(value) || PyDictValues_Check(value);
}

bool is_method(PyObject* value) {
  static PyObject* const method = imported("types", "MethodType");
  return reinterpret_cast<PyObject*>(Py_TYPE(value)) == method;
}

// Of an object, written in C.
bool is_method_in_c(PyObject* value) {
  PyObject* const self = PyCFunction_Check(value) ? PyCFunction_GetSelf(value) : nullptr;
  return self != nullptr && !PyModule_Check(self) && !PyType_Check(self);
}

// Each access of a method of a class or an object makes another one.
bool is_bound(PyObject* value) { return is_method(value) || is_method_in_c(value); }

bool is_sequence(PyObject* value) {
  return PyTuple_Check(value) || PyList_Check(value) || is_deque(value);
}

Py_ssize_t size_of(PyObject* sequence) {
  if (PyTuple_Check(sequence)) return PyTuple_Size(sequence);
  if (PyList_Check(sequence)) return PyList_Size(sequence);
  const Py_ssize_t size = PySequence_Size(sequence);
  if (size < 0) PyErr_Clear();
  return size;
}

// What the container holds, whatever a class of its own says; None where it cannot be read.
nb::object item_of(PyObject* sequence, Py_ssize_t i) {
  if (PyTuple_Check(sequence)) return nb::borrow(PyTuple_GetItem(sequence, i));
  if (PyList_Check(sequence)) return nb::borrow(PyList_GetItem(sequence, i));
  nb::object item = nb::steal(PySequence_GetItem(sequence, i));
  if (item.is_valid()) return item;
  PyErr_Clear();
  return nb::none();
}

// Classes, modules, compiled functions, PyTorch's and types of annotations are what they are
// called; loggers, and objects of the engine in a layer that has one of its own, change with every
// call and say nothing about a graph.
bool is_closed(PyObject* object) {
  static PyObject* const logger = imported("logging", "Logger");
  if (PyType_Check(object) || PyModule_Check(object) ||
      (PyCFunction_Check(object) && !is_method_in_c(object)) || is_instance(object, logger)) {
    return true;
  }
  static PyObject* const name = PyUnicode_InternFromString("__module__");
  PyObject* const owner =
      is_function(object) ? object : reinterpret_cast<PyObject*>(Py_TYPE(object));
  const nb::object home = attribute(owner, name);
  Py_ssize_t size = 0;
  const char* text = home.is_valid() && PyUnicode_Check(home.ptr())
                         ? PyUnicode_AsUTF8AndSize(home.ptr(), &size)
                         : nullptr;
  if (text == nullptr) PyErr_Clear();
  if (text == nullptr) return false;
  const std::string_view whole(text, static_cast<size_t>(size));
  return whole.starts_with("ortrain.") || whole == "typing" ||
         (is_function(object) && whole.starts_with("torch."));
}

void append_cells(PyObject* function, std::vector<nb::object>& contents) {
  static PyObject* const closure = PyUnicode_InternFromString("__closure__");
  static PyObject* const held = PyUnicode_InternFromString("cell_contents");
  const nb::object cells = attribute(function, closure);
  if (!cells.is_valid() || !PyTuple_Check(cells.ptr())) return;
  for (Py_ssize_t i = 0; i < PyTuple_Size(cells.ptr()); ++i) {
    nb::object content = attribute(PyTuple_GetItem(cells.ptr(), i), held);
    contents.push_back(content.is_valid() ? std::move(content) : nb::none());
  }
}

void append_slots(PyObject* object, std::vector<nb::object>& contents) {
  static PyObject* const names_of = imported("copyreg", "_slotnames");
  const nb::object names = nb::steal(PyObject_CallFunctionObjArgs(
      names_of, reinterpret_cast<PyObject*>(Py_TYPE(object)), nullptr));
  if (!names.is_valid()) PyErr_Clear();
  if (!names.is_valid() || !PyList_Check(names.ptr())) return;
  for (Py_ssize_t i = 0; i < PyList_Size(names.ptr()); ++i) {
    nb::object slot = attribute(object, PyList_GetItem(names.ptr(), i));
    contents.push_back(slot.is_valid() ? std::move(slot) : nb::none());
  }
}

void append_attributes(PyObject* object, std::initializer_list<const char*> names,
                       std::vector<nb::object>& contents) {
  for (const char* name : names) {
    nb::object part = attribute(object, nb::str(name).ptr());
    if (part.is_valid()) contents.push_back(std::move(part));
  }
}

// What containers written in C do besides holding items.
void append_settings(PyObject* object, Asked& asked, std::vector<nb::object>& contents) {
  static PyObject* const factory = PyUnicode_InternFromString("default_factory");
  static PyObject* const limit = PyUnicode_InternFromString("maxlen");
  PyObject* const name = PyDict_Check(object) ? factory : is_deque(asked) ? limit : nullptr;
  nb::object setting = name == nullptr ? nb::object() : attribute(object, name);
  if (setting.is_valid()) contents.push_back(std::move(setting));
}

nb::object result_of(PyObject* called, PyObject* argument) {
  nb::object made = nb::steal(PyObject_CallFunctionObjArgs(called, argument, nullptr));
  if (!made.is_valid()) PyErr_Clear();
  return made.is_valid() ? made : nb::none();
}

// Whether a module is of the standard library or one that is built like it; the builtins read no
// attributes.
bool is_library(PyObject* module_name) {
  static PyObject* const names = imported("sys", "stdlib_module_names");
  if (!PyUnicode_Check(module_name)) return false;
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(module_name, &size);
  if (text == nullptr) {
    PyErr_Clear();
    return false;
  }
  const std::string_view whole(text, static_cast<size_t>(size));
  const std::string_view top = whole.substr(0, whole.find('.'));
  // Their code calls methods, but reads no attributes of its own making.
  for (const char* other : {"builtins", "types", "abc", "typing", "enum", "contextlib"}) {
    if (top == other) return false;
  }
  if (whole == "collections.abc") return false;
  if (whole.starts_with("torch.distributions")) return true;
  const int found = PySet_Contains(names, nb::str(top.data(), top.size()).ptr());
  if (found < 0) PyErr_Clear();
  return found == 1;
}

// What a set holds, in its order; None where a class of its own does not tell.
nb::object items_of(PyObject* set) {
  nb::object items = nb::steal(PySequence_Tuple(set));
  if (items.is_valid()) return items;
  PyErr_Clear();
  return nb::none();
}

// Of the bytes of a buffer; -1 where they cannot be read.
int64_t checksum_of(PyObject* buffer) {
  static PyObject* const crc = imported("zlib", "crc32");
  const nb::object bytes = nb::steal(PyBytes_FromObject(buffer));
  const nb::object sum = bytes.is_valid()
                             ? nb::steal(PyObject_CallFunctionObjArgs(crc, bytes.ptr(), nullptr))
                             : nb::object();
  if (!sum.is_valid()) {
    PyErr_Clear();
    return -1;
  }
  return PyLong_AsLongLong(sum.ptr());
}

}  // namespace

Contents Contents::of(PyObject* object) {
  static PyObject* const partial = imported("functools", "partial");
  static PyObject* const dict = PyUnicode_InternFromString("__dict__");
  static PyObject* const list = imported("builtins", "list");
  static PyObject* const get = PyUnicode_InternFromString("get");
  static PyObject* const items = PyUnicode_InternFromString("items");
  Contents found;
  Asked asked(object);
  std::vector<nb::object>& contents = found.parts;
  if (is_function(object)) {
    append_cells(object, contents);
    append_attributes(object, {"__code__", "__defaults__", "__kwdefaults__", "__dict__"}, contents);
    return found;
  }
  if (is_weak_reference(asked)) {
    nb::object referent = nb::steal(PyObject_CallFunctionObjArgs(object, nullptr));
    if (!referent.is_valid()) PyErr_Clear();
    contents.push_back(referent.is_valid() ? std::move(referent) : nb::none());
    return found;
  }
  if (is_context_variable(asked)) {
    const nb::object method = attribute(object, get);
    // With an argument it would not give the default that the variable was made with.
    nb::object value = method.is_valid() ? nb::steal(PyObject_CallNoArgs(method.ptr())) : method;
    if (!value.is_valid()) PyErr_Clear();
    contents.push_back(value.is_valid() ? std::move(value) : nb::none());
    return found;
  }
  if (shows_items(object, asked)) {
    const nb::object method = attribute(object, items);
    const nb::object shown = method.is_valid()
                                 ? nb::steal(PyObject_CallFunctionObjArgs(method.ptr(), nullptr))
                                 : nb::borrow(object);
    if (!shown.is_valid()) PyErr_Clear();
    if (!shown.is_valid()) return found;
    found.made = 0;
    contents.push_back(result_of(list, shown.ptr()));
    return found;
  }
  if (is_bound(object)) {
    append_attributes(object, {"__self__", is_method(object) ? "__func__" : "__name__"}, contents);
    return found;
  }
  if (asked.is(partial)) {
    append_attributes(object, {"func", "args", "keywords"}, contents);
  }
  nb::object attributes = attribute(object, dict);
  if (attributes.is_valid() && PyDict_CheckExact(attributes.ptr())) {
    contents.push_back(std::move(attributes));
  }
  // Some dictionaries have an order of their own.
  if (PyDict_Check(object) && !PyDict_CheckExact(object)) {
    found.made = contents.size();
    contents.push_back(result_of(list, object));
  }
  append_settings(object, asked, contents);
  append_slots(object, contents);
  // One that holds nothing is what it is, whatever becomes of its class.
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (!contents.empty()) contents.push_back(nb::borrow(type));
  return found;
}

nb::object attribute(PyObject* object, PyObject* name) {
  nb::object value = nb::steal(PyObject_GetAttr(object, name));
  if (!value.is_valid()) PyErr_Clear();
  return value;
}

bool is_baked_in(PyObject* value) {
  const PyTypeObject* type = Py_TYPE(value);
  return value == Py_None || type == &PyBool_Type || type == &PyLong_Type ||
         type == &PyFloat_Type || type == &PyUnicode_Type || type == &PyComplex_Type;
}

bool are_equal_values(PyObject* a, PyObject* b) {
  if (Py_TYPE(a) != Py_TYPE(b)) return false;
  const auto are_equal_bits = [](double x, double y) {
    return std::bit_cast<uint64_t>(x) == std::bit_cast<uint64_t>(y);
  };
  if (PyFloat_CheckExact(a)) return are_equal_bits(PyFloat_AsDouble(a), PyFloat_AsDouble(b));
  if (PyComplex_CheckExact(a)) {
    return are_equal_bits(PyComplex_RealAsDouble(a), PyComplex_RealAsDouble(b)) &&
           are_equal_bits(PyComplex_ImagAsDouble(a), PyComplex_ImagAsDouble(b));
  }
  const int equal = PyObject_RichCompareBool(a, b, Py_EQ);
  if (equal < 0) PyErr_Clear();
  return equal == 1;
}

PyObject* imported(const char* module, const char* name) {
  return nb::object(nb::module_::import_(module).attr(name)).release().ptr();
}

bool is_instance(PyObject* value, PyObject* type) {
  const int found = PyObject_IsInstance(value, type);
  if (found < 0) PyErr_Clear();
  return found == 1;
}

bool is_function(PyObject* value) {
  static PyObject* const function = imported("types", "FunctionType");
  return reinterpret_cast<PyObject*>(Py_TYPE(value)) == function;
}

bool are_equal_strings(PyObject* a, PyObject* b) {
  return PyUnicode_CheckExact(a) && PyUnicode_CheckExact(b) && PyUnicode_Compare(a, b) == 0;
}

bool is_read(PyObject* names, PyObject* name) {
  if (names == Py_None) return true;
  const int found = PySet_Contains(names, name);
  if (found < 0) PyErr_Clear();
  return found != 0;
}

nb::object names_of(PyObject* object, PyObject* names) {
  if (names == Py_None) return nb::none();
  static PyObject* const order = PyUnicode_InternFromString("__mro__");
  static PyObject* const called = PyUnicode_InternFromString("__qualname__");
  static PyObject* const home = PyUnicode_InternFromString("__module__");
  static PyObject* const space = imported("types", "SimpleNamespace");
  static PyObject* const wholes = PyUnicode_InternFromString("namespaces as wholes");
  if (is_instance(object, space) && is_read(names, wholes)) return nb::none();
  const nb::object classes = attribute(reinterpret_cast<PyObject*>(Py_TYPE(object)), order);
  if (!classes.is_valid()) return nb::none();
  for (Py_ssize_t i = 0; i < PyTuple_Size(classes.ptr()); ++i) {
    PyObject* const type = PyTuple_GetItem(classes.ptr(), i);
    // Nobody has looked at what their own code reads.
    const nb::object module = attribute(type, home);
    if (module.is_valid() && is_library(module.ptr())) return nb::none();
    const nb::object name = attribute(type, called);
    const nb::object whole =
        name.is_valid() ? nb::steal(PyUnicode_FromFormat("class %U", name.ptr())) : nb::object();
    if (!whole.is_valid()) PyErr_Clear();
    if (!whole.is_valid() || is_read(names, whole.ptr())) return nb::none();
  }
  return nb::borrow(names);
}

nb::object names_within(PyObject* attribute, PyObject* names) {
  if (names == Py_None || !PyUnicode_Check(attribute)) return nb::borrow(names);
  const nb::object whole = nb::steal(PyUnicode_FromFormat("attributes of %U", attribute));
  if (!whole.is_valid()) PyErr_Clear();
  return !whole.is_valid() || is_read(names, whole.ptr()) ? nb::none() : nb::borrow(names);
}

SlotTensors::SlotTensors(std::span<PyObject* const> tensors)
    : tuple_(nb::steal(PyTuple_New(static_cast<Py_ssize_t>(tensors.size())))) {
  if (!tuple_.is_valid()) nb::raise_python_error();
  for (size_t slot = 0; slot < tensors.size(); ++slot) {
    PyTuple_SetItem(tuple_.ptr(), static_cast<Py_ssize_t>(slot),
                    nb::borrow(tensors[slot]).release().ptr());
    if (tensors[slot] != Py_None) first_.try_emplace(tensors[slot], static_cast<int64_t>(slot));
  }
}

bool SlotTensors::are(std::span<PyObject* const> tensors) const {
  if (PyTuple_Size(tuple_.ptr()) != static_cast<Py_ssize_t>(tensors.size())) return false;
  for (size_t slot = 0; slot < tensors.size(); ++slot) {
    if ((*this)[slot] != tensors[slot]) return false;
  }
  return true;
}

int64_t SlotTensors::slot_of(PyObject* object) const {
  const auto found = first_.find(object);
  return found == first_.end() ? -1 : found->second;
}

std::vector<int64_t> SlotTensors::ties() const {
  std::vector<int64_t> ties(static_cast<size_t>(PyTuple_Size(tuple_.ptr())));
  for (size_t slot = 0; slot < ties.size(); ++slot) ties[slot] = slot_of((*this)[slot]);
  return ties;
}

void Comparisons::add(const char* kind, PyObject* object, size_t number) {
  all_.append(nb::make_tuple(kind, nb::borrow(object), number));
}

size_t ContainerPlaces::add(PyObject* container) {
  objects_.push_back(container);
  return objects_.size() - 1;
}

bool ContainerPlaces::are_distinct() {
  if (!moved_) return true;
  std::vector<PyObject*> sorted = objects_;
  std::sort(sorted.begin(), sorted.end(), std::less<>());
  const bool distinct = std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
  moved_ = !distinct;
  return distinct;
}

AttributeSnapshot::AttributeSnapshot(PyObject* value, SnapshotContext& context, int depth,
                                     bool is_made)
    : value_(nb::borrow(value)) {
  if (is_baked_in(value) || (PyCFunction_Check(value) && !is_method_in_c(value)) ||
      (is_bound(value) && depth >= kDepth)) {
    kind_ = Kind::equal;
    context.tell("equal", value);
    if (is_bound(value)) context.put_off(value);
  } else if (context.inputs->count(value) != 0) {
    kind_ = Kind::identity;
    context.tell("input", value);
  } else if (is_instance(value, context.tensor_type)) {
    number_ = context.tensors->slot_of(value);
    kind_ = number_ < 0 ? Kind::tensor : Kind::slot_tensor;
    context.tell(number_ < 0 ? "tensor" : "slot", value,
                 number_ < 0 ? 0 : static_cast<size_t>(number_));
    if (number_ < 0) {
      number_ = version_of(value);
    } else {
      value_ = nb::none();  // another one may take its place, and it be let go
    }
  } else if (context.seen.count(value) != 0 || context.layers->count(value) != 0) {
    kind_ = Kind::identity;
    context.tell("same", value);
  } else if (depth >= kDepth && !is_made) {
    kind_ = Kind::identity;
    context.tell("same", value);
    context.put_off(value);
  } else if (is_sequence(value)) {
    kind_ = Kind::sequence;
    context.seen.insert(value);
    value_ = nb::borrow(reinterpret_cast<PyObject*>(Py_TYPE(value)));
    if (!is_made) place_ = static_cast<int64_t>(context.places->add(value));
    context.tell(is_made ? "made" : "sequence", value, static_cast<size_t>(size_of(value)));
    for (Py_ssize_t i = 0; i < size_of(value); ++i) {
      const nb::object item = item_of(value, i);
      parts_.emplace_back(item.ptr(), context, depth + 1,
                          is_made && PyTuple_CheckExact(item.ptr()));
    }
    take_contents(value, context, depth);
  } else if (PyDict_Check(value)) {
    place_ = static_cast<int64_t>(context.places->add(value));
    take_dictionary(value, context, depth);
    take_contents(value, context, depth);
  } else if (PyAnySet_Check(value)) {
    kind_ = Kind::set;
    context.seen.insert(value);
    place_ = static_cast<int64_t>(context.places->add(value));
    value_ = items_of(value);
    context.tell("set", value);
  } else if (is_buffer(value)) {
    kind_ = Kind::array;
    number_ = checksum_of(value);
    context.tell("array", value);
  } else if (!is_closed(value)) {
    context.seen.insert(value);
    take_contents(value, context, depth);
    if (!contents_.empty()) kind_ = Kind::object;
  } else {
    context.tell("same", value);
  }
}

void AttributeSnapshot::take_contents(PyObject* object, SnapshotContext& context, int depth) {
  if (PyTuple_CheckExact(object) || PyList_CheckExact(object) || PyDict_CheckExact(object)) return;
  // A class may have its own way from a name to an attribute, as configurations of transformers
  // have.
  const bool by_name = PyType_GetSlot(Py_TYPE(object), Py_tp_getattro) ==
                       reinterpret_cast<void*>(PyObject_GenericGetAttr);
  const nb::object names = by_name ? names_of(object, context.names) : nb::none();
  const auto [contents, made] = Contents::of(object);
  static PyObject* const dict = PyUnicode_InternFromString("__dict__");
  const nb::object attributes = attribute(object, dict);
  context.made.insert(context.made.end(), contents.begin(), contents.end());
  context.tell("object", object, contents.size());
  for (size_t i = 0; i < contents.size(); ++i) {
    const nb::object& part = contents[i];
    const bool are_attributes =
        part.is(attributes) && PyDict_CheckExact(part.ptr()) && context.seen.count(part.ptr()) == 0;
    contents_.push_back(are_attributes
                            ? of_attributes(part.ptr(), names.ptr(), context, depth + 1)
                            : AttributeSnapshot(part.ptr(), context, depth + 1, i == made));
  }
}

AttributeSnapshot AttributeSnapshot::of(PyObject* name, PyObject* value, SnapshotContext& context,
                                        int depth) {
  const nb::object names = names_within(name, context.names);
  PyObject* const before = std::exchange(context.names, names.ptr());
  AttributeSnapshot made(value, context, depth);
  context.names = before;
  return made;
}

AttributeSnapshot AttributeSnapshot::of_attributes(PyObject* dict, PyObject* names,
                                                   SnapshotContext& context, int depth) {
  AttributeSnapshot made(Py_None, context, depth);
  made.kind_ = Kind::attributes;
  made.value_ = nb::borrow(names);
  context.seen.insert(dict);
  context.tell("attributes", dict);
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t position = 0;
  while (PyDict_Next(dict, &position, &key, &value) != 0) {
    if (!is_read(names, key)) continue;
    made.keys_.push_back(nb::borrow(key));
    context.tell("name", key);
    made.parts_.push_back(of(key, value, context, depth + 1));
  }
  context.tell("end", dict);
  return made;
}

bool AttributeSnapshot::holds(PyObject* now, const Present& present) {
  if (place_ >= 0) present.places.see(static_cast<size_t>(place_), now);
  switch (kind_) {
    case Kind::identity:
      return now == value_.ptr();
    case Kind::tensor:
      return now == value_.ptr() && (number_ < 0 || version_of(now) == number_) &&
             present.tensors.slot_of(now) < 0;
    case Kind::slot_tensor:
      return now == present.tensors[static_cast<size_t>(number_)];
    case Kind::equal:
      return equals(now);
    case Kind::sequence:
      return holds_sequence(now, present);
    case Kind::dictionary:
      return holds_dictionary(now, present);
    case Kind::attributes:
      return holds_attributes(now, present);
    case Kind::set:
      return PyAnySet_Check(now) != 0 && holds_items(items_of(now));
    case Kind::array:
      return now == value_.ptr() && checksum_of(now) == number_;
    case Kind::object:
      if (now != value_.ptr() && !(is_bound(now) && is_bound(value_.ptr()))) return false;
      return holds_contents(now, present);
  }
  return false;
}

bool AttributeSnapshot::may_change_in_place() const {
  if (kind_ == Kind::identity || kind_ == Kind::equal) return false;
  if (kind_ != Kind::sequence || value_.ptr() != reinterpret_cast<PyObject*>(&PyTuple_Type)) {
    return true;
  }
  return std::any_of(parts_.begin(), parts_.end(),
                     [](const AttributeSnapshot& part) { return part.may_change_in_place(); });
}

int AttributeSnapshot::traverse(visitproc visit, void* arg) const {
  Py_VISIT(value_.ptr());
  for (const nb::object& key : keys_) Py_VISIT(key.ptr());
  for (const std::vector<AttributeSnapshot>* parts : {&parts_, &contents_}) {
    for (const AttributeSnapshot& part : *parts) {
      if (const int found = part.traverse(visit, arg)) return found;
    }
  }
  return 0;
}

void AttributeSnapshot::take_dictionary(PyObject* dict, SnapshotContext& context, int depth) {
  kind_ = Kind::dictionary;
  context.seen.insert(dict);
  value_ = nb::borrow(reinterpret_cast<PyObject*>(Py_TYPE(dict)));
  context.tell("dictionary", dict, static_cast<size_t>(PyDict_Size(dict)));
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t position = 0;
  while (PyDict_Next(dict, &position, &key, &value) != 0) {
    keys_.push_back(nb::borrow(key));
    context.tell("key", key);
    parts_.emplace_back(value, context, depth + 1);
  }
}

bool AttributeSnapshot::equals(PyObject* now) {
  if (now == value_.ptr()) return true;
  if (!are_equal_values(value_.ptr(), now)) return false;
  value_ = nb::borrow(now);
  return true;
}

bool AttributeSnapshot::holds_sequence(PyObject* now, const Present& present) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(now)) != value_.ptr()) return false;
  for (size_t i = 0; i < parts_.size(); ++i) {
    // Asked for each time: reading an attribute may run code that changes the list.
    if (size_of(now) != static_cast<Py_ssize_t>(parts_.size())) return false;
    const nb::object item = item_of(now, static_cast<Py_ssize_t>(i));
    if (!parts_[i].holds(item.ptr(), present)) return false;
  }
  return size_of(now) == static_cast<Py_ssize_t>(parts_.size()) && holds_contents(now, present);
}

// Code may go through a set, so that its order counts; equal numbers of other types are others.
bool AttributeSnapshot::holds_items(const nb::object& now) const {
  if (!PyTuple_CheckExact(now.ptr()) || !PyTuple_CheckExact(value_.ptr())) return false;
  const Py_ssize_t size = PyTuple_Size(value_.ptr());
  if (PyTuple_Size(now.ptr()) != size) return false;
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* const a = PyTuple_GetItem(value_.ptr(), i);
    PyObject* const b = PyTuple_GetItem(now.ptr(), i);
    if (a == b) continue;
    if (!are_equal_values(a, b)) return false;
  }
  return true;
}

bool AttributeSnapshot::holds_attributes(PyObject* now, const Present& present) {
  if (!PyDict_CheckExact(now)) return false;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t position = 0;
  size_t next = 0;
  while (PyDict_Next(now, &position, &key, &value) != 0) {
    if (!is_read(value_.ptr(), key)) continue;
    if (next == keys_.size() || !is_same_name(key, keys_[next].ptr()) ||
        !parts_[next].holds(nb::borrow(value).ptr(), present)) {
      return false;
    }
    ++next;
  }
  return next == keys_.size();
}

bool AttributeSnapshot::holds_contents(PyObject* now, const Present& present) {
  if (contents_.empty()) return true;
  const std::vector<nb::object> contents = Contents::of(now).parts;
  if (contents.size() != contents_.size()) return false;
  for (size_t i = 0; i < contents.size(); ++i) {
    if (!contents_[i].holds(contents[i].ptr(), present)) return false;
  }
  return true;
}

bool AttributeSnapshot::holds_dictionary(PyObject* now, const Present& present) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(now)) != value_.ptr() ||
      PyDict_Size(now) != static_cast<Py_ssize_t>(keys_.size())) {
    return false;
  }
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t position = 0;
  for (size_t i = 0; i < keys_.size(); ++i) {
    if (PyDict_Next(now, &position, &key, &value) == 0 || !is_same_name(key, keys_[i].ptr()) ||
        !parts_[i].holds(nb::borrow(value).ptr(), present)) {
      return false;
    }
  }
  return holds_contents(now, present);
}

DeepSnapshots::DeepSnapshots(SnapshotContext& context) {
  while (!context.deep.empty()) {
    auto [object, names] = std::move(context.deep.back());
    context.deep.pop_back();
    if (context.seen.count(object.ptr()) != 0) continue;  // it was found again, less deep
    PyObject* const before = std::exchange(context.names, names.ptr());
    snapshots_.emplace_back(object, AttributeSnapshot(object.ptr(), context));
    context.names = before;
  }
}

bool DeepSnapshots::hold(const Present& present) {
  return std::ranges::all_of(
      snapshots_, [&](auto& each) { return each.second.holds(each.first.ptr(), present); });
}

int DeepSnapshots::traverse(visitproc visit, void* arg) const {
  for (const auto& [object, snapshot] : snapshots_) {
    Py_VISIT(object.ptr());
    if (const int found = snapshot.traverse(visit, arg)) return found;
  }
  return 0;
}

}  // namespace ortrain::python
