// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "python/src/watched_dict.h"

#include <unordered_map>

#include "python/src/python_function.h"

namespace nb = nanobind;

namespace ortrain::python {

#if PY_VERSION_HEX < 0x030C0000

WatchedDict::WatchedDict(PyObject* dict) : dict_(nb::borrow(dict)) {}

WatchedDict::~WatchedDict() = default;

void WatchedDict::start() {}

bool WatchedDict::is_told() { return true; }

uint64_t WatchedDict::version() const {
  return dict_.is_valid() ? reinterpret_cast<PyDictObject*>(dict_.ptr())->ma_version_tag : 0;
}

#else

namespace {

// As the limited API knows no event, an event is a number.
using Callback = int (*)(int event, PyObject* dict, PyObject* key, PyObject* value);

struct Watcher {
  int number = -1;  // that Python gave; negative where it tells nothing
  int (*watch)(int number, PyObject* dict) = nullptr;
  int (*unwatch)(int number, PyObject* dict) = nullptr;
  std::unordered_map<PyObject*, WatchedDict::Record> records;
  uint64_t last = 0;  // version that was given
};

// Never freed: dictionaries change until the interpreter has ended.
Watcher* watcher = nullptr;

// Called before an item is set, replaced or removed. No code of Python's runs in between.
int note_change(int /*event*/, PyObject* dict, PyObject* /*key*/, PyObject* /*value*/) {
  const auto found = watcher->records.find(dict);
  if (found != watcher->records.end()) found->second.version = ++watcher->last;
  return 0;
}

// Python 3.13.0 does not tell of attributes that an object keeps beside its dictionary.
bool tells_of_attributes() {
  const nb::object probe = nb::handle(reinterpret_cast<PyObject*>(&PyType_Type))(
      "Probe", nb::make_tuple(), nb::dict())();
  probe.attr("first") = 0;
  probe.attr("second") = 0;
  const nb::object dict = nb::steal(PyObject_GenericGetDict(probe.ptr(), nullptr));
  const WatchedDict watched(dict.ptr());
  uint64_t before = watched.version();
  const auto is_told_of_change = [&] {
    const uint64_t version = watched.version();
    return std::exchange(before, version) != version;
  };
  probe.attr("first") = 1;
  bool is_told = is_told_of_change();
  probe.attr("third") = 1;
  is_told &= is_told_of_change();
  nb::delattr(probe, "second");
  is_told &= is_told_of_change();
  dict["first"] = 2;
  is_told &= is_told_of_change();
  dict.attr("clear")();
  return is_told_of_change() && is_told;
}

}  // namespace

void WatchedDict::start() {
  if (watcher != nullptr) return;
  watcher = new Watcher;
#ifdef Py_GIL_DISABLED
  return;  // records have no lock
#endif
  const auto add = python_function<int (*)(Callback)>("PyDict_AddWatcher");
  const auto remove = python_function<int (*)(int)>("PyDict_ClearWatcher");
  watcher->watch = python_function<int (*)(int, PyObject*)>("PyDict_Watch");
  watcher->unwatch = python_function<int (*)(int, PyObject*)>("PyDict_Unwatch");
  if (!add || !remove || !watcher->watch || !watcher->unwatch) return;
  watcher->number = add(note_change);
  if (watcher->number < 0) {
    PyErr_Clear();
  } else if (!tells_of_attributes()) {
    if (remove(std::exchange(watcher->number, -1)) != 0) PyErr_Clear();
  }
}

bool WatchedDict::is_told() { return watcher != nullptr && watcher->number >= 0; }

WatchedDict::WatchedDict(PyObject* dict) : dict_(nb::borrow(dict)) {
  if (dict == nullptr || !is_told()) return;
  const auto [found, is_first] = watcher->records.try_emplace(dict, Record{0, 0});
  if (is_first) {
    if (watcher->watch(watcher->number, dict) != 0) {
      PyErr_Clear();
      watcher->records.erase(found);
      return;
    }
    found->second.version = ++watcher->last;
  }
  record_ = &found->second;
  ++record_->uses;
}

WatchedDict::~WatchedDict() {
  if (record_ == nullptr || --record_->uses != 0) return;
  if (watcher->unwatch(watcher->number, dict_.ptr()) != 0) PyErr_Clear();
  watcher->records.erase(dict_.ptr());
}

uint64_t WatchedDict::version() const { return record_ == nullptr ? 0 : record_->version; }

#endif

int WatchedDict::traverse(visitproc visit, void* arg) const {
  Py_VISIT(dict_.ptr());
  return 0;
}

}  // namespace ortrain::python
