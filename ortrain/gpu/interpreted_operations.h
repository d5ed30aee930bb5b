// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/base/philox.h"
#include "ortrain/gpu/device_code.h"
#include "ortrain/gpu/expr_scalar_device.h"
#include "ortrain/gpu/interpreted_steps.h"
#include "ortrain/gpu/launch.h"

// One step of an interpreted program on one element: values are 8 bytes each, in slots.
namespace ortrain::gpu::interpreted {

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

}  // namespace ortrain::gpu::interpreted
