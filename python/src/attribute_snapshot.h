// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace ortrain::python {

// The attribute `name`, a Python string, of an object; invalid, and no Python error left, where it
// cannot be read.
nanobind::object attribute(PyObject* object, PyObject* name);

// What a module has under a name, for as long as the process lives.
PyObject* imported(const char* module, const char* name);
// False, and no Python error left, where that cannot be told.
bool is_instance(PyObject* value, PyObject* type);
bool is_function(PyObject* value);

// What a capture bakes in.
bool is_baked_in(PyObject* value);
// Of two objects whether they are of one class and mean the same to a graph: -0.0 is not 0.0, and
// NaN is what it was.
bool are_equal_values(PyObject* a, PyObject* b);

bool are_equal_strings(PyObject* a, PyObject* b);
// Whether two keys of dictionaries are one object, or equal strings.
inline bool is_same_name(PyObject* a, PyObject* b) { return a == b || are_equal_strings(a, b); }

// Parameters and buffers of a module by slot, None where a name stands for no tensor.
class SlotTensors {
 public:
  SlotTensors() = default;
  explicit SlotTensors(std::span<PyObject* const> tensors);

  // A tuple, one item per slot.
  nanobind::handle tuple() const { return tuple_; }
  bool are(std::span<PyObject* const> tensors) const;
  PyObject* operator[](size_t slot) const {
    return PyTuple_GetItem(tuple_.ptr(), static_cast<Py_ssize_t>(slot));
  }
  // The first slot that holds an object; -1 where none does.
  int64_t slot_of(PyObject* object) const;
  // For each slot the first one that holds the same tensor.
  std::vector<int64_t> ties() const;

 private:
  nanobind::object tuple_ = nanobind::steal(PyTuple_New(0));
  std::unordered_map<PyObject*, int64_t> first_;
};

// Whether code that counts reads attributes of a name; `names` is a set, or None where all are
// read.
bool is_read(PyObject* names, PyObject* name);

// Those of an object: None where `names` has one of its classes as "class <name>".
nanobind::object names_of(PyObject* object, PyObject* names);
// Those of what an attribute holds: None where `names` has "attributes of <name>".
nanobind::object names_within(PyObject* attribute, PyObject* names);

// Which objects stand where snapshots compare containers by what they hold. Code may ask whether
// two such places have the same object, so that those that were different ones have to stay so.
class ContainerPlaces {
 public:
  // Returns the number of a place, which holds `container` now.
  size_t add(PyObject* container);
  // Notes what stands at a place; runs no code.
  void see(size_t place, PyObject* container) {
    if (objects_[place] == container) return;
    objects_[place] = container;
    moved_ = true;
  }
  // Whether no two places have the same object; to be asked once all of them have been seen.
  bool are_distinct();

 private:
  std::vector<PyObject*> objects_;  // compared by address alone
  bool moved_ = false;              // since the last time that they were distinct
};

// What the places of a module have at the moment at which snapshots are compared.
struct Present {
  const SlotTensors& tensors;
  ContainerPlaces& places;
};

// What snapshots compare, in the order in which they are taken: tuples of a kind, the object, and a
// number. Made by whatever takes a snapshot, so that nothing is compared that does not stand there.
class Comparisons {
 public:
  void add(const char* kind, PyObject* object, size_t number = 0);
  nanobind::list all() const { return all_; }

 private:
  nanobind::list all_;
};

// What an object holds besides items: its class, attributes, slots, what it closes over, what it
// binds, what it shows or refers to. Empty where it holds nothing that Python shows.
struct Contents {
  static Contents of(PyObject* object);

  std::vector<nanobind::object> parts;
  size_t made = SIZE_MAX;  // the part that is a list of this moment
};

// What snapshots of the attributes of one module share while they are taken.
struct SnapshotContext {
  // Notes what is compared, where somebody asks.
  void tell(const char* kind, PyObject* object, size_t number = 0) const {
    if (comparisons != nullptr) comparisons->add(kind, object, number);
  }

  // Leaves an object to `DeepSnapshots`.
  void put_off(PyObject* object) {
    deep.emplace_back(nanobind::borrow(object), nanobind::borrow(names));
  }

  PyObject* tensor_type;
  const SlotTensors* tensors;
  const std::unordered_set<PyObject*>* layers;  // which have guards of their own
  PyObject* names;                              // attributes that are read: `is_read`
  // Inputs of graphs, of which the kind is compared by whoever made this.
  const std::unordered_set<PyObject*>* inputs;
  std::unordered_set<PyObject*> seen;  // objects within each other are compared once
  std::vector<nanobind::object> made;  // for the snapshots, so that no address is used again
  ContainerPlaces* places;
  Comparisons* comparisons = nullptr;
  // Objects that lie too deep for the stack, with the names that are read there.
  std::vector<std::pair<nanobind::object, nanobind::object>> deep = {};
};

// An attribute as it was. Numbers, flags, names and arrays are compared by value; containers,
// closures and objects by what they hold, and containers by whether they are different ones;
// tensors by identity and version, or by slot where they are parameters or buffers; what can only
// be replaced by identity. Holding what it compares keeps addresses from being used again.
class AttributeSnapshot {
 public:
  // Of a list that was made to be compared, and its tuples, nobody asks which ones they are.
  AttributeSnapshot(PyObject* value, SnapshotContext& context, int depth = 0, bool is_made = false);
  // Of the attribute `name`.
  static AttributeSnapshot of(PyObject* name, PyObject* value, SnapshotContext& context,
                              int depth = 0);

  bool holds(PyObject* now, const Present& present);
  // The object that holds whatever becomes of other things; null where there is none.
  PyObject* constant() const {
    return kind_ == Kind::identity || kind_ == Kind::equal ? value_.ptr() : nullptr;
  }
  // Whether the same object may stop to hold without being replaced.
  bool may_change_in_place() const;
  int traverse(visitproc visit, void* arg) const;

 private:
  enum class Kind {
    identity,
    equal,
    tensor,
    slot_tensor,
    sequence,
    dictionary,
    attributes,
    set,
    array,
    object
  };

  // Of a dictionary of attributes, those that are read.
  static AttributeSnapshot of_attributes(PyObject* dict, PyObject* names, SnapshotContext& context,
                                         int depth);
  void take_dictionary(PyObject* dict, SnapshotContext& context, int depth);
  void take_contents(PyObject* object, SnapshotContext& context, int depth);
  bool equals(PyObject* now);
  bool holds_items(const nanobind::object& now) const;
  bool holds_attributes(PyObject* now, const Present& present);
  bool holds_sequence(PyObject* now, const Present& present);
  bool holds_dictionary(PyObject* now, const Present& present);
  bool holds_contents(PyObject* now, const Present& present);

  // Of a list, tuple or dictionary its type, of a set its items, of attributes the names that are
  // read; none where a slot says all.
  nanobind::object value_;
  Kind kind_ = Kind::identity;
  int64_t number_ = -1;  // version of a tensor, or its slot; checksum of an array
  int64_t place_ = -1;   // of a container
  std::vector<nanobind::object> keys_;
  std::vector<AttributeSnapshot> parts_;     // items
  std::vector<AttributeSnapshot> contents_;  // attributes, slots, what a function closes over
};

// Objects so deep within others that those compare their identity alone.
class DeepSnapshots {
 public:
  DeepSnapshots() = default;
  // Of all that snapshots of `context` have put off.
  explicit DeepSnapshots(SnapshotContext& context);

  bool hold(const Present& present);
  int traverse(visitproc visit, void* arg) const;

 private:
  std::vector<std::pair<nanobind::object, AttributeSnapshot>> snapshots_;
};

}  // namespace ortrain::python
