// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "python/src/function_parts.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>

#include "python/src/attribute_snapshot.h"
#include "python/src/python_function.h"

namespace nb = nanobind;

namespace ortrain::python {
namespace {

// How Python hands out the parts of a function, outside of the limited API: none of them runs code
// or makes anything.
struct Access {
  using Part = PyObject* (*)(PyObject*);

  static Part named(const char* name) {
    const auto found = python_function<Part>(name);
    if (found == nullptr) nb::raise("this Python has no %s", name);
    return found;
  }

  Part code = named("PyFunction_GetCode"), defaults = named("PyFunction_GetDefaults"),
       keywords = named("PyFunction_GetKwDefaults"), cells = named("PyFunction_GetClosure"),
       content = named("PyCell_Get");  // the last returns a new reference, the others borrowed ones
};

const Access& access() {
  static const Access found;
  return found;
}

constexpr int kMostWraps = 16;

// Where an object has what it calls; null for no such object. Of classes of Python's own: others
// may answer anything.
const char* what_is_behind(PyObject* value) {
  struct Wrap {
    PyObject* of;
    const char* name;
  };
  static const Wrap wraps[] = {{imported("builtins", "staticmethod"), "__func__"},
                               {imported("builtins", "classmethod"), "__func__"},
                               {imported("types", "MethodType"), "__func__"},
                               {imported("builtins", "property"), "fget"},
                               {imported("functools", "cached_property"), "func"},
                               {imported("functools", "partial"), "func"},
                               {imported("functools", "_lru_cache_wrapper"), "__wrapped__"}};
  const auto* const found =
      std::ranges::find_if(wraps, [&](const Wrap& wrap) { return is_instance(value, wrap.of); });
  return found == std::end(wraps) ? nullptr : found->name;
}

}  // namespace

FunctionParts::FunctionParts(nb::object function) : function_(std::move(function)) {
  each([&](PyObject* part) {
    parts_.push_back(nb::borrow(part));
    return true;
  });
}

bool FunctionParts::hold() const {
  size_t next = 0;
  const bool same = each([&](PyObject* part) {
    if (next == parts_.size()) return false;
    PyObject* const before = parts_[next++].ptr();
    if (part == before) return true;
    return part != nullptr && before != nullptr && is_baked_in(before) &&
           are_equal_values(before, part);
  });
  return same && next == parts_.size();
}

int FunctionParts::traverse(visitproc visit, void* arg) const {
  Py_VISIT(function_.ptr());
  for (const nb::object& part : parts_) Py_VISIT(part.ptr());
  return 0;
}

template <typename See>
bool FunctionParts::each(See see) const {
  const Access& parts = access();
  PyObject* const function = function_.ptr();
  PyObject* const keywords = parts.keywords(function);
  if (!see(parts.code(function)) || !see(parts.defaults(function)) || !see(keywords)) return false;
  if (keywords != nullptr && PyDict_CheckExact(keywords)) {
    PyObject *name = nullptr, *value = nullptr;
    Py_ssize_t at = 0;
    while (PyDict_Next(keywords, &at, &name, &value) != 0) {
      if (!see(name) || !see(value)) return false;
    }
  }
  PyObject* const cells = parts.cells(function);
  const Py_ssize_t count = cells != nullptr && PyTuple_Check(cells) ? PyTuple_Size(cells) : 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    const nb::object content = nb::steal(parts.content(PyTuple_GetItem(cells, i)));
    if (!see(content.ptr())) return false;
  }
  return true;
}

void PartsOfFunctions::take(nb::handle value, int depth) {
  if (depth == kMostWraps) return;
  const char* behind = nullptr;
  if (is_function(value.ptr())) {
    if (!seen_.insert(value.ptr()).second) return;
    functions_.emplace_back(nb::borrow(value));
    behind = "__wrapped__";
  } else {
    behind = what_is_behind(value.ptr());
  }
  const nb::object next =
      behind == nullptr ? nb::object() : attribute(value.ptr(), nb::str(behind).ptr());
  if (next.is_valid()) take(next, depth + 1);
}

bool PartsOfFunctions::hold() const {
  return std::ranges::all_of(functions_, &FunctionParts::hold);
}

int PartsOfFunctions::traverse(visitproc visit, void* arg) const {
  for (const FunctionParts& function : functions_) {
    if (const int found = function.traverse(visit, arg)) return found;
  }
  return 0;
}

}  // namespace ortrain::python
