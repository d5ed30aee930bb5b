// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace ortrain::python {

// The dictionary of a class, which says more quickly than attributes do what it has itself; what
// shows its items where this Python hands none out.
nanobind::object dictionary_of_class(nanobind::handle cls);

// Whether an attribute of a class is what the class or one of its bases holds under that name, not
// what something there makes of it when it is asked.
bool is_held_by_class(PyObject* cls, PyObject* name);

// A class that is kept alive, and a number that says whether it is the same as before.
//
// Before 3.12 Python itself numbers classes as they are used. Later it calls those that watch a
// class when it is written to; these functions are outside of the limited API, so that they are
// looked up at run time.
class WatchedClass {
 public:
  WatchedClass() = default;
  // Of null, nothing is told.
  explicit WatchedClass(PyObject* cls);
  WatchedClass(WatchedClass&& other) noexcept { swap(other); }
  WatchedClass& operator=(WatchedClass&& other) noexcept {
    WatchedClass(std::move(other)).swap(*this);
    return *this;
  }
  WatchedClass(const WatchedClass&) = delete;
  WatchedClass& operator=(const WatchedClass&) = delete;
  ~WatchedClass();

  bool is_valid() const { return class_.is_valid(); }
  // Of a class that is watched, kept while it is.
  struct Record {
    uint64_t version;
    size_t uses;
  };

  // Another one whenever what the class, one of its bases or its metaclass has under a name was set
  // or removed; never again that of another state. 0 where nobody tells.
  uint64_t version() const;
  int traverse(visitproc visit, void* arg) const;

 private:
  void swap(WatchedClass& other) noexcept {
    std::swap(class_, other.class_);
    std::swap(own_, other.own_);
    std::swap(meta_, other.meta_);
  }

  nanobind::object class_;
  // From 3.12 on, of the class and its metaclass; null where nobody tells.
  Record* own_ = nullptr;
  Record* meta_ = nullptr;
};

}  // namespace ortrain::python
