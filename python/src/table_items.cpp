// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "python/src/table_items.h"

#include <algorithm>

namespace nb = nanobind;

namespace ortrain::python {

bool TableItems::is_table(nb::handle object) {
  return PyDict_Check(object.ptr()) || PyList_Check(object.ptr()) || PyAnySet_Check(object.ptr());
}

TableItems::TableItems(nb::handle table) : table_(nb::borrow(table)), items_(read()) {
  if (PyDict_Check(table.ptr())) dictionary_ = WatchedDict(table.ptr());
  version_ = dictionary_.version();
}

void TableItems::tell(const SnapshotContext& context) const {
  context.tell("items", table_.ptr());
}

bool TableItems::holds(nb::handle now) {
  if (!now.is(table_)) return false;
  const uint64_t version = dictionary_.version();
  if (version != 0 && version == version_) return true;
  const std::vector<nb::object> items = read();
  const auto is_same = [](const nb::object& a, const nb::object& b) { return a.is(b); };
  if (!std::ranges::equal(items, items_, is_same)) return false;
  version_ = version;
  return true;
}

int TableItems::traverse(visitproc visit, void* arg) const {
  Py_VISIT(table_.ptr());
  for (const nb::object& item : items_) Py_VISIT(item.ptr());
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
  } else if (PyList_Check(table)) {
    for (Py_ssize_t i = 0; i < PyList_Size(table); ++i) {
      items.push_back(nb::borrow(PyList_GetItem(table, i)));
    }
  } else {
    const nb::object copy = nb::steal(PyFrozenSet_New(table));
    if (!copy.is_valid()) throw nb::python_error();
    for (nb::handle item : nb::iter(copy)) items.push_back(nb::borrow(item));
  }
  return items;
}

}  // namespace ortrain::python
