// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ortrain/ir/attribute_reader.h"
#include "ortrain/ir/expr_program.h"

namespace ortrain {

// Writes an expression program. Equal instructions share a register. Registers handed out here are
// provisional: finish() moves the inputs to the front and drops what no output needs.
class ExprBuilder {
 public:
  // The next input of the program; `storage` is the element type of its tensor.
  ExprReg input(DType storage, bool per_row = false);
  ExprReg constant(DType type, double value);
  ExprReg int_constant(DType type, int64_t value);
  // The type of the result follows from the operands.
  ExprReg emit(ExprOp op, std::initializer_list<ExprReg> operands);
  ExprReg cast(ExprReg a, DType type);  // to a register type; `a` itself if it has it
  // What storing to `storage` and loading again makes of `a`, whatever its type.
  ExprReg convert(ExprReg a, DType storage);
  ExprReg dropout(ExprReg x, ExprReg seed, double ratio, int64_t stream);
  ExprReg dropout_mask(ExprReg seed, double ratio, int64_t stream);
  void output(ExprReg reg, DType storage);

  DType type(ExprReg reg) const;
  size_t size() const { return code_.size(); }
  // Reorders and prunes; inputs stay even if unused, since the node lists them.
  ExprProgram finish() const;

 private:
  ExprReg append(ExprInstruction instruction);

  std::vector<ExprInstruction> code_;
  std::vector<ExprOutput> outputs_;
};

// What OpDef::expression gets: the operands of one node as registers, its attributes, and
// shorthands for arithmetic. Constants take the type of the first input.
class ExprEmitter {
 public:
  struct Operand {
    ExprReg reg = kNoExprReg;
    DType storage = DType::undefined;     // undefined: absent
    std::optional<double> constant = {};  // contents of a scalar that is known already
  };
  ExprEmitter(ExprBuilder& builder, const OpDef& def, const Node& node,
              std::vector<Operand> operands, DType result)
      : builder_(&builder),
        def_(&def),
        node_(&node),
        operands_(std::move(operands)),
        result_(result) {}

  AttributeReader attrs() const { return AttributeReader(*def_, *node_); }
  size_t num_inputs() const { return operands_.size(); }
  bool has_input(size_t i) const {
    return i < operands_.size() && operands_[i].storage != DType::undefined;
  }
  ExprReg input(size_t i) const { return operands_.at(i).reg; }
  DType storage(size_t i) const { return operands_.at(i).storage; }
  std::optional<double> known(size_t i) const { return operands_.at(i).constant; }
  // Element type of the node's output.
  DType result() const { return result_; }
  ExprBuilder& builder() const { return *builder_; }
  DType type(ExprReg reg) const { return builder_->type(reg); }

  ExprReg emit(ExprOp op, std::initializer_list<ExprReg> operands) const {
    return builder_->emit(op, operands);
  }
  ExprReg number(double value) const;

  ExprReg unary(ExprOp op, ExprReg a) const { return emit(op, {a}); }
  ExprReg add(ExprReg a, ExprReg b) const { return emit(ExprOp::add, {a, b}); }
  ExprReg sub(ExprReg a, ExprReg b) const { return emit(ExprOp::sub, {a, b}); }
  ExprReg mul(ExprReg a, ExprReg b) const { return emit(ExprOp::mul, {a, b}); }
  ExprReg div(ExprReg a, ExprReg b) const { return emit(ExprOp::div, {a, b}); }
  ExprReg min(ExprReg a, ExprReg b) const { return emit(ExprOp::min, {a, b}); }
  ExprReg max(ExprReg a, ExprReg b) const { return emit(ExprOp::max, {a, b}); }
  ExprReg lt(ExprReg a, ExprReg b) const { return emit(ExprOp::lt, {a, b}); }
  ExprReg select(ExprReg condition, ExprReg a, ExprReg b) const {
    return emit(ExprOp::select, {condition, a, b});
  }

 private:
  ExprBuilder* builder_;
  const OpDef* def_;
  const Node* node_;
  std::vector<Operand> operands_;
  DType result_;
};

}  // namespace ortrain
