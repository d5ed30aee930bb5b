// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include <unordered_set>
#include <vector>

namespace ortrain::python {

// What a function consists of, each of which somebody may replace without replacing the function:
// its code, what its arguments are by default, and what it closes over. Which objects these are
// counts, not what becomes of them.
class FunctionParts {
 public:
  explicit FunctionParts(nanobind::object function);

  // Whether they are those that it had. Runs no Python code.
  bool hold() const;
  int traverse(visitproc visit, void* arg) const;

 private:
  // Calls `see` with one part after the other, null for what there is not, until it says no;
  // returns what it said last.
  template <typename See>
  bool each(See see) const;

  nanobind::object function_;
  std::vector<nanobind::object> parts_;
};

// The parts of functions, each once.
class PartsOfFunctions {
 public:
  // Takes the functions that an object calls in the end: itself, those behind methods of a class,
  // properties, partial functions, caches and decorators that say what they wrap.
  void take(nanobind::handle value) { take(value, 0); }
  bool hold() const;
  int traverse(visitproc visit, void* arg) const;

 private:
  void take(nanobind::handle value, int depth);

  std::vector<FunctionParts> functions_;
  std::unordered_set<PyObject*> seen_;  // which the functions keep alive
};

}  // namespace ortrain::python
