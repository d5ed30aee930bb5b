// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/expr_kernel_plan.h"

#include <algorithm>
#include <bit>

#include "ortrain/base/error.h"
#include "ortrain/base/narrow.h"

namespace ortrain::gpu {
namespace {

constexpr int64_t kNarrowLimit = int64_t{1} << 31;
constexpr int64_t kWarp = 32;  // AMD's 64 lanes only make rows of a warp longer than planned for
constexpr size_t kMostInstructions = 512;

int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// For Divider in expr_block_device.h.
std::pair<uint64_t, uint64_t> pack_divisor(int64_t divisor, bool wide) {
  if (wide) return {static_cast<uint64_t>(divisor), 0};
  const auto d = narrow_checked<uint32_t>(std::max<int64_t>(divisor, 1));
  const int shift = d == 1 ? 0 : 32 - std::countl_zero(d - 1);
  const uint64_t magic = (((uint64_t{1} << shift) - d) << 32) / d + 1;
  return {uint64_t{d} | magic << 32, static_cast<uint64_t>(shift)};
}

}  // namespace

std::optional<std::string> ExprKernelPlan::why_not(const ExprProgram& program,
                                                   const std::vector<Dims>& inputs) {
  const auto count = std::ranges::count_if(program.code, [](const ExprInstruction& i) {
    return i.op != ExprOp::input && i.op != ExprOp::constant;
  });
  if (auto why = program.why_no_executor()) return why;
  if (static_cast<size_t>(count) > kMostInstructions) {
    return str("the program has ", count, " instructions, more than ", kMostInstructions);
  }
  const size_t words = ExprKernelPlan(program, inputs, true).argument_words();
  if (words > kMostArgumentWords) {
    return str("it needs ", words, " arguments, more than ", kMostArgumentWords);
  }
  return std::nullopt;
}

ExprKernelPlan::ExprKernelPlan(ExprProgram program, const std::vector<Dims>& inputs, bool vectors)
    : program_(std::move(program)),
      axes_(device_axes(program_, inputs, rows_)),
      schedule_(program_, axes_) {
  Dims dense = strides_of(axes_.extents);
  Dims dense_rows = strides_of(Dims(axes_.extents.begin(), axes_.extents.end() - 1));
  dense_rows.push_back(0);
  for (size_t i = 0; i < inputs.size(); ++i) {
    // An axis of one element has any stride.
    const auto like = [&](const Dims& wanted) {
      for (size_t axis = 0; axis < wanted.size(); ++axis) {
        if (axes_.extents[axis] > 1 && axes_.strides[i][axis] != wanted[axis]) return false;
      }
      return true;
    };
    const bool per_row = schedule_.extents[i] == ExprExtent::per_row;
    dense_.push_back(per_row ? rows_ && like(dense_rows) : like(dense));
  }
  // Rows without elements still are counted.
  int64_t largest = std::max(num_elements(axes_.extents), axes_.rows());
  for (const int64_t extent : axes_.extents) largest = std::max(largest, extent);
  for (const Dims& input : inputs) largest = std::max(largest, num_elements(input));
  shape_.wide = largest >= kNarrowLimit;
  choose_shape(vectors);
  place_arguments();
}

void ExprKernelPlan::choose_shape(bool vectors) {
  // Vectors of 16 bytes of the narrowest operand, if the widest one takes no more than two.
  size_t narrowest = 16;
  size_t widest = 1;
  const auto see = [&](DType type) {
    narrowest = std::min(narrowest, size_of(type));
    widest = std::max(widest, size_of(type));
  };
  for (size_t i = 0; i < program_.num_inputs(); ++i) {
    if (schedule_.needed[i] && schedule_.is(static_cast<ExprReg>(i), ExprExtent::full)) {
      see(program_.code[i].dtype);
    }
  }
  for (const ExprOutput& output : program_.outputs) see(output.dtype);
  int64_t width = 1;
  if (vectors) {
    width = static_cast<int64_t>(std::min({16 / narrowest, 32 / widest, size_t{8}}));
  }
  const int64_t columns = axes_.columns();
  const bool one_axis = axes_.extents.size() == 1 && !rows_;
  while (width > 1 && !one_axis && columns % width != 0) width /= 2;

  if (!rows_) {
    shape_.vector = static_cast<int>(width);
    const int64_t count = num_elements(axes_.extents);
    threads_ = shape_.most_threads = 256;
    blocks_ = static_cast<unsigned>(std::min<int64_t>(ceil_divide(count, width * threads_), 4096));
    return;
  }

  // Short rows rather use all lanes of a warp than long vectors.
  while (width > 1 && columns < kWarp * width) width /= 2;
  shape_.vector = static_cast<int>(width);
  int64_t kept_words = 0;
  for (const ExprReg reg : schedule_.kept) {
    kept_words +=
        program_.register_type(reg) == DType::f64 || size_of(program_.register_type(reg)) == 8 ? 2
                                                                                               : 1;
  }
  const int64_t rows = axes_.rows();
  const int64_t row_vectors = ceil_divide(columns, width);
  const auto fits = [&](int64_t per_thread, int64_t registers) {
    return per_thread * width * kept_words <= registers;
  };
  const int64_t of_lane = std::max<int64_t>(ceil_divide(row_vectors, kWarp), 1);
  if (of_lane <= 4 && of_lane * width <= 32 && fits(of_lane, 64)) {
    shape_.kind = ExprKernelShape::Kind::warp_rows;
    shape_.per_thread = static_cast<int>(of_lane);
    threads_ = shape_.most_threads = 256;
    // AMD's warps of 64 lanes: half as many rows at a time, the rest comes by the stride.
    blocks_ =
        static_cast<unsigned>(std::min<int64_t>(ceil_divide(rows, threads_ / kWarp), 1 << 20));
    return;
  }
  shape_.kind = ExprKernelShape::Kind::block_rows;
  blocks_ = static_cast<unsigned>(std::min<int64_t>(rows, 1 << 20));
  for (const int64_t threads : {128, 256, 512, 1024}) {
    const int64_t per_thread = ceil_divide(row_vectors, threads);
    if (per_thread > (threads <= 256 ? 2 : 8) && threads < 1024) continue;
    if (per_thread > 8 || !fits(per_thread, threads <= 256 ? 64 : 32)) continue;
    shape_.per_thread = static_cast<int>(std::bit_ceil(static_cast<uint64_t>(per_thread)));
    threads_ = static_cast<unsigned>(threads);
    shape_.most_threads = threads <= 256 ? 256 : 1024;
    return;
  }
  shape_.per_thread = 0;
  threads_ = 128;
  while (threads_ < 1024 && threads_ * 4 < row_vectors) threads_ *= 2;
  shape_.most_threads = 1024;
}

void ExprKernelPlan::place_arguments() {
  // Fault slot, step, elements (or rows), columns.
  const bool elements = shape_.kind == ExprKernelShape::Kind::elements;
  words_ = {0, 0, static_cast<uint64_t>(elements ? num_elements(axes_.extents) : axes_.rows()),
            static_cast<uint64_t>(axes_.columns())};
  const auto append = [&](uint64_t word) {
    words_.push_back(word);
    return words_.size() - 1;
  };
  for (const int64_t extent : axes_.extents) {
    const auto [low, high] = pack_divisor(extent, shape_.wide);
    axis_words_.push_back(append(low));
    append(high);
  }
  for (size_t i = 0; i < program_.num_inputs(); ++i) {
    std::vector<size_t>& places = stride_words_.emplace_back();
    for (const int64_t stride : axes_.strides[i]) {
      places.push_back(dense_[i] ? 0 : append(static_cast<uint64_t>(stride)));
    }
  }
  place_draws();
  first_input_ = words_.size();
  words_.resize(first_input_ + program_.num_inputs() + program_.outputs.size());
  first_output_ = first_input_ + program_.num_inputs();
}

void ExprKernelPlan::place_draws() {
  const auto add = [](auto& list, auto value) {
    if (std::ranges::find(list, value) == list.end()) list.push_back(value);
  };
  for (size_t i = 0; i < program_.code.size(); ++i) {
    const ExprInstruction& instruction = program_.code[i];
    if (!schedule_.needed[i] || !draws(instruction.op)) continue;
    add(streams_, instruction.integer);
    const ExprReg seed = seed_of(instruction);
    if (program_.code[static_cast<size_t>(seed)].op == ExprOp::constant) add(constant_seeds_, seed);
  }
  first_stream_ = words_.size();
  for (const int64_t stream : streams_) words_.push_back(static_cast<uint64_t>(stream));
  first_seed_ = words_.size();
  for (const ExprReg seed : constant_seeds_) {
    words_.push_back(static_cast<uint64_t>(program_.code[static_cast<size_t>(seed)].integer));
  }
}

size_t ExprKernelPlan::stream_index(ExprReg draw) const {
  const int64_t stream = program_.code[static_cast<size_t>(draw)].integer;
  return static_cast<size_t>(std::ranges::find(streams_, stream) - streams_.begin());
}

std::optional<size_t> ExprKernelPlan::seed_word(ExprReg constant) const {
  const auto place = std::ranges::find(constant_seeds_, constant);
  if (place == constant_seeds_.end()) return std::nullopt;
  return first_seed_ + static_cast<size_t>(place - constant_seeds_.begin());
}

bool ExprKernelPlan::takes(const void* const* inputs, void* const* outputs) const {
  const auto lies_well = [&](const void* address, DType type) {
    const size_t access = std::min<size_t>(static_cast<size_t>(shape_.vector) * size_of(type), 16);
    return reinterpret_cast<uintptr_t>(address) % access == 0;
  };
  for (size_t i = 0; i < program_.num_inputs(); ++i) {
    if (!schedule_.needed[i] || !schedule_.is(static_cast<ExprReg>(i), ExprExtent::full)) continue;
    if (!lies_well(inputs[i], program_.code[i].dtype)) return false;
  }
  for (size_t k = 0; k < program_.outputs.size(); ++k) {
    if (!lies_well(outputs[k], program_.outputs[k].dtype)) return false;
  }
  return true;
}

void ExprKernelPlan::write_arguments(const void* const* inputs, void* const* outputs, Fault* fault,
                                     uint32_t step, uint64_t* words) const {
  std::ranges::copy(words_, words);
  words[0] = reinterpret_cast<uintptr_t>(fault);
  words[1] = step;
  for (size_t i = 0; i < program_.num_inputs(); ++i) {
    words[first_input_ + i] = reinterpret_cast<uintptr_t>(inputs[i]);
  }
  for (size_t k = 0; k < program_.outputs.size(); ++k) {
    words[first_output_ + k] = reinterpret_cast<uintptr_t>(outputs[k]);
  }
}

}  // namespace ortrain::gpu
