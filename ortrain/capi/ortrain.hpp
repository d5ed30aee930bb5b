// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
//
// The C interface with ownership and exceptions; needs C++17 and nothing but ortrain.h.
#ifndef ORTRAIN_CAPI_ORTRAIN_HPP_
#define ORTRAIN_CAPI_ORTRAIN_HPP_

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ortrain/capi/ortrain.h"

namespace ortrain::capi {

// What a call refused; `status` is the kind.
class Error : public std::runtime_error {
 public:
  Error(ortrain_status status, const std::string& message)
      : std::runtime_error(message), status_(status) {}
  ortrain_status status() const { return status_; }

 private:
  ortrain_status status_;
};

inline void check(ortrain_status status) {
  if (status != ORTRAIN_OK) throw Error(status, ortrain_last_error());
}

template <class T>
struct TypeOf;
template <>
struct TypeOf<float> {
  static constexpr ortrain_dtype value = ORTRAIN_FLOAT32;
};
template <>
struct TypeOf<double> {
  static constexpr ortrain_dtype value = ORTRAIN_FLOAT64;
};
template <>
struct TypeOf<int64_t> {
  static constexpr ortrain_dtype value = ORTRAIN_INT64;
};
template <>
struct TypeOf<int32_t> {
  static constexpr ortrain_dtype value = ORTRAIN_INT32;
};
template <>
struct TypeOf<uint8_t> {
  static constexpr ortrain_dtype value = ORTRAIN_UINT8;
};
template <>
struct TypeOf<bool> {
  static constexpr ortrain_dtype value = ORTRAIN_BOOL;
};

// A dense row-major tensor in memory of the program, which must outlive the call that reads it.
class Tensor {
 public:
  template <class T>
  Tensor(const T* data, std::vector<int64_t> dims)
      : dims_(std::move(dims)), dtype_(TypeOf<T>::value), data_(data) {}
  ortrain_tensor view() const { return {dtype_, dims_.size(), dims_.data(), data_}; }

 private:
  std::vector<int64_t> dims_;
  ortrain_dtype dtype_;
  const void* data_;
};

// The results of a step, in the order of the model's outputs.
class Outputs {
 public:
  explicit Outputs(ortrain_outputs* outputs) : outputs_(outputs, &ortrain_destroy_outputs) {}
  size_t size() const { return ortrain_output_count(outputs_.get()); }
  std::vector<int64_t> dims(size_t index) const {
    const ortrain_tensor tensor = get(index);
    return {tensor.dims, tensor.dims + tensor.rank};
  }
  // Valid as long as this object. Throws Error where the elements have another type.
  template <class T>
  const T* data(size_t index) const {
    const ortrain_tensor tensor = get(index);
    if (tensor.dtype != TypeOf<T>::value) {
      throw Error(ORTRAIN_INVALID_TYPE, "output " + std::to_string(index) + " has another type");
    }
    return static_cast<const T*>(tensor.data);
  }

 private:
  ortrain_tensor get(size_t index) const {
    ortrain_tensor tensor;
    check(ortrain_output(outputs_.get(), index, &tensor));
    return tensor;
  }
  std::unique_ptr<ortrain_outputs, decltype(&ortrain_destroy_outputs)> outputs_;
};

struct Options : ortrain_options {
  Options() { ortrain_default_options(this); }
};

// See ortrain.h for what each call does. All of them throw Error.
class Trainer {
 public:
  static Trainer from_artifacts(const std::string& folder) {
    ortrain_trainer* trainer = nullptr;
    check(ortrain_create_from_artifacts(folder.c_str(), &trainer));
    return Trainer(trainer);
  }
  static Trainer from_onnx(const std::string& path, const Options& options) {
    ortrain_trainer* trainer = nullptr;
    check(ortrain_create_from_onnx(path.c_str(), &options, &trainer));
    return Trainer(trainer);
  }

  Outputs train_step(std::initializer_list<Tensor> inputs) {
    return run(&ortrain_train_step, inputs);
  }
  Outputs eval_step(std::initializer_list<Tensor> inputs) {
    return run(&ortrain_eval_step, inputs);
  }
  void optimizer_step() { check(ortrain_optimizer_step(get())); }
  void lazy_reset_grad() { check(ortrain_lazy_reset_grad(get())); }

  double learning_rate() const {
    double rate = 0;
    check(ortrain_get_learning_rate(get(), &rate));
    return rate;
  }
  void set_learning_rate(double rate) { check(ortrain_set_learning_rate(get(), rate)); }
  void register_linear_lr_scheduler(int64_t warmup, int64_t total, double rate) {
    check(ortrain_register_linear_lr_scheduler(get(), warmup, total, rate));
  }
  void scheduler_step() { check(ortrain_scheduler_step(get())); }
  void set_seed(uint64_t seed) { check(ortrain_set_seed(get(), seed)); }

  std::vector<std::string> input_names(bool evaluation = false) const {
    return names(ortrain_model_input_count(get(), evaluation), &ortrain_model_input_name,
                 evaluation);
  }
  std::vector<std::string> output_names(bool evaluation = false) const {
    return names(ortrain_model_output_count(get(), evaluation), &ortrain_model_output_name,
                 evaluation);
  }

  std::vector<float> parameters(bool trained_only = true) const {
    size_t count = 0;
    check(ortrain_parameters_size(get(), trained_only, &count));
    std::vector<float> buffer(count);
    check(ortrain_copy_parameters_to_buffer(get(), trained_only, buffer.data(), count));
    return buffer;
  }
  void set_parameters(const std::vector<float>& buffer, bool trained_only = true) {
    check(ortrain_copy_buffer_to_parameters(get(), trained_only, buffer.data(), buffer.size()));
  }

  void save_checkpoint(const std::string& folder, bool with_optimizer = true) const {
    check(ortrain_save_checkpoint(get(), folder.c_str(), with_optimizer));
  }
  void load_checkpoint(const std::string& folder) {
    check(ortrain_load_checkpoint(get(), folder.c_str()));
  }
  // `outputs`: names of those to keep; empty: all.
  void export_for_inference(const std::string& path,
                            const std::vector<std::string>& outputs = {}) const {
    std::vector<const char*> kept;
    for (const std::string& name : outputs) kept.push_back(name.c_str());
    check(ortrain_export_for_inference(get(), path.c_str(), kept.data(), kept.size()));
  }

  ortrain_trainer* get() const { return trainer_.get(); }

 private:
  explicit Trainer(ortrain_trainer* trainer) : trainer_(trainer, &ortrain_destroy) {}

  template <class Step>
  Outputs run(Step step, std::initializer_list<Tensor> inputs) {
    std::vector<ortrain_tensor> views;
    for (const Tensor& input : inputs) views.push_back(input.view());
    ortrain_outputs* outputs = nullptr;
    check(step(get(), views.data(), views.size(), &outputs));
    return Outputs(outputs);
  }
  template <class NameOf>
  std::vector<std::string> names(size_t count, NameOf name_of, bool evaluation) const {
    std::vector<std::string> result;
    for (size_t i = 0; i < count; ++i) {
      const char* name = nullptr;
      check(name_of(get(), evaluation, i, &name));
      result.emplace_back(name);
    }
    return result;
  }

  std::unique_ptr<ortrain_trainer, decltype(&ortrain_destroy)> trainer_;
};

}  // namespace ortrain::capi

#endif  // ORTRAIN_CAPI_ORTRAIN_HPP_
