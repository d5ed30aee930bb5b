// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/gemm.h"

#include <algorithm>
#include <atomic>

#include "ortrain/base/error.h"
#include "ortrain/base/log.h"
#include "ortrain/gpu/gemm_padded.h"

namespace ortrain::gpu {
namespace {

std::atomic<bool> tf32_is_allowed{false};

// Whether D is one dense run of matrices, as one of all their rows.
bool d_is_one_matrix(const GemmProblem& p) {
  int64_t stride = p.m * p.ldd;
  for (size_t i = p.batch.size(); i-- > 0;) {
    if (p.batch[i].d != stride) return false;
    stride *= p.batch[i].count;
  }
  return true;
}

void check_problem(const GemmProblem& p) {
  check(p.m >= 0 && p.n >= 0 && p.k >= 0, "extents of a matrix product");
  check(p.lda >= (p.trans_a ? p.m : p.k) && p.ldb >= (p.trans_b ? p.k : p.n) && p.ldd >= p.n,
        "leading dimensions hold a row");
  const bool only_adds = p.alpha == 1.0 && p.bias == BiasAlong::none &&
                         p.activation == Activation::none && !p.bias_gradient;
  check(is_float(p.dtype) || (only_adds && p.beta == 0.0), "integers are multiplied only");
  check(!p.keep_aux || !p.activation_gradient, "aux is written or read");
  const bool c_as_d =
      p.c_row == p.ldd && p.c_column == 1 &&
      std::ranges::all_of(p.batch, [](const BatchAxis& axis) { return axis.c == axis.d; });
  check(!p.keep_sums ||
            (only_adds && (p.beta == 0.0 || (p.beta == 1.0 && c_as_d)) && is_float(p.dtype) &&
             p.ldd == std::max<int64_t>(p.n, 1) && d_is_one_matrix(p)),
        "sums are kept as they are, densely");
  check(p.activation != Activation::none || (!p.keep_aux && !p.activation_gradient),
        "aux belongs to an activation");
}

// Leading dimensions and C's strides filled in, the batch with as few axes as possible.
GemmProblem normalised(GemmProblem p) {
  if (p.lda == 0) p.lda = std::max<int64_t>(p.trans_a ? p.m : p.k, 1);
  if (p.ldb == 0) p.ldb = std::max<int64_t>(p.trans_b ? p.k : p.n, 1);
  if (p.ldd == 0) p.ldd = std::max<int64_t>(p.n, 1);
  const bool c_as_d = p.c_column < 0;
  if (c_as_d) {
    p.c_row = p.ldd;
    p.c_column = 1;
  }
  std::vector<BatchAxis> axes;
  for (BatchAxis axis : p.batch) {
    if (axis.count == 1) continue;
    if (p.beta == 0.0) axis.c = 0;
    if (p.beta != 0.0 && c_as_d) axis.c = axis.d;
    BatchAxis* outer = axes.empty() ? nullptr : &axes.back();
    const auto continues = [&](int64_t BatchAxis::* stride) {
      return outer->*stride == axis.*stride * axis.count;
    };
    if (outer != nullptr && continues(&BatchAxis::a) && continues(&BatchAxis::b) &&
        continues(&BatchAxis::c) && continues(&BatchAxis::d)) {
      axis.count *= outer->count;
      *outer = axis;
    } else {
      axes.push_back(axis);
    }
  }
  p.batch = std::move(axes);
  check_problem(p);
  return p;
}

// One way to do it all: a product, then passes over D for what it left out.
struct Way {
  GemmKernel kernel;
  bool activation_pass = false;
  bool sum_pass = false;
};

GemmProblem without_passes(GemmProblem p) {
  p.activation = Activation::none;
  p.keep_aux = p.activation_gradient = p.bias_gradient = false;
  return p;
}

std::vector<Way> ways_of(const GemmProblem& p, bool in_parts) {
  const bool activation = p.activation != Activation::none;
  std::vector<Way> ways;
  std::string why;
  if (padding_pays(p)) {
    if (auto kernel = padded_gemm(without_passes(p), kMostPaddedBytes, why)) {
      ways.push_back({*kernel, activation, p.bias_gradient});
      return ways;
    }
  }
  if (!in_parts && (activation || p.bias_gradient)) {
    if (auto kernel = library_gemm(p, why)) ways.push_back({*kernel});
  }
  if (ways.empty()) {
    if (auto kernel = library_gemm(without_passes(p), why)) {
      ways.push_back({*kernel, activation, p.bias_gradient});
    }
  }
  if (ways.empty() && log_enabled("dispatch")) {
    log_line("dispatch", str("matrix product [", p.m, ", ", p.n, ", ", p.k, "] of ",
                             name_of(p.dtype), " by tiles: ", why));
  }
  ways.push_back({tiled_gemm(without_passes(p)), activation, p.bias_gradient});
  return ways;
}

int64_t count_of(const std::vector<BatchAxis>& batch) {
  int64_t count = 1;
  for (const BatchAxis& axis : batch) count *= axis.count;
  return count;
}

}  // namespace

struct Gemm::Plan {
  GemmProblem problem;           // what the ways do
  std::vector<BatchAxis> outer;  // axes that the ways do not know: one run for each
  int64_t outer_count = 1;
  GemmProblem whole;  // D with all its rows, for the passes
  bool empty = false;
  std::vector<Way> ways;

  explicit Plan(const GemmProblem& wanted) : problem(normalised(wanted)) {
    whole = problem;
    whole.m *= count_of(problem.batch);
    empty = whole.m == 0 || problem.n == 0;
    const bool has_passes = problem.activation != Activation::none || problem.bias_gradient;
    check(!has_passes || d_is_one_matrix(problem), "D of one piece where more follows the product");
    whole.batch.clear();
    while (problem.batch.size() > kMaxBatchAxes) {
      outer.push_back(problem.batch.front());
      problem.batch.erase(problem.batch.begin());
    }
    outer_count = count_of(outer);
    if (!empty) ways = ways_of(problem, !outer.empty());
  }

  // The operands of one member of the outer axes.
  GemmOperands part(const GemmOperands& operands, int64_t member) const {
    GemmOperands result = operands;
    const auto size = static_cast<int64_t>(size_of(problem.dtype));
    const auto result_size = static_cast<int64_t>(size_of(problem.result_type()));
    for (size_t i = outer.size(); i-- > 0;) {
      const int64_t at = member % outer[i].count;
      member /= outer[i].count;
      result.a = moved(result.a, at * outer[i].a * size);
      result.b = moved(result.b, at * outer[i].b * size);
      result.c = moved(result.c, at * outer[i].c * result_size);
      result.d = moved(result.d, at * outer[i].d * result_size);
    }
    return result;
  }
};

Gemm::Gemm(const GemmProblem& problem) : plan_(std::make_shared<const Plan>(problem)) {}

ByteCount Gemm::workspace_bytes() const {
  ByteCount bytes;
  if (plan_->whole.bias_gradient) bytes = column_sum_workspace(plan_->whole);
  for (const Way& way : plan_->ways) bytes = std::max(bytes, way.kernel.workspace_bytes);
  return bytes;
}

std::string_view Gemm::algorithm() const {
  return plan_->ways.empty() ? "nothing" : plan_->ways.front().kernel.name;
}

void Gemm::run(const GemmOperands& operands, void* workspace, void* stream) const {
  const Plan& plan = *plan_;
  if (plan.empty) {
    if (plan.whole.bias_gradient) sum_columns(plan.whole, operands, workspace, stream);
    return;
  }
  for (int64_t member = 0; member < plan.outer_count; ++member) {
    const GemmOperands part = plan.part(operands, member);
    const auto done = std::ranges::find_if(
        plan.ways, [&](const Way& way) { return way.kernel.run(part, workspace, stream); });
    check(done != plan.ways.end(), "the last way takes everything");
    if (member + 1 < plan.outer_count) continue;
    if (done->activation_pass) apply_activation(plan.whole, operands, stream);
    if (done->sum_pass) sum_columns(plan.whole, operands, workspace, stream);
  }
}

void set_allow_tf32(bool allow) { tf32_is_allowed = allow; }
bool allow_tf32() { return tf32_is_allowed; }

}  // namespace ortrain::gpu
