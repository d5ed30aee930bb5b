// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/expr_interpreter.h"

#include <algorithm>
#include <cmath>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/base/error.h"
#include "ortrain/base/philox.h"
#include "ortrain/ir/expr_scalar.h"

namespace ortrain {
namespace {

constexpr int64_t kPieceColumns = 256;

// Calls body(TypeTag<T>{}) for the C++ type of a register.
template <typename Body>
void dispatch_register(DType type, Body&& body) {
  switch (type) {
    case DType::f16:
    case DType::bf16:
      throw InternalError("no register is a 16-bit float");
    default:
      dispatch_all(type, [&](auto tag) {
        using T = typename decltype(tag)::type;
        if constexpr (std::is_same_v<T, ComputeType<T>>) body(tag);
      });
  }
}

template <typename T, typename F>
void map(const void* a, void* y, int64_t n, F f) {
  const T* x = static_cast<const T*>(a);
  T* out = static_cast<T*>(y);
  for (int64_t i = 0; i < n; ++i) out[i] = f(x[i]);
}

// Operand steps are 0 for registers with one value per row or one value.
template <typename T, typename R, typename F>
void zip(const void* a, int64_t step_a, const void* b, int64_t step_b, void* y, int64_t n, F f) {
  const T* x = static_cast<const T*>(a);
  const T* z = static_cast<const T*>(b);
  R* out = static_cast<R*>(y);
  for (int64_t i = 0; i < n; ++i) out[i] = f(x[i * step_a], z[i * step_b]);
}

template <typename T>
void run_number(ExprOp op, const void* a, void* y, int64_t n) {
  switch (op) {
    case ExprOp::neg:
      return map<T>(a, y, n, expr::neg<T>);
    case ExprOp::abs:
      return map<T>(a, y, n, expr::abs<T>);
    case ExprOp::sign:
      return map<T>(a, y, n, expr::sign<T>);
    case ExprOp::relu:
      return map<T>(a, y, n, expr::relu<T>);
    default:
      throw InternalError("no operation on one number");
  }
}

template <typename T>
void run_real(ExprOp op, const void* a, void* y, int64_t n) {
  switch (op) {
    case ExprOp::exp:
      return map<T>(a, y, n, [](T x) { return std::exp(x); });
    case ExprOp::expm1:
      return map<T>(a, y, n, [](T x) { return std::expm1(x); });
    case ExprOp::log:
      return map<T>(a, y, n, [](T x) { return std::log(x); });
    case ExprOp::log1p:
      return map<T>(a, y, n, [](T x) { return std::log1p(x); });
    case ExprOp::sqrt:
      return map<T>(a, y, n, [](T x) { return std::sqrt(x); });
    case ExprOp::rsqrt:
      return map<T>(a, y, n, expr::rsqrt<T>);
    case ExprOp::reciprocal:
      return map<T>(a, y, n, [](T x) { return T{1} / x; });
    case ExprOp::tanh:
      return map<T>(a, y, n, [](T x) { return std::tanh(x); });
    case ExprOp::sigmoid:
      return map<T>(a, y, n, expr::sigmoid<T>);
    case ExprOp::erf:
      return map<T>(a, y, n, [](T x) { return std::erf(x); });
    case ExprOp::sin:
      return map<T>(a, y, n, [](T x) { return std::sin(x); });
    case ExprOp::cos:
      return map<T>(a, y, n, [](T x) { return std::cos(x); });
    case ExprOp::tan:
      return map<T>(a, y, n, [](T x) { return std::tan(x); });
    case ExprOp::asin:
      return map<T>(a, y, n, [](T x) { return std::asin(x); });
    case ExprOp::acos:
      return map<T>(a, y, n, [](T x) { return std::acos(x); });
    case ExprOp::atan:
      return map<T>(a, y, n, [](T x) { return std::atan(x); });
    case ExprOp::sinh:
      return map<T>(a, y, n, [](T x) { return std::sinh(x); });
    case ExprOp::cosh:
      return map<T>(a, y, n, [](T x) { return std::cosh(x); });
    case ExprOp::floor:
      return map<T>(a, y, n, [](T x) { return std::floor(x); });
    case ExprOp::ceil:
      return map<T>(a, y, n, [](T x) { return std::ceil(x); });
    case ExprOp::round:
      return map<T>(a, y, n, [](T x) { return std::nearbyint(x); });
    case ExprOp::to_bf16:
      return map<T>(a, y, n, [](T x) { return T{float{BFloat16(static_cast<float>(x))}}; });
    case ExprOp::to_f16:
      return map<T>(a, y, n, [](T x) { return T{float{Float16(static_cast<float>(x))}}; });
    default:
      throw InternalError("no operation on one float");
  }
}

struct Operands {
  const void* pointer[3];
  int64_t step[3];
};

template <typename T>
void run_two_numbers(ExprOp op, const Operands& in, void* y, int64_t n) {
  const auto apply = [&](T (*f)(T, T)) {
    zip<T, T>(in.pointer[0], in.step[0], in.pointer[1], in.step[1], y, n, f);
  };
  switch (op) {
    case ExprOp::add:
      return apply(expr::add<T>);
    case ExprOp::sub:
      return apply(expr::sub<T>);
    case ExprOp::mul:
      return apply(expr::mul<T>);
    case ExprOp::div:
      return apply(expr::div<T>);
    case ExprOp::fmod:
      return apply(expr::fmod<T>);
    case ExprOp::mod:
      return apply(expr::mod<T>);
    case ExprOp::floor_div:
      return apply(expr::floor_div<T>);
    case ExprOp::pow:
      return apply(expr::pow<T>);
    case ExprOp::min:
      return apply(expr::min<T>);
    case ExprOp::max:
      return apply(expr::max<T>);
    default:
      throw InternalError("no operation on two numbers");
  }
}

template <typename T>
void run_compare(ExprOp op, const Operands& in, void* y, int64_t n) {
  const auto apply = [&](auto f) {
    zip<T, bool>(in.pointer[0], in.step[0], in.pointer[1], in.step[1], y, n, f);
  };
  switch (op) {
    case ExprOp::eq:
      return apply([](T a, T b) { return a == b; });
    case ExprOp::ne:
      return apply([](T a, T b) { return a != b; });
    case ExprOp::lt:
      return apply([](T a, T b) { return a < b; });
    case ExprOp::le:
      return apply([](T a, T b) { return a <= b; });
    default:
      throw InternalError("no comparison");
  }
}

void run_logic(ExprOp op, const Operands& in, void* y, int64_t n) {
  const auto apply = [&](auto f) {
    zip<bool, bool>(in.pointer[0], in.step[0], in.pointer[1], in.step[1], y, n, f);
  };
  switch (op) {
    case ExprOp::logical_and:
      return apply([](bool a, bool b) { return a && b; });
    case ExprOp::logical_or:
      return apply([](bool a, bool b) { return a || b; });
    case ExprOp::logical_xor:
      return apply([](bool a, bool b) { return a != b; });
    case ExprOp::logical_not:
      return map<bool>(in.pointer[0], y, n, [](bool a) { return !a; });
    default:
      throw InternalError("no logical operation");
  }
}

template <typename T>
void run_bits(ExprOp op, const Operands& in, void* y, int64_t n) {
  const auto apply = [&](auto f) {
    zip<T, T>(in.pointer[0], in.step[0], in.pointer[1], in.step[1], y, n, f);
  };
  switch (op) {
    case ExprOp::bit_and:
      return apply([](T a, T b) { return static_cast<T>(a & b); });
    case ExprOp::bit_or:
      return apply([](T a, T b) { return static_cast<T>(a | b); });
    case ExprOp::bit_xor:
      return apply([](T a, T b) { return static_cast<T>(a ^ b); });
    case ExprOp::bit_not:
      return map<T>(in.pointer[0], y, n, [](T a) { return static_cast<T>(~a); });
    default:
      throw InternalError("no operation on bits");
  }
}

template <typename T>
T reduce_row(ExprOp op, const T* x, int64_t n) {
  if (op == ExprOp::row_max || op == ExprOp::row_min) {
    if (n == 0) throw ShapeError("the maximum or minimum of an empty row does not exist");
    T result = x[0];
    for (int64_t i = 1; i < n; ++i) {
      result = op == ExprOp::row_max ? expr::max(result, x[i]) : expr::min(result, x[i]);
    }
    return result;
  }
  if constexpr (expr::kIsFloat<T>) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]);
    return static_cast<T>(op == ExprOp::row_mean ? sum / static_cast<double>(n) : sum);
  } else {
    T sum{0};
    for (int64_t i = 0; i < n; ++i) sum = expr::add(sum, x[i]);
    return sum;
  }
}

template <typename T>
void run_select(const Operands& in, void* y, int64_t n) {
  const bool* condition = static_cast<const bool*>(in.pointer[0]);
  const T* a = static_cast<const T*>(in.pointer[1]);
  const T* b = static_cast<const T*>(in.pointer[2]);
  T* out = static_cast<T*>(y);
  for (int64_t i = 0; i < n; ++i) {
    out[i] = condition[i * in.step[0]] ? a[i * in.step[1]] : b[i * in.step[2]];
  }
}

void run_cast(DType from, DType to, const void* a, void* y, int64_t n) {
  dispatch_register(from, [&](auto from_tag) {
    using From = typename decltype(from_tag)::type;
    const From* in = static_cast<const From*>(a);
    dispatch_register(to, [&](auto to_tag) {
      using To = typename decltype(to_tag)::type;
      To* out = static_cast<To*>(y);
      for (int64_t i = 0; i < n; ++i) out[i] = expr::convert<To>(in[i]);
    });
  });
}

void run_dropout(const ExprInstruction& instruction, const Operands& in, int64_t first, void* y,
                 int64_t n) {
  const uint64_t stream = static_cast<uint64_t>(instruction.integer);
  const uint32_t threshold = dropout_threshold(instruction.number);
  if (instruction.op == ExprOp::dropout_mask) {
    const uint64_t seed = static_cast<uint64_t>(*static_cast<const int64_t*>(in.pointer[0]));
    bool* out = static_cast<bool*>(y);
    for (int64_t i = 0; i < n; ++i) {
      out[i] = instruction.number < 1.0 &&
               philox_word(seed, stream, static_cast<uint64_t>(first + i)) >= threshold;
    }
    return;
  }
  const uint64_t seed = static_cast<uint64_t>(*static_cast<const int64_t*>(in.pointer[1]));
  dispatch_float(instruction.dtype, [&](auto tag) {
    using T = ComputeType<typename decltype(tag)::type>;
    const T scale = static_cast<T>(dropout_scale(instruction.number));
    const T* x = static_cast<const T*>(in.pointer[0]);
    T* out = static_cast<T*>(y);
    for (int64_t i = 0; i < n; ++i) {
      const bool kept = philox_word(seed, stream, static_cast<uint64_t>(first + i)) >= threshold;
      out[i] = x[i] * (kept ? scale : T{0});
    }
  });
}

void run_constant(const ExprInstruction& instruction, void* y) {
  dispatch_register(instruction.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    *static_cast<T*>(y) = is_float(instruction.dtype) ? static_cast<T>(instruction.number)
                                                      : static_cast<T>(instruction.integer);
  });
}

void run_instruction(const ExprProgram& program, const ExprInstruction& instruction,
                     const Operands& in, int64_t first, int64_t operand_length, void* y,
                     int64_t n) {
  const DType type = instruction.dtype;
  switch (expr_op_info(instruction.op).typing) {
    case ExprTyping::number:
      return dispatch_register(type, [&](auto tag) {
        using T = typename decltype(tag)::type;
        if constexpr (!std::is_same_v<T, bool>) {
          if (expr_op_info(instruction.op).operands == 1) {
            run_number<T>(instruction.op, in.pointer[0], y, n);
          } else {
            run_two_numbers<T>(instruction.op, in, y, n);
          }
        }
      });
    case ExprTyping::real:
      return type == DType::f32 ? run_real<float>(instruction.op, in.pointer[0], y, n)
                                : run_real<double>(instruction.op, in.pointer[0], y, n);
    case ExprTyping::compare:
      return dispatch_register(program.register_type(instruction.operands[0]), [&](auto tag) {
        run_compare<typename decltype(tag)::type>(instruction.op, in, y, n);
      });
    case ExprTyping::logic:
      return run_logic(instruction.op, in, y, n);
    case ExprTyping::bits:
      return dispatch_register(type, [&](auto tag) {
        using T = typename decltype(tag)::type;
        if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
          run_bits<T>(instruction.op, in, y, n);
        }
      });
    case ExprTyping::select:
      return dispatch_register(
          type, [&](auto tag) { run_select<typename decltype(tag)::type>(in, y, n); });
    case ExprTyping::dropout:
    case ExprTyping::mask:
      return run_dropout(instruction, in, first, y, n);
    case ExprTyping::reduction:
      return dispatch_register(type, [&](auto tag) {
        using T = typename decltype(tag)::type;
        if constexpr (!std::is_same_v<T, bool>) {
          *static_cast<T*>(y) =
              reduce_row<T>(instruction.op, static_cast<const T*>(in.pointer[0]), operand_length);
        }
      });
    case ExprTyping::special:
      if (instruction.op == ExprOp::constant) return run_constant(instruction, y);
      return run_cast(program.register_type(instruction.operands[0]), type, in.pointer[0], y, n);
  }
}

void load(DType storage, const void* tensor, int64_t offset, int64_t step, void* y, int64_t n) {
  dispatch_all(storage, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* in = static_cast<const T*>(tensor) + offset;
    ComputeType<T>* out = static_cast<ComputeType<T>*>(y);
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<ComputeType<T>>(in[i * step]);
  });
}

// Register step 0 spreads one value over the elements of the output.
void store(DType storage, const void* x, int64_t step, void* tensor, int64_t offset, int64_t n) {
  dispatch_all(storage, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const ComputeType<T>* in = static_cast<const ComputeType<T>*>(x);
    T* out = static_cast<T*>(tensor) + offset;
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<T>(in[i * step]);
  });
}

}  // namespace

Shape expr_shape(const ExprProgram& program, const std::vector<Shape>& inputs) {
  if (inputs.size() != program.num_inputs()) {
    throw InvalidModelError(str("the expression program has ", program.num_inputs(),
                                " inputs, the node ", inputs.size()));
  }
  Shape full;
  for (size_t i = 0; i < inputs.size(); ++i) {
    full = broadcast(full, inputs[i]);
    if (program.code[i].per_row && !inputs[i].empty() && !inputs[i].back().is(1)) {
      throw ShapeError(str("input ", i, " of shape ", shape_str(inputs[i]),
                           " holds one value per row, so its last extent must be 1"));
    }
  }
  for (const ExprInstruction& instruction : program.code) {
    const ExprTyping typing = expr_op_info(instruction.op).typing;
    if (typing != ExprTyping::dropout && typing != ExprTyping::mask) continue;
    const size_t seed =
        static_cast<size_t>(instruction.operands[typing == ExprTyping::mask ? 0 : 1]);
    if (seed >= inputs.size()) continue;  // a constant
    for (const Dim& extent : inputs[seed]) {
      if (!extent.is(1)) {
        throw ShapeError(str("input ", seed, " of shape ", shape_str(inputs[seed]),
                             " is a seed, so it must be one value"));
      }
    }
  }
  return full;
}

Shape expr_output_shape(const ExprProgram& program, const Shape& full, size_t index) {
  const ExprReg reg = program.outputs[index].reg;
  Shape shape = full;
  if (program.extents()[static_cast<size_t>(reg)] != ExprExtent::full && !shape.empty()) {
    shape.back() = Dim(1);
  }
  return shape;
}

// `columns` elements from `column` on of row `row`.
struct ExprInterpreter::Piece {
  int64_t row;
  int64_t column;
  int64_t columns;
};

ExprInterpreter::ExprInterpreter(ExprProgram program, std::vector<Dims> inputs)
    : program_(std::move(program)) {
  program_.validate();
  if (const auto why = program_.why_no_executor()) throw UnsupportedError(*why);
  extents_ = program_.extents();
  std::vector<Shape> shapes;
  for (const Dims& input : inputs) shapes.push_back(to_shape(input));
  dims_ = to_dims(expr_shape(program_, shapes));
  columns_ = dims_.empty() ? 1 : dims_.back();
  rows_ = dims_.empty() ? 1 : num_elements(Dims(dims_.begin(), dims_.end() - 1));
  bool whole_rows = program_.has_reductions();
  for (const ExprOutput& output : program_.outputs) {
    whole_rows = whole_rows || extents_[static_cast<size_t>(output.reg)] != ExprExtent::full;
  }
  piece_columns_ = whole_rows ? columns_ : std::min(columns_, kPieceColumns);
  for (const Dims& input : inputs) {
    const Dims own = strides_of(input);
    Dims strides(dims_.size(), 0);
    const size_t skipped = dims_.size() - input.size();
    for (size_t axis = 0; axis < input.size(); ++axis) {
      if (input[axis] != 1) strides[axis + skipped] = own[axis];
    }
    strides_.push_back(std::move(strides));
  }
}

ByteCount ExprInterpreter::workspace_bytes() const {
  return bytes_of<double>(program_.code.size(), std::max<int64_t>(piece_columns_, 1));
}

void ExprInterpreter::run(const void* const* inputs, void* const* outputs, void* workspace) const {
  for (int64_t row = 0; row < rows_; ++row) {
    // A row of no elements still has its sums.
    int64_t column = 0;
    do {
      const int64_t columns = std::min(piece_columns_, columns_ - column);
      run_piece({row, column, columns}, inputs, outputs, workspace);
      column += piece_columns_;
    } while (column < columns_);
  }
}

void ExprInterpreter::run_piece(const Piece& piece, const void* const* inputs, void* const* outputs,
                                void* workspace) const {
  const size_t slot = static_cast<size_t>(std::max<int64_t>(piece_columns_, 1)) * 8;
  const auto address = [&](ExprReg reg) {
    return static_cast<char*>(workspace) + static_cast<size_t>(reg) * slot;
  };
  const int64_t first = piece.row * columns_ + piece.column;
  for (size_t i = 0; i < program_.code.size(); ++i) {
    const ExprInstruction& instruction = program_.code[i];
    void* result = address(static_cast<ExprReg>(i));
    const int64_t n = extents_[i] == ExprExtent::full ? piece.columns : 1;
    if (instruction.op == ExprOp::input) {
      int64_t offset = 0;
      int64_t rest = piece.row;
      for (size_t axis = dims_.empty() ? 0 : dims_.size() - 1; axis-- > 0;) {
        offset += rest % dims_[axis] * strides_[i][axis];
        rest /= dims_[axis];
      }
      const int64_t step = dims_.empty() ? 0 : strides_[i].back();
      load(instruction.dtype, inputs[i], offset + piece.column * step, step, result, n);
      continue;
    }
    Operands operands{};
    int64_t length = 1;
    for (int k = 0; k < expr_op_info(instruction.op).operands; ++k) {
      const ExprReg reg = instruction.operands[static_cast<size_t>(k)];
      operands.pointer[k] = address(reg);
      const bool full = extents_[static_cast<size_t>(reg)] == ExprExtent::full;
      operands.step[k] = full ? 1 : 0;
      if (full) length = piece.columns;
    }
    run_instruction(program_, instruction, operands, first, length, result, n);
  }
  for (size_t k = 0; k < program_.outputs.size(); ++k) {
    const ExprOutput& output = program_.outputs[k];
    const bool full = extents_[static_cast<size_t>(output.reg)] == ExprExtent::full;
    store(output.dtype, address(output.reg), full ? 1 : 0, outputs[k], full ? first : piece.row,
          full ? piece.columns : 1);
  }
}

}  // namespace ortrain
