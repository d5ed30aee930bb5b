// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/cpu/axis_lines.h"
#include "ortrain/cpu/threads.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

template <typename C>
struct Entry {
  C value;
  int64_t position;
};

// NaN counts as the largest value; positions break ties.
template <typename C>
bool before(const Entry<C>& a, const Entry<C>& b, bool largest) {
  const bool a_is_nan = a.value != a.value, b_is_nan = b.value != b.value;
  if (a_is_nan || b_is_nan) {
    if (a_is_nan != b_is_nan) return a_is_nan == largest;
    return a.position < b.position;
  }
  if (a.value != b.value) return largest ? a.value > b.value : a.value < b.value;
  return a.position < b.position;
}

// Lines are sorted in a buffer of their block; blocks do not depend on the number of threads.
template <typename T>
KernelFn top_k_of(NodeSpec& spec) {
  using C = ComputeType<T>;
  const int64_t axis = spec.attrs().int_("axis");
  const AxisLines a = axis_lines(spec.input(0).dims, axis);
  const int64_t k =
      spec.output(0).dims[static_cast<size_t>(normalize_axis(axis, spec.input(0).dims.size()))];
  const bool largest = spec.attrs().int_("largest") != 0;
  const bool wants_indices = spec.has_output(1);
  const bool wants_values = spec.has_output(0);
  const int64_t blocks = std::clamp<int64_t>(a.lines(), 1, 32);
  spec.request_workspace(bytes_of<Entry<C>>(blocks, a.length));
  return [=](const KernelArgs& args) {
    const T* x = args.input<T>(0);
    T* values = args.output<T>(0);
    parallel_blocks(blocks, [&](int64_t block) {
      Entry<C>* entries = static_cast<Entry<C>*>(args.workspace) + block * a.length;
      const auto order = [largest](const Entry<C>& l, const Entry<C>& r) {
        return before(l, r, largest);
      };
      const int64_t end = (block + 1) * a.lines() / blocks;
      for (int64_t line = block * a.lines() / blocks; line < end; ++line) {
        const int64_t o = line / a.inner, i = line % a.inner;
        const T* from = x + o * a.length * a.inner + i;
        for (int64_t j = 0; j < a.length; ++j) entries[j] = {static_cast<C>(from[j * a.inner]), j};
        // A heap of k pays as long as it is small beside the line.
        if (k < a.length / 8) {
          std::partial_sort(entries, entries + k, entries + a.length, order);
        } else {
          std::sort(entries, entries + a.length, order);
        }
        const int64_t to = o * k * a.inner + i;
        for (int64_t j = 0; j < k; ++j) {
          if (wants_values) values[to + j * a.inner] = from[entries[j].position * a.inner];
          if (wants_indices) args.output<int64_t>(1)[to + j * a.inner] = entries[j].position;
        }
      }
    });
  };
}

KernelFn make_top_k(NodeSpec& spec) {
  return dispatch_all(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_same_v<T, bool>) {
      throw DTypeError("no kernel for bool");
    } else {
      return top_k_of<T>(spec);
    }
  });
}

std::optional<std::string> why_not_non_zero(const NodeSpec&) {
  return "the extent of the result depends on data; a plan needs every shape beforehand";
}

}  // namespace

void register_top_k(KernelRegistry& registry);
void register_top_k(KernelRegistry& registry) {
  registry.add("TopK", {{.name = "ref", .make = make_top_k}});
  registry.add("NonZero", {{.name = "ref", .why_not = why_not_non_zero}});
}

}  // namespace ortrain::cpu
