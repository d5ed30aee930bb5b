// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <memory>
#include <utility>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/cpu/gemm.h"
#include "ortrain/cpu/threads.h"
#include "ortrain/ops/conv/conv_kernels.h"

namespace ortrain::cpu {
namespace {

using ops::ConvProblem;
using ops::WindowAxis;

// The windows of one image and group as the columns of a matrix, then GEMM. The columns
// are made for a band of output rows at a time, so that the matrix stays small.

constexpr int64_t kColumnElements = int64_t{1} << 18;

// Rows of the output, over depth and height, that one band covers.
int64_t band_rows(const ConvProblem& p) {
  // One after the other: the elements of a row of long windows may leave int64.
  const int64_t height = std::max<int64_t>(1, p.group_in() * p.kernel_size());
  const int64_t width = std::max<int64_t>(1, p.axes[2].out);
  return std::clamp<int64_t>(kColumnElements / height / width, 1, p.axes[0].out * p.axes[1].out);
}

// The windows are single elements in the order of the input: x is its own column matrix.
bool is_pointwise(const ConvProblem& p) {
  return std::all_of(p.axes.begin(), p.axes.end(), [](const WindowAxis& axis) {
    return axis.kernel == 1 && axis.stride == 1 && axis.pad_begin == 0 && axis.in == axis.out;
  });
}

// Walks the elements (row of the column matrix, place in x) of one band. Calls
// body(column address, x offset, count, x step, valid) for runs along the width; `valid` is false
// where the window lies in the padding.
template <typename Body>
void for_each_run(const ConvProblem& p, int64_t row_begin, int64_t rows, int64_t matrix_row,
                  Body&& body) {
  const WindowAxis &d = p.axes[0], &h = p.axes[1], &v = p.axes[2];
  const int64_t kw = matrix_row % v.kernel;
  const int64_t kh = matrix_row / v.kernel % h.kernel;
  const int64_t kd = matrix_row / (v.kernel * h.kernel) % d.kernel;
  const int64_t c = matrix_row / p.kernel_size();
  const int64_t shift = kw * v.dilation - v.pad_begin;
  const auto [first, last] = v.outputs_of(kw);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t od = (row_begin + r) / h.out, oh = (row_begin + r) % h.out;
    const int64_t id = d.start(od) + kd * d.dilation, ih = h.start(oh) + kh * h.dilation;
    const int64_t column = r * v.out;
    if (id < 0 || id >= d.in || ih < 0 || ih >= h.in) {
      body(column, int64_t{0}, v.out, int64_t{0}, false);
      continue;
    }
    const int64_t row = ((c * d.in + id) * h.in + ih) * v.in;
    body(column, int64_t{0}, first, int64_t{0}, false);
    body(column + first, row + shift + first * v.stride, last - first, v.stride, true);
    body(column + last, int64_t{0}, v.out - last, int64_t{0}, false);
  }
}

template <typename T, typename C>
void gather_columns(const ConvProblem& p, const T* x, int64_t row_begin, int64_t rows, C* columns) {
  const int64_t width = rows * p.axes[2].out;
  const int64_t height = p.group_in() * p.kernel_size();
  parallel_for(height, std::max<int64_t>(1, 16384 / std::max<int64_t>(1, width)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   C* out = columns + i * width;
                   for_each_run(
                       p, row_begin, rows, i,
                       [&](int64_t at, int64_t from, int64_t count, int64_t step, bool valid) {
                         if (!valid) {
                           std::fill_n(out + at, count, C(0));
                         } else if (step == 1) {
                           for (int64_t j = 0; j < count; ++j)
                             out[at + j] = static_cast<C>(x[from + j]);
                         } else {
                           for (int64_t j = 0; j < count; ++j)
                             out[at + j] = static_cast<C>(x[from + j * step]);
                         }
                       });
                 }
               });
}

// Adds the columns to the places they came from; channels are independent.
template <typename C>
void scatter_columns(const ConvProblem& p, const C* columns, int64_t row_begin, int64_t rows,
                     C* dx) {
  const int64_t width = rows * p.axes[2].out;
  const int64_t kernel = p.kernel_size();
  parallel_for(p.group_in(), std::max<int64_t>(1, 16384 / std::max<int64_t>(1, width * kernel)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin * kernel; i < end * kernel; ++i) {
                   const C* in = columns + i * width;
                   for_each_run(
                       p, row_begin, rows, i,
                       [&](int64_t at, int64_t to, int64_t count, int64_t step, bool valid) {
                         if (!valid) return;
                         for (int64_t j = 0; j < count; ++j) dx[to + j * step] += in[at + j];
                       });
                 }
               });
}

// Elements of the compute type that a run needs: columns, and widened copies for 16-bit types.
struct Im2colBuffers {
  int64_t columns = 0;
  int64_t weight = 0;
  int64_t x = 0;  // one image of one group
  int64_t y = 0;  // likewise
};

template <typename T>
Im2colBuffers im2col_buffers(const ConvNode& node) {
  const ConvProblem& p = node.problem;
  Im2colBuffers buffers;
  const auto aligned = [](int64_t n) { return (n + 15) / 16 * 16; };
  buffers.columns =
      aligned(count_elements(p.group_in(), p.kernel_size(), band_rows(p), p.axes[2].out));
  if (!std::is_same_v<T, ComputeType<T>>) {
    buffers.weight = aligned(p.w_numel());
    buffers.x = aligned(p.group_in() * p.in_size());
    buffers.y = aligned(p.group_out() * p.out_size());
  }
  return buffers;
}

// `from` itself when it has the compute type, otherwise its copy in `buffer`.
template <typename T, typename C>
const C* widened(const T* from, int64_t count, C* buffer) {
  if constexpr (std::is_same_v<T, C>) {
    return from;
  } else {
    parallel_for(count, 16384, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) buffer[i] = static_cast<C>(from[i]);
    });
    return buffer;
  }
}

// Where to compute a result: in place, or in `buffer` until `narrow` copies it.
template <typename T, typename C>
C* target(T* out, C* buffer) {
  if constexpr (std::is_same_v<T, C>) {
    return out;
  } else {
    return buffer;
  }
}

template <typename T, typename C>
void narrow_to(T* out, int64_t count, const C* buffer) {
  if constexpr (!std::is_same_v<T, C>) {
    parallel_for(count, 16384, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) out[i] = static_cast<T>(buffer[i]);
    });
  }
}

template <typename C>
void fill_channels(C* out, int64_t channels, int64_t size, const auto* bias) {
  for (int64_t c = 0; c < channels; ++c) {
    std::fill_n(out + c * size, size, bias ? static_cast<C>(bias[c]) : C(0));
  }
}

template <typename T>
class Im2col {
 public:
  using C = ComputeType<T>;

  explicit Im2col(ConvNode node)
      : node_(std::move(node)),
        p_(node_.problem),
        buffers_(im2col_buffers<T>(node_)),
        height_(p_.group_in() * p_.kernel_size()),
        rows_(p_.axes[0].out * p_.axes[1].out),
        band_(band_rows(p_)),
        pointwise_(is_pointwise(p_)) {}

  ByteCount workspace_bytes() const {
    return bytes_of<C>(buffers_.columns) + bytes_of<C>(buffers_.weight) + bytes_of<C>(buffers_.x) +
           bytes_of<C>(buffers_.y);
  }

  void run(const KernelArgs& args) const {
    const T* bias = node_.has_bias ? args.input<T>(2) : nullptr;
    C* workspace = static_cast<C*>(args.workspace);
    const T *a = args.input<T>(0), *b = args.input<T>(1);
    switch (node_.direction) {
      case Direction::kForward:
        return forward(a, b, bias, args.output<T>(0), workspace);
      case Direction::kInput:
        return input(a, b, bias, args.output<T>(0), workspace);
      case Direction::kWeight:
        return weight(a, b, args.output<T>(0), workspace);
    }
  }

 private:
  C* weight_buffer(C* workspace) const { return workspace + buffers_.columns; }
  C* x_buffer(C* workspace) const { return weight_buffer(workspace) + buffers_.weight; }
  C* y_buffer(C* workspace) const { return x_buffer(workspace) + buffers_.x; }
  int64_t group_weights() const { return p_.group_out() * height_; }

  // body(first row, rows, column matrix, its width) for every band of one image and group.
  template <typename Body>
  void for_each_band(Body&& body) const {
    for (int64_t row = 0; row < rows_; row += band_) {
      const int64_t count = std::min(band_, rows_ - row);
      body(row, count, count * p_.axes[2].out);
    }
  }

  template <typename Body>
  void for_each_image(Body&& body) const {
    for (int64_t n = 0; n < p_.batch; ++n) {
      for (int64_t g = 0; g < p_.groups; ++g) {
        body(g, (n * p_.groups + g) * p_.group_in() * p_.in_size(),
             (n * p_.groups + g) * p_.group_out() * p_.out_size());
      }
    }
  }

  void forward(const T* x, const T* w, const T* bias, T* y, C* workspace) const {
    const C* weights = widened(w, p_.w_numel(), weight_buffer(workspace));
    const int64_t out = p_.out_size();
    for_each_image([&](int64_t g, int64_t x_at, int64_t y_at) {
      C* result = target(y + y_at, y_buffer(workspace));
      fill_channels(result, p_.group_out(), out, bias ? bias + g * p_.group_out() : bias);
      for_each_band([&](int64_t row, int64_t count, int64_t width) {
        const C* columns = columns_of(x + x_at, row, count, workspace);
        const int64_t stride = columns == workspace ? width : out;
        gemm(false, false, p_.group_out(), width, height_, C(1), weights + g * group_weights(),
             height_, columns, stride, C(1), result + row * p_.axes[2].out, out);
      });
      narrow_to(y + y_at, p_.group_out() * out, result);
    });
  }

  void input(const T* dy, const T* w, const T* bias, T* dx, C* workspace) const {
    const C* weights = widened(w, p_.w_numel(), weight_buffer(workspace));
    const int64_t out = p_.out_size();
    for_each_image([&](int64_t g, int64_t x_at, int64_t y_at) {
      C* result = target(dx + x_at, x_buffer(workspace));
      fill_channels(result, p_.group_in(), p_.in_size(), bias ? bias + g * p_.group_in() : bias);
      const C* gradient = widened(dy + y_at, p_.group_out() * out, y_buffer(workspace));
      for_each_band([&](int64_t row, int64_t count, int64_t width) {
        gemm(true, false, height_, width, p_.group_out(), C(1), weights + g * group_weights(),
             height_, gradient + row * p_.axes[2].out, out, C(0), workspace, width);
        scatter_columns(p_, workspace, row, count, result);
      });
      narrow_to(dx + x_at, p_.group_in() * p_.in_size(), result);
    });
  }

  void weight(const T* dy, const T* x, T* dw, C* workspace) const {
    C* result = target(dw, weight_buffer(workspace));
    std::fill_n(result, p_.w_numel(), C(0));
    const int64_t out = p_.out_size();
    for_each_image([&](int64_t g, int64_t x_at, int64_t y_at) {
      const C* gradient = widened(dy + y_at, p_.group_out() * out, y_buffer(workspace));
      for_each_band([&](int64_t row, int64_t count, int64_t width) {
        const C* columns = columns_of(x + x_at, row, count, workspace);
        const int64_t stride = columns == workspace ? width : out;
        gemm(false, true, p_.group_out(), height_, width, C(1), gradient + row * p_.axes[2].out,
             out, columns, stride, C(1), result + g * group_weights(), height_);
      });
    });
    narrow_to(dw, p_.w_numel(), result);
  }

  const C* columns_of(const T* x, int64_t row, int64_t count, C* workspace) const {
    if constexpr (std::is_same_v<T, C>) {
      if (pointwise_) return x + row * p_.axes[2].out;
    }
    gather_columns(p_, x, row, count, workspace);
    return workspace;
  }

  ConvNode node_;
  const ConvProblem& p_;
  Im2colBuffers buffers_;
  int64_t height_;
  int64_t rows_;
  int64_t band_;
  bool pointwise_;
};

}  // namespace

std::optional<std::string> conv_im2col_refuses(const ConvNode& node) {
  const ConvProblem& p = node.problem;
  if (p.x_numel() == 0 || p.y_numel() == 0 || p.w_numel() == 0) return "an empty tensor";
  if (p.group_in() == 1 && p.group_out() == 1) return "a depthwise convolution makes thin matrices";
  return std::nullopt;
}

KernelFn conv_im2col(NodeSpec& spec, ConvNode node) {
  return dispatch_float(spec.input(0).dtype, [&]<typename T>(TypeTag<T>) -> KernelFn {
    auto im2col = std::make_shared<const Im2col<T>>(std::move(node));
    spec.request_workspace(im2col->workspace_bytes());
    return [im2col](const KernelArgs& args) { im2col->run(args); };
  });
}

}  // namespace ortrain::cpu
