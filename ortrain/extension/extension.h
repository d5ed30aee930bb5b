// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "ortrain/extension/abi.h"

// Operators of your own, in a shared library that a program loads at run time. Needs C++20 and this
// folder, nothing to link:
//
//   #include <ortrain/extension/extension.h>
//   namespace ox = ortrain::extension;
//
//   ORTRAIN_EXTENSION(library) {
//     library.add(ox::Operator("mylib", "Square")
//         .summary("x * x.")
//         .input("x", "T").output("y", "T").types("T", {ox::Type::f32})
//         .infer([](ox::Infer& node) { node.set_output(0, node.type(0), node.shape(0)); })
//         .gradient([](ox::Gradient& g) {
//           ox::Value twice = g.op("Add", {g.input(0), g.input(0)});
//           g.set_input_grad(0, g.op("Mul", {twice, g.output_grad(0)}));
//         })
//         .kernel([](ox::Prepare& node) {
//           const int64_t n = node.input(0).numel();
//           return [n](const ox::Run& run) {
//             const float* x = run.input<float>(0);
//             float* y = run.output<float>(0);
//             ox::parallel_for(n, 4096, [=](int64_t begin, int64_t end) {
//               for (int64_t i = begin; i < end; ++i) y[i] = x[i] * x[i];
//             });
//           };
//         }));
//   }
//
// Tensors are dense and row-major. Throw ox::Error to refuse a node; it reaches Python as the
// exception of its kind, with operator and layer in front.
#pragma GCC visibility push(hidden)  // each library has its own
namespace ortrain::extension {

// Element types, by their codes in ONNX.
enum class Type : int32_t {
  f32 = 1,
  u8 = 2,
  i8 = 3,
  u16 = 4,
  i16 = 5,
  i32 = 6,
  i64 = 7,
  boolean = 9,
  f16 = 10,
  f64 = 11,
  u32 = 12,
  u64 = 13,
  bf16 = 16,
};

class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message, OrtrainErrorKind kind = kOrtrainErrorModel)
      : std::runtime_error(message), kind_(kind) {}
  OrtrainErrorKind kind() const { return kind_; }

 private:
  OrtrainErrorKind kind_;
};

namespace internal {

inline const OrtrainHost* host = nullptr;

inline void check(int32_t status) {
  if (status != 0) {
    throw Error(host->last_error(), static_cast<OrtrainErrorKind>(host->last_error_kind()));
  }
}

// Runs `body`; an exception becomes the thread's error.
template <typename Body>
int32_t guarded(Body&& body) noexcept {
  try {
    body();
    return 0;
  } catch (const Error& error) {
    host->set_error(error.kind(), error.what());
  } catch (const std::exception& error) {
    host->set_error(kOrtrainErrorInternal, error.what());
  } catch (...) {
    host->set_error(kOrtrainErrorInternal, "the operator threw something that is no exception");
  }
  return 1;
}

}  // namespace internal

// Calls fn(begin, end) on disjoint ranges that cover [0, count), none shorter than `grain`, on the
// engine's threads. One of the exceptions is thrown on.
template <typename Fn>
void parallel_for(int64_t count, int64_t grain, Fn&& fn) {
  struct Call {
    std::remove_reference_t<Fn>* fn;
    std::mutex mutex;
    std::exception_ptr error;
  };
  Call call{&fn, {}, nullptr};
  internal::host->parallel_for(
      count, grain,
      [](void* argument, int64_t begin, int64_t end) {
        Call& shared = *static_cast<Call*>(argument);
        try {
          (*shared.fn)(begin, end);
        } catch (...) {
          const std::lock_guard lock(shared.mutex);
          if (!shared.error) shared.error = std::current_exception();
        }
      },
      &call);
  if (call.error) std::rethrow_exception(call.error);
}

using AttributeValue =
    std::variant<int64_t, double, std::string, std::vector<int64_t>, std::vector<double>>;
using Attributes = std::map<std::string, AttributeValue>;

namespace internal {

// Points into `name` and `value`.
inline OrtrainAttribute view_of(const std::string& name, const AttributeValue& value) {
  OrtrainAttribute view{};
  view.name = name.c_str();
  view.kind = static_cast<int32_t>(value.index());
  switch (value.index()) {
    case kOrtrainInt:
      view.int_value = std::get<int64_t>(value);
      break;
    case kOrtrainFloat:
      view.float_value = std::get<double>(value);
      break;
    case kOrtrainString:
      view.string_value = std::get<std::string>(value).c_str();
      break;
    case kOrtrainInts:
      view.ints = std::get<std::vector<int64_t>>(value).data();
      view.count = std::get<std::vector<int64_t>>(value).size();
      break;
    default:
      view.floats = std::get<std::vector<double>>(value).data();
      view.count = std::get<std::vector<double>>(value).size();
  }
  return view;
}

}  // namespace internal

// One node of a graph: its attributes, and which inputs and outputs it has.
class Node {
 public:
  explicit Node(OrtrainContext* context) : context_(context) {}

  // Each throws Error when the attribute is absent or of another kind.
  int64_t int_(const char* name) const { return attribute(name, kOrtrainInt).int_value; }
  double float_(const char* name) const { return attribute(name, kOrtrainFloat).float_value; }
  std::string string_(const char* name) const {
    return attribute(name, kOrtrainString).string_value;
  }
  std::vector<int64_t> ints(const char* name) const {
    const OrtrainAttribute found = attribute(name, kOrtrainInts);
    return {found.ints, found.ints + found.count};
  }
  std::vector<double> floats(const char* name) const {
    const OrtrainAttribute found = attribute(name, kOrtrainFloats);
    return {found.floats, found.floats + found.count};
  }
  bool has_attribute(const char* name) const {
    return internal::host->has_attribute(context_, name) != 0;
  }

  size_t num_inputs() const { return internal::host->num_inputs(context_); }
  size_t num_outputs() const { return internal::host->num_outputs(context_); }
  // False for an optional one that is left out.
  bool has_input(size_t index) const { return internal::host->has_input(context_, index) != 0; }
  // False for one that nobody reads.
  bool has_output(size_t index) const { return internal::host->has_output(context_, index) != 0; }
  Type type(size_t input) const {
    int32_t type = 0;
    internal::check(internal::host->input_type(context_, input, &type));
    return static_cast<Type>(type);
  }

 protected:
  OrtrainContext* context_;

 private:
  OrtrainAttribute attribute(const char* name, OrtrainAttributeKind kind) const {
    OrtrainAttribute result{};
    internal::check(internal::host->attribute(context_, name, kind, &result));
    return result;
  }
};

// An extent: a number, or an expression over the symbols of a graph ("2*batch + 1").
class Dim {
 public:
  Dim(int64_t value) : dim_{value, 0} {}  // NOLINT: extents are mostly numbers
  Dim(OrtrainContext* context, OrtrainDim dim) : context_(context), dim_(dim) {}

  bool is_number() const { return dim_.is_symbolic == 0; }
  // Only where is_number().
  int64_t number() const { return dim_.value; }
  OrtrainDim raw() const { return dim_; }

  friend Dim operator+(const Dim& a, const Dim& b) { return apply(kOrtrainDimAdd, a, b); }
  friend Dim operator-(const Dim& a, const Dim& b) { return apply(kOrtrainDimSub, a, b); }
  friend Dim operator*(const Dim& a, const Dim& b) { return apply(kOrtrainDimMul, a, b); }
  friend Dim floor_div(const Dim& a, const Dim& b) { return apply(kOrtrainDimFloorDiv, a, b); }
  friend Dim ceil_div(const Dim& a, const Dim& b) { return apply(kOrtrainDimCeilDiv, a, b); }
  friend Dim min(const Dim& a, const Dim& b) { return apply(kOrtrainDimMin, a, b); }
  friend Dim max(const Dim& a, const Dim& b) { return apply(kOrtrainDimMax, a, b); }
  // As NumPy broadcasts; throws Error where they cannot fit.
  friend Dim broadcast(const Dim& a, const Dim& b) { return apply(kOrtrainDimBroadcast, a, b); }
  friend bool operator==(const Dim& a, const Dim& b) {
    return internal::host->dim_equal(context_of(a, b), a.dim_, b.dim_) != 0;
  }

 private:
  static OrtrainContext* context_of(const Dim& a, const Dim& b) {
    return a.context_ != nullptr ? a.context_ : b.context_;
  }
  static Dim apply(OrtrainDimOperation operation, const Dim& a, const Dim& b) {
    OrtrainContext* context = context_of(a, b);
    OrtrainDim result{};
    internal::check(internal::host->dim_operation(context, operation, a.dim_, b.dim_, &result));
    return {context, result};
  }

  OrtrainContext* context_ = nullptr;
  OrtrainDim dim_{};
};

using Shape = std::vector<Dim>;

// Tells types and shapes of the results. Runs on symbolic extents when a graph is built, on numbers
// when it is planned.
class Infer : public Node {
 public:
  using Node::Node;

  Shape shape(size_t input) const {
    size_t rank = 0;
    internal::check(internal::host->input_rank(context_, input, &rank));
    Shape result;
    for (size_t axis = 0; axis < rank; ++axis) {
      OrtrainDim dim{};
      internal::check(internal::host->input_dim(context_, input, axis, &dim));
      result.emplace_back(context_, dim);
    }
    return result;
  }
  // The contents of an integer input of rank 0 or 1, where they are known.
  std::optional<std::vector<int64_t>> contents(size_t input) const {
    const int64_t* values = nullptr;
    size_t count = 0;
    int32_t known = 0;
    internal::check(internal::host->input_contents(context_, input, &values, &count, &known));
    if (known == 0) return std::nullopt;
    return std::vector<int64_t>(values, values + count);
  }
  void set_output(size_t index, Type type, const Shape& shape) {
    std::vector<OrtrainDim> dims;
    for (const Dim& dim : shape) dims.push_back(dim.raw());
    internal::check(internal::host->set_output(context_, index, static_cast<int32_t>(type),
                                               dims.data(), dims.size()));
  }
};

// A value of a graph; `absent` for an optional input that is left out.
enum class Value : int32_t { absent = -1 };

// Builds the gradients of a node's inputs out of other nodes.
class Gradient : public Node {
 public:
  using Node::Node;

  Value input(size_t index) const {
    int32_t value = -1;
    internal::check(internal::host->input_value(context_, index, &value));
    return Value{value};
  }
  Value output(size_t index) const {
    int32_t value = -1;
    internal::check(internal::host->output_value(context_, index, &value));
    return Value{value};
  }
  // The gradient that came in for an output; absent where none did.
  Value output_grad(size_t index) const {
    int32_t value = -1;
    internal::check(internal::host->output_gradient(context_, index, &value));
    return Value{value};
  }
  // Only these need to be built.
  bool needs_grad(size_t input) const {
    return internal::host->needs_gradient(context_, input) != 0;
  }
  // Of the shape and type of the input. Not setting one that is needed means zeros.
  void set_input_grad(size_t input, Value gradient) {
    internal::check(
        internal::host->set_input_gradient(context_, input, static_cast<int32_t>(gradient)));
  }

  // Adds a node of a domain: "" for ONNX's operators, "ortrain", or that of a library.
  std::vector<Value> node(const char* domain, const char* name, const std::vector<Value>& inputs,
                          const Attributes& attributes = {}, size_t num_outputs = 1) {
    std::vector<OrtrainAttribute> views;
    for (const auto& [key, value] : attributes) views.push_back(internal::view_of(key, value));
    std::vector<int32_t> ids;
    for (Value input : inputs) ids.push_back(static_cast<int32_t>(input));
    std::vector<int32_t> made(num_outputs, -1);
    internal::check(internal::host->add_node(context_, domain, name, ids.data(), ids.size(),
                                             views.data(), views.size(), made.data(), made.size()));
    std::vector<Value> result;
    for (int32_t id : made) result.push_back(Value{id});
    return result;
  }
  // One of ONNX's operators with one output.
  Value op(const char* name, const std::vector<Value>& inputs, const Attributes& attributes = {}) {
    return node("", name, inputs, attributes)[0];
  }
  Value scalar(Type type, double number) {
    int32_t value = -1;
    internal::check(
        internal::host->add_scalar(context_, static_cast<int32_t>(type), number, &value));
    return Value{value};
  }
  Value int64s(const std::vector<int64_t>& numbers) {
    int32_t value = -1;
    internal::check(internal::host->add_int64s(context_, numbers.data(), numbers.size(), &value));
    return Value{value};
  }
  // Sums over the axes along which broadcasting has repeated `like`.
  Value reduce_to_shape_of(Value value, Value like) {
    int32_t result = -1;
    internal::check(internal::host->reduce_to_shape_of(context_, static_cast<int32_t>(value),
                                                       static_cast<int32_t>(like), &result));
    return Value{result};
  }
  Type type(Value value) const {
    int32_t type = 0;
    internal::check(internal::host->value_type(context_, static_cast<int32_t>(value), &type));
    return static_cast<Type>(type);
  }
  size_t rank(Value value) const {
    size_t rank = 0;
    internal::check(internal::host->value_rank(context_, static_cast<int32_t>(value), &rank));
    return rank;
  }
  using Node::type;
};

// Type and extents of one tensor of a node.
struct TensorSpec {
  Type type{};
  std::vector<int64_t> dims;

  int64_t numel() const {
    int64_t product = 1;
    for (int64_t extent : dims) product *= extent;
    return product;
  }
};

// Makes the kernel of one node, all extents known.
class Prepare : public Node {
 public:
  using Node::Node;

  TensorSpec input(size_t index) const { return tensor(0, index); }
  TensorSpec output(size_t index) const { return tensor(1, index); }
  // Scratch memory that the kernel gets as Run::workspace, 64-byte aligned, not zeroed.
  void request_workspace(size_t bytes) {
    internal::check(internal::host->request_workspace(context_, bytes));
  }

 private:
  TensorSpec tensor(int32_t is_output, size_t index) const {
    int32_t type = 0;
    const int64_t* dims = nullptr;
    size_t rank = 0;
    internal::check(internal::host->tensor(context_, is_output, index, &type, &dims, &rank));
    return {static_cast<Type>(type), {dims, dims + rank}};
  }
};

// The addresses of one run: null for absent inputs and for outputs that nobody reads.
class Run {
 public:
  Run(const void* const* inputs, void* const* outputs, void* workspace)
      : inputs_(inputs), outputs_(outputs), workspace_(workspace) {}

  template <typename T>
  const T* input(size_t index) const {
    return static_cast<const T*>(inputs_[index]);
  }
  template <typename T>
  T* output(size_t index) const {
    return static_cast<T*>(outputs_[index]);
  }
  void* workspace() const { return workspace_; }

 private:
  const void* const* inputs_;
  void* const* outputs_;
  void* workspace_;
};

// Several threads may call one kernel at once; it should allocate nothing.
using Kernel = std::function<void(const Run&)>;

// The definition of one operator.
class Operator {
 public:
  // `domain`: the library's own. `since`: the version of the domain from which on it means this.
  Operator(std::string domain, std::string name, int32_t since = 1)
      : domain_(std::move(domain)), name_(std::move(name)), since_(since) {}

  // One sentence, with the formula.
  Operator& summary(std::string text) {
    summary_ = std::move(text);
    return *this;
  }
  // `type` names a type variable.
  Operator& input(std::string name, std::string type, OrtrainArity arity = kOrtrainSingle) {
    inputs_.push_back({std::move(name), std::move(type), arity});
    return *this;
  }
  Operator& output(std::string name, std::string type, OrtrainArity arity = kOrtrainSingle) {
    outputs_.push_back({std::move(name), std::move(type), arity});
    return *this;
  }
  // The element types that a type variable stands for; all values of one variable have one type.
  Operator& types(std::string variable, std::vector<Type> types) {
    std::vector<int32_t> codes;
    for (Type type : types) codes.push_back(static_cast<int32_t>(type));
    types_.emplace_back(std::move(variable), std::move(codes));
    return *this;
  }
  // An attribute with a default: int64_t, double, std::string or a vector of numbers.
  template <typename T>
  Operator& attribute(std::string name, T default_value) {
    if constexpr (std::is_integral_v<T>) {
      attributes_.push_back({std::move(name), static_cast<int64_t>(default_value), true});
    } else if constexpr (std::is_floating_point_v<T>) {
      attributes_.push_back({std::move(name), static_cast<double>(default_value), true});
    } else {
      attributes_.push_back({std::move(name), AttributeValue(std::move(default_value)), true});
    }
    return *this;
  }
  // An attribute that every node must give.
  Operator& required(std::string name, OrtrainAttributeKind kind) {
    AttributeValue empty;
    switch (kind) {
      case kOrtrainInt:
        empty = int64_t{0};
        break;
      case kOrtrainFloat:
        empty = 0.0;
        break;
      case kOrtrainString:
        empty = std::string();
        break;
      case kOrtrainInts:
        empty = std::vector<int64_t>();
        break;
      case kOrtrainFloats:
        empty = std::vector<double>();
        break;
    }
    attributes_.push_back({std::move(name), std::move(empty), false});
    return *this;
  }
  Operator& infer(std::function<void(Infer&)> function) {
    infer_ = std::move(function);
    return *this;
  }
  Operator& gradient(std::function<void(Gradient&)> function) {
    gradient_ = std::move(function);
    return *this;
  }
  // It has no gradient by definition: nothing flows back through it.
  Operator& not_differentiable() {
    differentiable_ = false;
    return *this;
  }
  // Two nodes with equal inputs are not one.
  Operator& draws_random_numbers() {
    random_ = true;
    return *this;
  }
  // Input and output may be the same memory when nobody reads the input later: the kernel reads
  // each element of the input before it writes that element of the output.
  Operator& inplace(int32_t input, int32_t output) {
    inplace_.push_back(input);
    inplace_.push_back(output);
    return *this;
  }
  // Called once per node and set of extents; returns what runs it.
  Operator& kernel(std::function<Kernel(Prepare&)> function) {
    kernel_ = std::move(function);
    return *this;
  }

 private:
  friend class Library;

  struct Formal {
    std::string name;
    std::string type;
    OrtrainArity arity;
  };
  struct FormalAttribute {
    std::string name;
    AttributeValue value;
    bool has_default;
  };

  static int32_t call_infer(void* self, OrtrainContext* context) {
    return internal::guarded([&] {
      Infer node(context);
      static_cast<Operator*>(self)->infer_(node);
    });
  }
  static int32_t call_gradient(void* self, OrtrainContext* context) {
    return internal::guarded([&] {
      Gradient node(context);
      static_cast<Operator*>(self)->gradient_(node);
    });
  }
  static int32_t call_prepare(void* self, OrtrainContext* context, void** kernel) {
    return internal::guarded([&] {
      Prepare node(context);
      *kernel = new Kernel(static_cast<Operator*>(self)->kernel_(node));
    });
  }
  static int32_t call_run(void* kernel, const void* const* inputs, void* const* outputs,
                          void* workspace) {
    return internal::guarded(
        [&] { (*static_cast<Kernel*>(kernel))(Run(inputs, outputs, workspace)); });
  }
  static void release(void* kernel) { delete static_cast<Kernel*>(kernel); }

  std::string domain_;
  std::string name_;
  int32_t since_;
  std::string summary_;
  std::vector<Formal> inputs_;
  std::vector<Formal> outputs_;
  std::vector<FormalAttribute> attributes_;
  std::vector<std::pair<std::string, std::vector<int32_t>>> types_;
  std::vector<int32_t> inplace_;
  bool differentiable_ = true;
  bool random_ = false;
  std::function<void(Infer&)> infer_;
  std::function<void(Gradient&)> gradient_;
  std::function<Kernel(Prepare&)> kernel_;
};

// The operators of one shared library.
class Library {
 public:
  explicit Library(OrtrainRegistrar* registrar) : registrar_(registrar) {}

  // Throws Error when the definition is not complete or the operator is there already.
  void add(Operator definition) {
    auto owner = std::make_unique<Operator>(std::move(definition));
    Operator* const op = owner.get();
    OrtrainOperator view{};
    view.size = sizeof(OrtrainOperator);
    view.domain = op->domain_.c_str();
    view.name = op->name_.c_str();
    view.since = op->since_;
    view.summary = op->summary_.c_str();
    const std::vector<OrtrainFormal> inputs = formals(op->inputs_);
    const std::vector<OrtrainFormal> outputs = formals(op->outputs_);
    view.inputs = inputs.data();
    view.num_inputs = inputs.size();
    view.outputs = outputs.data();
    view.num_outputs = outputs.size();
    std::vector<OrtrainFormalAttribute> attributes;
    for (const Operator::FormalAttribute& attribute : op->attributes_) {
      attributes.push_back({internal::view_of(attribute.name, attribute.value),
                            attribute.has_default ? 1 : 0, attribute.has_default ? 0 : 1});
    }
    view.attributes = attributes.data();
    view.num_attributes = attributes.size();
    std::vector<OrtrainTypeVariable> types;
    for (const auto& [name, codes] : op->types_) {
      types.push_back({name.c_str(), codes.data(), codes.size()});
    }
    view.types = types.data();
    view.num_types = types.size();
    view.differentiable = op->differentiable_ ? 1 : 0;
    view.draws_random_numbers = op->random_ ? 1 : 0;
    view.inplace = op->inplace_.data();
    view.num_inplace = op->inplace_.size() / 2;
    view.self = op;
    view.infer = op->infer_ ? &Operator::call_infer : nullptr;
    view.gradient = op->gradient_ ? &Operator::call_gradient : nullptr;
    view.prepare = op->kernel_ ? &Operator::call_prepare : nullptr;
    view.run = &Operator::call_run;
    view.release = &Operator::release;
    internal::check(internal::host->add_operator(registrar_, &view));
    kept().push_back(std::move(owner));
  }

 private:
  static std::vector<OrtrainFormal> formals(const std::vector<Operator::Formal>& values) {
    std::vector<OrtrainFormal> result;
    for (const Operator::Formal& value : values) {
      result.push_back({value.name.c_str(), value.type.c_str(), value.arity});
    }
    return result;
  }
  // The engine calls the operators as long as the process lives.
  static std::vector<std::unique_ptr<Operator>>& kept() {
    static auto* const operators = new std::vector<std::unique_ptr<Operator>>();
    return *operators;
  }

  OrtrainRegistrar* registrar_;
};

}  // namespace ortrain::extension
#pragma GCC visibility pop

// Defines what the engine calls when it has loaded the library; the body adds the operators to
// `library`, an ortrain::extension::Library&.
#define ORTRAIN_EXTENSION(library)                                             \
  static void ortrain_extension_body(::ortrain::extension::Library& library);  \
  extern "C" __attribute__((visibility("default"))) int32_t ortrain_extension( \
      const OrtrainHost* host, OrtrainRegistrar* registrar) {                  \
    if (host->abi != kOrtrainExtensionAbi) return 1;                           \
    ::ortrain::extension::internal::host = host;                               \
    return ::ortrain::extension::internal::guarded([&] {                       \
      ::ortrain::extension::Library operators(registrar);                      \
      ortrain_extension_body(operators);                                       \
    });                                                                        \
  }                                                                            \
  static void ortrain_extension_body(::ortrain::extension::Library& library)
