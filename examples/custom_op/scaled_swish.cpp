// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// ScaledSwish, y = x sigmoid(beta x), as a library of operators: definition, gradient and kernels.
#include <ortrain/extension/extension.h>

#include <cmath>
#include <cstdint>

namespace ox = ortrain::extension;

namespace {

constexpr int64_t kGrain = 2048;  // elements that are worth a thread

template <typename T>
ox::Kernel swish_kernel(int64_t n, T beta) {
  return [n, beta](const ox::Run& run) {
    const T* x = run.input<T>(0);
    T* y = run.output<T>(0);
    ox::parallel_for(n, kGrain, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) y[i] = x[i] / (T{1} + std::exp(-beta * x[i]));
    });
  };
}

// dx = dy (s + beta x s (1 - s)) with s = sigmoid(beta x).
template <typename T>
ox::Kernel swish_grad_kernel(int64_t n, T beta) {
  return [n, beta](const ox::Run& run) {
    const T* x = run.input<T>(0);
    const T* dy = run.input<T>(1);
    T* dx = run.output<T>(0);
    ox::parallel_for(n, kGrain, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T s = T{1} / (T{1} + std::exp(-beta * x[i]));
        dx[i] = dy[i] * (s + beta * x[i] * s * (T{1} - s));
      }
    });
  };
}

void refuse_bad_beta(const ox::Node& node) {
  if (!std::isfinite(node.float_("beta"))) throw ox::Error("attribute 'beta' must be finite");
}

}  // namespace

ORTRAIN_EXTENSION(library) {
  library.add(ox::Operator("example", "ScaledSwish")
                  .summary("x sigmoid(beta x).")
                  .input("x", "T")
                  .output("y", "T")
                  .attribute("beta", 1.0)
                  .types("T", {ox::Type::f32, ox::Type::f64})
                  .inplace(0, 0)
                  .infer([](ox::Infer& node) {
                    refuse_bad_beta(node);
                    node.set_output(0, node.type(0), node.shape(0));
                  })
                  .gradient([](ox::Gradient& g) {
                    g.set_input_grad(
                        0, g.node("example", "ScaledSwishGrad", {g.input(0), g.output_grad(0)},
                                  {{"beta", g.float_("beta")}})[0]);
                  })
                  .kernel([](ox::Prepare& node) {
                    const int64_t n = node.input(0).numel();
                    return node.type(0) == ox::Type::f64
                               ? swish_kernel<double>(n, node.float_("beta"))
                               : swish_kernel<float>(n, static_cast<float>(node.float_("beta")));
                  }));

  // No gradient of its own: run.py registers one from Python.
  library.add(ox::Operator("example", "ScaledSwishGrad")
                  .summary("dy (s + beta x s (1 - s)) with s = sigmoid(beta x).")
                  .input("x", "T")
                  .input("dy", "T")
                  .output("dx", "T")
                  .attribute("beta", 1.0)
                  .types("T", {ox::Type::f32, ox::Type::f64})
                  .inplace(1, 0)
                  .infer([](ox::Infer& node) {
                    refuse_bad_beta(node);
                    if (node.shape(0) != node.shape(1)) {
                      throw ox::Error("x and dy differ in shape", kOrtrainErrorShape);
                    }
                    node.set_output(0, node.type(0), node.shape(0));
                  })
                  .kernel([](ox::Prepare& node) {
                    const int64_t n = node.input(0).numel();
                    return node.type(0) == ox::Type::f64
                               ? swish_grad_kernel<double>(n, node.float_("beta"))
                               : swish_grad_kernel<float>(n,
                                                          static_cast<float>(node.float_("beta")));
                  }));

  // Without a gradient either, and summed by hand: the rule in Python reads its attribute.
  library.add(ox::Operator("example", "ScaledSquare")
                  .summary("scale x^2.")
                  .input("x", "T")
                  .output("y", "T")
                  .attribute("scale", 1.0)
                  .types("T", {ox::Type::f32})
                  .infer([](ox::Infer& node) { node.set_output(0, node.type(0), node.shape(0)); })
                  .kernel([](ox::Prepare& node) {
                    const int64_t n = node.input(0).numel();
                    const auto scale = static_cast<float>(node.float_("scale"));
                    return [n, scale](const ox::Run& run) {
                      const float* x = run.input<float>(0);
                      float* y = run.output<float>(0);
                      ox::parallel_for(n, kGrain, [=](int64_t begin, int64_t end) {
                        for (int64_t i = begin; i < end; ++i) y[i] = scale * x[i] * x[i];
                      });
                    };
                  }));
}
