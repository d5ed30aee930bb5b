// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/expr_source.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <set>

#include "ortrain/base/error.h"
#include "ortrain/base/philox.h"

namespace ortrain::gpu {
namespace {

using Kind = ExprKernelShape::Kind;

std::string storage_name(DType type) {
  switch (type) {
    case DType::f32:
      return "float";
    case DType::f64:
      return "double";
    case DType::f16:
      return "Half";
    case DType::bf16:
      return "BFloat";
    case DType::i8:
      return "signed char";
    case DType::i16:
      return "short";
    case DType::i32:
      return "int";
    case DType::i64:
      return "long long";
    case DType::u8:
      return "unsigned char";
    case DType::u16:
      return "unsigned short";
    case DType::u32:
      return "unsigned int";
    case DType::u64:
      return "unsigned long long";
    case DType::boolean:
      return "Boolean";
    default:
      throw InternalError("no storage type");
  }
}

std::string register_name(DType type) {
  return type == DType::boolean ? "bool" : storage_name(expr_register_type(type));
}

std::string format(const char* pattern, auto... values) {
  char buffer[96];
  std::snprintf(buffer, sizeof(buffer), pattern, values...);
  return buffer;
}

// The exact value, whatever it is.
std::string float_literal(DType type, double number) {
  if (type == DType::f64) {
    if (std::isfinite(number)) return format("%a", number);
    uint64_t bits = 0;
    std::memcpy(&bits, &number, sizeof(bits));
    return format("double_of_bits(0x%llxull)", static_cast<unsigned long long>(bits));
  }
  const float narrow = static_cast<float>(number);
  if (std::isfinite(narrow)) return format("%af", static_cast<double>(narrow));
  uint32_t bits = 0;
  std::memcpy(&bits, &narrow, sizeof(bits));
  return format("float_of_bits(0x%xu)", bits);
}

std::string integer_literal(DType type, int64_t value) {
  return format("static_cast<%s>(static_cast<long long>(0x%llxull))", register_name(type).c_str(),
                static_cast<unsigned long long>(value));
}

std::string register_of(ExprReg reg) { return str("r", reg); }

bool takes_faults(ExprOp op) {
  return op == ExprOp::div || op == ExprOp::fmod || op == ExprOp::mod || op == ExprOp::floor_div ||
         op == ExprOp::pow;
}

class Writer {
 public:
  explicit Writer(const ExprKernelPlan& plan)
      : plan_(plan),
        program_(plan.program()),
        schedule_(plan.schedule()),
        shape_(plan.shape()),
        elements_(shape_.kind == Kind::elements) {}

  ExprSource write() {
    write_addresses();
    write_once();
    if (elements_) {
      write_elements();
    } else {
      write_rows();
    }
    // The name follows from the text, so that equal kernels have equal names: FNV-1a.
    uint64_t hash = 0xcbf29ce484222325u;
    for (const char c : body_) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
    const std::string entry = format("ortrain_expr_%016llx", static_cast<unsigned long long>(hash));
    const std::string arguments =
        str("ortrain::gpu::scalar::Arguments<", plan_.argument_words(), ">");
    return {entry, str("\nextern \"C\" __global__ void __launch_bounds__(", shape_.most_threads,
                       ") ", entry, "(const ", arguments, " a) {\n", body_,
                       "}\n#if defined(ORTRAIN_EXPR_HOST)\nextern \"C\" void ", entry,
                       "_run(const void* a) { ", entry, "(*static_cast<const ", arguments,
                       "*>(a)); }\n#endif\n")};
  }

 private:
  const ExprInstruction& code(ExprReg reg) const { return program_.code[static_cast<size_t>(reg)]; }
  template <typename... Parts>
  void line(const Parts&... parts) {
    body_ += std::string(static_cast<size_t>(2 * depth_), ' ') + str(parts...) + "\n";
  }
  template <typename... Parts>
  void open(const Parts&... parts) {
    line(parts..., " {");
    ++depth_;
  }
  void close(const char* end = "}") {
    --depth_;
    line(end);
  }
  static std::string word(size_t place) { return str("a.words[", place, "]"); }
  std::string word_as_index(size_t place) const {
    return str("static_cast<Index>(", word(place), ")");
  }
  bool is_full(ExprReg reg) const { return schedule_.is(reg, ExprExtent::full); }
  // Of the axes that inputs walk along: all of them, or all but the columns.
  size_t outer_axes() const { return plan_.axes().extents.size() - 1; }

  // --- before any loop

  void write_addresses() {
    depth_ = 1;
    line("using namespace ortrain::gpu::scalar;");
    line("using Index = ", shape_.wide ? "unsigned long long" : "unsigned int", ";");
    line("[[maybe_unused]] const DivisionFaults faults{reinterpret_cast<int*>(", word(0),
         "), static_cast<U32>(", word(1), ")};");
    line("[[maybe_unused]] const Index count = ", word_as_index(2), ";");
    line("[[maybe_unused]] const Index columns = ", word_as_index(3), ";");
    for (size_t axis = 1; axis < plan_.axes().extents.size(); ++axis) {
      const std::string low = word(plan_.axis_word(axis));
      const std::string high = word(plan_.axis_word(axis) + 1);
      if (shape_.wide) {
        line("[[maybe_unused]] const WideDivider d", axis, "{", low, "};");
      } else {
        line("[[maybe_unused]] const Divider d", axis, "{static_cast<U32>(", low,
             "), static_cast<U32>(", low, " >> 32), static_cast<U32>(", high, ")};");
      }
    }
    for (size_t i = 0; i < program_.num_inputs(); ++i) {
      if (!schedule_.needed[i]) continue;
      const std::string type = storage_name(program_.code[i].dtype);
      line("[[maybe_unused]] const ", type, "* const in", i, " = reinterpret_cast<const ", type,
           "*>(", word(plan_.input_word(i)), ");");
    }
    for (size_t k = 0; k < program_.outputs.size(); ++k) {
      const std::string type = storage_name(program_.outputs[k].dtype);
      line(type, "* const out", k, " = reinterpret_cast<", type, "*>(", word(plan_.output_word(k)),
           ");");
    }
  }

  // What is one value for the whole kernel.
  void write_once() {
    for (size_t i = 0; i < program_.code.size(); ++i) {
      const auto reg = static_cast<ExprReg>(i);
      if (!schedule_.needed[i] || !schedule_.is(reg, ExprExtent::scalar)) continue;
      define(reg, code(reg).op == ExprOp::input ? str("widen(in", i, "[0])") : value_of(reg));
    }
  }

  void define(ExprReg reg, const std::string& value) {
    line("[[maybe_unused]] const ", register_name(code(reg).dtype), " ", register_of(reg), " = ",
         value, ";");
  }

  // --- one operation

  // The stream itself is an argument, the ratio is not: that would cost registers.
  std::string words_of(ExprReg draw) const {
    return str("words_", seed_of(code(draw)), "_", plan_.stream_index(draw));
  }

  std::string value_of(ExprReg reg) const {
    const ExprInstruction& instruction = code(reg);
    const ExprOpInfo& info = expr_op_info(instruction.op);
    switch (instruction.op) {
      case ExprOp::constant:
        if (const std::optional<size_t> place = plan_.seed_word(reg)) {
          return str("static_cast<long long>(", word(*place), ")");
        }
        return is_float(instruction.dtype)
                   ? float_literal(instruction.dtype, instruction.number)
                   : integer_literal(instruction.dtype, instruction.integer);
      case ExprOp::cast:
        return str("op_cast<", register_name(instruction.dtype), ">(",
                   register_of(instruction.operands[0]), ")");
      case ExprOp::dropout:
        return str("op_dropout(", register_of(instruction.operands[0]), ", ", words_of(reg),
                   ".values[v], ", dropout_threshold(instruction.number), "u, ",
                   float_literal(instruction.dtype, dropout_scale(instruction.number)), ")");
      case ExprOp::dropout_mask:
        if (!(instruction.number < 1.0)) return "false";
        return str(words_of(reg), ".values[v] >= ", dropout_threshold(instruction.number), "u");
      default:
        break;
    }
    std::string call = str("op_", info.name, "(");
    for (int k = 0; k < info.operands; ++k) {
      call += str(k > 0 ? ", " : "", register_of(instruction.operands[static_cast<size_t>(k)]));
    }
    return call + (takes_faults(instruction.op) ? ", faults)" : ")");
  }

  // --- where inputs lie

  // Splits `position` (a vector's first element, or a row) along the axes up to `last`.
  void write_coordinates(const std::string& position, size_t last) {
    std::string rest = position;
    for (size_t axis = last; axis > 0; --axis) {
      line("const Index q", axis, " = d", axis, ".quotient(", rest, ");");
      line("[[maybe_unused]] const Index i", axis, " = ", rest, " - q", axis,
           " * static_cast<Index>(d", axis, ".divisor);");
      rest = str("q", axis);
    }
    line("[[maybe_unused]] const Index i0 = ", rest, ";");
  }

  // The offset of input i along the axes before `end`.
  std::string offset_of(size_t i, size_t end) const {
    std::string sum;
    for (size_t axis = 0; axis < end; ++axis) {
      if (plan_.axes().strides[i][axis] == 0) continue;
      sum += str(sum.empty() ? "" : " + ", "i", axis, " * ",
                 word_as_index(plan_.stride_word(i, axis)));
    }
    return sum.empty() ? "static_cast<Index>(0)" : sum;
  }

  // --- elements

  bool walks() const {
    for (size_t i = 0; i < program_.num_inputs(); ++i) {
      const auto reg = static_cast<ExprReg>(i);
      if (schedule_.needed[i] && !schedule_.is(reg, ExprExtent::scalar) &&
          !(is_full(reg) && plan_.is_dense(i))) {
        return true;
      }
    }
    return false;
  }

  void write_elements() {
    open("const auto body = [&](auto width, const Index e)");
    line("constexpr int V = decltype(width)::value;");
    const size_t columns = outer_axes();
    if (walks()) write_coordinates("e", columns);
    for (size_t i = 0; i < program_.code.size(); ++i) {
      const auto reg = static_cast<ExprReg>(i);
      if (!schedule_.needed[i] || !schedule_.is(reg, ExprExtent::per_row)) continue;
      if (code(reg).op == ExprOp::input) {
        define(reg, str("widen(in", i, "[", offset_of(i, columns), "])"));
      } else {
        define(reg, value_of(reg));
      }
    }
    const std::vector<ExprReg>& list = schedule_.elements[0];
    write_loads(list, [&](size_t i) {
      if (plan_.is_dense(i)) return std::string("e");
      return str(offset_of(i, columns), " + i", columns);
    });
    write_random_words(list, "e");
    write_results("e", [&] { write_values(list, ""); });
    close("};");
    line("const Index stride = static_cast<Index>(gridDim.x) * blockDim.x;");
    line("const Index first = static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x;");
    line("for (Index t = first; t < count / ", shape_.vector, "; t += stride) body(Width<",
         shape_.vector, ">(), t * ", shape_.vector, ");");
    if (shape_.vector > 1 && columns == 0) {
      line("const Index last = count / ", shape_.vector, " * ", shape_.vector, " + first;");
      line("if (last < count) body(Width<1>(), last);");
    }
  }

  template <typename Offset>
  void write_loads(const std::vector<ExprReg>& list, const Offset& offset) {
    for (const ExprReg reg : list) {
      if (code(reg).op != ExprOp::input) continue;
      line("const auto x", reg, " = load<V>(in", reg, " + (", offset(static_cast<size_t>(reg)),
           "));");
    }
  }

  void write_random_words(const std::vector<ExprReg>& list, const std::string& element) {
    std::set<std::string> written;
    for (const ExprReg reg : list) {
      if (!draws(code(reg).op) || !written.insert(words_of(reg)).second) continue;
      line("const RandomWords<V> ", words_of(reg), "(static_cast<U64>(",
           register_of(seed_of(code(reg))), "), ", word(plan_.stream_word(reg)), ", ", element,
           ");");
    }
  }

  // Inside the loop over the elements of a vector. `kept`: the index of the vector among those of a
  // thread, where values stay from pass to pass; else empty.
  void write_values(const std::vector<ExprReg>& list, const std::string& kept) {
    for (const ExprReg reg : list) {
      if (code(reg).op == ExprOp::input) {
        define(reg, str("widen(x", reg, ".values[v])"));
      } else {
        define(reg, value_of(reg));
      }
      if (!kept.empty() && is_kept(reg)) {
        line("kept", reg, "[", kept, "][v] = ", register_of(reg), ";");
      }
    }
  }

  bool is_kept(ExprReg reg) const {
    return std::ranges::find(schedule_.kept, reg) != schedule_.kept.end();
  }

  // The loop over a vector, with the outputs of one value per element.
  template <typename Body>
  void write_results(const std::string& element, const Body& body) {
    const std::vector<ExprExtent> declared = program_.extents();
    std::vector<size_t> stored;
    for (size_t k = 0; k < program_.outputs.size(); ++k) {
      const auto reg = static_cast<size_t>(program_.outputs[k].reg);
      if (elements_ || declared[reg] == ExprExtent::full) stored.push_back(k);
    }
    for (const size_t k : stored) {
      line("Vector<", storage_name(program_.outputs[k].dtype), ", V> y", k, ";");
    }
    write_vector_loop([&] {
      body();
      for (const size_t k : stored) {
        line("y", k, ".values[v] = narrow<", storage_name(program_.outputs[k].dtype), ">(",
             register_of(program_.outputs[k].reg), ");");
      }
    });
    for (const size_t k : stored) line("store(out", k, " + (", element, "), y", k, ");");
  }

  template <typename Body>
  void write_vector_loop(const Body& body) {
    line("ORTRAIN_EXPR_UNROLL");
    open("for (int v = 0; v < V; ++v)");
    body();
    close();
  }

  // --- rows

  void write_rows() {
    const bool warp = shape_.kind == Kind::warp_rows;
    line("constexpr int V = ", shape_.vector, ";");
    if (warp) {
      line(
          "const Index row_step = static_cast<Index>(gridDim.x) * (blockDim.x / "
          "ORTRAIN_EXPR_WARP);");
      line(
          "const Index first_row = static_cast<Index>(blockIdx.x) * (blockDim.x / "
          "ORTRAIN_EXPR_WARP) + threadIdx.x / ORTRAIN_EXPR_WARP;");
      line("const Index thread = threadIdx.x % ORTRAIN_EXPR_WARP;");
      line("[[maybe_unused]] const Index threads = ORTRAIN_EXPR_WARP;");
    } else {
      line("const Index row_step = gridDim.x;");
      line("const Index first_row = blockIdx.x;");
      line("const Index thread = threadIdx.x;");
      line("[[maybe_unused]] const Index threads = blockDim.x;");
    }
    open("for (Index row = first_row; row < count; row += row_step)");
    const size_t outer = outer_axes();
    if (outer > 0) write_coordinates("row", outer - 1);
    for (size_t i = 0; i < program_.num_inputs(); ++i) {
      const auto reg = static_cast<ExprReg>(i);
      if (!schedule_.needed[i] || schedule_.is(reg, ExprExtent::scalar)) continue;
      const std::string dense = is_full(reg) ? "row * columns" : "row";
      line("[[maybe_unused]] const Index row_of", i, " = ",
           plan_.is_dense(i) ? dense : offset_of(i, outer), ";");
    }
    if (shape_.per_thread > 0) {
      for (const ExprReg reg : schedule_.kept) {
        line(register_name(code(reg).dtype), " kept", reg, "[", shape_.per_thread, "][V];");
      }
    }
    for (int pass = 0; pass < schedule_.passes; ++pass) write_pass(pass);
    close();
  }

  void write_pass(int pass) {
    for (size_t i = 0; i < program_.code.size(); ++i) {
      const auto reg = static_cast<ExprReg>(i);
      const ExprOp op = code(reg).op;
      if (!schedule_.needed[i] || !schedule_.is(reg, ExprExtent::per_row) || is_reduction(op) ||
          schedule_.pass_of[i] != pass) {
        continue;
      }
      define(reg, op == ExprOp::input ? str("widen(in", i, "[row_of", i, "])") : value_of(reg));
    }
    const std::vector<ExprReg>& reductions = schedule_.reductions[static_cast<size_t>(pass)];
    for (const ExprReg reg : reductions) {
      line(register_name(code(reg).dtype), " part", reg, " = ", neutral(reg), ";");
    }
    const bool last = pass == schedule_.passes - 1;
    const bool stays = shape_.per_thread > 0;
    std::vector<ExprReg> computed;
    std::vector<ExprReg> remembered;
    for (const ExprReg reg : schedule_.elements[static_cast<size_t>(pass)]) {
      const int own = schedule_.pass_of[static_cast<size_t>(reg)];
      if (!stays || own == pass) {
        computed.push_back(reg);
      } else if (is_kept(reg)) {
        remembered.push_back(reg);
      }
    }
    if (stays) {
      line("ORTRAIN_EXPR_UNROLL");
      open("for (int j = 0; j < ", shape_.per_thread, "; ++j)");
      line("const Index c = (static_cast<Index>(j) * threads + thread) * V;");
      line("if (c >= columns) continue;");
    } else {
      open("for (Index c = thread * V; c < columns; c += threads * V)");
    }
    write_loads(computed, [](size_t i) { return str("row_of", i, " + c"); });
    write_random_words(computed, "row * columns + c");
    const auto values = [&] {
      for (const ExprReg reg : remembered) define(reg, str("kept", reg, "[j][v]"));
      write_values(computed, stays ? "j" : "");
      for (const ExprReg reg : reductions) {
        line("part", reg, " = ", combiner(reg), "()(part", reg, ", ",
             register_of(code(reg).operands[0]), ");");
      }
    };
    if (last) {
      write_results("row * columns + c", values);
    } else {
      write_vector_loop(values);
    }
    close();
    for (const ExprReg reg : reductions) write_reduction(reg);
    if (last) write_row_results();
  }

  static std::string combiner_of(ExprOp op) {
    return op == ExprOp::row_max ? "MaxOf" : op == ExprOp::row_min ? "MinOf" : "SumOf";
  }
  std::string combiner(ExprReg reg) const { return combiner_of(code(reg).op); }

  // What changes no result of the reduction.
  std::string neutral(ExprReg reg) const {
    const DType type = code(reg).dtype;
    const ExprOp op = code(reg).op;
    if (op != ExprOp::row_max && op != ExprOp::row_min) {
      return str("static_cast<", register_name(type), ">(0)");
    }
    const bool lowest = op == ExprOp::row_max;
    if (is_float(type)) return float_literal(type, lowest ? -INFINITY : INFINITY);
    const int bits = static_cast<int>(8 * size_of(type));
    uint64_t value = 0;
    if (is_signed_integer(type)) {
      value = lowest ? ~uint64_t{0} << (bits - 1) : (uint64_t{1} << (bits - 1)) - 1;
    } else if (!lowest) {
      value = ~uint64_t{0} >> (64 - bits);
    }
    return integer_literal(type, static_cast<int64_t>(value));
  }

  void write_reduction(ExprReg reg) {
    const bool warp = shape_.kind == Kind::warp_rows;
    const std::string whole =
        warp ? str("reduce_warp(part", reg, ", ", combiner(reg), "())")
             : str("reduce_block(part", reg, ", ", neutral(reg), ", ", combiner(reg), "())");
    if (code(reg).op == ExprOp::row_mean) {
      define(reg, str("op_div(", whole, ", static_cast<", register_name(code(reg).dtype),
                      ">(columns), faults)"));
    } else {
      define(reg, whole);
    }
  }

  void write_row_results() {
    const std::vector<ExprExtent> declared = program_.extents();
    for (size_t k = 0; k < program_.outputs.size(); ++k) {
      const ExprOutput& output = program_.outputs[k];
      if (declared[static_cast<size_t>(output.reg)] == ExprExtent::full) continue;
      line("if (thread == 0) out", k, "[row] = narrow<", storage_name(output.dtype), ">(",
           register_of(output.reg), ");");
    }
  }

  const ExprKernelPlan& plan_;
  const ExprProgram& program_;
  const ExprSchedule& schedule_;
  const ExprKernelShape& shape_;
  bool elements_;
  std::string body_;
  int depth_ = 0;
};

}  // namespace

ExprSource print_source(const ExprKernelPlan& plan) { return Writer(plan).write(); }

}  // namespace ortrain::gpu
