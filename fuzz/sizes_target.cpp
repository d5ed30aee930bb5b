// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// Sizes against exact arithmetic: what the engine says is the exact number, or a refusal that the
// exact number justifies.
#include <algorithm>
#include <bit>
#include <optional>
#include <string>
#include <vector>

#include "fuzz/answers.h"
#include "fuzz/byte_source.h"
#include "fuzz/targets.h"
#include "ortrain/base/byte_count.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/shape_inference.h"
#include "ortrain/ir/text.h"
#include "ortrain/plan/memory_planner.h"
#include "ortrain/runtime/plan_verifier.h"
#include "ortrain/runtime/session.h"

namespace ortrain::fuzz {
namespace {

__extension__ using Wide = __int128;

// Far above all bounds of the engine, far below the end of Wide.
constexpr Wide kSaturated = Wide{1} << 120;

Wide saturated(Wide value) { return std::clamp(value, -kSaturated, kSaturated); }
Wide product(Wide a, Wide b) {
  Wide result = 0;
  if (__builtin_mul_overflow(a, b, &result)) return (a < 0) == (b < 0) ? kSaturated : -kSaturated;
  return saturated(result);
}
bool fits_int64(Wide value) { return value >= INT64_MIN && value <= INT64_MAX; }

// `made` runs what the engine computes. It must give `exact`, or refuse where `must_fit` is false.
template <class Made>
void compare(const char* what, Wide exact, bool must_fit, const Made& made) {
  std::optional<Wide> result;
  const bool taken = accepted([&] { result = made(); });
  require(taken || !must_fit, std::string(what) + " refuses what fits");
  if (taken) require(*result == exact, std::string(what) + " gives another number");
}

// Of extents, those of 0 counted as 1; negative ones make it unfit.
struct Extents {
  Wide elements = 1;
  Wide without_zeros = 1;
  bool negative = false;

  explicit Extents(const Dims& dims) {
    for (const int64_t dim : dims) {
      negative = negative || dim < 0;
      elements = product(elements, dim);
      without_zeros = product(without_zeros, dim == 0 ? 1 : dim);
    }
  }
};

void check_counts(ByteSource& source) {
  Dims dims;
  for (size_t rank = source.below(6); rank > 0; --rank) dims.push_back(source.extent());
  const Extents exact(dims);
  const bool counts = !exact.negative && fits_int64(exact.without_zeros);
  compare("num_elements", exact.elements, false, [&] { return Wide{num_elements(dims)}; });
  if (counts)
    compare("num_elements", exact.elements, true, [&] { return Wide{num_elements(dims)}; });
  compare("checked_product", exact.elements, false,
          [&] { return Wide{checked_product(to_shape(dims)).constant()}; });
  dims.resize(4, 1);
  const Extents four(dims);
  const bool four_count = !four.negative && fits_int64(four.without_zeros);
  compare("count_elements", four.elements, four_count,
          [&] { return Wide{count_elements(dims[0], dims[1], dims[2], dims[3])}; });
  require(four_count || !accepted([&] { count_elements(dims[0], dims[1], dims[2], dims[3]); }),
          "count_elements takes what does not fit");

  constexpr size_t kSizes[] = {1, 2, 4, 8, 64};
  const size_t size = kSizes[source.below(std::size(kSizes))];
  const bool fits = !four.negative && product(four.without_zeros, size) <= kMostBytes;
  require(fits == accepted([&] { check_extents(dims, size); }), "check_extents is wrong");
  const Wide bytes = product(four.elements, size);
  compare("ByteCount::of", bytes, four_count && bytes <= kMostBytes,
          [&] { return Wide{ByteCount::of(size, dims[0], dims[1], dims[2], dims[3]).value()}; });
  // Extents that are no int64.
  const uint64_t large = source.any<uint64_t>();
  compare("bytes_of", product(large, 8), product(large, 8) <= kMostBytes,
          [&] { return Wide{bytes_of<double>(large).value()}; });
}

void check_sums(ByteSource& source) {
  ByteCount made;
  Wide exact = 0;
  for (size_t steps = source.below(12); steps > 0; --steps) {
    const auto number = static_cast<int64_t>(source.extent());
    const size_t kind = source.below(3);
    Wide next = 0;
    bool valid = true;
    ByteCount result;
    const bool taken = [&] {
      if (kind == 0) {
        valid = number >= 0 && number <= kMostBytes;
        next = exact + number;
        return accepted([&] { result = made + bytes_of<char>(number); });
      }
      if (kind == 1) {
        valid = number >= 0;
        next = product(exact, number);
        return accepted([&] { result = made * number; });
      }
      const size_t unit = size_t{1} << source.below(12);
      next =
          (exact + static_cast<Wide>(unit) - 1) / static_cast<Wide>(unit) * static_cast<Wide>(unit);
      return accepted([&] { result = made.rounded_up(unit); });
    }();
    require(taken == (valid && next <= kMostBytes), "a ByteCount refuses what fits, or takes more");
    if (!taken) continue;
    require(static_cast<Wide>(result.value()) == next, "a ByteCount is not the exact sum");
    made = result;
    exact = next;
  }
}

void check_extent_arithmetic(ByteSource& source) {
  const int64_t a = source.extent(), b = source.extent();
  const Wide wa = a, wb = b;
  compare("a + b", wa + wb, fits_int64(wa + wb),
          [&] { return Wide{(Dim(a) + Dim(b)).constant()}; });
  compare("a - b", wa - wb, fits_int64(wa - wb),
          [&] { return Wide{(Dim(a) - Dim(b)).constant()}; });
  compare("a * b", wa * wb, fits_int64(wa * wb),
          [&] { return Wide{(Dim(a) * Dim(b)).constant()}; });
  compare("checked_add", wa + wb, fits_int64(wa + wb),
          [&] { return Wide{checked_add(a, b).constant()}; });
  compare("checked_mul", wa * wb, fits_int64(wa * wb),
          [&] { return Wide{checked_mul(a, b).constant()}; });
  if (b != 0) {
    const Wide quotient = wa / wb, remainder = wa % wb;
    const Wide down = quotient - (remainder != 0 && (remainder < 0) != (wb < 0));
    const Wide up = quotient + (remainder != 0 && (remainder < 0) == (wb < 0));
    compare("floor_div", down, fits_int64(down),
            [&] { return Wide{floor_div(Dim(a), Dim(b)).constant()}; });
    compare("ceil_div", up, false, [&] { return Wide{ceil_div(Dim(a), Dim(b)).constant()}; });
  } else {
    accepted([&] { floor_div(Dim(a), Dim(b)); });
    accepted([&] { ceil_div(Dim(a), Dim(b)); });
  }
  compare("min", std::min(wa, wb), true, [&] { return Wide{min(Dim(a), Dim(b)).constant()}; });
  compare("max", std::max(wa, wb), true, [&] { return Wide{max(Dim(a), Dim(b)).constant()}; });
  // (n + a) * (m - b) at numbers, against the same expression with symbols, evaluated.
  const int64_t n = source.extent(), m = source.extent();
  accepted([&] {
    const Dim expression = (Dim::symbol("n") + Dim(a)) * (Dim::symbol("m") - Dim(b));
    const std::optional<int64_t> value = expression.evaluate({{"n", n}, {"m", m}});
    const Wide exact = product(saturated(Wide{n} + wa), saturated(Wide{m} - wb));
    if (value) require(*value == exact, "an expression of extents gives another number");
    require(Dim::parse(expression.str()) == expression,
            "an expression does not read as it prints: " + expression.str());
  });
}

void check_layout(ByteSource& source) {
  std::vector<BufferLifetime> buffers;
  for (size_t count = source.below(14); count > 0; --count) {
    const int64_t bytes = source.extent();
    const int first = static_cast<int>(source.below(8));
    const int last = first + static_cast<int>(source.below(5));
    if (bytes < 0 || bytes > kMostBytes) continue;
    buffers.push_back({bytes_of<char>(bytes), first, last});
  }
  Wide sum = 0;
  for (const BufferLifetime& buffer : buffers) sum += (Wide{buffer.bytes.value()} + 63) / 64 * 64;
  MemoryLayout layout;
  const bool placed = accepted([&] { layout = plan_memory(buffers); });
  require(placed || sum > kMostBytes, "plan_memory refuses what fits");
  if (!placed) return;
  require(layout.offsets.size() == buffers.size(), "plan_memory leaves buffers out");
  Wide bound = 0;
  for (int step = 0; step < 16; ++step) {
    Wide alive = 0;
    for (const BufferLifetime& buffer : buffers) {
      const bool lives = buffer.first_step <= step && step <= buffer.last_step;
      if (lives) alive += (Wide{buffer.bytes.value()} + 63) / 64 * 64;
    }
    bound = std::max(bound, alive);
  }
  require(Wide{layout.lower_bound} == bound, "lower_bound is not what lives at the worst step");
  require(layout.total_bytes >= layout.lower_bound, "an arena is smaller than what lives in it");
  require(layout.total_bytes <= static_cast<size_t>(kMostBytes), "an arena is too large");
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (buffers[i].bytes == ByteCount()) continue;
    const Wide begin = layout.offsets[i], end = begin + buffers[i].bytes.value();
    require(layout.offsets[i] % kArenaAlignment == 0, "an offset is not aligned");
    require(end <= Wide{layout.total_bytes}, "a buffer reaches out of the arena");
    for (size_t j = 0; j < i; ++j) {
      const bool together = buffers[i].first_step <= buffers[j].last_step &&
                            buffers[j].first_step <= buffers[i].last_step;
      const Wide other = layout.offsets[j], other_end = other + buffers[j].bytes.value();
      require(!together || begin >= other_end || other >= end, "buffers lie over each other");
    }
  }
}

// Graphs whose extents are all symbols. The first ones are planned up to the end of what can be
// addressed: their kernels keep nothing that grows with an extent.
constexpr size_t kWithoutTables = 7;
constexpr uint64_t kMostWithTables = uint64_t{16} << 20;
constexpr const char* kGraphs[] = {
    "graph g (float32[n, m] x) => (y) {\n  y = Relu(x)\n}",
    "graph g (float32[n, k] x, float32[k, m] w) => (y) {\n  y = MatMul(x, w)\n}",
    "graph g (float32[n, 1] x, float32[1, m] y) => (z, s) {\n  a = Add(x, y)\n  z = Mul(a, a)\n"
    "  s = ReduceSum<keepdims = 0>(z)\n}",
    "graph g (float64[n, m, k] x) => (y) {\n  t = Transpose<perm = [2, 0, 1]>(x)\n"
    "  y = Softmax(t)\n}",
    "graph g (float16[n, m] x, float16[n, k] y) => (z, a, b) {\n  z = Concat<axis = 1>(x, y)\n"
    "  a = Transpose(z)\n  b = Concat<axis = 0>(a, a)\n}",
    "graph g (float32[n, 2, m, 8] q, float32[n, 2, k, 8] c) => (y) {\n"
    "  t = Transpose<perm = [0, 1, 3, 2]>(c)\n  s = MatMul(q, t)\n  p = Softmax(s)\n"
    "  y = MatMul(p, c)\n}",
    "graph g (float32[n, m] x) => (y, s) {\n"
    "  t = Shape(x)\n  p = ReduceProd<keepdims = 1>(t, int64[1] {0})\n  y = Expand(x, t)\n"
    "  s = Reshape(x, p)\n}",
    "graph g (float32[n, 4, m, k] x, float32[8, 4, 3, 3] w) => (y) {\n"
    "  y = Conv<pads = [1, 1, 1, 1]>(x, w)\n}",
    "graph g (float32[n, 4, m, k] x) => (y) {\n"
    "  y = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(x)\n}",
    "graph g (float32[n, m] x, int64[k] i) => (y, z) {\n  y = Gather<axis = 0>(x, i)\n"
    "  z = Gather<axis = 1>(x, i)\n}",
    "graph g (float32[n, m] x) => (y, z) {\n  y, i = TopK(x, int64[1] {1})\n"
    "  z = LayerNormalization(x, float32[1] {1})\n}",
    "graph g (float32[n, m] x, float32[k, m] h) => (y, z) {\n  u = Unsqueeze(x, int64[1] {1})\n"
    "  v = Sub(u, h)\n  y = ReduceMax<keepdims = 0>(v, int64[1] {2})\n  z = CumSum(v, int64 0)\n}",
};

void check_plans(ByteSource& source) {
  static const std::vector<Graph> graphs = [] {
    std::vector<Graph> parsed;
    for (const char* text : kGraphs) parsed.push_back(parse_graph(text));
    return parsed;
  }();
  const size_t which = source.below(graphs.size());
  const Graph& graph = graphs[which];
  const uint64_t limit = which < kWithoutTables ? uint64_t{kMostBytes} : kMostWithTables;
  const std::map<std::string, int64_t> bindings{
      {"n", source.extent()}, {"m", source.extent()}, {"k", source.extent()}};
  std::vector<Dims> dims;
  for (const GraphInput& input : graph.inputs()) {
    Dims shape;
    for (const Dim& extent : graph.value(input.value).shape) {
      shape.push_back(*extent.evaluate(bindings));
    }
    dims.push_back(std::move(shape));
  }
  std::shared_ptr<const ExecutionPlan> plan;
  const bool planned = accepted([&] {
    plan = make_execution_plan(graph, dims, cpu_kernels(),
                               {.sizes_only = true, .memory_limit = limit});
  });
  if (!planned) return;
  verify_plan(graph, dims, *plan);
  Wide outputs = 0;
  for (const TensorSpec& spec : plan->outputs) {
    outputs += product(Extents(spec.dims).elements, size_of(spec.dtype));
  }
  require(outputs == Wide{plan->forward_output_bytes}, "bytes of outputs are not their sum");
  require(plan->arena_bytes >= plan->arena_lower_bound,
          "an arena is smaller than what lives in it");
  require(plan->total_bytes() <= 5 * static_cast<size_t>(kMostBytes), "a plan is too large");
}

}  // namespace

void run_sizes(Bytes input) {
  ByteSource source(input);
  constexpr void (*kChecks[])(ByteSource&) = {check_counts, check_sums, check_extent_arithmetic,
                                              check_layout, check_plans};
  // A few: what a long input finds, a short one finds sooner.
  for (int i = 0; i < 3 && !source.empty(); ++i) {
    kChecks[source.below(std::size(kChecks))](source);
  }
}

}  // namespace ortrain::fuzz
