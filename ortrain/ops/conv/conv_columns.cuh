// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/gpu/launch.h"
#include "ortrain/gpu/reduce.h"
#include "ortrain/ops/conv/conv_problem.h"

// Convolutions on the device: windows as the columns of a matrix, and sums over windows directly.
namespace ortrain::gpu {

// What the columns of one product may take, 256 MiB at first; one that cannot be made smaller may
// take more. For plans made later.
void set_conv_column_bytes(int64_t bytes);

// The extents of a convolution, as kernels read them.
struct ConvExtents {
  struct Axis {
    int64_t in, out, kernel, stride, dilation, pad;
  };
  struct Place {
    int64_t d, h, w;
  };
  int64_t batch, in_channels, out_channels, group_in, group_out;
  int64_t in_size, out_size, kernel_size;
  DeviceArray<Axis, 3> axes;

  explicit ConvExtents(const ops::ConvProblem& p)
      : batch(p.batch),
        in_channels(p.in_channels),
        out_channels(p.out_channels),
        group_in(p.group_in()),
        group_out(p.group_out()),
        in_size(p.in_size()),
        out_size(p.out_size()),
        kernel_size(p.kernel_size()) {
    for (int i = 0; i < 3; ++i) {
      const ops::WindowAxis& axis = p.axes[static_cast<size_t>(i)];
      axes[i] = {axis.in, axis.out, axis.kernel, axis.stride, axis.dilation, axis.pad_begin};
    }
  }

  ORTRAIN_DEVICE static Place place(int64_t i, int64_t h, int64_t w) {
    return {i / w / h, i / w % h, i % w};
  }
  ORTRAIN_DEVICE Place out_place(int64_t o) const { return place(o, axes[1].out, axes[2].out); }
  ORTRAIN_DEVICE Place in_place(int64_t i) const { return place(i, axes[1].in, axes[2].in); }
  ORTRAIN_DEVICE Place tap(int64_t k) const { return place(k, axes[1].kernel, axes[2].kernel); }

  ORTRAIN_DEVICE int64_t input_along(int axis, int64_t o, int64_t k) const {
    const int64_t i = o * axes[axis].stride + k * axes[axis].dilation - axes[axis].pad;
    return i < axes[axis].in ? i : -1;
  }
  // The input under tap k of the window of output o; negative where it is padding.
  ORTRAIN_DEVICE int64_t input_at(const Place& o, const Place& k) const {
    const int64_t d = input_along(0, o.d, k.d), h = input_along(1, o.h, k.h),
                  w = input_along(2, o.w, k.w);
    return d < 0 || h < 0 || w < 0 ? -1 : (d * axes[1].in + h) * axes[2].in + w;
  }

  ORTRAIN_DEVICE int64_t output_along(int axis, int64_t i, int64_t k) const {
    const int64_t distance = i + axes[axis].pad - k * axes[axis].dilation;
    if (distance < 0 || distance % axes[axis].stride != 0) return -1;
    const int64_t o = distance / axes[axis].stride;
    return o < axes[axis].out ? o : -1;
  }
  // The output whose window has tap k at input i; negative where there is none.
  ORTRAIN_DEVICE int64_t output_at(const Place& i, const Place& k) const {
    const int64_t d = output_along(0, i.d, k.d), h = output_along(1, i.h, k.h),
                  w = output_along(2, i.w, k.w);
    return d < 0 || h < 0 || w < 0 ? -1 : (d * axes[1].out + h) * axes[2].out + w;
  }
};

// Element (channel * kernel_size + tap, image, position) of the columns is at
// row * row_stride + image * image_stride + position.
struct ColumnStrides {
  int64_t row, image;
};

// The columns of `images` images and `positions` outputs from `first` on, all channels.
template <class T>
__global__ void __launch_bounds__(kItemThreads)
    windows_to_columns(ConvExtents e, int64_t images, int64_t first, int64_t positions,
                       ColumnStrides strides, const T* x, T* columns) {
  const int64_t rows = e.in_channels * e.kernel_size;
  for_each_item(images * positions, [&](int64_t i) {
    const int64_t image = i / positions, position = i % positions;
    const ConvExtents::Place o = e.out_place(first + position);
    const T* planes = x + image * e.in_channels * e.in_size;
    T* out = columns + image * strides.image + position;
    for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
      const int64_t at = e.input_at(o, e.tap(row % e.kernel_size));
      out[row * strides.row] = at < 0 ? T{} : planes[row / e.kernel_size * e.in_size + at];
    }
  });
}

// x = bias + what the columns of `channels` channels from `first` on hold for each position; `x`
// begins at the first image.
template <class T>
__global__ void __launch_bounds__(kItemThreads)
    columns_to_inputs(ConvExtents e, int64_t images, int64_t first, int64_t channels,
                      const ComputeType<T>* columns, const T* bias, T* x) {
  using C = ComputeType<T>;
  for_each_item(images * channels * e.in_size, [&](int64_t i) {
    const ConvExtents::Place place = e.in_place(i % e.in_size);
    const int64_t channel = i / e.in_size % channels, image = i / e.in_size / channels;
    const C* rows = columns + (image * channels + channel) * e.kernel_size * e.out_size;
    C sum = bias == nullptr ? C(0) : static_cast<C>(bias[first + channel]);
    for (int64_t k = 0; k < e.kernel_size; ++k) {
      const int64_t o = e.output_at(place, e.tap(k));
      if (o >= 0) sum += rows[k * e.out_size + o];
    }
    x[(image * e.in_channels + first + channel) * e.in_size + i % e.in_size] = static_cast<T>(sum);
  });
}

// gradients[m][image][position] of the positions from `first` on: as the columns have them.
template <class T>
__global__ void __launch_bounds__(kItemThreads)
    gather_gradients(ConvExtents e, int64_t images, int64_t first, int64_t positions, const T* dy,
                     T* gradients) {
  for_each_item(e.out_channels * images * positions, [&](int64_t i) {
    const int64_t position = i % positions, image = i / positions % images,
                  m = i / positions / images;
    gradients[i] = dy[(image * e.out_channels + m) * e.out_size + first + position];
  });
}

// dw = the sum of the parts, in order.
template <class T>
__global__ void __launch_bounds__(kItemThreads)
    add_weight_parts(const ComputeType<T>* parts, int64_t count, int64_t size, T* dw) {
  using C = ComputeType<T>;
  for_each_item(size, [&](int64_t i) {
    C sum = 0;
    for (int64_t part = 0; part < count; ++part) sum += parts[part * size + i];
    dw[i] = static_cast<T>(sum);
  });
}

// --- one input channel per group

template <class T>
__global__ void __launch_bounds__(kItemThreads)
    depthwise(ConvExtents e, const T* x, const T* w, const T* bias, T* y) {
  using C = ComputeType<T>;
  for_each_item(e.batch * e.out_channels * e.out_size, [&](int64_t i) {
    const ConvExtents::Place o = e.out_place(i % e.out_size);
    const int64_t plane = i / e.out_size, m = plane % e.out_channels;
    const T* image = x + (plane / e.out_channels * e.in_channels + m / e.group_out) * e.in_size;
    C sum = bias == nullptr ? C(0) : static_cast<C>(bias[m]);
    for (int64_t k = 0; k < e.kernel_size; ++k) {
      const int64_t at = e.input_at(o, e.tap(k));
      if (at >= 0) sum += static_cast<C>(image[at]) * static_cast<C>(w[m * e.kernel_size + k]);
    }
    y[i] = static_cast<T>(sum);
  });
}

template <class T>
__global__ void __launch_bounds__(kItemThreads)
    depthwise_input(ConvExtents e, const T* dy, const T* w, const T* bias, T* dx) {
  using C = ComputeType<T>;
  for_each_item(e.batch * e.in_channels * e.in_size, [&](int64_t i) {
    const ConvExtents::Place place = e.in_place(i % e.in_size);
    const int64_t plane = i / e.in_size, c = plane % e.in_channels;
    const int64_t first = c * e.group_out;
    const T* gradient = dy + (plane / e.in_channels * e.out_channels + first) * e.out_size;
    C sum = bias == nullptr ? C(0) : static_cast<C>(bias[c]);
    for (int64_t k = 0; k < e.kernel_size; ++k) {
      const int64_t o = e.output_at(place, e.tap(k));
      if (o < 0) continue;
      for (int64_t m = 0; m < e.group_out; ++m) {
        sum += static_cast<C>(gradient[m * e.out_size + o]) *
               static_cast<C>(w[(first + m) * e.kernel_size + k]);
      }
    }
    dx[i] = static_cast<T>(sum);
  });
}

// A block per weight.
template <class T>
__global__ void depthwise_weight(ConvExtents e, const T* dy, const T* x, T* dw) {
  using C = ComputeType<T>;
  for (int64_t at = blockIdx.x; at < e.out_channels * e.kernel_size; at += gridDim.x) {
    const int64_t m = at / e.kernel_size;
    const ConvExtents::Place k = e.tap(at % e.kernel_size);
    C sum = 0;
    for (int64_t i = threadIdx.x; i < e.batch * e.out_size; i += blockDim.x) {
      const int64_t image = i / e.out_size, o = i % e.out_size;
      const int64_t from = e.input_at(e.out_place(o), k);
      if (from < 0) continue;
      sum += static_cast<C>(dy[(image * e.out_channels + m) * e.out_size + o]) *
             static_cast<C>(x[(image * e.in_channels + m / e.group_out) * e.in_size + from]);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) dw[at] = static_cast<T>(sum);
  }
}

}  // namespace ortrain::gpu
