// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "ortrain/base/byte_count.h"
#include "ortrain/base/dim.h"
#include "ortrain/base/dtype.h"

// cuDNN in our words: what is asked of it, and what comes back. One file, cudnn_frontend.cpp,
// knows its headers; the library is loaded at run time.
namespace ortrain::gpu {

// y = conv(x, w) + bias and its gradients, on dense row-major tensors [n, c, spatial...] of two or
// three spatial axes. Sums in float.
struct CudnnConvolution {
  enum class Direction { forward, input, weight };
  Direction direction = Direction::forward;
  DType dtype = DType::f32;     // f16, bf16 or f32, of all operands
  bool rounds_to_tf32 = false;  // float factors may be
  bool has_bias = false;        // of the channels of y; Direction::forward alone has one
  Dims x, w, y;                 // w: [out channels, in channels of a group, spatial...]
  Dims strides, dilations, pads_begin, pads_end;
  // Bytes of which the addresses are multiples; fewer than 16 only without a bias: what adds one
  // was seen not to regard it.
  int64_t alignment = 16;
};
// Operands in the order of addresses: forward x, w, (bias,) y; input dy, w, dx; weight dy, x, dw.

// softmax(scale q k^T) v per head, or its gradients. q [b, heads, queries, head_dim], k and v with
// kv_heads and keys, in any strides whose last is 1. `logsumexp` is natural, of the scaled scores,
// float32 [b, heads, queries].
struct CudnnAttention {
  bool backward = false;
  DType dtype = DType::f16;  // f16 or bf16
  int64_t batch = 0, heads = 0, kv_heads = 0, queries = 0, keys = 0, head_dim = 0, value_dim = 0;
  using Strides = std::array<int64_t, 3>;  // batch, head, row; those of gradients are the same
  Strides q = {}, k = {}, v = {}, out = {};
  double scale = 1.0;
  bool causal = false;          // hides keys j > i
  bool keeps_logsumexp = true;  // forward
};
// Operands: forward q, k, v, out(, logsumexp); backward dout, q, k, v, out, logsumexp, dq, dk, dv.

inline constexpr int64_t kCudnnAlignment = 16;  // of addresses, unless a problem says less

// An algorithm for one problem on one device.
class CudnnPlan {
 public:
  virtual ~CudnnPlan() = default;
  virtual size_t workspace_bytes() const = 0;
  virtual std::string engine() const = 0;
  // Puts the work onto the stream; neither waits nor allocates on the device. Several threads may.
  // Throws DeviceError.
  virtual void run(std::span<void* const> operands, void* workspace, void* stream) = 0;
};

// The library. Plans are for the calling thread's current device. All are the same from run to run:
// no algorithm whose sums are in an order of chance, none that rounds parts of sums to 16 bits.
class Cudnn {
 public:
  virtual ~Cudnn() = default;
  virtual size_t version() const = 0;  // 92400 is 9.24.0
  // Null, with the reason in `why`, where it has no algorithm. Throws DeviceError for failures that
  // may not come again, such as a lack of memory.
  virtual std::shared_ptr<CudnnPlan> plan(const CudnnConvolution& problem, std::string& why) = 0;
  virtual std::shared_ptr<CudnnPlan> plan(const CudnnAttention& problem, std::string& why) = 0;
};

// A device that is not there: plans for it can be made, but not run.
struct DescribedDevice {
  std::string properties;  // JSON, as cuDNN writes the properties of a device
  int capability = 0;      // 80, 90
};

// Over a library that is open. Null, with the reason in `why`, where this build has not cuDNN's
// headers or the library is too old. In cudnn_frontend.cpp; one library per process.
std::shared_ptr<Cudnn> make_cudnn(void* library, std::optional<DescribedDevice> device,
                                  std::string& why);

// cuDNN of this process, looked for when the first node is planned that it could take: the file or
// folder of `set_cudnn_path`; libcudnn.so.9 as library_folders.h finds it. Builds that are not for
// CUDA look at the path alone. Null, with the reason in `why`, where there is none.
std::shared_ptr<Cudnn> find_cudnn(std::string& why);
// A file, or a folder with one. Empty: none. For plans made later.
void set_cudnn_path(std::string path);
// In place of any library, for tests; null: as before.
void set_cudnn(std::shared_ptr<Cudnn> library);

// Of ORTRAIN_CUDNN: `off` nothing; `conv` convolutions; `auto` also attention where it is known to
// be faster than our own; `all` whatever it has an algorithm for.
enum class CudnnUse { off, conv, automatic, all };
// Null, with the reason in `why`, for another value.
std::optional<CudnnUse> cudnn_use(std::string& why);

// The plan for the problem, made once for the current device and kept for nodes that ask the same.
std::shared_ptr<CudnnPlan> cudnn_plan(const CudnnConvolution& problem, std::string& why);
std::shared_ptr<CudnnPlan> cudnn_plan(const CudnnAttention& problem, std::string& why);

// Whether convolutions of float32 may round their factors to TF32, as
// torch.backends.cudnn.conv.fp32_precision says. Of the process; false at the beginning.
void set_allow_tf32_convolutions(bool allow);
bool allow_tf32_convolutions();

// What to ask the plan of a node for: its workspace, to begin where the library wants it.
ByteCount cudnn_workspace(const CudnnPlan& plan);
// Runs the plan in such a workspace.
void run_cudnn(CudnnPlan& plan, std::span<void* const> operands, void* workspace, void* stream);
bool are_aligned(std::span<void* const> addresses, int64_t alignment);

}  // namespace ortrain::gpu
