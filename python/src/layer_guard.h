// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ortrain/base/dim.h"
#include "ortrain/base/dtype.h"
#include "python/src/attribute_snapshot.h"
#include "python/src/dlpack_abi.h"
#include "python/src/watched_dict.h"

namespace ortrain::python {

// What of a parameter or buffer a graph depends on: its class, type, shape and requires_grad. For
// tensors that the engine does not hold, what Python says of them.
class TensorKind {
 public:
  explicit TensorKind(PyObject* tensor);

  bool fits(PyObject* tensor) const;
  int traverse(visitproc visit, void* arg) const;

 private:
  bool requires_grad(PyObject* tensor) const;

  nanobind::object class_, described_;
  bool is_plain_ = false;  // of one of PyTorch's own classes
  bool requires_grad_ = false;
  DType dtype_ = DType::undefined;
  dlpack::Device place_{dlpack::kCpu, 0};
  Dims dims_;
  Dims strides_;  // none for dense row-major
};

// A layer: its class, its attributes, its tables of tensors and layers, its hooks.
class LayerGuard {
 public:
  // The hooks of the root run outside of a graph and count for nothing.
  LayerGuard(nanobind::handle layer, bool is_root);

  // To be called once the tensors of all layers are known. Attributes that nobody reads are not
  // compared.
  void take_attributes(SnapshotContext& context);

  // Appends the tensors that the tables hold now, one per name they held; false where the names or
  // the layers have changed. Runs no Python code.
  bool read_tables(std::vector<PyObject*>& tensors) const;

  // Compares class and attributes.
  bool holds(const Present& present);

  // Appends the dictionaries that hold attributes, tensors and layers.
  void append_dictionaries(std::vector<WatchedDict>& dictionaries) const;

  // Whether class and attribute dictionary are still the same objects.
  bool is_in_place(PyObject* attributes) const;

  int traverse(visitproc visit, void* arg) const;

  // An attribute whose object may change without being replaced, as `holds` has last seen it.
  class Changing;
  void append_changing(std::vector<Changing>& changing);
  // Hands over what `holds` has seen; invalidates what `append_changing` has appended.
  void forget(std::vector<nanobind::object>& seen);

 private:
  // Names, and what they stand for where that is a layer.
  class Table {
   public:
    Table(PyObject* dict, bool holds_tensors);

    PyObject* dict() const { return dict_.ptr(); }
    bool read(std::vector<PyObject*>& tensors) const;
    int traverse(visitproc visit, void* arg) const;

   private:
    nanobind::object dict_;
    bool holds_tensors_;
    std::vector<nanobind::object> names_, layers_;
  };

  struct Attribute {
    enum class Compared { value, table, hooks, nothing };

    bool holds(PyObject* now, const Present& present);
    // The object that holds in any case; null where there is none.
    PyObject* constant() const;

    Compared compared;
    bool is_read = true;
    bool may_change = false;  // without being replaced
    nanobind::object table;
    nanobind::object seen;                 // at the last comparison, where it may change
    std::vector<AttributeSnapshot> value;  // one, where it is the value that is compared
    std::vector<long> hooks;
  };

  // What settles the comparison of most attributes; small, as there are thousands.
  struct Glance {
    nanobind::object name;
    nanobind::object value;  // which holds wherever it is found; none where one has to look closer
    bool is_compared;
  };

  nanobind::object layer_, class_;
  bool is_root_;
  nanobind::object names_;  // attributes that are read: `is_read`
  std::vector<Table> tables_;
  std::vector<Glance> glances_;  // of the attributes
  std::vector<Attribute> attributes_;
};

class LayerGuard::Changing {
 public:
  explicit Changing(Attribute& attribute);

  bool holds(const Present& present) const;

 private:
  Attribute* attribute_;
  PyObject* seen_;  // kept by the attribute
  bool has_no_hooks_;
};

}  // namespace ortrain::python
