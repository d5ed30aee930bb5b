// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace ortrain::python {

// A dictionary that is kept alive, and a number that says whether it is the same as before.
//
// Before 3.12 Python itself numbers the contents of dictionaries. Later it calls those that watch a
// dictionary before it changes; these functions are outside of the limited API, so that they are
// looked up at run time.
class WatchedDict {
 public:
  WatchedDict() = default;
  // Of null, nothing is told.
  explicit WatchedDict(PyObject* dict);
  WatchedDict(WatchedDict&& other) noexcept { swap(other); }
  WatchedDict& operator=(WatchedDict&& other) noexcept {
    WatchedDict(std::move(other)).swap(*this);
    return *this;
  }
  WatchedDict(const WatchedDict&) = delete;
  WatchedDict& operator=(const WatchedDict&) = delete;
  ~WatchedDict();

  // Starts watching, once per process and before any dictionary is watched; to be called while a
  // module is imported, as it runs Python code.
  static void start();
  // Whether any dictionary has a version: not where this Python tells nothing, tells not of all
  // changes, or has as many watchers already as it takes.
  static bool is_told();

  PyObject* ptr() const { return dict_.ptr(); }
  // Another one whenever an item has been set, replaced or removed, and never again that of other
  // contents or of another dictionary. 0 where nobody tells.
  uint64_t version() const;
  int traverse(visitproc visit, void* arg) const;

  // Of the dictionaries that are watched, shared by all that watch the same.
  struct Record {
    uint64_t version;
    size_t uses;
  };

 private:
  void swap(WatchedDict& other) noexcept {
    std::swap(dict_, other.dict_);
    std::swap(record_, other.record_);
  }

  nanobind::object dict_;
  Record* record_ = nullptr;
};

}  // namespace ortrain::python
