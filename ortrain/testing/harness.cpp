// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/testing/harness.h"

#include <algorithm>
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

std::pair<std::string, std::string> split_op(const std::string& op) {
  const size_t colons = op.find("::");
  if (colons == std::string::npos) return {"", op};
  return {op.substr(0, colons), op.substr(colons + 2)};
}

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

std::string case_name(const OpCase& op_case) { return op_case.op + "/" + op_case.name; }

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
  const KernelFn run = kernel->make(spec);
  Device& device = kernels.device();
  const std::shared_ptr<void> scope = device.enter();
  std::vector<std::shared_ptr<Block>> blocks;
  const auto place = [&](size_t bytes) {
    blocks.push_back(device.tensor(std::max<size_t>(bytes, 1), nullptr));
    return blocks.back()->data();
  };
  std::vector<void*> results_on_device = out;
  if (!device.is_host()) {
    for (size_t i = 0; i < in.size(); ++i) {
      if (in[i] == nullptr) continue;
      void* const placed = place(inputs[i].bytes());
      device.upload(placed, in[i], inputs[i].bytes(), nullptr);
      in[i] = placed;
    }
    for (size_t i = 0; i < out.size(); ++i) results_on_device[i] = place(results[i].bytes());
  }
  void* const workspace = place(spec.workspace_bytes());
  const StepNumbers number({spec.context()});
  run({.in = in.data(),
       .out = results_on_device.data(),
       .workspace = workspace,
       .fault = device.fault_slot(),
       .step = number.first()});
  if (!device.is_host()) {
    for (size_t i = 0; i < out.size(); ++i) {
      device.download(out[i], results_on_device[i], results[i].bytes(), nullptr);
    }
    device.synchronize(nullptr);
    device.raise_faults();
  }
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

bool has_gradient_check(const OpCase& op_case) {
  if (!op_case.check_gradient || op_case.refusal) return false;
  if (!op_case.types.empty() && !op_case.types.contains(DType::f64)) return false;
  return def_of(op_case).differentiability() == Differentiability::rule;
}

namespace {

// The operator as a graph, every float64 input requiring its gradient.
Graph make_case_graph(const OpCase& op_case, const std::vector<TensorData>& inputs,
                      std::vector<size_t>& input_positions) {
  Graph graph;
  GraphBuilder builder(graph);
  std::vector<ValueId> values;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined()) {
      values.push_back(kNoValue);
    } else if (inputs[i].dtype() == DType::f64) {
      values.push_back(graph.add_input({.role = InputRole::user, .requires_grad = true},
                                       str("x", i), DType::f64, to_shape(inputs[i].dims())));
      input_positions.push_back(i);
    } else {
      values.push_back(graph.add_constant(inputs[i]));
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

std::vector<Dims> input_dims_of(const Graph& graph) {
  std::vector<Dims> dims;
  for (const GraphInput& input : graph.inputs()) {
    dims.push_back(to_dims(graph.value(input.value).shape));
  }
  return dims;
}

}  // namespace

CheckRow check_gradient(const OpCase& op_case, const KernelRegistry& kernels) {
  CheckRow row{.name = case_name(op_case), .kernel = "gradient", .type = DType::f64};
  const std::vector<TensorData> inputs = make_inputs(op_case, DType::f64, 7);
  std::vector<size_t> positions;
  const Graph forward_graph = make_case_graph(op_case, inputs, positions);
  Graph gradient_graph = forward_graph;
  build_backward(gradient_graph, {.output_indices = op_case.gradient_outputs});
  gradient_graph.remove_dead_nodes();
  gradient_graph.sort();

  auto forward_session = std::make_shared<Session>(forward_graph, kernels);
  auto gradient_session = std::make_shared<Session>(gradient_graph, kernels);
  const auto forward_plan = forward_session->plan(input_dims_of(forward_graph));
  const auto gradient_plan = gradient_session->plan(input_dims_of(gradient_graph));

  std::vector<std::vector<double>> x;
  for (size_t position : positions) x.push_back(to_doubles(inputs[position]));
  std::vector<std::vector<double>> cotangents;
  Random random(99);
  for (size_t index : op_case.gradient_outputs) {
    std::vector<double> cotangent(static_cast<size_t>(forward_plan->outputs[index].numel()));
    for (double& value : cotangent) value = random.normal();
    cotangents.push_back(std::move(cotangent));
  }

  Device& device = kernels.device();
  std::vector<std::shared_ptr<Block>> placed;
  const auto on_device = [&](const std::vector<double>& values) -> const void* {
    placed.push_back(device.tensor(std::max<size_t>(values.size() * sizeof(double), 1), nullptr));
    device.upload(placed.back()->data(), values.data(), values.size() * sizeof(double), nullptr);
    return placed.back()->data();
  };
  const auto on_host = [&](const RunOutput& output) {
    std::vector<double> values(static_cast<size_t>(output.spec.numel()));
    device.download(values.data(), output.block->data(), values.size() * sizeof(double), nullptr);
    return values;
  };

  const auto weighted_sum = [&] {
    std::vector<const void*> addresses;
    for (const std::vector<double>& values : x) addresses.push_back(on_device(values));
    RunContext context(forward_session, forward_plan);
    const std::vector<RunOutput> outputs = context.forward(addresses);
    double sum = 0;
    for (size_t k = 0; k < cotangents.size(); ++k) {
      const std::vector<double> y = on_host(outputs[op_case.gradient_outputs[k]]);
      for (size_t i = 0; i < cotangents[k].size(); ++i) sum += y[i] * cotangents[k][i];
    }
    placed.clear();
    return sum;
  };

  std::vector<const void*> addresses;
  std::vector<const void*> gradient_addresses;
  size_t next_gradient = 0;
  for (size_t i = 0; i < gradient_graph.inputs().size(); ++i) {
    const bool is_gradient = gradient_graph.inputs()[i].role == InputRole::gradient;
    addresses.push_back(is_gradient ? nullptr : on_device(x[i]));
    gradient_addresses.push_back(is_gradient ? on_device(cotangents[next_gradient++]) : nullptr);
  }
  RunContext context(gradient_session, gradient_plan);
  context.forward(addresses);
  if (gradient_plan->num_forward_steps == gradient_plan->steps.size() && next_gradient == 0) {
    row.message = "no input gets a gradient";
    return row;
  }
  std::vector<RunOutput> gradients;
  if (context.can_run_backward()) gradients = context.backward(gradient_addresses);
  placed.clear();

  row.passed = true;
  for (size_t p = 0; p < positions.size(); ++p) {
    std::optional<std::vector<double>> analytic;
    for (size_t k = 0; k < gradients.size(); ++k) {
      const GraphOutput& output = gradient_graph.outputs()[k];
      if (output.role == OutputRole::gradient && output.target == str("x", positions[p])) {
        analytic = on_host(gradients[k]);
      }
    }
    for (size_t i = 0; i < x[p].size(); ++i) {
      const double step = 1e-6 * std::max(1.0, std::abs(x[p][i]));
      const double saved = x[p][i];
      x[p][i] = saved + step;
      const double above = weighted_sum();
      x[p][i] = saved - step;
      const double below = weighted_sum();
      x[p][i] = saved;
      const double numeric = (above - below) / (2 * step);
      const double value = analytic ? (*analytic)[i] : 0.0;
      const double delta = std::abs(value - numeric);
      row.difference = std::max(row.difference, delta / std::max(1.0, std::abs(numeric)));
      if (!(delta <= 1e-5 + 1e-3 * std::abs(numeric))) {
        row.passed = false;
        row.message = str("input ", positions[p], " element ", i, ": rule gives ", value,
                          ", finite difference ", numeric);
      }
    }
  }
  return row;
}

}  // namespace ortrain::testing
