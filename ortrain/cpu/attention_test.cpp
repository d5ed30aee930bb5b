// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/attention.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "ortrain/base/philox.h"
#include "ortrain/cpu/simd/for_each_target.h"

namespace ortrain::cpu {
namespace {

enum class MaskForm { kNone, kKeyPadding, kBoolFull, kHeadBias, kRowBias };

struct Case {
  AttentionShape shape;
  AttentionOptions options;
  MaskForm mask = MaskForm::kNone;
  bool sequence_first = false;  // [b, s, h, d] instead of [b, h, s, d]
};

template <class T>
std::vector<T> random_values(int64_t n, uint32_t seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<double> distribution(0, 1);
  std::vector<T> values(n);
  for (T& v : values) v = static_cast<T>(distribution(engine));
  return values;
}

AttentionStrides strides(int64_t heads, int64_t rows, int64_t dim, bool sequence_first) {
  return sequence_first ? AttentionStrides{rows * heads * dim, dim, heads * dim}
                        : AttentionStrides{heads * rows * dim, rows * dim, dim};
}

// Operands and results of one case in T (float or double); `lse` has the same type.
template <class T>
struct Problem {
  std::vector<T> q, k, v, dout, out, lse, dq, dk, dv, mask_values, dmask;
  std::vector<char> mask_bools, workspace;
  AttentionForward forward;
  AttentionBackward backward;

  explicit Problem(const Case& c) {
    const AttentionShape& s = c.shape;
    auto narrowed = [](int64_t n, uint32_t seed) {
      const auto f = random_values<float>(n, seed);
      return std::vector<T>(f.begin(), f.end());
    };
    q = narrowed(s.batch * s.heads * s.queries * s.head_dim, 1);
    k = narrowed(s.batch * s.kv_heads * s.keys * s.head_dim, 2);
    v = narrowed(s.batch * s.kv_heads * s.keys * s.value_dim, 3);
    dout = narrowed(s.batch * s.heads * s.queries * s.value_dim, 4);
    out.assign(dout.size(), T(77));
    lse.assign(s.batch * s.heads * s.queries, T(77));
    dq.assign(q.size(), T(77));
    dk.assign(k.size(), T(77));
    dv.assign(v.size(), T(77));

    AttentionMask mask;
    const int64_t keys = s.keys;
    const int64_t rows = s.queries;
    switch (c.mask) {
      case MaskForm::kNone:
        break;
      case MaskForm::kKeyPadding:
        for (int64_t i = 0; i < s.batch * keys; ++i) mask_bools.push_back(i % 5 != 1);
        mask = {AttentionMask::Kind::kBool, mask_bools.data(), keys, 0, 0, 1};
        break;
      case MaskForm::kBoolFull:  // row 2 sees nothing
        for (int64_t i = 0; i < s.batch * rows * keys; ++i) {
          mask_bools.push_back(i / keys % rows != 2 && i % 7 != 3);
        }
        mask = {AttentionMask::Kind::kBool, mask_bools.data(), rows * keys, 0, keys, 1};
        break;
      case MaskForm::kHeadBias:  // [1, h, s, t], row 1 sees nothing
        mask_values = narrowed(s.heads * rows * keys, 5);
        for (int64_t i = 0; i < s.heads * rows * keys; ++i) {
          if (i / keys % rows == 1) mask_values[i] = -std::numeric_limits<T>::infinity();
        }
        mask = {AttentionMask::Kind::kFloat, mask_values.data(), 0, rows * keys, keys, 1};
        break;
      case MaskForm::kRowBias:  // [b, 1, s, 1]
        mask_values = narrowed(s.batch * rows, 5);
        mask = {AttentionMask::Kind::kFloat, mask_values.data(), rows, 0, 1, 0};
        break;
    }
    dmask.assign(mask_values.size(), T(77));
    const bool sf = c.sequence_first;
    forward = {s,
               c.options,
               sizeof(T) == 4 ? Storage::kF32 : Storage::kF64,
               q.data(),
               k.data(),
               v.data(),
               strides(s.heads, s.queries, s.head_dim, sf),
               strides(s.kv_heads, s.keys, s.head_dim, sf),
               strides(s.kv_heads, s.keys, s.value_dim, sf),
               mask,
               out.data(),
               strides(s.heads, s.queries, s.value_dim, sf),
               {s.heads * s.queries, s.queries, s.keys},
               lse.data()};
    const bool wants = !mask_values.empty();
    workspace.resize(attention_backward_workspace(s, mask, wants));
    backward = {forward,
                dout.data(),
                forward.out_strides,
                dq.data(),
                dk.data(),
                dv.data(),
                forward.q_strides,
                forward.k_strides,
                forward.v_strides,
                wants ? dmask.data() : nullptr,
                static_cast<int64_t>(dmask.size()),
                workspace.data()};
  }
};

void expect_near(const std::vector<float>& got, const std::vector<double>& want, const char* name) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::isinf(want[i])) {
      ASSERT_EQ(got[i], want[i]) << name << " " << i;
    } else {
      ASSERT_NEAR(got[i], want[i], 4e-5 * (1 + std::abs(want[i]))) << name << " " << i;
    }
  }
}

std::vector<Case> cases() {
  std::vector<Case> list;
  auto add = [&](AttentionShape shape, AttentionOptions options, MaskForm mask, bool sf = false) {
    list.push_back({shape, options, mask, sf});
  };
  add({1, 1, 1, 1, 1, 1, 1}, {}, MaskForm::kNone);
  add({2, 3, 3, 7, 9, 8, 8}, {.scale = 0.3}, MaskForm::kNone);
  add({2, 4, 2, 17, 33, 5, 9}, {.scale = 0.5}, MaskForm::kKeyPadding, true);
  add({2, 2, 1, 9, 17, 8, 8}, {.scale = 0.5}, MaskForm::kBoolFull);
  add({2, 2, 2, 9, 17, 8, 8}, {.scale = 0.5}, MaskForm::kHeadBias, true);
  add({3, 2, 2, 9, 17, 8, 8}, {.scale = 0.5}, MaskForm::kRowBias);
  add({1, 2, 2, 100, 300, 16, 24}, {.scale = 0.25, .causal = true}, MaskForm::kNone);
  add({1, 2, 2, 300, 100, 16, 16}, {.scale = 0.25, .causal = true}, MaskForm::kNone, true);
  add({1, 1, 1, 150, 600, 32, 32}, {.scale = 0.2, .dropout = 0.2, .seed = 9, .stream = 3},
      MaskForm::kHeadBias);
  add({2, 2, 1, 90, 90, 40, 40},
      {.scale = 0.2, .causal = true, .dropout = 0.5, .seed = 1ull << 40, .stream = 1},
      MaskForm::kKeyPadding, true);
  return list;
}

TEST(Attention, BlockedEqualsReference) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(::testing::Message() << c.shape.batch << " " << c.shape.heads << " "
                                      << c.shape.queries << " " << c.shape.keys);
    Problem<double> want(c);
    attention_reference(want.forward);
    attention_reference(want.backward);
    for_each_target([&] {
      Problem<float> got(c);
      attention_blocked(got.forward);
      expect_near(got.out, want.out, "out");
      expect_near(got.lse, want.lse, "lse");
      attention_blocked(got.backward);
      expect_near(got.dq, want.dq, "dq");
      expect_near(got.dk, want.dk, "dk");
      expect_near(got.dv, want.dv, "dv");
      expect_near(got.dmask, want.dmask, "dmask");
    });
  }
}

TEST(Attention, FloatReferenceEqualsDoubleReference) {
  for (const Case& c : cases()) {
    Problem<double> want(c);
    attention_reference(want.forward);
    attention_reference(want.backward);
    Problem<float> got(c);
    attention_reference(got.forward);
    attention_reference(got.backward);
    expect_near(got.out, want.out, "out");
    expect_near(got.dk, want.dk, "dk");
    expect_near(got.dmask, want.dmask, "dmask");
  }
}

// Values from the formula, gradients by central differences.
TEST(Attention, ReferenceGradients) {
  for (const Case& c : cases()) {
    if (c.shape.queries > 20) continue;
    Problem<double> p(c);
    attention_reference(p.forward);
    attention_reference(p.backward);
    auto loss = [&] {
      attention_reference(p.forward);
      double sum = 0;
      for (size_t i = 0; i < p.out.size(); ++i) sum += p.out[i] * p.dout[i];
      return sum;
    };
    auto check = [&](std::vector<double>& x, const std::vector<double>& dx, const char* name) {
      for (size_t i = 0; i < x.size(); i += 1 + x.size() / 50) {
        const double kept = x[i];
        if (std::isinf(kept)) {
          EXPECT_EQ(dx[i], 0.0);
          continue;
        }
        constexpr double kStep = 1e-5;
        x[i] = kept + kStep;
        const double above = loss();
        x[i] = kept - kStep;
        const double below = loss();
        x[i] = kept;
        ASSERT_NEAR(dx[i], (above - below) / (2 * kStep), 1e-7) << name << " " << i;
      }
    };
    check(p.q, p.dq, "dq");
    check(p.k, p.dk, "dk");
    check(p.v, p.dv, "dv");
    check(p.mask_values, p.dmask, "dmask");
  }
}

TEST(Attention, ReferenceFollowsTheFormulaWithDropout) {
  const Case c{{1, 2, 2, 3, 4, 2, 1}, {.scale = 0.5, .dropout = 0.4, .seed = 5, .stream = 2}};
  Problem<double> p(c);
  attention_reference(p.forward);
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t i = 0; i < 3; ++i) {
      double sum = 0, out = 0;
      for (int64_t j = 0; j < 4; ++j) {
        const double dot = p.q[(h * 3 + i) * 2] * p.k[(h * 4 + j) * 2] +
                           p.q[(h * 3 + i) * 2 + 1] * p.k[(h * 4 + j) * 2 + 1];
        const double e = std::exp(0.5 * dot);
        sum += e;
        const bool keep = philox_half(5, 2, (h * 3 + i) * 8 + j) >= half_threshold(0.4);
        if (keep) out += e * p.v[h * 4 + j] * half_scale(0.4);
      }
      EXPECT_NEAR(p.out[h * 3 + i], out / sum, 1e-12);
      EXPECT_NEAR(p.lse[h * 3 + i], std::log(sum), 1e-12);
    }
  }
}

TEST(Attention, RowsThatSeeNothingAreZero) {
  for (const MaskForm mask : {MaskForm::kBoolFull, MaskForm::kHeadBias}) {
    const Case c{{1, 1, 1, 4, 6, 8, 8}, {}, mask};
    const int64_t dead = mask == MaskForm::kBoolFull ? 2 : 1;
    Problem<float> p(c);
    attention_blocked(p.forward);
    attention_blocked(p.backward);
    for (int64_t d = 0; d < 8; ++d) {
      EXPECT_EQ(p.out[dead * 8 + d], 0.0f);
      EXPECT_EQ(p.dq[dead * 8 + d], 0.0f);
    }
    for (float x : p.dk) EXPECT_TRUE(std::isfinite(x));
  }
}

TEST(Attention, NoKeysGiveZeros) {
  const Case c{{1, 2, 2, 3, 0, 8, 8}, {}};
  Problem<float> p(c);
  attention_blocked(p.forward);
  attention_blocked(p.backward);
  for (float x : p.out) EXPECT_EQ(x, 0.0f);
  for (float x : p.dq) EXPECT_EQ(x, 0.0f);
}

TEST(Attention, NanReachesTheResult) {
  Problem<float> p(Case{{1, 1, 1, 3, 5, 8, 8}, {}});
  p.q[0] = std::numeric_limits<float>::quiet_NaN();
  attention_blocked(p.forward);
  EXPECT_TRUE(std::isnan(p.out[0]));
  EXPECT_FALSE(std::isnan(p.out[8]));
}

TEST(Attention, ResultDoesNotDependOnThreads) {
  const Case c{{1, 2, 2, 300, 700, 16, 16},
               {.scale = 0.2, .causal = false, .dropout = 0.1},
               MaskForm::kHeadBias};
  const int before = omp_get_max_threads();
  omp_set_num_threads(1);
  Problem<float> want(c);
  attention_blocked(want.forward);
  attention_blocked(want.backward);
  EXPECT_GT(want.workspace.size(), 0u);
  for (int threads : {2, 3}) {
    omp_set_num_threads(threads);
    Problem<float> got(c);
    attention_blocked(got.forward);
    attention_blocked(got.backward);
    EXPECT_EQ(got.out, want.out);
    EXPECT_EQ(got.dq, want.dq);
    EXPECT_EQ(got.dk, want.dk);
    EXPECT_EQ(got.dmask, want.dmask);
  }
  omp_set_num_threads(before);
}

TEST(Attention, SixteenBitStorage) {
  for (const Storage storage : {Storage::kBF16, Storage::kF16}) {
    const Case c{{2, 2, 1, 33, 40, 24, 24}, {.scale = 0.2, .causal = true}, MaskForm::kRowBias};
    Problem<float> wide(c);
    auto narrowed = [&](std::vector<float>& values) {
      std::vector<uint16_t> bits(values.size());
      const int64_t n = static_cast<int64_t>(values.size());
      narrow(storage, values.data(), bits.data(), n);
      widen(storage, bits.data(), values.data(), n);
      return bits;
    };
    auto q = narrowed(wide.q), k = narrowed(wide.k), v = narrowed(wide.v);
    auto mask = narrowed(wide.mask_values), dout = narrowed(wide.dout);
    std::vector<uint16_t> out(wide.out.size()), dq(q.size()), dk(k.size()), dv(v.size());
    std::vector<float> dmask(mask.size());
    attention_blocked(wide.forward);
    attention_blocked(wide.backward);

    Problem<float> lse_holder(c);
    AttentionBackward g = wide.backward;
    g.forward.storage = storage;
    g.forward.q = q.data(), g.forward.k = k.data(), g.forward.v = v.data();
    g.forward.mask.data = mask.data();
    g.forward.out = out.data();
    g.forward.logsumexp = lse_holder.lse.data();
    g.dout = dout.data();
    g.dq = dq.data(), g.dk = dk.data(), g.dv = dv.data(), g.dmask = dmask.data();
    for (const bool reference : {false, true}) {
      if (reference) {
        attention_reference(g.forward);
        attention_reference(g);
      } else {
        attention_blocked(g.forward);
        attention_blocked(g);
      }
      auto expect_close = [&](const std::vector<uint16_t>& bits, const std::vector<float>& want) {
        std::vector<float> got(bits.size());
        widen(storage, bits.data(), got.data(), static_cast<int64_t>(bits.size()));
        for (size_t i = 0; i < got.size(); ++i) {
          ASSERT_NEAR(got[i], want[i], 0.03 * (1 + std::abs(want[i])));
        }
      };
      expect_close(out, wide.out);
      expect_close(dq, wide.dq);
      expect_close(dk, wide.dk);
      expect_close(dv, wide.dv);
      for (size_t i = 0; i < dmask.size(); ++i) ASSERT_NEAR(dmask[i], wide.dmask[i], 0.05);
    }
  }
}

}  // namespace
}  // namespace ortrain::cpu
