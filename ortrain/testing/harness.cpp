// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/testing/harness.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <numbers>

#include "ortrain/autodiff/build_backward.h"
#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/ir/graph_builder.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/runtime/session.h"

namespace ortrain::testing {
namespace {

// SplitMix64, and normal numbers by Box-Muller.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  double normal() {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
    return radius * std::cos(2.0 * std::numbers::pi * uniform());
  }

 private:
  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  uint64_t state_;
};

const OpDef& def_of(const OpCase& op_case) {
  const auto [domain, name] = split_op(op_case.op);
  return op_registry().get(domain, name);
}

double draw(const CaseInput& input, size_t index, Random& random) {
  switch (input.fill) {
    case CaseInput::Fill::normal:
      return random.normal();
    case CaseInput::Fill::uniform:
      return input.low + (input.high - input.low) * random.uniform();
    case CaseInput::Fill::positive:
      return 0.5 + 1.5 * random.uniform();
    case CaseInput::Fill::integers:
      return std::floor(input.low + (input.high - input.low) * random.uniform());
    case CaseInput::Fill::values:
      return input.values.at(index);
    case CaseInput::Fill::absent:
      return 0;
  }
  return 0;
}

std::vector<double> to_doubles(const TensorData& tensor) {
  std::vector<double> result(static_cast<size_t>(tensor.numel()));
  dispatch_all(tensor.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (size_t i = 0; i < result.size(); ++i) {
      result[i] = static_cast<double>(static_cast<ComputeType<T>>(tensor.data_as<T>()[i]));
    }
  });
  return result;
}

// Rounding of the 16-bit types sets the bar there.
double tolerance_of(const OpCase& op_case, DType type) {
  if (type == DType::bf16) return std::max(op_case.tolerance, 2e-2);
  if (type == DType::f16) return std::max(op_case.tolerance, 3e-3);
  if (type == DType::f64) return std::min(op_case.tolerance, 1e-10);
  return op_case.tolerance;
}

// Largest relative difference; infinity when shapes or NaN places differ.
double difference(const TensorData& a, const TensorData& b) {
  if (a.defined() != b.defined()) return INFINITY;
  if (!a.defined()) return 0;
  if (a.dims() != b.dims() || a.dtype() != b.dtype()) return INFINITY;
  const std::vector<double> left = to_doubles(a);
  const std::vector<double> right = to_doubles(b);
  double largest = 0;
  for (size_t i = 0; i < left.size(); ++i) {
    if (left[i] == right[i] || (std::isnan(left[i]) && std::isnan(right[i]))) continue;
    const double delta = std::abs(left[i] - right[i]) / std::max(1.0, std::abs(right[i]));
    largest = std::isnan(delta) ? INFINITY : std::max(largest, delta);
  }
  return largest;
}

Node make_node(const OpCase& op_case, const std::vector<TensorData>& inputs) {
  const auto [domain, name] = split_op(op_case.op);
  Node node;
  node.op = name;
  node.domain = domain;
  node.name = op_case.name;
  node.attributes = op_case.attributes;
  for (size_t i = 0; i < inputs.size(); ++i) {
    node.inputs.push_back(inputs[i].defined() ? static_cast<ValueId>(i) : kNoValue);
  }
  while (!node.inputs.empty() && node.inputs.back() == kNoValue) node.inputs.pop_back();
  for (size_t i = 0; i < op_case.outputs; ++i) {
    node.outputs.push_back(static_cast<ValueId>(inputs.size() + i));
  }
  return node;
}

}  // namespace

const CaseRegistry& all_cases() {
  static const CaseRegistry* const registry = [] {
    auto* filled = new CaseRegistry();
    register_all_cases(*filled);
    return filled;
  }();
  return *registry;
}

std::pair<std::string, std::string> split_op(const std::string& op) {
  const size_t colons = op.find("::");
  if (colons == std::string::npos) return {"", op};
  return {op.substr(0, colons), op.substr(colons + 2)};
}

std::string case_name(const OpCase& op_case) { return op_case.op + "/" + op_case.name; }

std::string test_name(const OpCase& op_case, size_t number) {
  std::string name;
  for (char c : case_name(op_case)) {
    if (std::isalnum(static_cast<unsigned char>(c))) {
      name += c;
    } else if (!name.ends_with('_')) {
      name += '_';
    }
  }
  return name + "_" + std::to_string(number);
}

std::vector<DType> types_under_test(const OpCase& op_case) {
  std::vector<DType> result;
  DTypeSet types = op_case.types;
  if (types.empty()) {
    const OpDef& def = def_of(op_case);
    for (size_t i = 0; i < op_case.inputs.size(); ++i) {
      if (op_case.inputs[i].dtype != DType::undefined) continue;
      if (op_case.inputs[i].fill == CaseInput::Fill::absent) continue;
      const FormalValue* formal = def.formal_input(i);
      if (formal == nullptr) break;
      auto variable = def.types.find(formal->type);
      if (variable != def.types.end()) types = variable->second & kFloatTypes;
      break;
    }
  }
  for (DType type :
       {DType::f32, DType::f64, DType::f16, DType::bf16, DType::i8, DType::i16, DType::i32,
        DType::i64, DType::u8, DType::u16, DType::u32, DType::u64, DType::boolean}) {
    if (types.contains(type)) result.push_back(type);
  }
  if (result.empty()) result.push_back(DType::f32);  // no input of the type under test
  return result;
}

std::vector<TensorData> make_inputs(const OpCase& op_case, DType type, uint64_t seed) {
  Random random(seed);
  std::vector<TensorData> result;
  for (const CaseInput& input : op_case.inputs) {
    if (input.fill == CaseInput::Fill::absent) {
      result.emplace_back();
      continue;
    }
    void* data = nullptr;
    const DType dtype = input.dtype == DType::undefined ? type : input.dtype;
    TensorData tensor = TensorData::allocate(dtype, input.dims, &data);
    dispatch_all(dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      for (int64_t i = 0; i < tensor.numel(); ++i) {
        const double drawn = draw(input, static_cast<size_t>(i), random);
        // Through int64 so that values beyond 2^53 in literals of integers stay defined.
        if constexpr (std::is_integral_v<T>) {
          static_cast<T*>(data)[i] = static_cast<T>(static_cast<int64_t>(drawn));
        } else {
          static_cast<T*>(data)[i] = static_cast<T>(static_cast<ComputeType<T>>(drawn));
        }
      }
    });
    result.push_back(std::move(tensor));
  }
  return result;
}

namespace {

// Calls of one kernel, with memory of its device.
class KernelRun {
 public:
  KernelRun(const Kernel& kernel, NodeSpec& spec, Device& device)
      : device_(device),
        run_(kernel.make(spec)),
        scope_(device.enter()),
        workspace_(place(spec.workspace_bytes().value())),
        number_({spec.context()}) {}

  void* place(size_t bytes) {
    blocks_.push_back(device_.tensor(std::max<size_t>(bytes, 1), nullptr));
    return blocks_.back()->data();
  }
  // A copy of host memory; that itself where kernels read it.
  const void* placed(const void* data, size_t bytes) {
    if (device_.is_host()) return data;
    void* const copy = place(bytes);
    device_.upload(copy, data, bytes, nullptr);
    return copy;
  }
  void* copied(const void* data, size_t bytes) {
    void* const copy = place(bytes);
    device_.copy(copy, data, bytes, nullptr);
    return copy;
  }

  // Fills `results`; those that have an address in `made` are written there first.
  void call(const std::vector<const void*>& in, std::vector<TensorData>& results,
            std::vector<void*> made = {}) {
    made.resize(results.size(), nullptr);
    for (size_t i = 0; i < made.size(); ++i) {
      if (made[i] == nullptr) made[i] = place(results[i].bytes());
    }
    run_({.in = in.data(),
          .out = made.data(),
          .workspace = workspace_,
          .fault = device_.fault_slot(),
          .step = number_.first()});
    for (size_t i = 0; i < made.size(); ++i) {
      void* data = nullptr;
      TensorData read = TensorData::allocate(results[i].dtype(), results[i].dims(), &data);
      if (device_.is_host()) {
        if (read.bytes() > 0) std::memcpy(data, made[i], read.bytes());
      } else {
        device_.download(data, made[i], read.bytes(), nullptr);
      }
      results[i] = std::move(read);
    }
    if (device_.is_host()) return;
    device_.synchronize(nullptr);
    device_.raise_faults();
  }

 private:
  Device& device_;
  const KernelFn run_;
  const std::shared_ptr<void> scope_;
  std::vector<std::shared_ptr<Block>> blocks_;
  void* const workspace_;
  const StepNumbers number_;
};

using Pairs = std::vector<std::pair<size_t, size_t>>;  // operands and results

// Pairs that plans may put in one place: each by itself, and as many at once as can be.
std::vector<Pairs> pairs_to_try(const Kernel& kernel, const NodeSpec& spec) {
  std::vector<Pairs> tried;
  Pairs together;
  for (const auto& [from, to] : kernel.inplace_of ? kernel.inplace_of(spec) : kernel.inplace) {
    const auto i = static_cast<size_t>(from), j = static_cast<size_t>(to);
    if (i >= spec.num_inputs() || j >= spec.num_outputs()) continue;
    if (!spec.has_input(i) || !spec.has_output(j)) continue;
    if (spec.input(i).bytes() == 0 || spec.input(i).bytes() != spec.output(j).bytes()) continue;
    tried.push_back({{i, j}});
    const bool taken = std::ranges::any_of(
        together, [&](const auto& pair) { return pair.first == i || pair.second == j; });
    if (!taken) together.emplace_back(i, j);
  }
  if (together.size() > 1) tried.push_back(std::move(together));
  return tried;
}

// The kernel gives the same bits where results take the memory of operands, as it says they may.
void check_in_place(KernelRun& run, const Kernel& kernel, const NodeSpec& spec,
                    const std::vector<const void*>& in, const std::vector<TensorData>& expected) {
  for (const Pairs& pairs : pairs_to_try(kernel, spec)) {
    std::vector<const void*> operands = in;
    std::vector<void*> made(expected.size(), nullptr);
    for (const auto& [i, j] : pairs) {
      operands[i] = made[j] = run.copied(in[i], spec.input(i).bytes());
    }
    std::vector<TensorData> actual = expected;
    run.call(operands, actual, made);
    for (size_t j = 0; j < expected.size(); ++j) {
      if (actual[j].equals(expected[j])) continue;
      throw InternalError(str(spec.context(), "kernel '", kernel.name, "': result ", j,
                              " is another one where ", pairs.size(), " of its results take the ",
                              "memory of operands, operand ", pairs[0].first, " first"));
    }
  }
}

}  // namespace

std::vector<TensorData> run_kernel(const OpCase& op_case, const std::vector<TensorData>& inputs,
                                   const std::string& kernel_name, const KernelRegistry& kernels) {
  const OpDef& def = def_of(op_case);
  const Node node = make_node(op_case, inputs);
  std::vector<InferredValue> values;
  std::vector<TensorSpec> input_specs;
  std::vector<const void*> in;
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    if (!inputs[i].defined()) {
      values.emplace_back();
      input_specs.emplace_back();
      in.push_back(nullptr);
      continue;
    }
    InferredValue value{inputs[i].dtype(), to_shape(inputs[i].dims()), {}, inputs[i]};
    if (kIndexTypes.contains(value.dtype) && value.shape.size() <= 1) {
      const std::vector<int64_t> contents = inputs[i].to_int64s();
      value.known.emplace(contents.begin(), contents.end());
    }
    values.push_back(std::move(value));
    input_specs.push_back({inputs[i].dtype(), inputs[i].dims()});
    in.push_back(inputs[i].data());
  }
  const std::vector<InferredValue> inferred = infer_node(def, node, std::move(values));
  std::vector<TensorData> results;
  std::vector<TensorSpec> output_specs;
  std::vector<void*> out;
  for (const InferredValue& value : inferred) {
    if (!is_constant(value.shape)) {
      throw UnsupportedError(str(Graph::context(node), "the shape of its result depends on data"));
    }
    output_specs.push_back({value.dtype, to_dims(value.shape)});
    void* data = nullptr;
    results.push_back(TensorData::allocate(value.dtype, output_specs.back().dims, &data));
    out.push_back(data);
  }
  // What a view or kernel knows while planning lies on the host; what it reads, on the device.
  NodeSpec spec(def, node, input_specs, output_specs, in);
  std::string why;
  const Kernel* kernel =
      kernel_name.empty() ? kernels.select(spec) : kernels.select_named(spec, kernel_name, &why);
  if (kernel == nullptr) {
    throw UnsupportedError(str(Graph::context(node), "kernel '", kernel_name, "': ", why));
  }
  if (!kernel->make) {
    const std::vector<int64_t> offsets = *kernel->view(spec);
    for (size_t i = 0; i < out.size(); ++i) {
      if (results[i].bytes() == 0) continue;
      std::memcpy(out[i], static_cast<const char*>(in[0]) + offsets[i], results[i].bytes());
    }
    return results;
  }
  KernelRun run(*kernel, spec, kernels.device());
  for (size_t i = 0; i < in.size(); ++i) {
    if (in[i] != nullptr) in[i] = run.placed(in[i], inputs[i].bytes());
  }
  run.call(in, results);
  check_in_place(run, *kernel, spec, in, results);
  return results;
}

std::vector<CheckRow> check_kernels(const OpCase& op_case, const KernelRegistry& kernels) {
  std::vector<CheckRow> rows;
  const auto [domain, name] = split_op(op_case.op);
  for (DType type : types_under_test(op_case)) {
    const std::vector<TensorData> inputs = make_inputs(op_case, type);
    if (op_case.refusal) {
      CheckRow row{.name = case_name(op_case), .kernel = "", .type = type};
      try {
        run_kernel(op_case, inputs, "", kernels);
        row.message = "was not refused";
      } catch (const Error& error) {
        row.message = error.what();
        row.passed = row.message.find(*op_case.refusal) != std::string::npos;
      }
      rows.push_back(std::move(row));
      continue;
    }
    std::vector<TensorData> expected;
    for (const std::string reference : {"ref", "view", ""}) {
      if (!expected.empty()) break;
      try {
        expected = run_kernel(op_case, inputs, reference, cpu_kernels());
      } catch (const UnsupportedError&) {
        if (reference.empty()) throw;
      }
    }
    for (const Kernel& kernel : kernels.find(domain, name)) {
      CheckRow row{.name = case_name(op_case), .kernel = kernel.name, .type = type};
      try {
        const std::vector<TensorData> actual = run_kernel(op_case, inputs, kernel.name, kernels);
        for (size_t i = 0; i < actual.size(); ++i) {
          row.difference = std::max(row.difference, difference(actual[i], expected[i]));
        }
        row.passed = row.difference <= tolerance_of(op_case, type);
        if (!row.passed) row.message = str("differs from ref by ", row.difference);
      } catch (const UnsupportedError& error) {
        row.refused = true;
        row.message = error.what();
      } catch (const Error& error) {
        row.message = error.what();
      }
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

Graph graph_of_case(const OpCase& op_case, const std::vector<TensorData>& inputs,
                    const std::function<bool(const TensorData&)>& is_constant) {
  Graph graph;
  GraphBuilder builder(graph);
  std::vector<ValueId> values;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined()) {
      values.push_back(kNoValue);
    } else if (is_constant(inputs[i])) {
      values.push_back(graph.add_constant(inputs[i]));
    } else {
      const DType dtype = inputs[i].dtype();
      values.push_back(
          graph.add_input({.role = InputRole::user, .requires_grad = kFloatTypes.contains(dtype)},
                          str("x", i), dtype, to_shape(inputs[i].dims())));
    }
  }
  const auto [domain, name] = split_op(op_case.op);
  builder.set_layer(op_case.name);
  const std::vector<ValueId> outputs = builder.node(domain, name, values, op_case.attributes,
                                                    std::vector<bool>(op_case.outputs, true));
  for (size_t i = 0; i < outputs.size(); ++i) {
    graph.add_output({.value = outputs[i], .name = str("y", i), .role = OutputRole::user});
  }
  return graph;
}

bool has_gradient_check(const OpCase& op_case) {
  if (!op_case.check_gradient || op_case.refusal) return false;
  if (!op_case.types.empty() && !op_case.types.contains(DType::f64)) return false;
  return def_of(op_case).differentiability() == Differentiability::rule;
}

namespace {

std::vector<Dims> input_dims_of(const Graph& graph) {
  std::vector<Dims> dims;
  for (const GraphInput& input : graph.inputs()) {
    dims.push_back(to_dims(graph.value(input.value).shape));
  }
  return dims;
}

// Between devices in float64: orders of sums differ, nothing else.
constexpr double kDeviceTolerance = 1e-9;

// A case in float64 on one provider: forward runs at any inputs, and the gradients of a sum of its
// outputs with fixed random weights.
class GradientRun {
 public:
  GradientRun(const OpCase& op_case, const KernelRegistry& kernels)
      : op_case_(op_case), device_(kernels.device()) {
    const std::vector<TensorData> inputs = make_inputs(op_case, DType::f64, 7);
    const auto is_constant = [](const TensorData& input) { return input.dtype() != DType::f64; };
    const Graph forward_graph = graph_of_case(op_case, inputs, is_constant);
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].defined() && !is_constant(inputs[i])) positions.push_back(i);
    }
    gradient_graph_ = forward_graph;
    build_backward(gradient_graph_, {.output_indices = op_case.gradient_outputs});
    gradient_graph_.remove_dead_nodes();
    gradient_graph_.sort();
    forward_session_ = std::make_shared<Session>(forward_graph, kernels);
    gradient_session_ = std::make_shared<Session>(gradient_graph_, kernels);
    forward_plan_ = forward_session_->plan(input_dims_of(forward_graph));
    for (size_t position : positions) x.push_back(to_doubles(inputs[position]));
    Random random(99);
    for (size_t index : op_case.gradient_outputs) {
      std::vector<double> weights(static_cast<size_t>(forward_plan_->outputs[index].numel()));
      for (double& value : weights) value = random.normal();
      weights_.push_back(std::move(weights));
    }
  }

  // Which inputs of the case have float64 elements, and those elements.
  std::vector<size_t> positions;
  std::vector<std::vector<double>> x;

  double weighted_sum() {
    std::vector<const void*> addresses;
    for (const std::vector<double>& values : x) addresses.push_back(on_device(values));
    RunContext context(forward_session_, forward_plan_);
    const std::vector<RunOutput> outputs = context.forward(addresses);
    double sum = 0;
    for (size_t k = 0; k < weights_.size(); ++k) {
      const std::vector<double> y = on_host(outputs[op_case_.gradient_outputs[k]]);
      for (size_t i = 0; i < weights_[k].size(); ++i) sum += y[i] * weights_[k][i];
    }
    placed_.clear();
    return sum;
  }

  // One for each of `x`, absent where an input gets none; absent as a whole where no input does.
  std::optional<std::vector<std::optional<std::vector<double>>>> gradients() {
    const auto plan = gradient_session_->plan(input_dims_of(gradient_graph_));
    std::vector<const void*> addresses;
    std::vector<const void*> weight_addresses;
    size_t next = 0;
    for (size_t i = 0; i < gradient_graph_.inputs().size(); ++i) {
      const bool is_gradient = gradient_graph_.inputs()[i].role == InputRole::gradient;
      addresses.push_back(is_gradient ? nullptr : on_device(x[i]));
      weight_addresses.push_back(is_gradient ? on_device(weights_[next++]) : nullptr);
    }
    RunContext context(gradient_session_, plan);
    context.forward(addresses);
    if (plan->num_forward_steps == plan->steps.size() && next == 0) return std::nullopt;
    std::vector<RunOutput> outputs;
    if (context.can_run_backward()) outputs = context.backward(weight_addresses);
    placed_.clear();
    std::vector<std::optional<std::vector<double>>> found(x.size());
    for (size_t k = 0; k < outputs.size(); ++k) {
      const GraphOutput& output = gradient_graph_.outputs()[k];
      for (size_t p = 0; p < positions.size(); ++p) {
        if (output.role == OutputRole::gradient && output.target == str("x", positions[p])) {
          found[p] = on_host(outputs[k]);
        }
      }
    }
    return found;
  }

 private:
  const void* on_device(const std::vector<double>& values) {
    placed_.push_back(device_.tensor(std::max<size_t>(values.size() * sizeof(double), 1), nullptr));
    device_.upload(placed_.back()->data(), values.data(), values.size() * sizeof(double), nullptr);
    return placed_.back()->data();
  }

  std::vector<double> on_host(const RunOutput& output) {
    std::vector<double> values(static_cast<size_t>(output.spec.numel()));
    device_.download(values.data(), output.block->data(), values.size() * sizeof(double), nullptr);
    return values;
  }

  const OpCase& op_case_;
  Device& device_;
  Graph gradient_graph_;
  std::shared_ptr<Session> forward_session_, gradient_session_;
  std::shared_ptr<const ExecutionPlan> forward_plan_;
  std::vector<std::vector<double>> weights_;
  std::vector<std::shared_ptr<Block>> placed_;
};

}  // namespace

CheckRow check_gradient(const OpCase& op_case, const KernelRegistry& kernels) {
  CheckRow row{.name = case_name(op_case), .kernel = "gradient", .type = DType::f64};
  GradientRun run(op_case, kernels);
  const auto analytic = run.gradients();
  if (!analytic) {
    row.message = "no input gets a gradient";
    return row;
  }
  const bool is_cpu = &kernels == &cpu_kernels();
  std::optional<std::vector<std::optional<std::vector<double>>>> reference;
  if (!is_cpu) {
    GradientRun on_cpu(op_case, cpu_kernels());
    reference = on_cpu.gradients();
    const double expected = on_cpu.weighted_sum();
    const double sum = run.weighted_sum();
    if (!(std::abs(sum - expected) <= kDeviceTolerance * std::max(1.0, std::abs(expected)))) {
      row.message = str("sum of outputs: ", sum, ", the CPU ", expected);
      return row;
    }
  }

  const auto compare = [&](size_t p, size_t i, double expected, double tolerance,
                           const char* what) {
    const double value = (*analytic)[p] ? (*analytic)[p]->at(i) : 0.0;
    const double delta = std::abs(value - expected);
    row.difference = std::max(row.difference, delta / std::max(1.0, std::abs(expected)));
    if (delta <= tolerance) return;
    row.passed = false;
    row.message = str("input ", run.positions[p], " element ", i, ": rule gives ", value, ", ",
                      what, " ", expected);
  };

  row.passed = true;
  for (size_t p = 0; p < run.positions.size(); ++p) {
    std::vector<double>& x = run.x[p];
    if (!is_cpu) {
      const std::optional<std::vector<double>>& expected = (*reference)[p];
      if (expected.has_value() != (*analytic)[p].has_value()) {
        row.passed = false;
        row.message = str("input ", run.positions[p], " gets a gradient on one device alone");
      }
      for (size_t i = 0; expected && i < x.size(); ++i) {
        const double truth = expected->at(i);
        compare(p, i, truth, kDeviceTolerance * std::max(1.0, std::abs(truth)), "the CPU");
      }
      continue;
    }
    for (size_t i = 0; i < x.size(); ++i) {
      const double step = 1e-6 * std::max(1.0, std::abs(x[i]));
      const double saved = x[i];
      x[i] = saved + step;
      const double above = run.weighted_sum();
      x[i] = saved - step;
      const double below = run.weighted_sum();
      x[i] = saved;
      const double numeric = (above - below) / (2 * step);
      compare(p, i, numeric, 1e-5 + 1e-3 * std::abs(numeric), "finite difference");
    }
  }
  return row;
}

}  // namespace ortrain::testing
