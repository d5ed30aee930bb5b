// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "ortrain/base/error.h"
#include "ortrain/extension/host.h"
#include "ortrain/ir/op_registry.h"

namespace ortrain::extension {
namespace {

std::string text(const char* given, const char* what) {
  if (given == nullptr || *given == '\0') throw InvalidModelError(str("has no ", what));
  return given;
}

Arity arity_of(int32_t arity) {
  switch (arity) {
    case kOrtrainSingle:
      return Arity::single;
    case kOrtrainOptional:
      return Arity::optional;
    case kOrtrainVariadic:
      return Arity::variadic;
    default:
      throw InvalidModelError(str("arity ", arity, " is none"));
  }
}

std::vector<FormalValue> formals_of(const OrtrainFormal* given, size_t count, const OpDef& def) {
  std::vector<FormalValue> result;
  required_list(given, count, "inputs or outputs");
  for (size_t i = 0; i < count; ++i) {
    FormalValue formal{text(given[i].name, "name of an input or output"),
                       text(given[i].type, "type of an input or output"), arity_of(given[i].arity)};
    if (!def.types.contains(formal.type)) {
      throw InvalidModelError(str("'", formal.name, "' has type variable '", formal.type,
                                  "', for which no types are given"));
    }
    if (formal.arity == Arity::variadic && i + 1 != count) {
      throw InvalidModelError(str("only the last may be variadic, '", formal.name, "' is not"));
    }
    result.push_back(std::move(formal));
  }
  return result;
}

FormalAttribute attribute_of(const OrtrainFormalAttribute& given) {
  const OrtrainAttribute& value = given.value;
  const auto list = [&](const auto* values) {
    const auto numbers = required_list(values, value.count, "numbers of a default");
    return std::vector(numbers.begin(), numbers.end());
  };
  std::string name = text(value.name, "name of an attribute");
  if (given.has_default == 0) {
    constexpr AttributeKind kKinds[] = {AttributeKind::int_, AttributeKind::float_,
                                        AttributeKind::string_, AttributeKind::ints,
                                        AttributeKind::floats};
    if (value.kind < 0 || static_cast<size_t>(value.kind) >= std::size(kKinds)) {
      throw InvalidModelError(str("attribute '", name, "' has kind ", value.kind));
    }
    return {std::move(name), kKinds[value.kind], given.required != 0};
  }
  switch (value.kind) {
    case kOrtrainInt:
      return {std::move(name), value.int_value};
    case kOrtrainFloat:
      return {std::move(name), value.float_value};
    case kOrtrainString:
      return {std::move(name), required_text(value.string_value, "text of a default")};
    case kOrtrainInts:
      return {std::move(name), list(value.ints)};
    case kOrtrainFloats:
      return {std::move(name), list(value.floats)};
    default:
      throw InvalidModelError(str("attribute '", name, "' has kind ", value.kind));
  }
}

DTypeSet types_of(const OrtrainTypeVariable& given) {
  DTypeSet result;
  for (const int32_t code : required_list(given.types, given.count, "element types")) {
    const std::optional<DType> type = dtype_from_onnx(code);
    if (!type) {
      throw InvalidModelError(
          str("type variable '", given.name, "': the engine has no element type ", code));
    }
    result = result | DTypeSet{*type};
  }
  if (result.empty()) throw InvalidModelError(str("type variable '", given.name, "' has no types"));
  return result;
}

Kernel kernel_of(const OrtrainOperator& op, const std::string& domain) {
  Kernel kernel;
  kernel.name = domain;
  required_list(op.inplace, op.num_inplace, "pairs");
  for (size_t i = 0; i < op.num_inplace; ++i) {
    const int32_t input = op.inplace[2 * i];
    const int32_t output = op.inplace[2 * i + 1];
    if (input < 0 || output < 0 || static_cast<size_t>(input) >= op.num_inputs ||
        static_cast<size_t>(output) >= op.num_outputs) {
      throw InvalidModelError(str("in place (", input, ", ", output, ") names what is not there"));
    }
    kernel.inplace.emplace_back(input, output);
  }
  kernel.make = [prepare = op.prepare, run = op.run, release = op.release,
                 self = op.self](NodeSpec& spec) -> KernelFn {
    OrtrainContext context{.attributes = spec.attrs(), .spec = &spec};
    void* made = nullptr;
    forget_last_error();
    if (prepare(self, &context, &made) != 0) throw_last_error();
    const std::shared_ptr<void> state(made, release);
    return [run, state](const KernelArgs& args) {
      forget_last_error();
      if (run(state.get(), args.in, args.out, args.workspace) != 0) throw_last_error();
    };
  };
  return kernel;
}

OrtrainRegistrar::Entry complete_entry(const OrtrainOperator& op) {
  OrtrainRegistrar::Entry entry;
  OpDef& def = entry.def;
  def.domain = op.domain;
  def.name = op.name;
  def.since = op.since;
  def.summary = op.summary == nullptr ? "" : op.summary;
  for (const OrtrainTypeVariable& type : required_list(op.types, op.num_types, "type variables")) {
    def.types[text(type.name, "name of a type variable")] = types_of(type);
  }
  def.inputs = formals_of(op.inputs, op.num_inputs, def);
  def.outputs = formals_of(op.outputs, op.num_outputs, def);
  if (def.outputs.empty()) throw InvalidModelError("has no outputs");
  for (const OrtrainFormalAttribute& attribute :
       required_list(op.attributes, op.num_attributes, "attributes")) {
    def.attrs.push_back(attribute_of(attribute));
  }
  def.draws_random_numbers = op.draws_random_numbers != 0;
  def.differentiable = op.differentiable != 0;

  if (op.infer == nullptr) throw InvalidModelError("has no inference function");
  if (op.prepare == nullptr || op.run == nullptr || op.release == nullptr) {
    throw InvalidModelError("has no kernel");
  }
  def.infer = [infer = op.infer, self = op.self](InferContext& node) {
    OrtrainContext context{.attributes = node.attrs(), .infer = &node};
    forget_last_error();
    if (infer(self, &context) != 0) throw_last_error();
    for (size_t i = 0; i < node.num_outputs(); ++i) {
      if (node.wants_output(i) && node.outputs()[i].dtype == DType::undefined) {
        throw InvalidModelError(str("its inference function leaves output ", i, " out"));
      }
    }
  };
  if (op.gradient != nullptr) {
    if (!def.differentiable) throw InvalidModelError("has a gradient, and none by definition");
    def.gradient = [gradient = op.gradient, self = op.self](GradContext& node) {
      OrtrainContext context{.attributes = node.attrs(), .gradient = &node};
      forget_last_error();
      if (gradient(self, &context) != 0) throw_last_error();
    };
  }
  entry.kernels = {kernel_of(op, def.domain)};
  return entry;
}

}  // namespace

OrtrainRegistrar::Entry entry_of(const OrtrainOperator& op) {
  if (op.size != sizeof(OrtrainOperator)) {
    throw InvalidModelError("an operator was defined for another version of ortrain");
  }
  const std::string domain = text(op.domain, "domain");
  const std::string full = str(domain, "::", text(op.name, "name"));
  if (domain == kOrtrainDomain || domain.starts_with("ai.onnx")) {
    throw InvalidModelError(str(full, ": this domain is not for extensions"));
  }
  return with_context(str("operator ", full, ": "), [&] { return complete_entry(op); });
}

}  // namespace ortrain::extension
