// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "ortrain/base/error.h"
#include "ortrain/ir/graph_assembler.h"
#include "ortrain/ir/roles.h"
#include "ortrain/ir/text.h"
#include "ortrain/ir/text_scanner.h"
#include "ortrain/ir/text_values.h"

namespace ortrain {
namespace {

class Parser {
 public:
  Parser(std::string_view text, const OpRegistry& registry)
      : scanner_(text), assembler_(registry) {}

  Graph parse() {
    if (!scanner_.accept_word("graph")) scanner_.fail("'graph' is expected here");
    if (scanner_.at_name()) assembler_.graph().name = scanner_.name();
    scanner_.expect("(");
    parse_list(")", [&] { parse_input(); });
    scanner_.expect("=>");
    scanner_.expect("(");
    parse_list(")", [&] { parse_output(); });
    scanner_.expect("{");
    while (!scanner_.accept("}")) parse_statement();
    if (!scanner_.at_end()) scanner_.fail("the graph ends before this");
    for (PendingOutput& pending : outputs_) {
      pending.output.value = value_at(pending.position, pending.value_name);
      assembler_.graph().add_output(std::move(pending.output));
    }
    return assembler_.finish();
  }

 private:
  struct PendingOutput {
    size_t position;
    std::string value_name;
    GraphOutput output;
  };

  template <typename ParseOne>
  void parse_list(std::string_view end, const ParseOne& parse_one) {
    if (scanner_.accept(end)) return;
    do {
      parse_one();
    } while (scanner_.accept(","));
    scanner_.expect(end);
  }

  ValueId value_at(size_t position, const std::string& name) {
    const ValueId value = assembler_.find(name);
    if (value == kNoValue) scanner_.fail_at(position, str("no value '", name, "' stands before"));
    return value;
  }

  // Puts the place in front of errors; only there it is worked out, by counting lines.
  template <typename Body>
  void at(size_t position, const Body& body) {
    try {
      body();
    } catch (const Error&) {
      rethrow_with_context(scanner_.place(position));
    }
  }

  size_t here() {
    scanner_.peek();
    return scanner_.position();
  }

  template <class Role, size_t kCount>
  Role parse_role(const std::array<std::pair<std::string_view, Role>, kCount>& roles) {
    for (const auto& [word, role] : roles) {
      if (scanner_.accept_word(word)) return role;
    }
    scanner_.fail("a role is expected here");
  }

  void parse_input() {
    const size_t begin = here();
    const DType dtype = parse_dtype(scanner_);
    Shape shape = parse_shape(scanner_);
    const std::string name = scanner_.name();
    GraphInput input;
    if (scanner_.accept("[")) {
      input.role = parse_role(kInputRoles);
      if (scanner_.at_name()) {
        input.target = scanner_.name();
      } else if (is_kept(input.role)) {
        input.target = name;
      }
      input.requires_grad = scanner_.accept_word("grad");
      scanner_.expect("]");
    }
    at(begin, [&] { assembler_.add_input(std::move(input), name, dtype, std::move(shape)); });
  }

  void parse_output() {
    PendingOutput pending;
    pending.position = here();
    pending.value_name = scanner_.name();
    pending.output.name = scanner_.accept_word("as") ? scanner_.name() : pending.value_name;
    if (scanner_.accept("[")) {
      pending.output.role = parse_role(kOutputRoles);
      if (scanner_.at_name()) pending.output.target = scanner_.name();
      scanner_.expect("]");
    }
    outputs_.push_back(std::move(pending));
  }

  void parse_statement() {
    if (accept_label("forward", Phase::forward) || accept_label("backward", Phase::backward))
      return;
    const size_t begin = here();
    if (scanner_.accept_word("const")) {
      const std::string name = scanner_.name();
      scanner_.expect("=");
      TensorData tensor = parse_tensor(scanner_);
      at(begin, [&] { assembler_.add_constant(std::move(tensor), name); });
      return;
    }
    parse_node();
  }

  bool accept_label(std::string_view word, Phase phase) {
    if (!scanner_.accept_word(word)) return false;
    scanner_.expect(":");
    phase_ = phase;
    return true;
  }

  void parse_node() {
    const size_t begin = here();
    NamedNode node;
    node.phase = phase_;
    if (scanner_.accept("(")) {
      scanner_.expect(")");
    } else {
      do {
        node.outputs.push_back(scanner_.accept_word("_") ? "" : scanner_.name());
      } while (scanner_.accept(","));
    }
    scanner_.expect("=");
    node.op = scanner_.name();
    if (scanner_.accept("::")) node.domain = std::exchange(node.op, scanner_.name());
    node.attributes = parse_attributes(scanner_, assembler_.registry().find(node.domain, node.op));
    scanner_.expect("(");
    parse_list(")", [&] { node.inputs.push_back(parse_operand()); });
    if (scanner_.accept("@")) node.name = scanner_.name();
    if (scanner_.accept("~")) node.checkpoint = parse_checkpoint();
    at(begin, [&] { assembler_.add_node(std::move(node)); });
  }

  int parse_checkpoint() {
    const size_t begin = here();
    const std::optional<int> number = checkpoint_number(scanner_.number());
    if (!number || phase_ == Phase::backward) {
      throw InvalidModelError(
          str(scanner_.place(begin), "'~' is followed by a number from 1, at forward nodes"));
    }
    return *number;
  }

  ValueId parse_operand() {
    if (scanner_.accept_word("_")) return kNoValue;
    if (at_tensor(scanner_)) return assembler_.add_unnamed_constant(parse_tensor(scanner_));
    const size_t begin = here();
    return value_at(begin, scanner_.name());
  }

  TextScanner scanner_;
  GraphAssembler assembler_;
  std::vector<PendingOutput> outputs_;
  Phase phase_ = Phase::forward;
};

}  // namespace

Graph parse_graph(std::string_view text) { return parse_graph(text, op_registry()); }

Graph parse_graph(std::string_view text, const OpRegistry& registry) {
  return Parser(text, registry).parse();
}

}  // namespace ortrain
