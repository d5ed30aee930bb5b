// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/base/philox.h"
#include "ortrain/gpu/device_code.h"
#include "ortrain/gpu/expr_scalar_device.h"
#include "ortrain/gpu/interpreted_program.h"
#include "ortrain/gpu/launch.h"
#include "ortrain/gpu/reduce.h"

namespace ortrain::gpu {
namespace {

// Values of 8 bytes that a thread has at a time, in its local memory.
constexpr int kSlots = 64;
constexpr int kMostAddresses = 120;

// What a register is computed in: integers in 64 bits, then cut to their type.
enum class Machine : uint8_t { f32, f64, i64, u64 };

Machine machine_of(DType type) {
  if (type == DType::f64) return Machine::f64;
  if (is_float(type)) return Machine::f32;
  return is_signed_integer(type) || type == DType::boolean ? Machine::i64 : Machine::u64;
}

struct DeviceStep {
  ExprOp op;
  DType type;       // of the result; of an input, of its tensor
  Machine machine;  // of the result
  Machine operand;  // of the first operand
  uint16_t result;  // slots
  uint16_t operands[3];
  uint16_t tensor;  // input
  int64_t integer;  // bits of a constant, stream of dropout
  double number;    // ratio of dropout
};
static_assert(sizeof(DeviceStep) == 32);

struct DeviceResult {
  uint16_t slot;
  DType type;
  bool per_row;
};

// One pass over a row: steps before it, steps per element, and the reduction at its end.
struct DevicePass {
  int first_of_row, first_of_element, end;
  int reduction;  // index of its step; -1 in the last pass
};

// The program in device memory: pointers into one block.
struct DeviceProgram {
  const DeviceStep* steps;
  const DevicePass* passes;
  const DeviceResult* results;
  const int64_t* extents;  // of the axes, then per input its strides
  int num_passes, num_results, num_inputs, rank;
  int64_t rows, columns;
  FaultReporter faults;
};

using Addresses = DeviceArray<void*, kMostAddresses>;

struct DivisionReporter {
  FaultReporter faults;
  ORTRAIN_DEVICE void division() const { faults.report(FaultKind::division, 0, 0, 0, 0); }
};

// --- slots

template <class T>
ORTRAIN_DEVICE T from_bits(uint64_t bits) {
  T value;
  memcpy(&value, &bits, sizeof(T));
  return value;
}
template <class T>
ORTRAIN_DEVICE uint64_t to_bits(T value) {
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  return bits;
}

// Integers are kept as the 64-bit number that their type holds.
ORTRAIN_DEVICE uint64_t cut(DType type, uint64_t bits) {
  switch (type) {
    case DType::i8:
      return static_cast<uint64_t>(static_cast<int64_t>(static_cast<int8_t>(bits)));
    case DType::i16:
      return static_cast<uint64_t>(static_cast<int64_t>(static_cast<int16_t>(bits)));
    case DType::i32:
      return static_cast<uint64_t>(static_cast<int64_t>(static_cast<int32_t>(bits)));
    case DType::u8:
      return static_cast<uint8_t>(bits);
    case DType::u16:
      return static_cast<uint16_t>(bits);
    case DType::u32:
      return static_cast<uint32_t>(bits);
    default:
      return bits;
  }
}

template <class T>
ORTRAIN_DEVICE T element(const void* tensor, int64_t at) {
  return static_cast<const T*>(tensor)[at];
}

ORTRAIN_DEVICE uint64_t load_element(DType type, const void* tensor, int64_t at) {
  const auto wide = [](int64_t value) { return static_cast<uint64_t>(value); };
  switch (type) {
    case DType::f32:
      return to_bits(element<float>(tensor, at));
    case DType::f64:
      return to_bits(element<double>(tensor, at));
    case DType::f16:
      return to_bits(static_cast<float>(element<Float16>(tensor, at)));
    case DType::bf16:
      return to_bits(static_cast<float>(element<BFloat16>(tensor, at)));
    case DType::i8:
      return wide(element<int8_t>(tensor, at));
    case DType::i16:
      return wide(element<int16_t>(tensor, at));
    case DType::i32:
      return wide(element<int32_t>(tensor, at));
    case DType::i64:
      return wide(element<int64_t>(tensor, at));
    case DType::u8:
      return element<uint8_t>(tensor, at);
    case DType::u16:
      return element<uint16_t>(tensor, at);
    case DType::u32:
      return element<uint32_t>(tensor, at);
    case DType::u64:
      return element<uint64_t>(tensor, at);
    default:
      return element<uint8_t>(tensor, at) != 0 ? 1 : 0;
  }
}

ORTRAIN_DEVICE void store_element(DType type, uint64_t bits, void* tensor, int64_t at) {
  switch (type) {
    case DType::f16:
      static_cast<Float16*>(tensor)[at] = Float16(from_bits<float>(bits));
      break;
    case DType::bf16:
      static_cast<BFloat16*>(tensor)[at] = BFloat16(from_bits<float>(bits));
      break;
    case DType::f32:
    case DType::i32:
    case DType::u32:
      static_cast<uint32_t*>(tensor)[at] = static_cast<uint32_t>(bits);
      break;
    case DType::i16:
    case DType::u16:
      static_cast<uint16_t*>(tensor)[at] = static_cast<uint16_t>(bits);
      break;
    case DType::f64:
    case DType::i64:
    case DType::u64:
      static_cast<uint64_t*>(tensor)[at] = bits;
      break;
    default:
      static_cast<uint8_t*>(tensor)[at] = static_cast<uint8_t>(bits);
  }
}

// --- one operation

template <class T>
ORTRAIN_DEVICE bool compare(ExprOp op, T a, T b) {
  switch (op) {
    case ExprOp::eq:
      return a == b;
    case ExprOp::ne:
      return a != b;
    case ExprOp::lt:
      return a < b;
    default:
      return a <= b;
  }
}

template <class T>
ORTRAIN_DEVICE T apply_number(ExprOp op, T a, T b, const DivisionReporter& faults) {
  switch (op) {
    case ExprOp::neg:
      return scalar::op_neg(a);
    case ExprOp::abs:
      return scalar::op_abs(a);
    case ExprOp::sign:
      return scalar::op_sign(a);
    case ExprOp::relu:
      return scalar::op_relu(a);
    case ExprOp::add:
    case ExprOp::row_sum:
    case ExprOp::row_mean:
      return scalar::op_add(a, b);
    case ExprOp::sub:
      return scalar::op_sub(a, b);
    case ExprOp::mul:
      return scalar::op_mul(a, b);
    case ExprOp::div:
      return scalar::op_div(a, b, faults);
    case ExprOp::fmod:
      return scalar::op_fmod(a, b, faults);
    case ExprOp::mod:
      return scalar::op_mod(a, b, faults);
    case ExprOp::floor_div:
      return scalar::op_floor_div(a, b, faults);
    case ExprOp::pow:
      return scalar::op_pow(a, b, faults);
    case ExprOp::min:
    case ExprOp::row_min:
      return scalar::op_min(a, b);
    case ExprOp::max:
    case ExprOp::row_max:
      return scalar::op_max(a, b);
    default:
      return a;
  }
}

template <class T>
ORTRAIN_DEVICE T apply_real(ExprOp op, T a) {
  switch (op) {
    case ExprOp::exp:
      return scalar::op_exp(a);
    case ExprOp::expm1:
      return scalar::op_expm1(a);
    case ExprOp::log:
      return scalar::op_log(a);
    case ExprOp::log1p:
      return scalar::op_log1p(a);
    case ExprOp::sqrt:
      return scalar::op_sqrt(a);
    case ExprOp::rsqrt:
      return scalar::op_rsqrt(a);
    case ExprOp::reciprocal:
      return scalar::op_reciprocal(a);
    case ExprOp::tanh:
      return scalar::op_tanh(a);
    case ExprOp::sigmoid:
      return scalar::op_sigmoid(a);
    case ExprOp::erf:
      return scalar::op_erf(a);
    case ExprOp::sin:
      return scalar::op_sin(a);
    case ExprOp::cos:
      return scalar::op_cos(a);
    case ExprOp::tan:
      return scalar::op_tan(a);
    case ExprOp::asin:
      return scalar::op_asin(a);
    case ExprOp::acos:
      return scalar::op_acos(a);
    case ExprOp::atan:
      return scalar::op_atan(a);
    case ExprOp::sinh:
      return scalar::op_sinh(a);
    case ExprOp::cosh:
      return scalar::op_cosh(a);
    case ExprOp::floor:
      return scalar::op_floor(a);
    case ExprOp::ceil:
      return scalar::op_ceil(a);
    case ExprOp::round:
      return scalar::op_round(a);
    case ExprOp::to_bf16:
      return scalar::op_to_bf16(static_cast<float>(a));
    case ExprOp::to_f16:
      return scalar::op_to_f16(static_cast<float>(a));
    default:
      return a;
  }
}

ORTRAIN_DEVICE uint64_t apply_bits(ExprOp op, uint64_t a, uint64_t b) {
  switch (op) {
    case ExprOp::logical_and:
    case ExprOp::bit_and:
      return a & b;
    case ExprOp::logical_or:
    case ExprOp::bit_or:
      return a | b;
    case ExprOp::logical_xor:
    case ExprOp::bit_xor:
      return a ^ b;
    case ExprOp::logical_not:
      return a ^ 1;
    default:
      return ~a;
  }
}

template <class From>
ORTRAIN_DEVICE uint64_t convert_from(DType to, From value) {
  switch (to) {
    case DType::f32:
      return to_bits(static_cast<float>(value));
    case DType::f64:
      return to_bits(static_cast<double>(value));
    case DType::boolean:
      return value != From(0) ? 1 : 0;
    case DType::u64:
      return scalar::op_cast<uint64_t>(value);
    case DType::i32:
      return cut(to, static_cast<uint64_t>(scalar::op_cast<int32_t>(value)));
    default:
      return cut(to, static_cast<uint64_t>(scalar::op_cast<int64_t>(value)));
  }
}

ORTRAIN_DEVICE uint64_t combine(const DeviceStep& step, uint64_t a, uint64_t b,
                                const DivisionReporter& faults) {
  switch (step.machine) {
    case Machine::f32:
      return to_bits(apply_number(step.op, from_bits<float>(a), from_bits<float>(b), faults));
    case Machine::f64:
      return to_bits(apply_number(step.op, from_bits<double>(a), from_bits<double>(b), faults));
    case Machine::i64:
      return cut(step.type, to_bits(apply_number(step.op, static_cast<int64_t>(a),
                                                 static_cast<int64_t>(b), faults)));
    default:
      return cut(step.type, apply_number(step.op, a, b, faults));
  }
}

ORTRAIN_DEVICE bool is_kept(const DeviceStep& step, uint64_t seed, int64_t at) {
  const uint32_t word =
      scalar::philox_element(seed, static_cast<uint64_t>(step.integer), static_cast<uint64_t>(at));
  return word >= dropout_threshold(step.number);
}

// `at`: the element, counted in the whole space.
ORTRAIN_DEVICE void run_step(const DeviceStep& step, uint64_t* slots, int64_t at,
                             const DivisionReporter& faults) {
  const uint64_t a = slots[step.operands[0]];
  const uint64_t b = slots[step.operands[1]];
  uint64_t& result = slots[step.result];
  if (step.op <= ExprOp::constant) {
    result = static_cast<uint64_t>(step.integer);
  } else if (step.op <= ExprOp::relu || (step.op >= ExprOp::add && step.op <= ExprOp::max)) {
    result = combine(step, a, b, faults);
  } else if (step.op <= ExprOp::to_f16) {
    result = step.machine == Machine::f32 ? to_bits(apply_real(step.op, from_bits<float>(a)))
                                          : to_bits(apply_real(step.op, from_bits<double>(a)));
  } else if (step.op <= ExprOp::le) {
    switch (step.operand) {
      case Machine::f32:
        result = compare(step.op, from_bits<float>(a), from_bits<float>(b));
        break;
      case Machine::f64:
        result = compare(step.op, from_bits<double>(a), from_bits<double>(b));
        break;
      case Machine::i64:
        result = compare(step.op, static_cast<int64_t>(a), static_cast<int64_t>(b));
        break;
      default:
        result = compare(step.op, a, b);
    }
  } else if (step.op <= ExprOp::bit_not) {
    result = cut(step.type, apply_bits(step.op, a, b));
  } else if (step.op == ExprOp::select) {
    result = a != 0 ? b : slots[step.operands[2]];
  } else if (step.op == ExprOp::cast) {
    switch (step.operand) {
      case Machine::f32:
        result = convert_from(step.type, from_bits<float>(a));
        break;
      case Machine::f64:
        result = convert_from(step.type, from_bits<double>(a));
        break;
      case Machine::i64:
        result = convert_from(step.type, static_cast<int64_t>(a));
        break;
      default:
        result = convert_from(step.type, a);
    }
  } else if (step.op == ExprOp::dropout_mask) {
    result = step.number < 1.0 && is_kept(step, a, at) ? 1 : 0;
  } else {
    const bool kept = is_kept(step, b, at);
    const double scale = kept ? dropout_scale(step.number) : 0.0;
    result = step.machine == Machine::f32 ? to_bits(from_bits<float>(a) * static_cast<float>(scale))
                                          : to_bits(from_bits<double>(a) * scale);
  }
}

// --- the loops

ORTRAIN_DEVICE int64_t offset_of(const DeviceProgram& program, int input, int64_t row,
                                 int64_t column) {
  const int64_t* strides = program.extents + (input + 1) * program.rank;
  int64_t offset = column * strides[program.rank - 1];
  for (int axis = program.rank - 2; axis >= 0; --axis) {
    offset += row % program.extents[axis] * strides[axis];
    row /= program.extents[axis];
  }
  return offset;
}

ORTRAIN_DEVICE void run_steps(const DeviceProgram& program, int first, int end, int64_t row,
                              int64_t column, const Addresses& addresses, uint64_t* slots) {
  const DivisionReporter faults{program.faults};
  for (int i = first; i < end; ++i) {
    const DeviceStep step = program.steps[i];
    if (step.op == ExprOp::input) {
      slots[step.result] = load_element(step.type, addresses[step.tensor],
                                        offset_of(program, step.tensor, row, column));
    } else {
      run_step(step, slots, row * program.columns + column, faults);
    }
  }
}

ORTRAIN_DEVICE void store_results(const DeviceProgram& program, bool per_row, int64_t at,
                                  const Addresses& addresses, const uint64_t* slots) {
  for (int k = 0; k < program.num_results; ++k) {
    const DeviceResult result = program.results[k];
    if (result.per_row == per_row) {
      store_element(result.type, slots[result.slot], addresses[program.num_inputs + k], at);
    }
  }
}

__global__ void __launch_bounds__(256)
    interpret_elements(DeviceProgram program, Addresses addresses) {
  const DevicePass pass = program.passes[0];
  uint64_t slots[kSlots];
  for_each_item(program.rows * program.columns, [&](int64_t i) {
    run_steps(program, pass.first_of_row, pass.end, i / program.columns, i % program.columns,
              addresses, slots);
    store_results(program, false, i, addresses, slots);
  });
}

struct Combine {
  const DeviceStep& step;
  const DivisionReporter& faults;
  ORTRAIN_DEVICE uint64_t operator()(uint64_t a, uint64_t b) const {
    return combine(step, a, b, faults);
  }
};

__global__ void __launch_bounds__(256) interpret_rows(DeviceProgram program, Addresses addresses) {
  const DivisionReporter faults{program.faults};
  uint64_t slots[kSlots];
  for (int64_t row = blockIdx.x; row < program.rows; row += gridDim.x) {
    for (int p = 0; p < program.num_passes; ++p) {
      const DevicePass pass = program.passes[p];
      run_steps(program, pass.first_of_row, pass.first_of_element, row, 0, addresses, slots);
      const bool last = pass.reduction < 0;
      const DeviceStep reduction = program.steps[last ? 0 : pass.reduction];
      uint64_t part = static_cast<uint64_t>(reduction.integer);  // what changes nothing
      for (int64_t column = threadIdx.x; column < program.columns; column += blockDim.x) {
        run_steps(program, pass.first_of_element, pass.end, row, column, addresses, slots);
        if (last) {
          store_results(program, false, row * program.columns + column, addresses, slots);
        } else {
          part = combine(reduction, part, slots[reduction.operands[0]], faults);
        }
      }
      if (last) {
        if (threadIdx.x == 0) store_results(program, true, row, addresses, slots);
        continue;
      }
      part =
          block_reduce(part, static_cast<uint64_t>(reduction.integer), Combine{reduction, faults});
      if (reduction.op == ExprOp::row_mean) {
        DeviceStep divide = reduction;
        divide.op = ExprOp::div;
        const uint64_t size = convert_from(reduction.type, program.columns);
        part = combine(divide, part, size, faults);
      }
      slots[reduction.result] = part;
    }
  }
}

// --- translation

class Translation {
 public:
  Translation(const ExprProgram& program, std::vector<Dims> inputs)
      : axes(device_axes(program, std::move(inputs), rows)),
        program_(program),
        schedule_(program, axes) {
    translate();
  }

  bool rows = false;
  ExprAxes axes;
  std::vector<DeviceStep> steps;
  std::vector<DevicePass> passes;
  std::vector<DeviceResult> results;
  int slots_used = 1;  // slot 0 is what absent operands name

 private:
  bool lasts(ExprReg reg) const { return schedule_.extents[at(reg)] != ExprExtent::full || !rows; }
  static size_t at(ExprReg reg) { return static_cast<size_t>(reg); }

  void translate() {
    slot_of_.assign(program_.code.size(), 0);
    if (!rows) {
      DevicePass pass{0, 0, 0, -1};
      std::vector<ExprReg> all;
      for (size_t i = 0; i < program_.code.size(); ++i) {
        if (schedule_.needed[i]) all.push_back(static_cast<ExprReg>(i));
      }
      std::vector<ExprReg> read;
      for (const ExprOutput& output : program_.outputs) read.push_back(output.reg);
      append_elements(all, read, 1);
      pass.end = static_cast<int>(steps.size());
      passes.push_back(pass);
    } else {
      // What lasts for a row has a slot of its own, the rest of each pass shares those behind.
      for (size_t i = 0; i < program_.code.size(); ++i) {
        if (schedule_.needed[i] && lasts(static_cast<ExprReg>(i))) {
          slot_of_[i] = static_cast<uint16_t>(slots_used++);
        }
      }
      const int shared = slots_used;
      for (int p = 0; p < schedule_.passes; ++p) append_pass(p, shared);
    }
    const std::vector<ExprExtent> declared = program_.extents();
    for (const ExprOutput& output : program_.outputs) {
      results.push_back({slot_of_[at(output.reg)], output.dtype,
                         rows && declared[at(output.reg)] != ExprExtent::full});
    }
  }

  void append_pass(int p, int shared) {
    const int first_of_row = static_cast<int>(steps.size());
    for (size_t i = 0; i < program_.code.size(); ++i) {
      const auto reg = static_cast<ExprReg>(i);
      if (schedule_.needed[i] && lasts(reg) && !is_reduction(program_.code[i].op) &&
          schedule_.pass_of[i] == p) {
        append(reg);
      }
    }
    int first = first_of_row;
    // One reduction at a time.
    for (const ExprReg reduction : schedule_.reductions[static_cast<size_t>(p)]) {
      append_loop(first, schedule_.elements[static_cast<size_t>(p)],
                  {program_.code[at(reduction)].operands[0]}, shared);
      passes.back().reduction = static_cast<int>(steps.size());
      append(reduction);
      first = static_cast<int>(steps.size());
    }
    if (p != schedule_.passes - 1) return;
    std::vector<ExprReg> read;
    for (const ExprOutput& output : program_.outputs) read.push_back(output.reg);
    append_loop(first, schedule_.elements[static_cast<size_t>(p)], read, shared);
  }

  void append_loop(int first_of_row, const std::vector<ExprReg>& list,
                   const std::vector<ExprReg>& read, int shared) {
    const int first_of_element = static_cast<int>(steps.size());
    append_elements(list, read, shared);
    passes.push_back({first_of_row, first_of_element, static_cast<int>(steps.size()), -1});
  }

  // What `read` depends on among `list`, in slots from `shared` on that are used again when nobody
  // reads them any more.
  void append_elements(const std::vector<ExprReg>& list, const std::vector<ExprReg>& read,
                       int shared) {
    std::vector<size_t> last_use(program_.code.size(), 0);
    std::vector<bool> wanted(program_.code.size(), false);
    for (const ExprReg reg : read) {
      wanted[at(reg)] = true;
      last_use[at(reg)] = program_.code.size();
    }
    for (size_t n = list.size(); n-- > 0;) {
      const size_t i = at(list[n]);
      if (!wanted[i]) continue;
      for (int k = 0; k < expr_op_info(program_.code[i].op).operands; ++k) {
        const size_t operand = at(program_.code[i].operands[static_cast<size_t>(k)]);
        wanted[operand] = true;
        last_use[operand] = std::max(last_use[operand], i);
      }
    }
    std::vector<uint16_t> free;
    int next = shared;
    std::vector<size_t> live;
    for (const ExprReg reg : list) {
      const size_t i = at(reg);
      if (!wanted[i]) continue;
      std::erase_if(live, [&](size_t other) {
        if (last_use[other] >= i) return false;
        free.push_back(slot_of_[other]);
        return true;
      });
      if (free.empty()) {
        slot_of_[i] = static_cast<uint16_t>(next++);
      } else {
        slot_of_[i] = free.back();
        free.pop_back();
      }
      live.push_back(i);
      append(reg);
    }
    slots_used = std::max(slots_used, next);
  }

  void append(ExprReg reg) {
    const ExprInstruction& instruction = program_.code[at(reg)];
    DeviceStep step{};
    step.op = instruction.op;
    step.type = instruction.dtype;
    step.machine = machine_of(instruction.dtype);
    step.operand = step.machine;
    step.result = slot_of_[at(reg)];
    step.tensor = static_cast<uint16_t>(reg);
    step.number = instruction.number;
    step.integer = instruction.integer;
    for (int k = 0; k < expr_op_info(instruction.op).operands; ++k) {
      step.operands[k] = slot_of_[at(instruction.operands[static_cast<size_t>(k)])];
    }
    if (expr_op_info(instruction.op).operands > 0) {
      step.operand = machine_of(program_.register_type(instruction.operands[0]));
    }
    if (instruction.op == ExprOp::constant) step.integer = constant_bits(instruction);
    if (is_reduction(instruction.op)) step.integer = neutral_bits(instruction);
    steps.push_back(step);
  }

  static int64_t bits_of(DType type, double number, int64_t integer) {
    int64_t bits = 0;
    if (type == DType::f64) {
      std::memcpy(&bits, &number, sizeof(number));
    } else if (type == DType::f32) {
      const float narrow = static_cast<float>(number);
      std::memcpy(&bits, &narrow, sizeof(narrow));
    } else {
      dispatch_all(type, [&](auto tag) {
        using T = typename decltype(tag)::type;
        if constexpr (std::is_integral_v<T>) {
          bits = static_cast<int64_t>(static_cast<T>(integer));
        }
      });
    }
    return bits;
  }
  static int64_t constant_bits(const ExprInstruction& instruction) {
    return bits_of(instruction.dtype, instruction.number, instruction.integer);
  }
  // What changes nothing.
  static int64_t neutral_bits(const ExprInstruction& instruction) {
    if (instruction.op != ExprOp::row_max && instruction.op != ExprOp::row_min) return 0;
    const bool lowest = instruction.op == ExprOp::row_max;
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    if (is_float(instruction.dtype)) {
      return bits_of(instruction.dtype, lowest ? -kInfinity : kInfinity, 0);
    }
    int64_t bits = 0;
    dispatch_all(instruction.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      if constexpr (std::is_integral_v<T>) {
        bits = static_cast<int64_t>(lowest ? std::numeric_limits<T>::lowest()
                                           : std::numeric_limits<T>::max());
      }
    });
    return bits;
  }

  const ExprProgram& program_;
  ExprSchedule schedule_;
  std::vector<uint16_t> slot_of_;
};

}  // namespace

std::optional<std::string> InterpretedProgram::why_not(const ExprProgram& program,
                                                       const std::vector<Dims>& inputs) {
  const size_t addresses = program.num_inputs() + program.outputs.size();
  if (addresses > kMostAddresses) {
    return str("it has ", addresses, " operands, more than ", kMostAddresses);
  }
  const int slots = Translation(program, inputs).slots_used;
  if (slots > kSlots) {
    return str("the program keeps ", slots, " values at a time, more than ", kSlots);
  }
  return std::nullopt;
}

InterpretedProgram::InterpretedProgram(const ExprProgram& program, const std::vector<Dims>& inputs,
                                       Device& device)
    : num_inputs_(program.num_inputs()), num_outputs_(program.outputs.size()) {
  const Translation translation(program, inputs);
  rows_ = translation.rows;
  row_count_ = translation.axes.rows();
  columns_ = translation.axes.columns();
  rank_ = static_cast<int>(translation.axes.extents.size());
  num_passes_ = static_cast<int>(translation.passes.size());
  Dims axes = translation.axes.extents;
  for (const Dims& strides : translation.axes.strides) {
    axes.insert(axes.end(), strides.begin(), strides.end());
  }
  std::string packed;
  const auto append = [&](const auto& values) {
    const size_t start = packed.size();
    packed.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(values[0]));
    packed.append((32 - packed.size() % 32) % 32, '\0');
    return start;
  };
  append(translation.steps);
  passes_at_ = append(translation.passes);
  results_at_ = append(translation.results);
  axes_at_ = append(axes);
  code_ = place_bytes(device, packed.data(), packed.size());
}

void InterpretedProgram::run(const void* const* inputs, void* const* outputs,
                             const KernelArgs& args) const {
  const char* code = static_cast<const char*>(code_->data());
  DeviceProgram program{.steps = reinterpret_cast<const DeviceStep*>(code),
                        .passes = reinterpret_cast<const DevicePass*>(code + passes_at_),
                        .results = reinterpret_cast<const DeviceResult*>(code + results_at_),
                        .extents = reinterpret_cast<const int64_t*>(code + axes_at_),
                        .num_passes = num_passes_,
                        .num_results = static_cast<int>(num_outputs_),
                        .num_inputs = static_cast<int>(num_inputs_),
                        .rank = rank_,
                        .rows = row_count_,
                        .columns = columns_,
                        .faults = FaultReporter(args)};
  Addresses addresses;
  const int first_output = static_cast<int>(num_inputs_);
  for (int i = 0; i < first_output; ++i) addresses[i] = const_cast<void*>(inputs[i]);
  for (int k = 0; k < program.num_results; ++k) addresses[first_output + k] = outputs[k];
  if (!rows_) {
    launch(interpret_elements, items(row_count_ * columns_), args.stream, program, addresses);
    return;
  }
  const LaunchShape shape{.blocks = block_count(std::min<int64_t>(row_count_, int64_t{1} << 20)),
                          .threads = row_threads(columns_, 2, 256)};
  launch(interpret_rows, shape, args.stream, program, addresses);
}

}  // namespace ortrain::gpu
