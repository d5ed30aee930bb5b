// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "python/src/table_items.h"

#include <algorithm>

namespace nb = nanobind;

namespace ortrain::python {
namespace {

constexpr int kMostTables =
    8;  // within each other; which objects they are counts of those that lie deeper

// Not what an object says of its class, which may be another's.
bool is_of(nb::handle object, nb::handle type) {
  return PyType_IsSubtype(Py_TYPE(object.ptr()), reinterpret_cast<PyTypeObject*>(type.ptr())) != 0;
}

// Tables that the C API does not know, by their classes.
struct OtherTables {
  nb::handle proxy = imported("types", "MappingProxyType");
  nb::handle queue = imported("collections", "deque");
  nb::handle ordered = imported("collections", "OrderedDict");
  nb::handle context_variable = imported("contextvars", "ContextVar");
  nb::handle cell = imported("types", "CellType");
};

const OtherTables& classes() {
  static const OtherTables found;
  return found;
}

// None where it has none; with an argument it would not give the one that it was made with.
nb::object value_of(nb::handle context_variable) {
  static PyObject* const get = PyUnicode_InternFromString("get");
  nb::object value = nb::steal(PyObject_CallMethodObjArgs(context_variable.ptr(), get, nullptr));
  if (!value.is_valid()) PyErr_Clear();
  return value.is_valid() ? value : nb::none();
}

void append_all(nb::handle iterable, std::vector<nb::object>& items) {
  for (nb::handle item : nb::iter(iterable)) items.push_back(nb::borrow(item));
}

}  // namespace

bool TableItems::is_table(nb::handle object) {
  return PyDict_Check(object.ptr()) || PyList_Check(object.ptr()) || PyAnySet_Check(object.ptr()) ||
         PyTuple_Check(object.ptr()) || is_of(object, classes().proxy) ||
         is_of(object, classes().queue) || is_of(object, classes().context_variable) ||
         is_of(object, classes().cell);
}

TableItems::TableItems(nb::handle table, int depth) : table_(nb::borrow(table)), items_(read()) {
  // The order of those that have one of their own changes without a word.
  if (PyDict_Check(table.ptr()) && !is_of(table, classes().ordered))
    dictionary_ = WatchedDict(table.ptr());
  version_ = dictionary_.version();
  if (depth + 1 == kMostTables) return;
  for (const nb::object& item : items_) {
    if (is_table(item)) within_.emplace_back(item, depth + 1);
  }
}

void TableItems::tell(const SnapshotContext& context) const { context.tell("items", table_.ptr()); }

void TableItems::append_functions(PartsOfFunctions& functions) const {
  for (const nb::object& item : items_) functions.take(item);
  for (const TableItems& table : within_) table.append_functions(functions);
}

bool TableItems::holds(nb::handle now) {
  if (!now.is(table_)) return false;
  const uint64_t version = dictionary_.version();
  if (version == 0 || version != version_) {
    std::vector<nb::object> items;
    try {
      items = read();
    } catch (nb::python_error&) {  // of a mapping that a proxy shows
      return false;
    }
    const auto is_same = [](const nb::object& a, const nb::object& b) {
      return a.is(b) || (is_baked_in(a.ptr()) && are_equal_values(a.ptr(), b.ptr()));
    };
    if (!std::ranges::equal(items, items_, is_same)) return false;
    version_ = version;
  }
  return std::ranges::all_of(within_, [](TableItems& table) { return table.holds(table.table_); });
}

int TableItems::traverse(visitproc visit, void* arg) const {
  Py_VISIT(table_.ptr());
  for (const nb::object& item : items_) Py_VISIT(item.ptr());
  for (const TableItems& table : within_) {
    if (const int found = table.traverse(visit, arg)) return found;
  }
  return dictionary_.traverse(visit, arg);
}

std::vector<nb::object> TableItems::read() const {
  PyObject* const table = table_.ptr();
  std::vector<nb::object> items;
  if (PyDict_Check(table)) {
    Py_ssize_t at = 0;
    PyObject *key = nullptr, *value = nullptr;
    while (PyDict_Next(table, &at, &key, &value)) {
      items.push_back(nb::borrow(key));
      items.push_back(nb::borrow(value));
    }
    if (is_of(table_, classes().ordered))
      append_all(classes().ordered.attr("__iter__")(table_), items);
  } else if (PyList_Check(table)) {
    for (Py_ssize_t i = 0; i < PyList_Size(table); ++i) {
      items.push_back(nb::borrow(PyList_GetItem(table, i)));
    }
  } else if (PyTuple_Check(table)) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(table); ++i) {
      items.push_back(nb::borrow(PyTuple_GetItem(table, i)));
    }
  } else if (is_of(table_, classes().queue)) {
    append_all(classes().queue.attr("__iter__")(table_), items);
  } else if (is_of(table_, classes().proxy)) {
    for (nb::handle pair : nb::iter(table_.attr("items")())) append_all(pair, items);
  } else if (is_of(table_, classes().context_variable)) {
    items.push_back(value_of(table_));
  } else if (is_of(table_, classes().cell)) {
    static PyObject* const held = PyUnicode_InternFromString("cell_contents");
    if (nb::object content = attribute(table, held); content.is_valid()) {
      items.push_back(std::move(content));
    }
  } else {
    const nb::object copy = nb::steal(PyFrozenSet_New(table));
    if (!copy.is_valid()) throw nb::python_error();
    append_all(copy, items);
  }
  return items;
}

}  // namespace ortrain::python
