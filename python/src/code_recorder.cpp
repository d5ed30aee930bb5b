// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <Python.h>

// From Python 3.12 on sys.monitoring tells which code runs, and the stable ABI has none of this.
#if PY_VERSION_HEX < 0x030C0000
#if PY_VERSION_HEX >= 0x030B0000
#define ORTRAIN_HOOKS_FRAMES
#define Py_BUILD_CORE 1
// Its inline functions are C.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpedantic"
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
extern "C" {
#include <internal/pycore_frame.h>
}
#pragma GCC diagnostic pop
#undef Py_BUILD_CORE
#endif
#include <frameobject.h>
#endif

#include <nanobind/nanobind.h>

#include <set>
#include <unordered_set>
#include <utility>
#include <vector>

#include "python/src/init.h"

namespace nb = nanobind;

namespace ortrain::python {

#if PY_VERSION_HEX < 0x030C0000
namespace {

// Records which Python functions a thread calls. A profile function in Python costs as much as all
// that it watches, one in C a third of that; what runs frames (PEP 523) can be asked for less.
class CodeRecorder {
 public:
  void start() {
#ifdef ORTRAIN_HOOKS_FRAMES
    if (active == nullptr) {
      PyInterpreterState* const interpreter = PyInterpreterState_Get();
      thread_ = PyThreadState_Get();
      raised_in_ = nullptr;
      first_ = _PyInterpreterState_GetEvalFrameFunc(interpreter);
      if (first_ == record_frame) first_ = _PyEval_EvalFrameDefault;
      active = this;
      _PyInterpreterState_SetEvalFrameFunc(interpreter, record_frame);
      return;
    }
#endif
    const PyThreadState* const thread = PyThreadState_Get();
    previous_ = thread->c_profilefunc;
    previous_object_ = nb::borrow(thread->c_profileobj);
    PyEval_SetProfile(see, nb::find(this).ptr());
  }

  void stop() {
#ifdef ORTRAIN_HOOKS_FRAMES
    if (active == this) {
      active = nullptr;
      PyInterpreterState* const interpreter = PyInterpreterState_Get();
      // Somebody may have put his own in front of this one, which passes frames on from now on.
      if (_PyInterpreterState_GetEvalFrameFunc(interpreter) == record_frame) {
        _PyInterpreterState_SetEvalFrameFunc(interpreter, first_);
      }
      return;
    }
#endif
    PyEval_SetProfile(previous_, previous_object_.is_valid() ? previous_object_.ptr() : nullptr);
    previous_object_.reset();
  }

  // Pairs: the code that went on, and the one that an exception came from which it had seen.
  nb::list handled() const {
    nb::list result;
    for (const auto& [code, origin] : handled_) {
      result.append(nb::make_tuple(nb::borrow(code), nb::borrow(origin)));
    }
    return result;
  }

  // Pairs: the code of a function, and its globals the first time that it ran.
  nb::list codes() const {
    nb::list result;
    for (const auto& [code, globals] : codes_) result.append(nb::make_tuple(code, globals));
    return result;
  }

 private:
  void add(PyObject* code, PyObject* globals) {
    if (known_.insert(code).second) codes_.emplace_back(nb::borrow(code), nb::borrow(globals));
  }

  static int see(PyObject* self, PyFrameObject* frame, int what, PyObject* argument) {
    auto* const recorder = nb::inst_ptr<CodeRecorder>(self);
    if (what == PyTrace_CALL) {
      const nb::object code = nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
      const nb::object globals =
          nb::steal(PyObject_GetAttrString(reinterpret_cast<PyObject*>(frame), "f_globals"));
      if (!globals.is_valid()) return -1;
      recorder->add(code.ptr(), globals.ptr());
    }
    if (recorder->previous_ == nullptr) return 0;
    return recorder->previous_(recorder->previous_object_.ptr(), frame, what, argument);
  }

#ifdef ORTRAIN_HOOKS_FRAMES
  // The interpreter itself runs frames, not who was asked before: he may put himself in front of this
  // function, and if it asked him, both would ask each other for ever.
  static PyObject* record_frame(PyThreadState* thread, _PyInterpreterFrame* frame, int throws) {
    CodeRecorder* const recorder = active;
    if (recorder == nullptr || recorder->thread_ != thread) {
      return _PyEval_EvalFrameDefault(thread, frame, throws);
    }
    PyObject* const code = reinterpret_cast<PyObject*>(frame->f_code);
    recorder->add(code, frame->f_globals);
    PyObject* const of_caller = std::exchange(recorder->raised_in_, nullptr);
    PyObject* const result = _PyEval_EvalFrameDefault(thread, frame, throws);
    if (active != recorder) return result;
    PyObject* const origin = recorder->raised_in_;
    recorder->raised_in_ = of_caller;
    if (result == nullptr) {
      if (origin != nullptr || !ends_a_search()) recorder->raised_in_ = origin ? origin : code;
    } else if (origin != nullptr) {
      recorder->handled_.emplace(code, origin);
    }
    return result;
  }

  // Whether the present exception is one that C code takes for an answer: an attribute, an item or
  // a module that is not there, the end of a loop.
  static bool ends_a_search() {
    PyObject* const kinds[] = {PyExc_AttributeError, PyExc_LookupError,        PyExc_ImportError,
                               PyExc_StopIteration,  PyExc_StopAsyncIteration, PyExc_GeneratorExit};
    for (PyObject* const kind : kinds) {
      if (PyErr_ExceptionMatches(kind)) return true;
    }
    return false;
  }

  inline static CodeRecorder* active = nullptr;
  _PyFrameEvalFunction first_ = nullptr;  // who was asked before
  PyThreadState* thread_ = nullptr;
  // Where the exception began that the last frame to be called from the present one has ended with.
  PyObject* raised_in_ = nullptr;
#endif
  std::set<std::pair<PyObject*, PyObject*>> handled_;  // kept alive by codes_
  std::unordered_set<PyObject*> known_;
  std::vector<std::pair<nb::object, nb::object>> codes_;
  Py_tracefunc previous_ = nullptr;
  nb::object previous_object_;
};

}  // namespace

void init_code_recorder(nb::module_& module) {
  nb::class_<CodeRecorder>(module, "CodeRecorder")
      .def(nb::init<>())
      .def("start", &CodeRecorder::start)
      .def("stop", &CodeRecorder::stop)
      .def_prop_ro("codes", &CodeRecorder::codes)
      .def_prop_ro("handled", &CodeRecorder::handled);
}

#else

void init_code_recorder(nb::module_&) {}

#endif

}  // namespace ortrain::python
