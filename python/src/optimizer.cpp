// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/optimizer.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ortrain/base/error.h"
#include "python/src/device.h"
#include "python/src/init.h"
#include "python/src/tensor_exchange.h"
#include "python/src/tensor_order.h"
#include "python/src/written_ranges.h"

#if defined(ORTRAIN_HAVE_GPU)
#include "ortrain/gpu/optimizer.h"
#endif

namespace nb = nanobind;

namespace ortrain::python {
namespace {

using cpu::OptimizerOperand;
using cpu::OptimizerTensor;

[[noreturn]] void refuse_dtype(nb::handle tensor, const char* what) {
  throw DTypeError(str("the ", what, " is ", text_of(tensor.attr("dtype")),
                       ", expected torch.float32, float64, bfloat16 or float16"));
}

cpu::Storage storage_of(DType dtype, nb::handle tensor, const char* what) {
  if (!is_float(dtype)) refuse_dtype(tensor, what);
  return cpu::storage_of(dtype);
}

double number(nb::handle group, const char* key) {
  nb::object value = group[key];
  const double result = PyFloat_AsDouble(value.ptr());
  if (result == -1.0 && PyErr_Occurred() != nullptr) throw nb::python_error();
  return result;
}

bool truth(nb::handle group, const char* key) {
  nb::object value = group[key];
  const int result = PyObject_IsTrue(value.ptr());
  if (result < 0) throw nb::python_error();
  return result == 1;
}

// A key that is looked up for every parameter in every step.
class Key {
 public:
  explicit Key(const char* literal)
      : text_(literal), object_(nb::steal(PyUnicode_InternFromString(literal))) {}
  PyObject* ptr() const { return object_.ptr(); }
  const char* text() const { return text_; }

 private:
  const char* text_;
  nb::object object_;
};

// What a group of parameters asks for, read anew in every step.
struct Group {
  nb::object dict;
  nb::object params;  // a list
  size_t state_count = 0;
  cpu::StepRule rule;
  double sign = 1;
};

// A parameter with its entry of the optimizer's state.
struct Member {
  nb::object param;
  nb::object state;  // a dict, or none yet
};

// A parameter that takes part in the step under way.
struct Item {
  size_t group = 0;
  nb::object grad;
  void* step = nullptr;  // the step number, float or double
  bool wide_step = false;
  bool first = false;  // SGD: the buffer was made in this step
  size_t first_copy = 0;
};

// An operand in another order than its parameter works on a copy.
struct Copy {
  nb::object original, copy;
  bool is_written;  // the original gets the result

  void write_back() const {
    if (is_written) original.attr("detach")().attr("copy_")(copy);
  }
};

// One multi-tensor step of a torch optimizer over its param_groups and state, whose layout is that
// of torch.optim. Tensors are looked at in every step, so any of them may be replaced between
// steps; entries of the state are found by identity. Nothing is written before all is checked.
class MultiTensorStep {
 public:
  // `simulated`: tensors on the CPU are the GPU provider's, by the simulator.
  MultiTensorStep(const std::string& kind, nb::object init_state, nb::object mark_written,
                  bool simulated)
      : kind_(kind == "adamw"  ? Kind::adamw
              : kind == "adam" ? Kind::adam
              : kind == "lamb" ? Kind::lamb
                               : Kind::sgd),
        init_state_(std::move(init_state)),
        mark_written_(std::move(mark_written)),
        simulated_(simulated) {
    if (kind_ == Kind::sgd) {
      keys_.emplace_back("momentum_buffer");
      return;
    }
    for (const char* key : {"exp_avg", "exp_avg_sq"}) keys_.emplace_back(key);
    if (kind_ == Kind::adamw) keys_.emplace_back("max_exp_avg_sq");
  }

  // Returns the norm of the gradients, multiplied by `gradient_factor`, or None where `max_norm` is
  // None. The gradients are not written. On a device the norm is a tensor there, float64, and two
  // float32 scalars there may be given: gradients are divided by `grad_scale`, and nothing changes
  // where `found_inf` is not 0. Nobody waits for the device.
  nb::object step(nb::list groups, nb::dict state, double gradient_factor, nb::object max_norm,
                  nb::object grad_scale, nb::object found_inf) {
    if (running_) throw InternalError("the optimizer is already taking a step in another thread");
    running_ = true;
    struct Guard {
      MultiTensorStep& self;
      ~Guard() { self.finish(); }
    } guard{*this};
    try {
      read_groups(groups);
      collect(state);
    } catch (...) {
      drop_new_buffers();
      throw;
    }
    if (on_device()) {
      try {
        raise_faults();
      } catch (...) {
        drop_new_buffers();
        throw;
      }
      // Buffers that a skipped step has made would count as filled in the next one; waits for the
      // device in the first step alone.
      if (!new_buffers_.empty() && !found_inf.is_none() &&
          nb::cast<double>(nb::float_(found_inf)) != 0) {
        drop_new_buffers();
        return nb::none();
      }
      nb::object norm = run_on_device(gradient_factor, max_norm, grad_scale, found_inf);
      finish_copies();
      return norm;
    }
    blocks_.assign(tensors_);
    nb::object result = nb::none();
    double factor = gradient_factor;
    if (!max_norm.is_none()) {
      const double most = nb::cast<double>(max_norm);
      double norm = 0;
      {
        nb::gil_scoped_release release;
        norm = std::abs(gradient_factor) * cpu::gradient_norm(tensors_, blocks_);
      }
      factor *= cpu::clip_factor(norm, most);
      result = nb::float_(norm);
    }
    if (ranges_.are_shared()) {
      run_one_by_one(factor);
    } else {
      run(factor, 0, items_.size(), blocks_);
    }
    finish_copies();
    return result;
  }

  // What the garbage collector asks for: a parameter may lead back to its optimizer.
  int traverse(visitproc visit, void* arg) {
    Py_VISIT(init_state_.ptr());
    Py_VISIT(mark_written_.ptr());
    Py_VISIT(written_.ptr());
    for (const std::vector<Member>* list : {&members_, &entries_}) {
      for (const Member& member : *list) {
        Py_VISIT(member.param.ptr());
        Py_VISIT(member.state.ptr());
      }
    }
    return 0;
  }
  void clear() {
    members_.clear();
    entries_.clear();
    written_ = nb::list();
  }

 private:
  enum class Kind { adamw, adam, sgd, lamb };

  void finish() {
    for (Item& item : items_) item.grad.reset();
    items_.clear();
    tensors_.clear();
    copies_.clear();
    new_buffers_.clear();
    ranges_.clear();
    groups_.clear();
    place_.reset();
    running_ = false;
  }

  void finish_copies() {
    for (const Copy& copy : copies_) copy.write_back();
    if (nb::len(written_) > 0) mark_written_(written_);
  }

  // Whether the GPU provider runs the step under way.
  bool on_device() const { return !items_.empty() && (simulated_ || place_->type != dlpack::kCpu); }

  void drop_new_buffers() {
    nb::error_scope keep;
    for (const nb::object& state : new_buffers_) {
      if (PyDict_DelItem(state.ptr(), keys_[0].ptr()) != 0) PyErr_Clear();
    }
  }

  void read_groups(nb::list groups) {
    for (nb::handle dict : groups) {
      Group group;
      group.dict = nb::borrow(dict);
      group.params = dict["params"];
      if (!PyList_Check(group.params.ptr())) group.params = nb::list(group.params);
      group.rule.lr = number(dict, "lr");
      group.rule.weight_decay = number(dict, "weight_decay");
      group.sign = truth(dict, "maximize") ? -1 : 1;
      if (kind_ == Kind::sgd) {
        group.rule.momentum = number(dict, "momentum");
        group.rule.dampening = number(dict, "dampening");
        group.rule.nesterov = truth(dict, "nesterov");
        group.state_count = group.rule.momentum != 0 ? 1 : 0;
      } else {
        nb::object betas = dict["betas"];
        group.rule.beta1 = nb::cast<double>(nb::float_(betas[0]));
        group.rule.beta2 = nb::cast<double>(nb::float_(betas[1]));
        group.rule.epsilon = number(dict, "eps");
        group.state_count = 2;
      }
      if (kind_ == Kind::adamw && truth(dict, "amsgrad")) group.state_count = 3;
      // Of groups of torch.optim.AdamW, which say so from 2.7 on.
      const bool tells = PyDict_GetItemString(dict.ptr(), "decoupled_weight_decay") != nullptr;
      if (kind_ == Kind::adamw && tells && !truth(dict, "decoupled_weight_decay")) {
        group.rule.decay_mode = cpu::DecayMode::l2;
      }
      if (kind_ == Kind::adam) {
        group.rule.decay_mode =
            static_cast<cpu::DecayMode>(nb::cast<int>(nb::int_(dict["adam_w_mode"])));
        group.rule.bias_correction = truth(dict, "bias_correction");
      }
      if (kind_ == Kind::lamb) {
        group.rule.ratio_min = number(dict, "ratio_min");
        group.rule.ratio_max = number(dict, "ratio_max");
        group.rule.bias_correction = truth(dict, "bias_correction");
      }
      groups_.push_back(std::move(group));
    }
  }

  // Forgets the entries of the state when one was added, removed or replaced.
  void refresh(nb::dict state) {
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t position = 0;
    size_t i = 0;
    bool same = static_cast<size_t>(PyDict_Size(state.ptr())) == entries_.size();
    while (same && PyDict_Next(state.ptr(), &position, &key, &value)) {
      same = entries_[i].param.ptr() == key && entries_[i].state.ptr() == value;
      ++i;
    }
    if (same) return;
    members_.clear();
    entries_.clear();
    for (position = 0; PyDict_Next(state.ptr(), &position, &key, &value);) {
      entries_.push_back({nb::borrow(key), nb::borrow(value)});
    }
  }

  void collect(nb::dict state) {
    refresh(state);
    size_t at = 0;
    Py_ssize_t written = 0;
    for (size_t g = 0; g < groups_.size(); ++g) {
      PyObject* params = groups_[g].params.ptr();
      for (Py_ssize_t i = 0; i < PyList_Size(params); ++i, ++at) {
        nb::handle param = PyList_GetItem(params, i);
        nb::object grad = nb::steal(PyObject_GetAttr(param.ptr(), grad_.ptr()));
        if (!grad.is_valid()) throw nb::python_error();
        if (grad.is_none()) continue;
        if (at >= members_.size()) members_.resize(at + 1);
        Member& member = members_[at];
        if (member.param.ptr() != param.ptr()) member = {nb::borrow(param), {}};
        Item item{.group = g, .grad = std::move(grad)};
        try {
          add(state, member, std::move(item));
        } catch (const Error&) {
          rethrow_with_context(describe(g, i));
        }
        note_written(written++, param);
      }
    }
    if (PyList_SetSlice(written_.ptr(), written, PY_SSIZE_T_MAX, nullptr) != 0) {
      throw nb::python_error();
    }
  }

  std::string describe(size_t g, Py_ssize_t i) const {
    nb::dict dict = nb::borrow<nb::dict>(groups_[g].dict);
    std::string name = str("parameter ", i);
    if (dict.contains("param_names")) {
      name += str(" '", text_of(dict["param_names"][i]), "'");
    }
    if (groups_.size() > 1) name += str(" of group ", g);
    return str("[optimizer, ", name, "] ");
  }

  // The list of parameters written is kept from step to step.
  void note_written(Py_ssize_t i, nb::handle param) {
    if (i >= PyList_Size(written_.ptr())) {
      written_.append(param);
    } else if (PyList_GetItem(written_.ptr(), i) != param.ptr()) {
      written_[i] = param;
    }
  }

  void add(nb::dict all_states, Member& member, Item item) {
    const Group& group = groups_[item.group];
    OptimizerTensor tensor;
    const TensorView param = look(member.param, "parameter");
    tensor.size = numel(param);
    tensor.param = {param.data, storage_of(param.dtype, member.param, "parameter")};
    const TensorView grad = look(item.grad, "gradient");
    tensor.grad = operand(param, tensor.param, item.grad, grad, "gradient");
    item.first_copy = copies_.size();
    ranges_.write(items_.size(), param);
    ranges_.read(items_.size(), grad);
    bool flat = lies_flat(param) && lies_flat(grad);
    const bool has_state = kind_ != Kind::sgd || group.state_count > 0;
    std::array<PyObject*, 3> state_tensors{};
    std::array<TensorView, 3> views;
    if (has_state) {
      find_state(all_states, member, group, item);
      if (kind_ != Kind::sgd) find_step(member, item);
      for (size_t k = 0; k < group.state_count; ++k) {
        state_tensors[k] = get(member, keys_[k]);
        views[k] = look(state_tensors[k], keys_[k].text());
        tensor.states[k] =
            operand(param, tensor.param, state_tensors[k], views[k], keys_[k].text());
        ranges_.write(items_.size(), views[k]);
        flat = flat && lies_flat(views[k]);
      }
    }
    if (!flat && tensor.size > 0) {
      align(param, member.param, tensor.param, param, true);
      align(param, item.grad, tensor.grad, grad, false);
      for (size_t k = 0; k < group.state_count; ++k) {
        align(param, state_tensors[k], tensor.states[k], views[k], true);
      }
    }
    items_.push_back(std::move(item));
    tensors_.push_back(tensor);
  }

  TensorView look(nb::handle tensor, const char* what) {
    try {
      TensorView view = view_anywhere(tensor, what);
      view.is_negated = is_negated(tensor);
      if (view.data == nullptr && numel(view) > 0) {
        throw UnsupportedError(
            str("the ", what, " is a ", text_of(tensor.type()), " without memory of its own"));
      }
      // The first parameter says where; what belongs to no provider is refused in any case.
      if (!place_) {
        if (view.place.type != dlpack::kCpu) find_device(name_of(view.place));
        place_ = view.place;
      }
      if (view.place != *place_) {
        throw DeviceError(str("the ", what, " is on device '", text_of(tensor.attr("device")),
                              "', expected '", name_of(*place_), "'"));
      }
      return view;
    } catch (const DTypeError&) {
      if (!nb::hasattr(tensor, "layout")) throw;
      if (text_of(tensor.attr("layout")) != "torch.strided") {
        throw UnsupportedError(str("the ", what, " is sparse (", text_of(tensor.attr("layout")),
                                   "), expected a dense tensor"));
      }
      if (!nb::cast<bool>(tensor.attr("is_floating_point")())) refuse_dtype(tensor, what);
      throw;
    }
  }

  static OptimizerOperand operand(const TensorView& param, const OptimizerOperand& param_operand,
                                  nb::handle tensor, const TensorView& view, const char* what) {
    if (!same_dims(param, view)) {
      throw ShapeError(str("the ", what, " has shape ", dims_str(dims_of(view)),
                           ", the parameter has shape ", dims_str(dims_of(param))));
    }
    const cpu::Storage storage = storage_of(view.dtype, tensor, what);
    if ((storage == cpu::Storage::kF64) != (param_operand.storage == cpu::Storage::kF64)) {
      throw DTypeError(str("the ", what, " is ", name_of(view.dtype), ", the parameter is ",
                           name_of(param.dtype)));
    }
    return {view.data, storage};
  }

  static bool lies_flat(const TensorView& view) { return is_row_major(view) && !view.is_negated; }

  // PyTorch writes to none that has several elements in one place, and would refuse it when others
  // have been written.
  static void refuse_repeated_elements(const TensorView& view) {
    for (int i = 0; i < view.rank && view.strides != nullptr; ++i) {
      if (view.dims[i] > 1 && view.strides[i] == 0) {
        throw UnsupportedError(
            "a tensor that is to be written has several elements in one place (expand()): pass a "
            "copy, clone()");
      }
    }
  }

  // Points `target` to a copy in the order of the parameter where the tensor's is another one. A
  // parameter with gaps or overlaps is itself worked on as a row-major copy. What is negated is
  // copied.
  void align(const TensorView& param, nb::handle tensor, OptimizerOperand& target,
             const TensorView& view, bool write_back) {
    const bool dense = is_dense(param);
    if (!view.is_negated && (dense ? same_order(param, view) : is_row_major(view))) return;
    if (write_back) refuse_repeated_elements(view);
    nb::object copy = copy_in_order(tensor, param);
    target.data = view_anywhere(copy, "copy").data;
    copies_.push_back({nb::borrow(tensor), std::move(copy), write_back});
  }

  PyObject* get(const Member& member, const Key& key) const {
    PyObject* tensor = PyDict_GetItemWithError(member.state.ptr(), key.ptr());
    if (tensor == nullptr) {
      if (PyErr_Occurred() != nullptr) throw nb::python_error();
      throw InvalidModelError(str("the optimizer state has no '", key.text(), "'"));
    }
    return tensor;
  }

  // SGD makes a buffer where there is none yet, the others an empty entry's tensors.
  void find_state(nb::dict all_states, Member& member, const Group& group, Item& item) {
    if (!member.state.is_valid()) {
      const Py_ssize_t before = PyDict_Size(all_states.ptr());
      member.state = nb::steal(PyObject_GetItem(all_states.ptr(), member.param.ptr()));
      if (!member.state.is_valid()) throw nb::python_error();
      // A new one stands behind all others. It may be gone before the next step.
      if (PyDict_Size(all_states.ptr()) > before) entries_.push_back(member);
    }
    if (!PyDict_Check(member.state.ptr())) {
      throw InvalidModelError("the optimizer state of the parameter is no dict");
    }
    if (kind_ != Kind::sgd) {
      if (PyDict_Size(member.state.ptr()) == 0) {
        init_state_(member.param, group.dict, member.state);
      }
      return;
    }
    PyObject* buffer = PyDict_GetItemWithError(member.state.ptr(), keys_[0].ptr());
    if (buffer == nullptr || buffer == Py_None) {
      init_state_(member.param, group.dict, member.state);
      new_buffers_.push_back(member.state);
      item.first = true;
    }
  }

  void find_step(const Member& member, Item& item) {
    PyObject* tensor = get(member, step_);
    // Loaded states have it on the CPU.
    if (place_->type != dlpack::kCpu && view_anywhere(tensor, "step").place.type == dlpack::kCpu) {
      member.state[step_.ptr()] = nb::handle(tensor).attr("to")(member.param.attr("device"));
      tensor = get(member, step_);
    }
    const TensorView step = look(tensor, "step");
    if (step.is_negated) refuse_negated("step");
    if (numel(step) != 1 || (step.dtype != DType::f32 && step.dtype != DType::f64)) {
      throw InvalidModelError(str("'step' of the optimizer state is ", name_of(step.dtype),
                                  dims_str(dims_of(step)), ", expected one float32 number"));
    }
    item.step = step.data;
    item.wide_step = step.dtype == DType::f64;
  }

  static double increment(const Item& item) {
    if (item.wide_step) return *static_cast<double*>(item.step) += 1;
    return *static_cast<float*>(item.step) += 1;
  }

  // Increments the step numbers of some items. Calls make(group, step number) where one of them is
  // not that of the parameter before.
  template <class Coefficients, class Make>
  std::vector<Coefficients> coefficients(std::span<const Item> items, double factor, Make make) {
    std::vector<Coefficients> all;
    all.reserve(items.size());
    size_t group = 0;
    double step = -1;
    for (const Item& item : items) {
      const double next = increment(item);
      if (all.empty() || item.group != group || next != step) {
        group = item.group;
        step = next;
        all.push_back(make(groups_[group], step));
        all.back().gradient_factor = factor * groups_[group].sign;
      } else {
        all.push_back(all.back());
      }
    }
    return all;
  }

  // What one parameter's step writes another one reads: as PyTorch, which goes from one to the
  // next.
  void run_one_by_one(double factor) {
    for (size_t i = 0; i < items_.size(); ++i) {
      const size_t end = i + 1 < items_.size() ? items_[i + 1].first_copy : copies_.size();
      const std::span<const Copy> copies =
          std::span<const Copy>(copies_).subspan(items_[i].first_copy, end - items_[i].first_copy);
      for (const Copy& copy : copies) copy.copy.attr("copy_")(copy.original.attr("detach")());
      cpu::TensorBlocks blocks;
      blocks.assign(std::span(tensors_).subspan(i, 1));
      run(factor, i, 1, blocks);
      for (const Copy& copy : copies) copy.write_back();
    }
    copies_.clear();
  }

  // The step of some items.
  void run(double factor, size_t begin, size_t count, const cpu::TensorBlocks& blocks) {
    const auto items = std::span<const Item>(items_).subspan(begin, count);
    const auto tensors = std::span<const OptimizerTensor>(tensors_).subspan(begin, count);
    switch (kind_) {
      case Kind::adamw:
      case Kind::adam: {
        const auto all = coefficients<cpu::AdamCoefficients>(
            items, factor,
            [](const Group& g, double step) { return adam_coefficients(g.rule, step); });
        nb::gil_scoped_release release;
        cpu::adam_step(tensors, blocks, all);
        return;
      }
      case Kind::lamb: {
        const auto all = coefficients<cpu::LambCoefficients>(
            items, factor,
            [](const Group& g, double step) { return lamb_coefficients(g.rule, step); });
        nb::gil_scoped_release release;
        cpu::lamb_step(tensors, blocks, all);
        return;
      }
      case Kind::sgd: {
        std::vector<cpu::SgdCoefficients> all;
        all.reserve(items.size());
        for (const Item& item : items) {
          const Group& group = groups_[item.group];
          all.push_back(sgd_coefficients(group.rule, item.first));
          all.back().gradient_factor = factor * group.sign;
        }
        nb::gil_scoped_release release;
        cpu::sgd_step(tensors, blocks, all);
        return;
      }
    }
  }

#if defined(ORTRAIN_HAVE_GPU)
  static gpu::OptimizerOperand operand_on_device(const OptimizerOperand& operand) {
    switch (operand.storage) {
      case cpu::Storage::kF32:
        return {operand.data, DType::f32};
      case cpu::Storage::kF64:
        return {operand.data, DType::f64};
      case cpu::Storage::kBF16:
        return {operand.data, DType::bf16};
      case cpu::Storage::kF16:
        return {operand.data, DType::f16};
    }
    throw InternalError("an operand of an unknown type");
  }

  const float* scalar_on_device(nb::handle tensor, const char* what) {
    if (tensor.is_none()) return nullptr;
    const TensorView view = look(tensor, what);
    if (view.is_negated) refuse_negated(what);
    if (numel(view) != 1 || view.dtype != DType::f32) {
      throw DTypeError(str("the ", what, " is ", name_of(view.dtype), dims_str(dims_of(view)),
                           ", expected one float32 number"));
    }
    return static_cast<const float*>(view.data);
  }

  Device& device() const {
    return find_device(simulated_ ? "simulator" : name_of(*place_)).kernels->device();
  }

  // Throws what is known by now to have gone wrong in the runs before. What is found later makes
  // the device leave out the step, and is thrown by a later call.
  void raise_faults() {
    Device& device = this->device();
    void* const stream = current_stream(*place_);
    const std::shared_ptr<void> scope = device.enter();
    nb::gil_scoped_release release;
    // As above for buffers.
    if (!new_buffers_.empty() && !device.is_recorded_elsewhere(stream)) device.synchronize(stream);
    device.raise_faults();
  }

  nb::object run_on_device(double factor, nb::handle max_norm, nb::handle grad_scale,
                           nb::handle found_inf) {
    std::vector<gpu::OptimizerParameter> parameters;
    for (size_t i = 0; i < items_.size(); ++i) {
      gpu::OptimizerTensor tensor{.size = tensors_[i].size,
                                  .param = operand_on_device(tensors_[i].param),
                                  .grad = operand_on_device(tensors_[i].grad)};
      for (size_t k = 0; k < tensor.states.size(); ++k) {
        tensor.states[k] = operand_on_device(tensors_[i].states[k]);
      }
      parameters.push_back({.tensor = tensor,
                            .group = static_cast<int>(items_[i].group),
                            .step = items_[i].step,
                            .wide_step = items_[i].wide_step,
                            .first = items_[i].first});
    }
    std::vector<gpu::OptimizerGroup> groups;
    for (const Group& group : groups_) groups.push_back({group.rule, group.sign});
    gpu::OptimizerScaling scaling{.gradient_factor = factor,
                                  .grad_scale = scalar_on_device(grad_scale, "grad_scale"),
                                  .found_inf = scalar_on_device(found_inf, "found_inf")};
    Device& device = this->device();
    scaling.fault = device.fault_slot();
    void* const stream = current_stream(*place_);
    const std::shared_ptr<void> scope = device.enter();
    RunOutput norm;
    if (!max_norm.is_none()) {
      scaling.max_norm = nb::cast<double>(max_norm);
      norm.spec = {DType::f64, {}};
      norm.block = device.results(std::array{&std::as_const(norm.spec)}, stream)[0];
      scaling.norm = static_cast<double*>(norm.block->data());
    }
    gpu::OptimizerKind kind = gpu::OptimizerKind::adam;
    if (kind_ == Kind::sgd) kind = gpu::OptimizerKind::sgd;
    if (kind_ == Kind::lamb) kind = gpu::OptimizerKind::lamb;
    const std::shared_ptr<Block> workspace =
        device.tensor(gpu::optimizer_workspace(parameters), stream);
    {
      nb::gil_scoped_release release;
      gpu::optimizer_step(kind, parameters, groups, scaling, workspace->data(), stream);
    }
    return norm.block ? to_torch(norm, *place_) : nb::object(nb::none());
  }
#else
  void raise_faults() {}
  nb::object run_on_device(double, nb::handle, nb::handle, nb::handle) {
    throw InternalError("this build has no GPU provider");
  }
#endif

  Kind kind_;
  nb::object init_state_;    // called with a parameter, its group and its entry of the state
  nb::object mark_written_;  // called with the parameters written
  std::vector<Key> keys_;    // of the states, in the order of OptimizerTensor::states
  bool simulated_;
  std::optional<dlpack::Device> place_;  // of the tensors of the step under way
  Key grad_{"grad"};
  Key step_{"step"};
  std::vector<Member> members_;  // by position in the groups
  std::vector<Member> entries_;  // the state as it was last seen
  nb::list written_;
  cpu::TensorBlocks blocks_;
  bool running_ = false;
  // Of the step under way.
  std::vector<Group> groups_;
  std::vector<Item> items_;
  std::vector<OptimizerTensor> tensors_;
  std::vector<Copy> copies_;
  std::vector<nb::object> new_buffers_;
  WrittenRanges ranges_;
};

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<MultiTensorStep>(self)->traverse(visit, arg) : 0;
}

int clear(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<MultiTensorStep>(self)->clear();
  return 0;
}

PyType_Slot kSlots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                        {Py_tp_clear, reinterpret_cast<void*>(clear)},
                        {0, nullptr}};

}  // namespace

void init_optimizer(nb::module_& module) {
  nb::class_<MultiTensorStep>(module, "MultiTensorStep", nb::type_slots(kSlots))
      .def(nb::init<const std::string&, nb::object, nb::object, bool>(), nb::arg("kind"),
           nb::arg("init_state"), nb::arg("mark_written"), nb::arg("simulated") = false)
      .def("step", &MultiTensorStep::step, nb::arg("groups"), nb::arg("state"),
           nb::arg("gradient_factor"), nb::arg("max_norm").none(),
           nb::arg("grad_scale").none() = nb::none(), nb::arg("found_inf").none() = nb::none());
}

}  // namespace ortrain::python
