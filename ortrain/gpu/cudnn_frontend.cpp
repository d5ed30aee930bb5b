// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// The one file that includes cuDNN's headers: where ORTRAIN_CUDNN_FRONTEND is defined. They take
// most of a minute to compile.
#include "ortrain/base/error.h"
#include "ortrain/gpu/cudnn.h"

#if defined(ORTRAIN_CUDNN_FRONTEND)

#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>
#include <vector>

#include "ortrain/gpu/gpu_device.h"

#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn_frontend.h>

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;  // where the headers look for the library's functions
}

namespace ortrain::gpu {
namespace {

namespace fe = cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

constexpr size_t kOldest = 90800;          // the first whose properties of devices can be described
constexpr size_t kOldestBackward = 91600;  // before, it took pieces of its workspace unaligned
constexpr int64_t kWorkspace = int64_t{256} << 20;

// Of a device. The lock is held while the stream of a handle is set and work put on it. A handle is
// for one thread at a time, so that plans are made with another one.
struct Handle {
  std::mutex mutex;
  cudnnHandle_t value = nullptr, planning = nullptr;  // never given back: drivers may be gone
};

fe::DataType_t data_type(DType type) {
  switch (type) {
    case DType::f16:
      return fe::DataType_t::HALF;
    case DType::bf16:
      return fe::DataType_t::BFLOAT16;
    default:
      return fe::DataType_t::FLOAT;
  }
}

// First line of what the library says; more of it are the algorithms that it tried.
std::string words_of(fe::error_t error) {
  const std::string message = error.get_message();
  return message.substr(0, message.find('\n'));
}

class FrontendPlan final : public CudnnPlan {
 public:
  FrontendPlan(std::unique_ptr<fe::graph::Graph> graph, std::shared_ptr<Handle> handle)
      : graph_(std::move(graph)), handle_(std::move(handle)) {
    int64_t bytes = 0;
    const fe::error_t error = graph_->get_workspace_size(bytes);
    check(error.is_good(), "a plan knows its workspace");
    workspace_ = static_cast<size_t>(bytes);
  }

  size_t workspace_bytes() const override { return workspace_; }
  std::string engine() const override {
    std::string name;
    const fe::error_t error = graph_->get_plan_name(name);
    return error.is_good() ? name : "?";
  }
  void run(std::span<void* const> operands, void* workspace, void* stream) override {
    check(handle_ != nullptr, "plans for described devices are not run");
    const std::lock_guard lock(handle_->mutex);
    const cudnnStatus_t status =
        fe::detail::set_stream(handle_->value, static_cast<cudaStream_t>(stream));
    if (status != CUDNN_STATUS_SUCCESS) {
      throw DeviceError(str("setting the stream of cuDNN: ", fe::detail::get_error_string(status)));
    }
    const std::string error = execute(operands, workspace);
    // Recordings are made on streams that are gone afterwards.
    static_cast<void>(fe::detail::set_stream(handle_->value, nullptr));
    if (!error.empty()) {
      throw DeviceError(str("running cuDNN: ", error, "; ORTRAIN_CUDNN=off does without it"));
    }
  }

 private:
  // Operands have the numbers of their places, so these are in the order that is asked for.
  std::string execute(std::span<void* const> operands, void* workspace) {
    try {
      fe::error_t error = graph_->execute(handle_->value, const_cast<void**>(operands.data()),
                                          static_cast<int>(operands.size()), workspace);
      std::string words = error.is_bad() ? error.get_message() : "";
      std::ranges::replace(words, '\n', ' ');
      return words;
    } catch (const std::exception& error) {
      return error.what();
    }
  }

  std::unique_ptr<fe::graph::Graph> graph_;
  std::shared_ptr<Handle> handle_;
  size_t workspace_ = 0;
};

// A graph whose operands get their numbers in the order in which they are made.
struct Builder {
  std::unique_ptr<fe::graph::Graph> graph = std::make_unique<fe::graph::Graph>();
  int64_t operands = 0;
  int64_t alignment = kCudnnAlignment;

  // `capability` of the device, which the headers would load CUDA's runtime to learn.
  Builder(DType type, int capability) {
    graph
        ->set_sm_version(capability)  // nodes take over what is known when they are made
        .set_io_data_type(data_type(type))
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
  }
  Tensor input(const Dims& dims, const Dims& strides, DType type) {
    return graph->tensor(fe::graph::Tensor_attributes()
                             .set_uid(++operands)
                             .set_dim(dims)
                             .set_stride(strides)
                             .set_alignment(alignment)
                             .set_data_type(data_type(type)));
  }
  void output(const Tensor& tensor, const Dims& dims, const Dims& strides, DType type) {
    tensor->set_output(true)
        .set_uid(++operands)
        .set_dim(dims)
        .set_stride(strides)
        .set_alignment(alignment)
        .set_data_type(data_type(type));
  }
};

// Its operators: convolution and what is added to it.
Builder describe(const CudnnConvolution& p, int capability) {
  using Direction = CudnnConvolution::Direction;
  check(!p.has_bias || (p.direction == Direction::forward && p.alignment >= kCudnnAlignment),
        "a bias of y, at addresses for it");
  Builder b(p.dtype, capability);
  b.alignment = p.alignment;
  const auto dense = [&](const Dims& dims) { return b.input(dims, strides_of(dims), p.dtype); };
  const auto windows = [&](auto options) {
    return options.set_pre_padding(p.pads_begin)
        .set_post_padding(p.pads_end)
        .set_stride(p.strides)
        .set_dilation(p.dilations);
  };
  const Dims& result = p.direction == Direction::forward ? p.y
                       : p.direction == Direction::input ? p.x
                                                         : p.w;
  Tensor sums;
  if (p.direction == Direction::forward) {
    const Tensor x = dense(p.x), w = dense(p.w);
    sums = b.graph->conv_fprop(x, w, windows(fe::graph::Conv_fprop_attributes()));
  } else if (p.direction == Direction::input) {
    const Tensor dy = dense(p.y), w = dense(p.w);
    sums = b.graph->conv_dgrad(dy, w, windows(fe::graph::Conv_dgrad_attributes()));
  } else {
    const Tensor dy = dense(p.y), x = dense(p.x);
    sums = b.graph->conv_wgrad(dy, x, windows(fe::graph::Conv_wgrad_attributes()));
  }
  // Extents do not follow from those of a gradient.
  sums->set_dim(result).set_stride(strides_of(result));
  if (p.has_bias) {
    Dims channels(result.size(), 1);
    channels[1] = result[1];
    sums = b.graph->pointwise(sums, dense(channels),
                              fe::graph::Pointwise_attributes().set_mode(fe::PointwiseMode_t::ADD));
  }
  b.output(sums, result, strides_of(result), p.dtype);
  return b;
}

Builder describe(const CudnnAttention& p, int capability) {
  Builder b(p.dtype, capability);
  const auto full = [](const CudnnAttention::Strides& s) { return Dims{s[0], s[1], s[2], 1}; };
  const Dims q{p.batch, p.heads, p.queries, p.head_dim}, k{p.batch, p.kv_heads, p.keys, p.head_dim},
      v{p.batch, p.kv_heads, p.keys, p.value_dim}, out{p.batch, p.heads, p.queries, p.value_dim},
      rows{p.batch, p.heads, p.queries, 1};
  const auto options = [&](auto all) {
    all.set_attn_scale(static_cast<float>(p.scale));
    if (p.causal) {
      all.set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
          .set_diagonal_band_right_bound(0);
    }
    return all;
  };
  const auto given = [&](const Dims& dims, const CudnnAttention::Strides& strides) {
    return b.input(dims, full(strides), p.dtype);
  };
  if (!p.backward) {
    const Tensor tq = given(q, p.q), tk = given(k, p.k), tv = given(v, p.v);
    const auto [result, logsumexp] = b.graph->sdpa(
        tq, tk, tv, options(fe::graph::SDPA_attributes().set_generate_stats(p.keeps_logsumexp)));
    b.output(result, out, full(p.out), p.dtype);
    if (p.keeps_logsumexp) b.output(logsumexp, rows, strides_of(rows), DType::f32);
    return b;
  }
  const Tensor dout = given(out, p.out), tq = given(q, p.q), tk = given(k, p.k), tv = given(v, p.v),
               result = given(out, p.out);
  const Tensor logsumexp = b.input(rows, strides_of(rows), DType::f32);
  const auto [dq, dk, dv] = b.graph->sdpa_backward(
      tq, tk, tv, result, dout, logsumexp,
      options(fe::graph::SDPA_backward_attributes().set_deterministic_algorithm(true)));
  b.output(dq, q, full(p.q), p.dtype);
  b.output(dk, k, full(p.k), p.dtype);
  b.output(dv, v, full(p.v), p.dtype);
  return b;
}

// What no algorithm may do: see Cudnn.
std::vector<fe::NumericalNote_t> unwanted(DType dtype, bool exact_floats) {
  using Note = fe::NumericalNote_t;
  std::vector<Note> notes{Note::NONDETERMINISTIC, Note::REDUCED_PRECISION_REDUCTION,
                          Note::DOWN_CONVERT_INPUTS};
  // Transformed factors are rounded to 16 bits once more.
  if (size_of(dtype) == 2) notes.insert(notes.end(), {Note::WINOGRAD, Note::FFT});
  if (exact_floats) {
    // What rounds factors, and what transforms them, with errors larger than those of sums.
    notes.insert(notes.end(), {Note::TENSOR_CORE, Note::FFT, Note::WINOGRAD_TILE_6x6,
                               Note::WINOGRAD_TILE_13x13});
  }
  return notes;
}

// Bytes of workspace that a plan may take. The algorithms of tensor cores want other layouts than
// ours, so those for convolutions hold copies of all operands; what is left without is many times
// slower.
int64_t most_workspace(const CudnnConvolution& p) {
  const int64_t elements = num_elements(p.x) + num_elements(p.w) + num_elements(p.y);
  return kWorkspace + elements * static_cast<int64_t>(size_of(p.dtype));
}
int64_t most_workspace(const CudnnAttention&) { return kWorkspace; }

// Algorithms that round more than their notes say: what 9.19 gave a gradient in float16 on an H200
// was off as much as sums in 16 bits are.
std::vector<std::string> unwanted_engines(const CudnnConvolution& p) {
  if (p.dtype == DType::f16 && p.direction == CudnnConvolution::Direction::input) return {"eng2"};
  return {};
}
std::vector<std::string> unwanted_engines(const CudnnAttention&) { return {}; }

class FrontendCudnn final : public Cudnn {
 public:
  size_t version() const override { return fe::detail::get_backend_version(); }

  std::shared_ptr<CudnnPlan> plan(const CudnnConvolution& p, std::string& why) override {
    return guarded(p, p.dtype == DType::f32 && !p.rounds_to_tf32, why);
  }
  std::shared_ptr<CudnnPlan> plan(const CudnnAttention& p, std::string& why) override {
    if (p.backward && version() < kOldestBackward) {
      why = str("the gradients of attention by cuDNN ", version(), ", older than 9.16");
      return nullptr;
    }
    return guarded(p, false, why);
  }

  // Plans are made for it.
  std::string describe_device(const DescribedDevice& device) {
    auto properties = std::make_shared<fe::DeviceProperties>();
    const std::string& text = device.properties;
    const fe::error_t error =
        properties->deserialize(std::vector<uint8_t>(text.begin(), text.end()));
    if (error.is_bad()) return words_of(error);
    described_ = properties;
    capability_ = device.capability;
    return "";
  }

 private:
  template <class Problem>
  std::shared_ptr<CudnnPlan> guarded(const Problem& problem, bool exact_floats, std::string& why) {
    try {
      return build(problem, exact_floats, why);
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {  // of the headers, where a driver or runtime is missing
      throw DeviceError(str("cuDNN: ", error.what()));
    }
  }

  template <class Problem>
  std::shared_ptr<CudnnPlan> build(const Problem& problem, bool exact_floats, std::string& why) {
    std::shared_ptr<Handle> handle;
    Builder b = describe(problem, described_ ? capability_ : compute_capability(current_device()));
    fe::graph::Graph& graph = *b.graph;
    if (described_) {
      graph.set_device_properties(described_);
    } else {
      handle = handle_of(current_device());
    }
    const auto fine = [&](const fe::error_t& error) {
      if (error.is_good()) return true;
      why = "cuDNN: " + words_of(error);
      return false;
    };
    if (!fine(graph.validate())) return nullptr;
    if (!fine(described_ ? graph.build_operation_graph()
                         : graph.build_operation_graph(handle->planning))) {
      return nullptr;
    }
    if (!fine(graph.create_execution_plans({fe::HeurMode_t::A, fe::HeurMode_t::FALLBACK}))) {
      return nullptr;
    }
    graph.deselect_numeric_notes(unwanted(problem.dtype, exact_floats))
        .deselect_engines(unwanted_engines(problem))
        .deselect_workspace_greater_than(most_workspace(problem));
    if (!fine(graph.check_support())) return nullptr;
    if (!fine(graph.build_plans())) {
      if (described_) return nullptr;
      throw DeviceError(why);  // for want of memory, say
    }
    std::vector<int64_t> places(static_cast<size_t>(b.operands));
    std::iota(places.begin(), places.end(), 1);
    check(graph.get_variant_pack_uids_sorted() == places, "operands of cuDNN in our order");
    return std::make_shared<FrontendPlan>(std::move(b.graph), std::move(handle));
  }

  std::shared_ptr<Handle> handle_of(int device) {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<Handle>& handle = handles_[device];
    if (handle) return handle;
    auto made = std::make_shared<Handle>();
    for (cudnnHandle_t* one : {&made->value, &made->planning}) {
      const cudnnStatus_t status = fe::detail::create_handle(one);
      if (status != CUDNN_STATUS_SUCCESS) {
        throw DeviceError(str("making a handle of cuDNN: ", fe::detail::get_error_string(status)));
      }
    }
    return handle = std::move(made);
  }

  std::mutex mutex_;
  std::map<int, std::shared_ptr<Handle>> handles_;
  std::shared_ptr<const fe::DeviceProperties> described_;
  int capability_ = 0;
};

}  // namespace

std::shared_ptr<Cudnn> make_cudnn(void* library, std::optional<DescribedDevice> device,
                                  std::string& why) {
  // The headers stop the process for a function that is not there.
  for (const char* name : {"cudnnGetVersion", "cudnnBackendCreateDescriptor", "cudnnCreate"}) {
    if (dlsym(library, name) != nullptr) continue;
    why = str("the library has no ", name);
    return nullptr;
  }
  // Asked without the headers, which stay with the library whose functions they have called.
  const auto version = reinterpret_cast<size_t (*)()>(dlsym(library, "cudnnGetVersion"))();
  if (version < kOldest) {
    why = str("cuDNN ", version, " is older than 9.8");
    return nullptr;
  }
  if (fe::cudnn_dlhandle != nullptr && fe::cudnn_dlhandle != library) {
    why = "another cuDNN is in use";
    return nullptr;
  }
  fe::cudnn_dlhandle = library;
  try {
    auto made = std::make_shared<FrontendCudnn>();
    // Loads CUDA's runtime now, which a run would do.
    if (!device) static_cast<void>(fe::detail::get_cuda_runtime_version());
    if (device) {
      why = made->describe_device(*device);
      if (!why.empty()) return nullptr;
    }
    return made;
  } catch (const std::exception& error) {
    why = str("cuDNN: ", error.what());
    return nullptr;
  }
}

}  // namespace ortrain::gpu

#else

namespace ortrain::gpu {

std::shared_ptr<Cudnn> make_cudnn(void*, std::optional<DescribedDevice>, std::string& why) {
  why = "this build was made without cuDNN's headers";
  return nullptr;
}

}  // namespace ortrain::gpu

#endif
