// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/onednn/conv.h"

#include <cstddef>
#include <memory>
#include <new>
#include <string_view>

#include "ortrain/onednn/engine.h"
#include "ortrain/onednn/product_stack.h"
#include "ortrain/onednn/team.h"

namespace ortrain::onednn {
namespace {

using dnnl::memory;

memory::dims row_major(const memory::dims& dims) {
  memory::dims strides(dims.size(), 1);
  for (size_t i = dims.size(); i-- > 1;) strides[i - 1] = strides[i] * dims[i];
  return strides;
}

memory::desc plain_desc(const memory::dims& dims) {
  return memory::desc(dims, memory::data_type::f32, row_major(dims));
}

memory::desc any_desc(const memory::dims& dims) {
  return memory::desc(dims, memory::data_type::f32, memory::format_tag::any);
}

struct Descs {
  memory::dims x, weight, bias, y, stride, dilation, pad_begin, pad_end;
};

Descs describe(const OrtrainOnednnConv& c) {
  Descs d;
  d.x = {c.batch, c.in_channels};
  d.y = {c.batch, c.out_channels};
  d.weight = c.groups == 1
                 ? memory::dims{c.out_channels, c.in_channels}
                 : memory::dims{c.groups, c.out_channels / c.groups, c.in_channels / c.groups};
  d.bias = {c.out_channels};
  for (int i = 0; i < c.spatial; ++i) {
    d.x.push_back(c.in[i]);
    d.y.push_back(c.out[i]);
    d.weight.push_back(c.kernel[i]);
    d.stride.push_back(c.stride[i]);
    d.dilation.push_back(c.dilation[i] - 1);
    d.pad_begin.push_back(c.pad_begin[i]);
    d.pad_end.push_back(c.pad_end[i]);
  }
  return d;
}

// Of the implementations the first that keeps to the stack; the last one is oneDNN's reference.
template <class Description>
Description in_the_stack(Description description) {
  while (may_leave_the_stack(description.impl_info_str())) {
    if (!description.next_impl() ||
        std::string_view(description.impl_info_str()).starts_with("ref")) {
      throw dnnl::error(dnnl_unimplemented, "only a product that leaves the stack would do");
    }
  }
  return description;
}

constexpr std::align_val_t kAlignment{64};

// Memory of the calling thread for operands in a layout of oneDNN's, as large as the largest run
// needed so far: convolutions run one after the other, and the next one finds it in the cache.
std::byte* layout_memory(size_t bytes) {
  struct Free {
    void operator()(std::byte* data) const { operator delete(data, kAlignment); }
  };
  static thread_local std::unique_ptr<std::byte, Free> data;
  static thread_local size_t size = 0;
  if (bytes > size) {
    data.reset();
    size = 0;
    data.reset(static_cast<std::byte*>(operator new(bytes, kAlignment)));
    size = bytes;
  }
  return data.get();
}

}  // namespace

Conv::Operand Conv::operand(int argument, const memory::desc& plain, const memory::desc& chosen,
                            bool is_input) {
  dnnl::engine& engine = cpu_engine();
  Operand result;
  result.argument = argument;
  result.plain = memory(plain, engine, nullptr);
  result.reordered = plain != chosen;
  if (!result.reordered) {
    result.chosen = result.plain;
  } else {
    result.chosen = memory(chosen, engine, nullptr);
    result.offset = shared_bytes_;
    const auto alignment = static_cast<size_t>(kAlignment);
    shared_bytes_ += (chosen.get_size() + alignment - 1) / alignment * alignment;
    result.reorder = is_input ? dnnl::reorder(result.plain, result.chosen)
                              : dnnl::reorder(result.chosen, result.plain);
  }
  arguments_.insert({argument, result.chosen});
  return result;
}

Conv::Conv(const OrtrainOnednnConv& c) {
  dnnl::engine& engine = cpu_engine();
  const Descs d = describe(c);
  const memory::desc x = plain_desc(d.x);
  const memory::desc y = plain_desc(d.y);
  const memory::desc weight = plain_desc(d.weight);
  const memory::desc bias = c.has_bias ? plain_desc(d.bias) : memory::desc();

  const auto direct = dnnl::algorithm::convolution_direct;
  using Forward = dnnl::convolution_forward;
  Forward::primitive_desc forward(engine,
                                  c.kind == kOrtrainConvForward ? dnnl::prop_kind::forward_inference
                                                                : dnnl::prop_kind::forward_training,
                                  direct, any_desc(d.x), any_desc(d.weight), bias, any_desc(d.y),
                                  d.stride, d.dilation, d.pad_begin, d.pad_end);

  switch (c.kind) {
    case kOrtrainConvForward:
      forward = in_the_stack(forward);
      primitive_ = Forward(forward);
      inputs_.push_back(operand(DNNL_ARG_SRC, x, forward.src_desc(), true));
      inputs_.push_back(operand(DNNL_ARG_WEIGHTS, weight, forward.weights_desc(), true));
      if (c.has_bias) inputs_.push_back(operand(DNNL_ARG_BIAS, bias, bias, true));
      outputs_.push_back(operand(DNNL_ARG_DST, y, forward.dst_desc(), false));
      break;
    case kOrtrainConvBackwardData: {
      using Backward = dnnl::convolution_backward_data;
      const auto backward = in_the_stack(
          Backward::primitive_desc(engine, direct, any_desc(d.x), any_desc(d.weight), any_desc(d.y),
                                   d.stride, d.dilation, d.pad_begin, d.pad_end, forward));
      primitive_ = Backward(backward);
      inputs_.push_back(operand(DNNL_ARG_DIFF_DST, y, backward.diff_dst_desc(), true));
      inputs_.push_back(operand(DNNL_ARG_WEIGHTS, weight, backward.weights_desc(), true));
      outputs_.push_back(operand(DNNL_ARG_DIFF_SRC, x, backward.diff_src_desc(), false));
      break;
    }
    case kOrtrainConvBackwardWeights: {
      using Backward = dnnl::convolution_backward_weights;
      const auto backward = in_the_stack(Backward::primitive_desc(
          engine, direct, any_desc(d.x), any_desc(d.weight), bias, any_desc(d.y), d.stride,
          d.dilation, d.pad_begin, d.pad_end, forward));
      primitive_ = Backward(backward);
      inputs_.push_back(operand(DNNL_ARG_DIFF_DST, y, backward.diff_dst_desc(), true));
      inputs_.push_back(operand(DNNL_ARG_SRC, x, backward.src_desc(), true));
      outputs_.push_back(
          operand(DNNL_ARG_DIFF_WEIGHTS, weight, backward.diff_weights_desc(), false));
      if (c.has_bias) outputs_.push_back(operand(DNNL_ARG_DIFF_BIAS, bias, bias, false));
      break;
    }
    default:
      throw dnnl::error(dnnl_invalid_arguments, "unknown direction of convolution");
  }
}

void Conv::run(const float* const* in, float* const* out) {
  dnnl::stream& stream = thread_stream();
  std::byte* shared = layout_memory(shared_bytes_);
  for (auto* operands : {&inputs_, &outputs_}) {
    for (Operand& operand : *operands) {
      if (operand.reordered) operand.chosen.set_data_handle(shared + operand.offset);
    }
  }
  for (size_t i = 0; i < inputs_.size(); ++i) {
    Operand& operand = inputs_[i];
    operand.plain.set_data_handle(const_cast<float*>(in[i]));
    if (operand.reordered) operand.reorder.execute(stream, operand.plain, operand.chosen);
  }
  for (size_t i = 0; i < outputs_.size(); ++i) outputs_[i].plain.set_data_handle(out[i]);
  primitive_.execute(stream, arguments_);
  for (Operand& operand : outputs_) {
    if (operand.reordered) operand.reorder.execute(stream, operand.chosen, operand.plain);
  }
  stream.wait();
}

ConvOfTeams::ConvOfTeams(const OrtrainOnednnConv& conv) : conv_(conv) {
  const Team team;
  by_size_.try_emplace(team.size(), conv_);
}

void ConvOfTeams::run(const float* const* in, float* const* out) {
  const Team team;
  by_size_.try_emplace(team.size(), conv_).first->second.run(in, out);
}

}  // namespace ortrain::onednn
