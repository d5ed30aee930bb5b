// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <vector>

#include "ortrain/gpu/gemm.h"
#include "ortrain/ops/conv/conv_columns.cuh"
#include "ortrain/ops/conv/conv_cudnn.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

using ops::ConvProblem;

std::atomic<int64_t> most_column_bytes{int64_t{256} << 20};

bool is_pointwise(const ConvProblem& p) {
  return p.kernel_size() == 1 && std::ranges::all_of(p.axes, [](const ops::WindowAxis& axis) {
           return axis.stride == 1 && axis.pad_begin == 0 && axis.in == axis.out;
         });
}
bool is_depthwise(const ConvProblem& p) { return p.group_in() == 1 && p.in_channels > 1; }

// The product of one part of the work, by its extents: parts differ in at most two of them.
class Products {
 public:
  template <class Make>
  const Gemm& of(int64_t images, int64_t extent, const Make& make) {
    for (const Made& made : made_) {
      if (made.images == images && made.extent == extent) return made.gemm;
    }
    made_.push_back({images, extent, Gemm(make())});
    bytes_ = std::max(bytes_, made_.back().gemm.workspace_bytes());
    return made_.back().gemm;
  }
  ByteCount workspace_bytes() const { return bytes_.rounded_up(64); }

 private:
  struct Made {
    int64_t images, extent;
    Gemm gemm;
  };
  std::vector<Made> made_;
  ByteCount bytes_;
};

// Some images, all of their outputs or, of one image, some.
struct Part {
  int64_t image, images, first, extent;
  Gemm gemm;
};

// Cuts `batch` images with `extent` units of `unit_bytes` each; calls make(images, extent).
template <class Make>
std::vector<Part> parts_of(int64_t batch, int64_t extent, int64_t unit_bytes, Products& products,
                           const Make& make) {
  std::vector<Part> parts;
  if (extent == 0) return parts;
  const int64_t most_units =
      std::max<int64_t>(most_column_bytes / std::max<int64_t>(unit_bytes, 1), 1);
  const int64_t units = std::min(extent, most_units);
  const int64_t images = std::max<int64_t>(most_units / extent, 1);
  for (int64_t image = 0; image < batch; image += images) {
    const int64_t now = std::min(images, batch - image);
    for (int64_t first = 0; first < extent; first += units) {
      const int64_t length = std::min(units, extent - first);
      parts.push_back(
          {image, now, first, length, products.of(now, length, [&] { return make(now, length); })});
    }
  }
  return parts;
}

LaunchShape column_shape(int64_t items_across, int64_t rows) {
  LaunchShape shape = items(items_across);
  shape.blocks_y = static_cast<unsigned>(std::clamp<int64_t>(rows / 8, 1, 1024));
  return shape;
}

// --- y [M, positions] = w [M, K] columns [K, positions], per image and group

template <class T>
KernelFn forward_by_columns(NodeSpec& spec, const ConvProblem& p, bool has_bias) {
  const int64_t rows = p.in_channels * p.kernel_size(), depth = p.group_in() * p.kernel_size();
  const int64_t out = p.out_size();
  const bool pointwise = is_pointwise(p);
  Products products;
  const auto product = [&](int64_t images, int64_t positions) {
    // Channels of the input are the columns where windows have one element.
    const int64_t ld = pointwise ? out : positions;
    GemmProblem g{.dtype = spec.input(0).dtype, .m = p.group_out(), .n = positions, .k = depth};
    g.ldb = ld;
    g.ldd = out;
    g.beta = has_bias ? 1.0 : 0.0;
    g.c_row = 1;
    g.c_column = 0;
    g.batch = {{images, 0, rows * ld, 0, p.out_channels * out},
               {p.groups, p.group_out() * depth, depth * ld, p.group_out(), p.group_out() * out}};
    return g;
  };
  const std::vector<Part> parts = parts_of(
      p.batch, out, pointwise ? 0 : rows * static_cast<int64_t>(sizeof(T)), products, product);
  ByteCount column_bytes;
  for (const Part& part : parts) {
    if (pointwise) break;
    column_bytes = std::max(column_bytes, bytes_of<T>(part.images, part.extent, rows));
  }
  spec.request_workspace(products.workspace_bytes() + column_bytes);
  return [parts, pointwise, rows, has_bias, e = ConvExtents(p),
          at = products.workspace_bytes().value()](const KernelArgs& args) {
    const T* x = args.input<T>(0);
    T* y = args.output<T>(0);
    T* columns = reinterpret_cast<T*>(static_cast<char*>(args.workspace) + at);
    for (const Part& part : parts) {
      const T* images = x + part.image * e.in_channels * e.in_size;
      if (!pointwise) {
        launch(windows_to_columns<T>, column_shape(part.images * part.extent, rows), args.stream, e,
               part.images, part.first, part.extent, ColumnStrides{part.extent, rows * part.extent},
               images, columns);
      }
      part.gemm.run({.a = args.in[1],
                     .b = pointwise ? images + part.first : columns,
                     .d = y + part.image * e.out_channels * e.out_size + part.first,
                     .c = has_bias ? args.in[2] : nullptr},
                    args.workspace, args.stream);
    }
  };
}

// --- columns [K, out] = w^T [K, M] dy [M, out], then each input gathers what it is in

template <class T>
KernelFn input_by_columns(NodeSpec& spec, const ConvProblem& p, bool has_bias) {
  const int64_t kernel = p.kernel_size(), depth = p.group_in() * kernel, out = p.out_size();
  const bool pointwise = is_pointwise(p);
  // Where the columns of one image are too many: some channels of one group at a time.
  using C = ComputeType<T>;
  const int64_t channel_bytes = count_elements(kernel, out, sizeof(C));
  const bool by_group =
      !pointwise && count_elements(p.in_channels, channel_bytes) > most_column_bytes;
  const int64_t channels_at_once = by_group ? p.group_in() : p.in_channels;
  Products products;
  const auto product = [&](int64_t images, int64_t channels) {
    GemmProblem g{.dtype = spec.input(0).dtype,
                  .m = (by_group ? channels : p.group_in()) * kernel,
                  .n = out,
                  .k = p.group_out(),
                  .trans_a = true};
    g.lda = depth;
    g.keep_sums = !pointwise;
    g.beta = pointwise && has_bias ? 1.0 : 0.0;
    g.c_row = 1;
    g.c_column = 0;
    if (!by_group) {
      g.batch = {{images, 0, p.out_channels * out, 0, p.in_channels * kernel * out},
                 {p.groups, p.group_out() * depth, p.group_out() * out, p.group_in(), depth * out}};
    }
    return g;
  };
  // One image per part where channels are taken apart, so `parts_of` cuts either of them.
  const std::vector<Part> parts =
      parts_of(p.batch, channels_at_once, pointwise ? 0 : channel_bytes, products,
               [&](int64_t images, int64_t channels) { return product(images, channels); });
  ByteCount column_bytes;
  for (const Part& part : parts) {
    if (pointwise) break;
    const int64_t images = by_group ? 1 : part.images;
    column_bytes = std::max(column_bytes, bytes_of<char>(images, part.extent, channel_bytes));
  }
  spec.request_workspace(products.workspace_bytes() + column_bytes);
  return [parts, pointwise, by_group, depth, kernel, out, has_bias, e = ConvExtents(p),
          groups = by_group ? p.groups : 1,
          at = products.workspace_bytes().value()](const KernelArgs& args) {
    const T *dy = args.input<T>(0), *w = args.input<T>(1);
    const T* bias = has_bias ? args.input<T>(2) : nullptr;
    T* dx = args.output<T>(0);
    C* columns = reinterpret_cast<C*>(static_cast<char*>(args.workspace) + at);
    for (const Part& part : parts) {
      for (int64_t image = part.image; image < part.image + part.images;
           image += by_group ? 1 : part.images) {
        const int64_t images = by_group ? 1 : part.images;
        T* inputs = dx + image * e.in_channels * e.in_size;
        for (int64_t group = 0; group < groups; ++group) {
          const int64_t channel = group * e.group_in + part.first;
          part.gemm.run({.a = w + group * e.group_out * depth + part.first * kernel,
                         .b = dy + (image * e.out_channels + group * e.group_out) * out,
                         .d = pointwise ? static_cast<void*>(inputs) : columns,
                         .c = bias},
                        args.workspace, args.stream);
          if (pointwise) continue;
          launch(columns_to_inputs<T>, items(images * part.extent * e.in_size), args.stream, e,
                 images, channel, part.extent, columns, bias, inputs);
        }
      }
    }
  };
}

// --- dw [M, K] = dy [M, positions] columns^T [positions, K] over all images

template <class T>
KernelFn weight_by_columns(NodeSpec& spec, const ConvProblem& p) {
  const int64_t rows = p.in_channels * p.kernel_size(), depth = p.group_in() * p.kernel_size();
  const int64_t out = p.out_size();
  using C = ComputeType<T>;
  Products products;
  bool several = false;
  const auto product = [&](int64_t images, int64_t positions) {
    const int64_t inner = images * positions;
    several = several || images < p.batch || positions < out;
    GemmProblem g{
        .dtype = spec.input(0).dtype, .m = p.group_out(), .n = depth, .k = inner, .trans_b = true};
    g.keep_sums = several;
    g.lda = images == 1 ? out : inner;
    g.batch = {{p.groups, p.group_out() * g.lda, depth * inner, 0, p.group_out() * depth}};
    return g;
  };
  const auto size = static_cast<int64_t>(sizeof(T));
  const std::vector<Part> parts =
      parts_of(p.batch, out, (rows + p.out_channels) * size, products, product);
  int64_t most = 0;
  for (const Part& part : parts) most = std::max(most, part.images * part.extent);
  const ByteCount columns = bytes_of<T>(most, rows).rounded_up(64);
  const ByteCount gradients = bytes_of<T>(most, p.out_channels).rounded_up(64);
  const int64_t weights = p.w_numel();
  spec.request_workspace(products.workspace_bytes() + columns + gradients +
                         bytes_of<C>(weights, parts.size() > 1 ? parts.size() : 0));
  return [parts, rows, weights, column_bytes = columns.value(), gradient_bytes = gradients.value(),
          e = ConvExtents(p), at = products.workspace_bytes().value()](const KernelArgs& args) {
    const T *dy = args.input<T>(0), *x = args.input<T>(1);
    char* memory = static_cast<char*>(args.workspace) + at;
    T* columns = reinterpret_cast<T*>(memory);
    T* gradients = reinterpret_cast<T*>(memory + column_bytes);
    C* sums = reinterpret_cast<C*>(memory + column_bytes + gradient_bytes);
    T* dw = args.output<T>(0);
    for (size_t i = 0; i < parts.size(); ++i) {
      const Part& part = parts[i];
      const int64_t inner = part.images * part.extent;
      launch(windows_to_columns<T>, column_shape(inner, rows), args.stream, e, part.images,
             part.first, part.extent, ColumnStrides{inner, part.extent},
             x + part.image * e.in_channels * e.in_size, columns);
      const T* factors = dy + part.image * e.out_channels * e.out_size + part.first;
      if (part.images > 1) {
        launch(gather_gradients<T>, items(e.out_channels * inner), args.stream, e, part.images,
               part.first, part.extent, dy + part.image * e.out_channels * e.out_size, gradients);
        factors = gradients;
      }
      part.gemm.run({.a = factors,
                     .b = columns,
                     .d = parts.size() == 1 ? static_cast<void*>(dw)
                                            : sums + static_cast<int64_t>(i) * weights},
                    args.workspace, args.stream);
    }
    if (parts.size() == 1) return;
    launch(add_weight_parts<T>, items(weights), args.stream, sums,
           static_cast<int64_t>(parts.size()), weights, dw);
  };
}

// --- kernels

template <class T>
KernelFn forward(NodeSpec& spec, const ConvProblem& p, bool has_bias) {
  if (!is_depthwise(p)) return forward_by_columns<T>(spec, p, has_bias);
  return [e = ConvExtents(p), has_bias, count = p.y_numel()](const KernelArgs& args) {
    launch(depthwise<T>, items(count), args.stream, e, args.input<T>(0), args.input<T>(1),
           has_bias ? args.input<T>(2) : nullptr, args.output<T>(0));
  };
}

// Also ConvTranspose, whose bias belongs to the channels of x.
template <class T>
KernelFn input(NodeSpec& spec, const ConvProblem& p, bool has_bias) {
  if (!is_depthwise(p)) return input_by_columns<T>(spec, p, has_bias);
  return [e = ConvExtents(p), has_bias, count = p.x_numel()](const KernelArgs& args) {
    launch(depthwise_input<T>, items(count), args.stream, e, args.input<T>(0), args.input<T>(1),
           has_bias ? args.input<T>(2) : nullptr, args.output<T>(0));
  };
}

template <class T>
KernelFn weight(NodeSpec& spec, const ConvProblem& p) {
  if (!is_depthwise(p)) return weight_by_columns<T>(spec, p);
  return [e = ConvExtents(p),
          shape =
              LaunchShape{.blocks = block_count(std::min<int64_t>(p.w_numel(), 65535)),
                          .threads = row_threads(p.batch * p.out_size())}](const KernelArgs& args) {
    launch(depthwise_weight<T>, shape, args.stream, e, args.input<T>(0), args.input<T>(1),
           args.output<T>(0));
  };
}

using Direction = CudnnConvolution::Direction;

ConvNode forward_node(const NodeSpec& spec) {
  return {
      Direction::forward,
      ops::conv_problem(spec.attrs(), spec.input(0).dims, spec.input(1).dims, spec.output(0).dims),
      spec.has_input(2)};
}
ConvNode input_grad_node(const NodeSpec& spec) {
  return {Direction::input, ops::conv_problem(spec.attrs(), spec.output(0).dims, spec.input(1).dims,
                                              spec.input(0).dims)};
}
ConvNode weight_grad_node(const NodeSpec& spec) {
  return {Direction::weight, ops::conv_problem(spec.attrs(), spec.input(1).dims,
                                               spec.output(0).dims, spec.input(0).dims)};
}
ConvNode transpose_node(const NodeSpec& spec) {
  return {Direction::input,
          ops::conv_transpose_problem(spec.attrs(), spec.input(0).dims, spec.input(1).dims,
                                      spec.output(0).dims),
          spec.has_input(2)};
}

template <auto kNode>
KernelFn make_own(NodeSpec& spec) {
  const ConvNode node = kNode(spec);
  return dispatch_float(spec.input(0).dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    switch (node.direction) {
      case Direction::forward:
        return forward<T>(spec, node.problem, node.has_bias);
      case Direction::input:
        return input<T>(spec, node.problem, node.has_bias);
      default:
        return weight<T>(spec, node.problem);
    }
  });
}

template <auto kNode>
std::vector<Kernel> conv_kernels() {
  return {{.name = "cudnn",
           .types = {DType::f16, DType::bf16, DType::f32},
           .why_not = [](const NodeSpec& spec) { return conv_cudnn_refuses(spec, kNode(spec)); },
           .make = [](NodeSpec& spec) { return conv_cudnn(spec, kNode(spec), make_own<kNode>); }},
          {.name = "columns", .make = make_own<kNode>}};
}

}  // namespace

void set_conv_column_bytes(int64_t bytes) { most_column_bytes = bytes; }

void register_conv(KernelRegistry& registry) {
  registry.add("Conv", conv_kernels<forward_node>());
  registry.add("ConvTranspose", conv_kernels<transpose_node>());
  registry.add("ortrain::ConvInputGrad", conv_kernels<input_grad_node>());
  registry.add("ortrain::ConvWeightGrad", conv_kernels<weight_grad_node>());
}

}  // namespace ortrain::gpu
