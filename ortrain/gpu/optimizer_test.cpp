// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/optimizer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "ortrain/base/half.h"
#include "ortrain/cpu/optimizer.h"
#include "ortrain/gpu/simulator.h"

// The steps outside of graphs, run by the simulator, against those of the CPU.
namespace ortrain::gpu {
namespace {

constexpr int64_t kSizes[] = {0, 1, 7, 64, 1025, 8192, 20001};

struct Formats {
  DType param, grad, state;
};
constexpr Formats kFormats[] = {{DType::f32, DType::f32, DType::f32},
                                {DType::f64, DType::f64, DType::f64},
                                {DType::bf16, DType::bf16, DType::f32},
                                {DType::f32, DType::f16, DType::bf16},
                                {DType::f16, DType::f16, DType::f16}};

// One operand in memory of either side, off its alignment by one element for every other tensor.
class Values {
 public:
  Values(DType dtype, int64_t n, int64_t seed, bool shifted)
      : dtype_(dtype), n_(n), bytes_(static_cast<size_t>(n + 1) * size_of(dtype)) {
    shift_ = shifted ? size_of(dtype) : 0;
    for (int64_t i = 0; i < n; ++i) {
      set(i, seed == 0 ? 0.0 : static_cast<double>((7919 * i + seed) % 2003) / 1001.5 - 1 + 1e-4);
    }
  }
  void* data() { return bytes_.data() + shift_; }
  cpu::OptimizerOperand on_cpu() { return {data(), cpu::storage_of(dtype_)}; }
  OptimizerOperand on_gpu() { return {data(), dtype_}; }

  double get(int64_t i) {
    switch (dtype_) {
      case DType::f64:
        return at<double>(i);
      case DType::f32:
        return at<float>(i);
      case DType::bf16:
        return at<BFloat16>(i);
      default:
        return at<Float16>(i);
    }
  }
  void set(int64_t i, double value) {
    switch (dtype_) {
      case DType::f64:
        return put(i, value);
      case DType::f32:
        return put(i, static_cast<float>(value));
      case DType::bf16:
        return put(i, BFloat16(static_cast<float>(value)));
      default:
        return put(i, Float16(static_cast<float>(value)));
    }
  }
  int64_t size() const { return n_; }
  double tolerance() const {
    return dtype_ == DType::f64   ? 1e-12
           : dtype_ == DType::f32 ? 5e-6
           : dtype_ == DType::f16 ? 4e-3
                                  : 2e-2;
  }
  bool operator==(const Values& other) const { return bytes_ == other.bytes_; }

 private:
  template <class T>
  T at(int64_t i) {
    T value;
    std::memcpy(&value, static_cast<char*>(data()) + static_cast<size_t>(i) * sizeof(T), sizeof(T));
    return value;
  }
  template <class T>
  void put(int64_t i, T value) {
    std::memcpy(static_cast<char*>(data()) + static_cast<size_t>(i) * sizeof(T), &value, sizeof(T));
  }
  DType dtype_;
  int64_t n_;
  size_t shift_ = 0;
  std::vector<unsigned char> bytes_;
};

struct Tensor {
  Values param, grad;
  std::vector<Values> states;

  bool operator==(const Tensor& other) const {
    return param == other.param && states == other.states;
  }
};

std::vector<Tensor> make_tensors(const Formats& formats, size_t states, int copies = 1) {
  std::vector<Tensor> tensors;
  for (int copy = 0; copy < copies; ++copy) {
    for (int64_t n : kSizes) {
      const bool shifted = tensors.size() % 2 == 1;
      Tensor tensor{Values(formats.param, n, 10 + copy, shifted),
                    Values(formats.grad, n, 711 + copy, shifted),
                    {}};
      for (size_t k = 0; k < states; ++k) tensor.states.emplace_back(formats.state, n, 0, shifted);
      tensors.push_back(std::move(tensor));
    }
  }
  return tensors;
}

void expect_close(std::vector<Tensor>& actual, std::vector<Tensor>& expected, double slack) {
  for (size_t t = 0; t < actual.size(); ++t) {
    std::vector<std::pair<Values*, Values*>> pairs = {{&actual[t].param, &expected[t].param}};
    for (size_t k = 0; k < actual[t].states.size(); ++k) {
      pairs.emplace_back(&actual[t].states[k], &expected[t].states[k]);
    }
    for (auto& [a, e] : pairs) {
      for (int64_t i = 0; i < a->size(); ++i) {
        ASSERT_NEAR(a->get(i), e->get(i),
                    slack * a->tolerance() * std::max(1.0, std::abs(e->get(i))))
            << "tensor " << t << " element " << i << " of " << a->size();
      }
    }
  }
}

// The device's side of a step: every second parameter is in the second group, steps are on the
// device.
class Device {
 public:
  Device(std::vector<Tensor>& tensors, std::vector<float>& steps) {
    for (size_t t = 0; t < tensors.size(); ++t) {
      OptimizerParameter parameter;
      parameter.tensor.size = tensors[t].param.size();
      parameter.tensor.param = tensors[t].param.on_gpu();
      parameter.tensor.grad = tensors[t].grad.on_gpu();
      for (size_t k = 0; k < tensors[t].states.size(); ++k) {
        parameter.tensor.states[k] = tensors[t].states[k].on_gpu();
      }
      parameter.group = static_cast<int>(t % 2);
      parameter.step = &steps[t];
      parameters.push_back(parameter);
    }
    workspace.resize(optimizer_workspace(parameters) / sizeof(double) + 2);
  }
  void step(OptimizerKind kind, std::span<const OptimizerGroup> groups,
            const OptimizerScaling& scaling) {
    void* const memory = workspace.data() + reinterpret_cast<uintptr_t>(workspace.data()) % 16 / 8;
    optimizer_step(kind, parameters, groups, scaling, memory, nullptr);
  }
  std::vector<OptimizerParameter> parameters;
  std::vector<double> workspace;
};

std::vector<OptimizerGroup> two_groups() {
  StepRule rule{.lr = 0.05,
                .beta1 = 0.8,
                .beta2 = 0.9,
                .epsilon = 1e-3,
                .weight_decay = 0.1,
                .momentum = 0.9,
                .dampening = 0.1,
                .ratio_min = 0.1,
                .ratio_max = 2};
  OptimizerGroup first{rule, 1}, second{rule, -1};
  second.rule.lr = 0.01;
  second.rule.weight_decay = 0;
  second.rule.nesterov = true;
  second.rule.dampening = 0;
  return {first, second};
}

void cpu_step(OptimizerKind kind, std::vector<Tensor>& tensors,
              const std::vector<OptimizerGroup>& groups, double factor, int step) {
  std::vector<cpu::OptimizerTensor> list;
  for (Tensor& tensor : tensors) {
    cpu::OptimizerTensor entry;
    entry.size = tensor.param.size();
    entry.param = tensor.param.on_cpu();
    entry.grad = tensor.grad.on_cpu();
    for (size_t k = 0; k < tensor.states.size(); ++k) entry.states[k] = tensor.states[k].on_cpu();
    list.push_back(entry);
  }
  cpu::TensorBlocks blocks;
  blocks.assign(list);
  const auto all = [&](auto make) {
    std::vector<decltype(make(StepRule()))> coefficients;
    for (size_t t = 0; t < tensors.size(); ++t) {
      coefficients.push_back(make(groups[t % 2].rule));
      coefficients.back().gradient_factor = factor * groups[t % 2].sign;
    }
    return coefficients;
  };
  switch (kind) {
    case OptimizerKind::adam:
      return cpu::adam_step(
          list, blocks, all([&](const StepRule& rule) { return adam_coefficients(rule, step); }));
    case OptimizerKind::sgd:
      return cpu::sgd_step(list, blocks, all([&](const StepRule& rule) {
                             return sgd_coefficients(rule, step == 1);
                           }));
    case OptimizerKind::adagrad:
      return cpu::adagrad_step(list, blocks, all([&](const StepRule& rule) {
                                 return adagrad_coefficients(rule, step);
                               }));
    case OptimizerKind::lamb:
      return cpu::lamb_step(
          list, blocks, all([&](const StepRule& rule) { return lamb_coefficients(rule, step); }));
  }
}

double norm_of(std::vector<Tensor>& tensors) {
  double total = 0;
  for (Tensor& tensor : tensors) {
    for (int64_t i = 0; i < tensor.grad.size(); ++i) {
      total += tensor.grad.get(i) * tensor.grad.get(i);
    }
  }
  return std::sqrt(total);
}

struct Kind {
  OptimizerKind kind;
  size_t states;
};
constexpr Kind kKinds[] = {{OptimizerKind::adam, 2},    {OptimizerKind::adam, 3},
                           {OptimizerKind::sgd, 1},     {OptimizerKind::sgd, 0},
                           {OptimizerKind::adagrad, 1}, {OptimizerKind::lamb, 2}};

TEST(GpuOptimizer, StepsEqualTheCpu) {
  const std::vector<OptimizerGroup> groups = two_groups();
  for (const Formats& formats : kFormats) {
    for (const Kind& kind : kKinds) {
      std::vector<OptimizerGroup> now = groups;
      if (kind.kind == OptimizerKind::sgd && kind.states == 0) {
        for (OptimizerGroup& group : now) group.rule.momentum = 0;
      }
      std::vector<Tensor> actual = make_tensors(formats, kind.states), expected = actual;
      std::vector<float> steps(actual.size(), 0);
      const float scale = 4;
      double norm = 0;
      for (int step = 1; step <= 2; ++step) {
        Device(actual, steps)
            .step(kind.kind, now,
                  {.gradient_factor = 0.5, .grad_scale = &scale, .max_norm = 3, .norm = &norm});
        const double expected_norm = norm_of(expected) / 8;
        EXPECT_NEAR(norm, expected_norm, 1e-9 * expected_norm);
        cpu_step(kind.kind, expected, now, clip_factor(expected_norm, 3) / 8, step);
        expect_close(actual, expected, 4);
        if (HasFatalFailure()) return;
        for (float number : steps) ASSERT_EQ(number, static_cast<float>(step));
        actual = expected;  // rounding of 16-bit formats does not add up
      }
    }
  }
}

TEST(GpuOptimizer, FoundInfChangesNothing) {
  for (const Kind& kind : kKinds) {
    std::vector<Tensor> tensors = make_tensors(kFormats[0], kind.states);
    tensors[3].grad.set(2, std::numeric_limits<double>::infinity());
    const std::vector<Tensor> before = tensors;
    std::vector<float> steps(tensors.size(), 5);
    const float found = 1, scale = 1024;
    double norm = 0;
    Device(tensors, steps)
        .step(kind.kind, two_groups(),
              {.grad_scale = &scale, .found_inf = &found, .max_norm = 1, .norm = &norm});
    EXPECT_TRUE(tensors == before);
    for (float number : steps) EXPECT_EQ(number, 5);
    EXPECT_TRUE(std::isinf(norm));
  }
}

TEST(GpuOptimizer, AFaultThatIsRecordedChangesNothing) {
  for (const Kind& kind : kKinds) {
    std::vector<Tensor> tensors = make_tensors(kFormats[0], kind.states);
    const std::vector<Tensor> before = tensors;
    std::vector<float> steps(tensors.size(), 5);
    Fault fault{.kind = FaultKind::label};
    Device(tensors, steps).step(kind.kind, two_groups(), {.fault = &fault});
    EXPECT_TRUE(tensors == before);
    for (float number : steps) EXPECT_EQ(number, 5);
    fault.kind = FaultKind::none;
    Device(tensors, steps).step(kind.kind, two_groups(), {.fault = &fault});
    EXPECT_FALSE(tensors == before);
    for (float number : steps) EXPECT_EQ(number, 6);
  }
}

TEST(GpuOptimizer, ManyTensorsAndGroups) {
  std::vector<Tensor> actual = make_tensors(kFormats[0], 2, 20), expected = actual;
  ASSERT_GT(actual.size(), 128u);  // more than a launch of any kind takes
  std::vector<float> steps(actual.size(), 0);
  const std::vector<OptimizerGroup> groups = two_groups();
  // Eleven groups that say the same as two.
  std::vector<OptimizerGroup> many;
  for (int g = 0; g < 11; ++g) many.push_back(groups[static_cast<size_t>(g % 2)]);
  Device device(actual, steps);
  for (size_t t = 0; t < device.parameters.size(); ++t) {
    device.parameters[t].group = static_cast<int>(t % 2 + 2 * (t / 7 % 5));
  }
  device.step(OptimizerKind::lamb, many, {});
  cpu_step(OptimizerKind::lamb, expected, groups, 1, 1);
  expect_close(actual, expected, 4);
}

TEST(GpuOptimizer, SameResultInAnyOrderOfThreads) {
  std::vector<Tensor> first = make_tensors(kFormats[0], 2), second = first;
  std::vector<float> steps(first.size(), 0), other_steps = steps;
  const std::vector<OptimizerGroup> groups = two_groups();
  double norm = 0, other_norm = 0;
  simulator::set_thread_order(simulator::ThreadOrder::ascending);
  Device(first, steps).step(OptimizerKind::lamb, groups, {.max_norm = 1, .norm = &norm});
  simulator::set_thread_order(simulator::ThreadOrder::shuffled);
  Device(second, other_steps)
      .step(OptimizerKind::lamb, groups, {.max_norm = 1, .norm = &other_norm});
  simulator::set_thread_order(simulator::ThreadOrder::ascending);
  EXPECT_EQ(norm, other_norm);
  EXPECT_TRUE(first == second);
}

}  // namespace
}  // namespace ortrain::gpu
