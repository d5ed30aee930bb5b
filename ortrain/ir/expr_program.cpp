// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/expr_program.h"

#include <algorithm>
#include <charconv>
#include <limits>

#include "ortrain/base/error.h"

namespace ortrain {
namespace {

// Bounds that keep hostile files from asking for absurd amounts of scratch memory.
constexpr size_t kMaxInstructions = ExprProgram::kMaxInstructions;
constexpr size_t kMaxOutputs = 256;

using enum ExprTyping;

constexpr ExprOpInfo kTable[] = {
    {ExprOp::input, "input", 0, special},
    {ExprOp::constant, "constant", 0, special},
    {ExprOp::neg, "neg", 1, number},
    {ExprOp::abs, "abs", 1, number},
    {ExprOp::sign, "sign", 1, number},
    {ExprOp::relu, "relu", 1, number},
    {ExprOp::exp, "exp", 1, real},
    {ExprOp::expm1, "expm1", 1, real},
    {ExprOp::log, "log", 1, real},
    {ExprOp::log1p, "log1p", 1, real},
    {ExprOp::sqrt, "sqrt", 1, real},
    {ExprOp::rsqrt, "rsqrt", 1, real},
    {ExprOp::reciprocal, "reciprocal", 1, real},
    {ExprOp::tanh, "tanh", 1, real},
    {ExprOp::sigmoid, "sigmoid", 1, real},
    {ExprOp::erf, "erf", 1, real},
    {ExprOp::sin, "sin", 1, real},
    {ExprOp::cos, "cos", 1, real},
    {ExprOp::tan, "tan", 1, real},
    {ExprOp::asin, "asin", 1, real},
    {ExprOp::acos, "acos", 1, real},
    {ExprOp::atan, "atan", 1, real},
    {ExprOp::sinh, "sinh", 1, real},
    {ExprOp::cosh, "cosh", 1, real},
    {ExprOp::floor, "floor", 1, real},
    {ExprOp::ceil, "ceil", 1, real},
    {ExprOp::round, "round", 1, real},
    {ExprOp::to_bf16, "to_bf16", 1, real},
    {ExprOp::to_f16, "to_f16", 1, real},
    {ExprOp::add, "add", 2, number},
    {ExprOp::sub, "sub", 2, number},
    {ExprOp::mul, "mul", 2, number},
    {ExprOp::div, "div", 2, number},
    {ExprOp::fmod, "fmod", 2, number},
    {ExprOp::mod, "mod", 2, number},
    {ExprOp::floor_div, "floor_div", 2, number},
    {ExprOp::pow, "pow", 2, number},
    {ExprOp::min, "min", 2, number},
    {ExprOp::max, "max", 2, number},
    {ExprOp::eq, "eq", 2, compare},
    {ExprOp::ne, "ne", 2, compare},
    {ExprOp::lt, "lt", 2, compare},
    {ExprOp::le, "le", 2, compare},
    {ExprOp::logical_and, "and", 2, logic},
    {ExprOp::logical_or, "or", 2, logic},
    {ExprOp::logical_xor, "xor", 2, logic},
    {ExprOp::logical_not, "not", 1, logic},
    {ExprOp::bit_and, "bit_and", 2, bits},
    {ExprOp::bit_or, "bit_or", 2, bits},
    {ExprOp::bit_xor, "bit_xor", 2, bits},
    {ExprOp::bit_not, "bit_not", 1, bits},
    {ExprOp::select, "select", 3, select},
    {ExprOp::cast, "cast", 1, special},
    {ExprOp::dropout, "dropout", 2, dropout},
    {ExprOp::dropout_mask, "dropout_mask", 1, mask},
    {ExprOp::row_sum, "row_sum", 1, reduction},
    {ExprOp::row_mean, "row_mean", 1, reduction},
    {ExprOp::row_max, "row_max", 1, reduction},
    {ExprOp::row_min, "row_min", 1, reduction},
};
static_assert(std::size(kTable) == kExprOpCount);
static_assert([] {
  for (int i = 0; i < kExprOpCount; ++i) {
    if (static_cast<int>(kTable[i].op) != i) return false;
  }
  return true;
}());

bool is_register_type(DType type) {
  return kAllTypes.contains(type) && type != DType::f16 && type != DType::bf16;
}

bool is_number(DType type) { return is_float(type) || is_integer(type); }

[[noreturn]] void fail(const std::string& message) {
  throw InvalidModelError("expression program: " + message);
}

// A sentence about what is wrong with the types, or an empty text.
std::string type_fault(const ExprProgram& program, const ExprInstruction& instruction) {
  const ExprOpInfo& info = expr_op_info(instruction.op);
  const DType type = instruction.dtype;
  std::array<DType, 3> t{};
  for (int i = 0; i < info.operands; ++i) {
    t[static_cast<size_t>(i)] = program.register_type(instruction.operands[static_cast<size_t>(i)]);
  }
  const bool same = (info.operands < 1 || t[0] == type) && (info.operands < 2 || t[1] == type);
  switch (info.typing) {
    case number:
      return same && is_number(type) ? "" : "takes operands of its own numeric type";
    case real:
      if (instruction.op == ExprOp::to_bf16 || instruction.op == ExprOp::to_f16) {
        return same && type == DType::f32 ? "" : "takes and gives float32";
      }
      return same && is_float(type) ? "" : "takes operands of its own float type";
    case compare:
      return t[0] == t[1] && type == DType::boolean ? "" : "compares operands of one type to bool";
    case logic:
      return same && type == DType::boolean ? "" : "takes and gives bool";
    case bits:
      return same && is_integer(type) ? "" : "takes operands of its own integer type";
    case select:
      return t[0] == DType::boolean && t[1] == type && t[2] == type
                 ? ""
                 : "takes bool and two operands of its own type";
    case dropout:
      return t[0] == type && is_float(type) && t[1] == DType::i64
                 ? ""
                 : "takes a float and an int64 seed";
    case mask:
      return t[0] == DType::i64 && type == DType::boolean ? "" : "takes an int64 seed, gives bool";
    case reduction:
      return same && is_number(type) ? "" : "takes an operand of its own numeric type";
    case special:
      return "";
  }
  return "";
}

void validate_instruction(const ExprProgram& program, size_t index,
                          const std::vector<ExprExtent>& extents) {
  const ExprInstruction& instruction = program.code[index];
  const ExprOpInfo& info = expr_op_info(instruction.op);
  const auto complain = [&](const std::string& what) {
    fail(str("%", index, " = ", info.name, " ", what));
  };
  const bool input = instruction.op == ExprOp::input;
  if (!(input ? kAllTypes.contains(instruction.dtype) : is_register_type(instruction.dtype))) {
    complain(str("has the type ", name_of(instruction.dtype), ", which no register can have"));
  }
  if (input && index > 0 && program.code[index - 1].op != ExprOp::input) {
    complain("stands behind other instructions");
  }
  if (instruction.per_row && !input) complain("cannot be per_row");
  for (int i = 0; i < info.operands; ++i) {
    const ExprReg reg = instruction.operands[static_cast<size_t>(i)];
    if (reg < 0 || static_cast<size_t>(reg) >= index) {
      complain(str("reads %", reg, ", which is not defined before it"));
    }
  }
  const std::string fault = type_fault(program, instruction);
  if (!fault.empty()) complain(fault);
  const auto extent = [&](size_t operand) {
    return extents[static_cast<size_t>(instruction.operands[operand])];
  };
  if (is_reduction(instruction.op) && extent(0) != ExprExtent::full) {
    complain("takes an operand with one value per element");
  }
  if (instruction.op == ExprOp::dropout || instruction.op == ExprOp::dropout_mask) {
    const bool is_mask = instruction.op == ExprOp::dropout_mask;
    const ExprReg seed = instruction.operands[is_mask ? 0 : 1];
    const ExprOp source = program.code[static_cast<size_t>(seed)].op;
    if (source != ExprOp::input && source != ExprOp::constant) {
      complain("needs a seed that is an input or a constant");
    }
    if (!is_mask && extent(0) != ExprExtent::full) {
      complain("takes an operand with one value per element");
    }
    if (!(instruction.number >= 0.0 && instruction.number <= 1.0)) {
      complain(str("has the ratio ", instruction.number, ", outside of [0, 1]"));
    }
  }
}

ExprExtent extent_of(const ExprInstruction& instruction, const std::vector<ExprExtent>& known) {
  const ExprOpInfo& info = expr_op_info(instruction.op);
  switch (instruction.op) {
    case ExprOp::input:
      return instruction.per_row ? ExprExtent::per_row : ExprExtent::full;
    case ExprOp::constant:
      return ExprExtent::scalar;
    case ExprOp::dropout:
    case ExprOp::dropout_mask:
      return ExprExtent::full;
    default:
      break;
  }
  if (info.typing == reduction) return ExprExtent::per_row;
  ExprExtent result = ExprExtent::scalar;
  for (int i = 0; i < info.operands; ++i) {
    const ExprReg reg = instruction.operands[static_cast<size_t>(i)];
    if (reg >= 0 && static_cast<size_t>(reg) < known.size()) {
      result = std::max(result, known[static_cast<size_t>(reg)]);
    }
  }
  return result;
}

}  // namespace

const ExprOpInfo& expr_op_info(ExprOp op) { return kTable[static_cast<size_t>(op)]; }

std::optional<ExprOp> expr_op_from_name(std::string_view name) {
  for (const ExprOpInfo& info : kTable) {
    if (info.name == name) return info.op;
  }
  return std::nullopt;
}

bool is_reduction(ExprOp op) { return expr_op_info(op).typing == reduction; }

DType expr_register_type(DType storage) {
  return storage == DType::f16 || storage == DType::bf16 ? DType::f32 : storage;
}

size_t ExprProgram::num_inputs() const {
  size_t count = 0;
  while (count < code.size() && code[count].op == ExprOp::input) ++count;
  return count;
}

DType ExprProgram::register_type(ExprReg reg) const {
  return expr_register_type(code.at(static_cast<size_t>(reg)).dtype);
}

std::vector<ExprExtent> ExprProgram::extents() const {
  std::vector<ExprExtent> result;
  result.reserve(code.size());
  for (const ExprInstruction& instruction : code) result.push_back(extent_of(instruction, result));
  return result;
}

std::optional<std::string> ExprProgram::why_no_executor() const {
  for (const ExprInstruction& instruction : code) {
    if (instruction.op == ExprOp::row_mean && !is_float(instruction.dtype)) {
      return str("the mean of a row of ", name_of(instruction.dtype),
                 ", whose sum needs more bits");
    }
  }
  return std::nullopt;
}

bool ExprProgram::has_reductions() const {
  return std::any_of(code.begin(), code.end(),
                     [](const ExprInstruction& i) { return is_reduction(i.op); });
}

void ExprProgram::validate() const {
  if (code.size() > kMaxInstructions) fail(str("more than ", kMaxInstructions, " instructions"));
  if (outputs.empty()) fail("no output");
  if (outputs.size() > kMaxOutputs) fail(str("more than ", kMaxOutputs, " outputs"));
  const std::vector<ExprExtent> known = extents();
  for (size_t i = 0; i < code.size(); ++i) validate_instruction(*this, i, known);
  for (const ExprOutput& output : outputs) {
    if (output.reg < 0 || static_cast<size_t>(output.reg) >= code.size()) {
      fail(str("output %", output.reg, " is not defined"));
    }
    if (expr_register_type(output.dtype) != register_type(output.reg)) {
      fail(str("output %", output.reg, " holds ", name_of(register_type(output.reg)),
               ", which is not stored as ", name_of(output.dtype)));
    }
  }
}

// --- text

namespace {

constexpr std::string_view kHeader = "expr 1";

std::string number_text(double value) {
  char buffer[64];
  const auto result = std::to_chars(buffer, buffer + sizeof(buffer), value);
  return std::string(buffer, result.ptr);
}

std::vector<std::string_view> words_of(std::string_view line) {
  std::vector<std::string_view> words;
  size_t at = 0;
  while (at < line.size()) {
    const size_t end = std::min(line.find(' ', at), line.size());
    if (end > at) words.push_back(line.substr(at, end - at));
    at = end + 1;
  }
  return words;
}

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  ExprProgram parse() {
    if (next_line() != kHeader) complain(str("starts not with '", kHeader, "'"));
    while (at_ < text_.size()) {
      const std::string_view line = next_line();
      words_ = words_of(line);
      word_ = 0;
      if (words_.empty()) continue;
      if (words_[0] == "output") {
        read_output();
      } else {
        read_instruction();
      }
      if (word_ != words_.size()) complain(str("unexpected '", words_[word_], "'"));
      if (program_.code.size() > kMaxInstructions) complain("too many instructions");
    }
    program_.validate();
    return std::move(program_);
  }

 private:
  [[noreturn]] void complain(const std::string& what) const {
    fail(str("line ", line_, ": ", what));
  }
  std::string_view next_line() {
    ++line_;
    const size_t end = std::min(text_.find('\n', at_), text_.size());
    const std::string_view line = text_.substr(at_, end - at_);
    at_ = end + 1;
    return line;
  }
  std::string_view next_word() {
    if (word_ >= words_.size()) complain("ends too early");
    return words_[word_++];
  }
  template <typename T>
  T next_value() {
    const std::string_view word = next_word();
    T value{};
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
    if (error != std::errc{} || end != word.data() + word.size()) {
      complain(str("'", word, "' is no number"));
    }
    return value;
  }
  ExprReg next_register() {
    const std::string_view word = next_word();
    ExprReg reg = kNoExprReg;
    const char* last = word.data() + word.size();
    if (word.size() < 2 || word[0] != '%') complain(str("'", word, "' is no register"));
    const auto [end, error] = std::from_chars(word.data() + 1, last, reg);
    if (error != std::errc{} || end != last || reg < 0) {
      complain(str("'", word, "' is no register"));
    }
    return reg;
  }
  DType next_type() {
    const std::string_view word = next_word();
    const std::optional<DType> type = dtype_from_name(word);
    if (!type) complain(str("'", word, "' is no element type"));
    return *type;
  }
  void expect(std::string_view wanted) {
    const std::string_view word = next_word();
    if (word != wanted) complain(str("'", word, "' where '", wanted, "' is expected"));
  }
  void read_output() {
    next_word();
    const ExprReg reg = next_register();
    program_.outputs.push_back({reg, next_type()});
  }
  void read_instruction() {
    if (!program_.outputs.empty()) complain("an instruction behind the outputs");
    const ExprReg reg = next_register();
    if (static_cast<size_t>(reg) != program_.code.size()) {
      complain(str("defines %", reg, " where %", program_.code.size(), " is expected"));
    }
    expect("=");
    const std::string_view name = next_word();
    const std::optional<ExprOp> op = expr_op_from_name(name);
    if (!op) complain(str("unknown operation '", name, "'"));
    ExprInstruction instruction{.op = *op, .dtype = next_type()};
    for (int i = 0; i < expr_op_info(*op).operands; ++i) {
      instruction.operands[static_cast<size_t>(i)] = next_register();
    }
    if (*op == ExprOp::input && word_ < words_.size()) {
      expect("per_row");
      instruction.per_row = true;
    } else if (*op == ExprOp::constant && is_float(instruction.dtype)) {
      instruction.number = next_value<double>();
    } else if (*op == ExprOp::constant) {
      instruction.integer = next_value<int64_t>();
    } else if (*op == ExprOp::dropout || *op == ExprOp::dropout_mask) {
      expect("ratio");
      instruction.number = next_value<double>();
      expect("stream");
      instruction.integer = next_value<int64_t>();
    }
    program_.code.push_back(instruction);
  }

  std::string_view text_;
  size_t at_ = 0;
  size_t line_ = 0;
  std::vector<std::string_view> words_;
  size_t word_ = 0;
  ExprProgram program_;
};

}  // namespace

std::string ExprProgram::text() const {
  std::string out = str(kHeader, "\n");
  for (size_t i = 0; i < code.size(); ++i) {
    const ExprInstruction& instruction = code[i];
    const ExprOpInfo& info = expr_op_info(instruction.op);
    out += str("%", i, " = ", info.name, " ", name_of(instruction.dtype));
    for (int k = 0; k < info.operands; ++k) {
      out += str(" %", instruction.operands[static_cast<size_t>(k)]);
    }
    if (instruction.per_row) out += " per_row";
    if (instruction.op == ExprOp::constant) {
      out += " " + (is_float(instruction.dtype) ? number_text(instruction.number)
                                                : std::to_string(instruction.integer));
    }
    if (instruction.op == ExprOp::dropout || instruction.op == ExprOp::dropout_mask) {
      out += str(" ratio ", number_text(instruction.number), " stream ", instruction.integer);
    }
    out += "\n";
  }
  for (const ExprOutput& output : outputs) {
    out += str("output %", output.reg, " ", name_of(output.dtype), "\n");
  }
  return out;
}

ExprProgram ExprProgram::parse(std::string_view text) { return Parser(text).parse(); }

}  // namespace ortrain
