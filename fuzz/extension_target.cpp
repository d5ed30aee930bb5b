// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// A library of operators inside of the program: what it defines and what it answers is drawn. It
// keeps to what no host can check (arrays are as long as it says, a kernel writes into its results
// alone), and to nothing else.
#include <array>
#include <cstring>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "fuzz/answers.h"
#include "fuzz/byte_source.h"
#include "fuzz/exercise_graph.h"
#include "fuzz/guarded_memory.h"
#include "fuzz/targets.h"
#include "ortrain/extension/abi.h"
#include "ortrain/extension/host.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/text.h"

namespace ortrain::fuzz {
namespace {

// Keeps what definitions and attributes point to.
class Drawn {
 public:
  explicit Drawn(ByteSource& source) : source_(source) {}

  const char* text() {
    constexpr const char* kTexts[] = {"fuzz", "Op", "T",      "x",     "axis",    "",
                                      "Relu", "y",  "scales", "modes", "ortrain", "ai.onnx.ml"};
    const size_t kind = source_.below(16);
    if (kind == 15) return nullptr;
    if (kind < std::size(kTexts)) return kTexts[kind];
    return texts_.emplace_back(source_.text(9)).c_str();
  }
  // A count with its array, or without one.
  template <class T, class Draw>
  const T* array(std::deque<std::vector<T>>& kept, size_t& count, const Draw& draw) {
    count = source_.below(5);
    if (source_.rarely(16)) return nullptr;
    std::vector<T> made;
    for (size_t i = 0; i < count; ++i) made.push_back(draw());
    return kept.emplace_back(std::move(made)).data();
  }
  const int64_t* ints(size_t& count) {
    return array(ints_, count, [&] { return source_.extent(); });
  }
  const double* floats(size_t& count) {
    return array(floats_, count, [&] { return source_.any<double>(); });
  }
  const int32_t* codes(size_t& count) {
    return array(codes_, count, [&] { return static_cast<int32_t>(source_.extent()); });
  }
  const int32_t* pairs(size_t& count) {
    size_t numbers = 0;
    const int32_t* const data = codes(numbers);
    count = data == nullptr ? numbers : numbers / 2;
    return data;
  }
  OrtrainAttribute attribute() {
    OrtrainAttribute made{};
    made.name = text();
    made.kind = static_cast<int32_t>(source_.below(7)) - 1;
    made.int_value = source_.extent();
    made.float_value = source_.any<double>();
    made.string_value = text();
    size_t floats_count = 0;
    made.ints = ints(made.count);
    made.floats = floats(floats_count);
    // One count serves both.
    if (made.kind == kOrtrainFloats) made.count = floats_count;
    return made;
  }
  const OrtrainFormal* formals(size_t& count) {
    return array(formals_, count, [&] {
      return OrtrainFormal{text(), text(), static_cast<int32_t>(source_.below(5)) - 1};
    });
  }
  const OrtrainFormalAttribute* formal_attributes(size_t& count) {
    return array(attributes_, count, [&] {
      return OrtrainFormalAttribute{attribute(), source_.flag(), source_.flag()};
    });
  }
  const OrtrainTypeVariable* types(size_t& count) {
    return array(types_, count, [&] {
      OrtrainTypeVariable made{text(), nullptr, 0};
      made.types = codes(made.count);
      return made;
    });
  }

 private:
  ByteSource& source_;
  std::deque<std::string> texts_;
  std::deque<std::vector<int64_t>> ints_;
  std::deque<std::vector<double>> floats_;
  std::deque<std::vector<int32_t>> codes_;
  std::deque<std::vector<OrtrainFormal>> formals_;
  std::deque<std::vector<OrtrainFormalAttribute>> attributes_;
  std::deque<std::vector<OrtrainTypeVariable>> types_;
};

// --- operators whose functions draw what they answer

ByteSource* answers = nullptr;  // of the input that runs

const OrtrainHost& host() { return extension::host(); }

int32_t drawn_value(OrtrainContext* context) {
  ByteSource& source = *answers;
  int32_t value = -1;
  switch (source.below(5)) {
    case 0:
      return static_cast<int32_t>(source.extent());
    case 1:
      host().input_value(context, source.below(4), &value);
      return value;
    case 2:
      host().output_value(context, source.below(3), &value);
      return value;
    default:
      host().output_gradient(context, source.below(3), &value);
      return value;
  }
}

size_t drawn_index() {
  return answers->rarely(4) ? static_cast<size_t>(answers->extent()) : answers->below(4);
}

// Any of the functions that the host offers, in any of its three states.
void ask_once(OrtrainContext* context) {
  ByteSource& source = *answers;
  Drawn drawn(source);
  int32_t number = 0;
  size_t count = 0;
  const int64_t* list = nullptr;
  OrtrainDim dim{};
  switch (source.below(17)) {
    case 0: {
      OrtrainAttribute result{};
      host().attribute(context, drawn.text(), static_cast<int32_t>(source.below(8)) - 1,
                       source.rarely(16) ? nullptr : &result);
      return;
    }
    case 1:
      host().has_attribute(context, drawn.text());
      return;
    case 2:
      host().input_type(context, drawn_index(), &number);
      return;
    case 3:
      host().input_rank(context, drawn_index(), &count);
      return;
    case 4:
      host().input_dim(context, drawn_index(), drawn_index(), &dim);
      return;
    case 5:
      host().input_contents(context, drawn_index(), &list, &count, &number);
      return;
    case 6: {
      const OrtrainDim a{source.extent(), source.rarely(4)}, b{source.extent(), 0};
      host().dim_operation(source.rarely(16) ? nullptr : context,
                           static_cast<int32_t>(source.below(10)) - 1, a, b, &dim);
      return;
    }
    case 7:
      host().tensor(context, source.flag(), drawn_index(), &number, &list, &count);
      return;
    case 8:
      host().request_workspace(context, static_cast<size_t>(source.extent()));
      return;
    case 9:
      host().needs_gradient(context, drawn_index());
      return;
    case 10:
      host().set_input_gradient(context, drawn_index(), drawn_value(context));
      return;
    case 11: {
      std::vector<int32_t> inputs;
      for (size_t i = source.below(4); i > 0; --i) inputs.push_back(drawn_value(context));
      std::vector<OrtrainAttribute> attributes;
      for (size_t i = source.below(3); i > 0; --i) attributes.push_back(drawn.attribute());
      std::vector<int32_t> outputs(source.below(4));
      constexpr const char* kOps[] = {"Mul",   "Relu", "MatMul", "Reshape",
                                      "Split", "Cast", "Concat"};
      const char* const name =
          source.rarely(4) ? drawn.text() : kOps[source.below(std::size(kOps))];
      host().add_node(context, source.rarely(8) ? drawn.text() : "", name, inputs.data(),
                      inputs.size(), attributes.data(), attributes.size(), outputs.data(),
                      outputs.size());
      return;
    }
    case 12:
      host().add_scalar(context, static_cast<int32_t>(source.below(20)), source.any<double>(),
                        &number);
      return;
    case 13:
      list = drawn.ints(count);
      host().add_int64s(context, list, count, &number);
      return;
    case 14:
      host().reduce_to_shape_of(context, drawn_value(context), drawn_value(context), &number);
      return;
    case 15:
      host().value_type(context, drawn_value(context), &number);
      host().value_rank(context, drawn_value(context), &count);
      return;
    default:
      host().set_error(static_cast<int32_t>(source.below(8)) - 1, drawn.text());
  }
}

int32_t status() {
  // Without an error set: what the host says then.
  return answers->rarely(12) ? static_cast<int32_t>(answers->extent()) : 0;
}

int32_t infer(void*, OrtrainContext* context) {
  ByteSource& source = *answers;
  for (size_t i = source.below(4); i > 0; --i) ask_once(context);
  const size_t outputs = host().num_outputs(context);
  for (size_t k = 0; k < outputs; ++k) {
    if (source.rarely(16)) continue;  // forgotten
    std::vector<OrtrainDim> dims;
    size_t rank = 0;
    host().input_rank(context, 0, &rank);
    for (size_t axis = 0; axis < rank && !source.rarely(12); ++axis) {
      OrtrainDim dim{};
      host().input_dim(context, 0, axis, &dim);
      if (source.rarely(8)) dim = {source.extent(), source.rarely(4)};
      dims.push_back(dim);
    }
    int32_t type = 1;
    host().input_type(context, 0, &type);
    if (source.rarely(12)) type = static_cast<int32_t>(source.extent());
    const size_t index = source.rarely(16) ? drawn_index() : k;
    host().set_output(context, index, type, dims.data(), dims.size());
  }
  return status();
}

int32_t gradient(void*, OrtrainContext* context) {
  for (size_t i = answers->below(6); i > 0; --i) ask_once(context);
  int32_t incoming = -1;
  host().output_gradient(context, 0, &incoming);
  if (!answers->rarely(8)) host().set_input_gradient(context, 0, incoming);
  return status();
}

struct PreparedKernel {
  size_t workspace = 0;
  std::vector<size_t> output_bytes;
};

size_t bytes_of_type(int32_t type) {
  const std::optional<DType> known = dtype_from_onnx(type);
  return known ? size_of(*known) : 0;
}

int32_t prepare(void*, OrtrainContext* context, void** kernel) {
  for (size_t i = answers->below(3); i > 0; --i) ask_once(context);
  auto made = std::make_unique<PreparedKernel>();
  for (size_t k = 0; k < host().num_outputs(context); ++k) {
    int32_t type = 0;
    const int64_t* dims = nullptr;
    size_t rank = 0;
    size_t bytes = 0;
    if (host().has_output(context, k) != 0 &&
        host().tensor(context, 1, k, &type, &dims, &rank) == 0) {
      bytes = bytes_of_type(type);
      for (size_t axis = 0; axis < rank; ++axis) bytes *= static_cast<size_t>(dims[axis]);
    }
    made->output_bytes.push_back(bytes);
  }
  if (answers->rarely(2)) {
    const auto wanted = static_cast<size_t>(answers->extent());
    if (host().request_workspace(context, wanted) == 0) made->workspace = wanted;
  }
  // What a failed call has made the library keeps.
  const int32_t failed = status();
  if (failed == 0 && !answers->rarely(16)) *kernel = made.release();
  return failed;
}

int32_t run_kernel(void* kernel, const void* const* inputs, void* const* outputs, void* workspace) {
  if (kernel == nullptr) return 1;
  const auto& prepared = *static_cast<PreparedKernel*>(kernel);
  if (prepared.workspace > 0) {
    std::memset(workspace, 1, 1);
    static_cast<char*>(workspace)[prepared.workspace - 1] = 1;
  }
  for (size_t k = 0; k < prepared.output_bytes.size(); ++k) {
    if (prepared.output_bytes[k] > 0) std::memset(outputs[k], 1, prepared.output_bytes[k]);
  }
  (void)inputs;
  return status();
}

void release(void* kernel) { delete static_cast<PreparedKernel*>(kernel); }

// Registered once: the registries keep what they have.
void define_operators() {
  static const bool defined = [] {
    static constexpr int32_t kTypes[] = {1, 11, 7};
    static constexpr OrtrainTypeVariable kVariables[] = {{"T", kTypes, 3}};
    static constexpr OrtrainFormal kOne[] = {{"x", "T", kOrtrainSingle}};
    static constexpr OrtrainFormal kTwo[] = {{"x", "T", kOrtrainSingle},
                                             {"y", "T", kOrtrainOptional}};
    static constexpr OrtrainFormal kMany[] = {{"x", "T", kOrtrainVariadic}};
    static constexpr int32_t kInplace[] = {0, 0};
    static constexpr int64_t kInts[] = {1, 2};
    static const OrtrainFormalAttribute kAttributes[] = {
        {{"axis", kOrtrainInt, -1, 0, nullptr, nullptr, nullptr, 0}, 1, 0},
        {{"scales", kOrtrainInts, 0, 0, nullptr, kInts, nullptr, 2}, 1, 0},
        {{"modes", kOrtrainString, 0, 0, "sum", nullptr, nullptr, 0}, 1, 0}};
    OrtrainOperator op{};
    op.size = sizeof(op);
    op.domain = "fuzz";
    op.since = 1;
    op.attributes = kAttributes;
    op.num_attributes = std::size(kAttributes);
    op.types = kVariables;
    op.num_types = 1;
    op.differentiable = 1;
    op.infer = infer;
    op.gradient = gradient;
    op.prepare = prepare;
    op.run = run_kernel;
    op.release = release;
    const auto add = [&](const char* name, std::span<const OrtrainFormal> inputs,
                         std::span<const OrtrainFormal> outputs) {
      op.name = name;
      op.inputs = inputs.data();
      op.num_inputs = inputs.size();
      op.outputs = outputs.data();
      op.num_outputs = outputs.size();
      OrtrainRegistrar::Entry entry = extension::entry_of(op);
      guarded_kernels().add(std::string("fuzz::") + name, entry.kernels);
      mutable_cpu_kernels().add(std::string("fuzz::") + name, std::move(entry.kernels));
      mutable_op_registry().add(std::move(entry.def));
    };
    add("Two", kTwo, kTwo);
    add("Many", kMany, kMany);
    op.inplace = kInplace;
    op.num_inplace = 1;
    add("Inplace", kOne, kOne);
    return true;
  }();
  (void)defined;
}

void run_operators(ByteSource& source) {
  define_operators();
  constexpr const char* kGraphs[] = {
      "graph g (float32[n, 3] x [user grad]) => (z) {\n"
      "  y = fuzz::Inplace (x)\n  z = fuzz::Inplace <axis = 2> (y)\n}",
      "graph g (float32[2, 3] x [user grad], float32[2, 3] w [user grad]) => (z, b) {\n"
      "  a, b = fuzz::Two (x, w)\n  z = Mul(a, x)\n}",
      "graph g (float64[n] x [user grad], float64[n] w) => (p, r) {\n"
      "  p, q, r = fuzz::Many <scales = [3]> (x, w, x)\n}",
      "graph g (int64[2] x) => (y, z) {\n  y = fuzz::Inplace (x)\n"
      "  z = Reshape(float32[4] {1, 2, 3, 4}, y)\n}",
      "graph g () => (y) {\n  y, _ = fuzz::Two (float32[2] {1, 2}, _)\n}",
  };
  std::optional<Graph> graph;
  const char* const text = kGraphs[source.below(std::size(kGraphs))];
  answers = &source;
  if (accepted([&] { graph = parse_graph(text); })) {
    // Such a library answers the same question in two ways, so nothing can be compared.
    plan_and_run(*graph, source.any<uint8_t>(), make_execution_plan, false);
    accepted([&] { differentiate(*graph); });
    plan_and_run(*graph, source.any<uint8_t>(), make_execution_plan, false);
  }
  answers = nullptr;
}

void define(ByteSource& source) {
  Drawn drawn(source);
  OrtrainOperator op{};
  op.size = source.rarely(16) ? source.any<size_t>() : sizeof(op);
  op.domain = drawn.text();
  op.name = drawn.text();
  op.since = static_cast<int32_t>(source.extent());
  op.summary = drawn.text();
  op.inputs = drawn.formals(op.num_inputs);
  op.outputs = drawn.formals(op.num_outputs);
  op.attributes = drawn.formal_attributes(op.num_attributes);
  op.types = drawn.types(op.num_types);
  op.differentiable = source.flag();
  op.draws_random_numbers = source.flag();
  op.inplace = drawn.pairs(op.num_inplace);
  op.infer = source.rarely(16) ? nullptr : infer;
  op.gradient = source.flag() ? nullptr : gradient;
  op.prepare = source.rarely(16) ? nullptr : prepare;
  op.run = source.rarely(16) ? nullptr : run_kernel;
  op.release = source.rarely(16) ? nullptr : release;
  OrtrainRegistrar registrar;
  const int32_t failed = host().add_operator(&registrar, &op);
  require(failed == 0 ? registrar.entries.size() == 1 : registrar.entries.empty(),
          "add_operator keeps what it refuses");
  require(
      failed == 0 || host().last_error_kind() != kOrtrainErrorInternal,
      std::string("a definition is refused as a mistake of the engine's: ") + host().last_error());
}

}  // namespace

void run_extension(Bytes input) {
  ByteSource source(input);
  if (source.flag()) {
    define(source);
  } else {
    run_operators(source);
  }
}

}  // namespace ortrain::fuzz
