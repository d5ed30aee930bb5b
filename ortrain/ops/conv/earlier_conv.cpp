// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <utility>

#include "ortrain/base/error.h"
#include "ortrain/ir/expand_context.h"
#include "ortrain/ir/op_registry.h"

// Before opset 11 padding that is derived goes to the other end where it is odd.
namespace ortrain::ops {
namespace {

std::vector<ValueId> expand_conv_transpose(ExpandContext& e) {
  const std::string& auto_pad = e.attrs().string_("auto_pad");
  if (e.attrs().has("output_shape") || (auto_pad != "NOTSET" && auto_pad != "VALID")) {
    throw UnsupportedError("padding that follows from the shape of the result before opset 11");
  }
  Attributes attributes{{"auto_pad", auto_pad}, {"group", e.attrs().int_("group")}};
  for (const char* name : {"dilations", "kernel_shape", "output_padding", "pads", "strides"}) {
    if (const auto given = e.attrs().optional_ints(name)) attributes.emplace(name, *given);
  }
  std::vector<ValueId> inputs{e.input(0), e.input(1)};
  if (e.has_input(2)) inputs.push_back(e.input(2));
  return {e.op("ConvTranspose", std::move(inputs), std::move(attributes))};
}

}  // namespace

void register_earlier_conv(OpRegistry& registry);
void register_earlier_conv(OpRegistry& registry) {
  registry.add({.name = "ConvTranspose",
                .since = 1,
                .until = 10,
                .summary = "Pads are given.",
                .inputs = {{"X", "T"}, {"W", "T"}, {"B", "T", Arity::optional}},
                .outputs = {{"Y", "T"}},
                .attrs = {{"auto_pad", std::string("NOTSET")},
                          {"dilations", AttributeKind::ints},
                          {"group", int64_t{1}},
                          {"kernel_shape", AttributeKind::ints},
                          {"output_padding", AttributeKind::ints},
                          {"output_shape", AttributeKind::ints},
                          {"pads", AttributeKind::ints},
                          {"strides", AttributeKind::ints}},
                .types = {{"T", kFloatTypes}},
                .expand = expand_conv_transpose});
}

}  // namespace ortrain::ops
