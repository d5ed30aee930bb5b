// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <mutex>
#include <vector>

#include "ortrain/base/error.h"
#include "ortrain/gpu/fault_state.h"
#include "ortrain/gpu/gpu_device.h"
#include "ortrain/gpu/launch.h"
#include "ortrain/gpu/runtime_names.h"

namespace ortrain::gpu {
namespace {

std::mutex allocator_mutex;
Allocator allocator;
ResultAllocator result_allocator;

ORTRAIN_GPU(Stream_t) stream_of(void* stream) { return static_cast<ORTRAIN_GPU(Stream_t)>(stream); }

void require(ORTRAIN_GPU(Error_t) code, const char* what) {
  check_device_call(static_cast<int>(code), what);
}

// Values that came as an argument of the launch.
__global__ void __launch_bounds__(256)
    write_bytes(unsigned char* to, DeviceArray<unsigned char, Device::kMostWritten> from,
                int bytes) {
  for (int i = static_cast<int>(threadIdx.x); i < bytes; i += static_cast<int>(blockDim.x)) {
    to[i] = from[i];
  }
}

__global__ void count_fault(const Fault* slot, int64_t* count) {
  if (threadIdx.x == 0 && has_fault(slot)) ++*count;
}

class GraphRecording final : public Recording {
 public:
  GraphRecording(ORTRAIN_GPU(GraphExec_t) executable, size_t num_nodes)
      : executable_(executable), num_nodes_(num_nodes) {}
  ~GraphRecording() override { static_cast<void>(ORTRAIN_GPU(GraphExecDestroy)(executable_)); }
  GraphRecording(const GraphRecording&) = delete;
  GraphRecording& operator=(const GraphRecording&) = delete;
  void launch(void* stream) override {
    require(ORTRAIN_GPU(GraphLaunch)(executable_, stream_of(stream)), "launching a recording");
  }
  size_t num_launches() const override { return num_nodes_; }

 private:
  ORTRAIN_GPU(GraphExec_t) executable_;
  size_t num_nodes_;
};

class GpuDevice final : public Device {
 public:
  explicit GpuDevice(int index) : index_(index) {}

  std::string name() const override { return str(platform(), ":", index_); }
  int index() const override { return index_; }
  bool is_host() const override { return false; }

  std::shared_ptr<Block> arena(size_t bytes, void* stream) override { return take(bytes, stream); }
  std::shared_ptr<Block> tensor(size_t bytes, void* stream) override { return take(bytes, stream); }
  std::vector<std::shared_ptr<Block>> results(std::span<const TensorSpec* const> specs,
                                              void* stream) override {
    ResultAllocator own;
    {
      const std::lock_guard lock(allocator_mutex);
      own = result_allocator;
    }
    return own ? own(index_, specs, stream) : Device::results(specs, stream);
  }

  void copy(void* to, const void* from, size_t bytes, void* stream) override {
    if (bytes == 0 || to == from) return;
    require(ORTRAIN_GPU(MemcpyAsync)(to, from, bytes, ORTRAIN_GPU(MemcpyDeviceToDevice),
                                     stream_of(stream)),
            "copying on the device");
  }
  void upload(void* to, const void* from, size_t bytes, void* stream) override {
    if (bytes == 0) return;
    // Pageable memory: the call returns when the host's memory has been read.
    require(ORTRAIN_GPU(MemcpyAsync)(to, from, bytes, ORTRAIN_GPU(MemcpyHostToDevice),
                                     stream_of(stream)),
            "copying to the device");
    require(ORTRAIN_GPU(StreamSynchronize)(stream_of(stream)), "copying to the device");
  }
  void write(void* to, const void* from, size_t bytes, void* stream) override {
    check(bytes <= kMostWritten, "too much for one write");
    if (bytes == 0) return;
    DeviceArray<unsigned char, kMostWritten> kept;
    std::memcpy(kept.values, from, bytes);
    launch(write_bytes, {.threads = 256}, stream, static_cast<unsigned char*>(to), kept,
           static_cast<int>(bytes));
  }
  void zero(void* to, size_t bytes, void* stream) override {
    if (bytes == 0) return;
    require(ORTRAIN_GPU(MemsetAsync)(to, 0, bytes, stream_of(stream)), "clearing memory");
  }
  void download(void* to, const void* from, size_t bytes, void* stream) override {
    if (bytes > 0) {
      require(ORTRAIN_GPU(MemcpyAsync)(to, from, bytes, ORTRAIN_GPU(MemcpyDeviceToHost),
                                       stream_of(stream)),
              "copying from the device");
    }
    require(ORTRAIN_GPU(StreamSynchronize)(stream_of(stream)), "waiting for the device");
  }
  void synchronize(void* stream) override {
    require(ORTRAIN_GPU(StreamSynchronize)(stream_of(stream)), "waiting for the device");
  }

  void synchronize_all() override {
    // A device cannot be waited for while any thread records.
    const std::lock_guard lock(recording_mutex_);
    require(ORTRAIN_GPU(DeviceSynchronize)(), "waiting for the device");
  }

  bool is_recorded_elsewhere(void* stream) override {
    auto status = ORTRAIN_GPU(StreamCaptureStatusNone);
    if (ORTRAIN_GPU(StreamIsCapturing)(stream_of(stream), &status) != ORTRAIN_GPU(Success)) {
      static_cast<void>(
          ORTRAIN_GPU(GetLastError)());  // the default stream, while another is recorded
      return true;
    }
    return status != ORTRAIN_GPU(StreamCaptureStatusNone);
  }
  bool records() const override { return true; }
  std::shared_ptr<Recording> record(const std::function<void(void*)>& work) override {
    const std::lock_guard lock(recording_mutex_);
    // A stream of its own: PyTorch's default stream cannot be recorded.
    ORTRAIN_GPU(Stream_t) stream = nullptr;
    require(ORTRAIN_GPU(StreamCreateWithFlags)(&stream, ORTRAIN_GPU(StreamNonBlocking)),
            "making a stream");
    const std::shared_ptr<void> own(
        stream, [](void* s) { static_cast<void>(ORTRAIN_GPU(StreamDestroy)(stream_of(s))); });
    require(ORTRAIN_GPU(StreamBeginCapture)(stream, ORTRAIN_GPU(StreamCaptureModeThreadLocal)),
            "beginning a recording");
    ORTRAIN_GPU(Graph_t) graph = nullptr;
    try {
      work(stream);
    } catch (...) {
      static_cast<void>(ORTRAIN_GPU(StreamEndCapture)(stream, &graph));
      if (graph != nullptr) static_cast<void>(ORTRAIN_GPU(GraphDestroy)(graph));
      static_cast<void>(ORTRAIN_GPU(GetLastError)());
      throw;
    }
    require(ORTRAIN_GPU(StreamEndCapture)(stream, &graph), "ending a recording");
    ORTRAIN_GPU(GraphExec_t) executable = nullptr;
    size_t num_nodes = 0;
    auto code = ORTRAIN_GPU(GraphGetNodes)(graph, nullptr, &num_nodes);
    if (code == ORTRAIN_GPU(Success)) {
      code = ORTRAIN_GPU(GraphInstantiateWithFlags)(&executable, graph, 0);
    }
    static_cast<void>(ORTRAIN_GPU(GraphDestroy)(graph));
    require(code, "preparing a recording");
    return std::make_shared<GraphRecording>(executable, num_nodes);
  }

  Fault* fault_slot() override {
    const std::lock_guard lock(mutex_);
    if (fault_ == nullptr) {
      // Memory that host and device see; kept as long as the process.
      void* memory = nullptr;
      require(ORTRAIN_GPU(HostAlloc)(&memory, sizeof(Fault), ORTRAIN_GPU(HostAllocMapped)),
              "allocating pinned memory");
      fault_ = new (memory) Fault();
    }
    return fault_;
  }

  void count_if_faulty(int64_t* count, void* stream) override {
    launch(count_fault, {.threads = kWarpSize}, stream, fault_slot(), count);
  }

  std::shared_ptr<void> enter() override {
    int before = -1;
    require(ORTRAIN_GPU(GetDevice)(&before), "asking for the current device");
    if (before == index_) return nullptr;
    require(ORTRAIN_GPU(SetDevice)(index_), "changing the current device");
    // The pointer is not read; dropping it sets back what was current.
    return {static_cast<void*>(this),
            [before](void*) { static_cast<void>(ORTRAIN_GPU(SetDevice)(before)); }};
  }

 private:
  std::shared_ptr<Block> take(size_t bytes, void* stream) {
    bytes = std::max<size_t>(bytes, 64);
    Allocator own;
    {
      const std::lock_guard lock(allocator_mutex);
      own = allocator;
    }
    if (own) return own(index_, bytes, stream);
    void* memory = nullptr;
    const auto code = ORTRAIN_GPU(MallocAsync)(&memory, bytes, stream_of(stream));
    if (code == ORTRAIN_GPU(ErrorMemoryAllocation)) {
      static_cast<void>(ORTRAIN_GPU(GetLastError)());
      throw OutOfMemoryError(str("no ", bytes, " bytes on ", name()));
    }
    require(code, "allocating memory");
    return {new Block(memory, bytes), [stream](Block* block) {
              static_cast<void>(ORTRAIN_GPU(FreeAsync)(block->data(), stream_of(stream)));
              delete block;
            }};
  }

  int index_;
  std::mutex mutex_;
  Fault* fault_ = nullptr;
  // Recursive: who waits inside of a recording gets the driver's error.
  std::recursive_mutex recording_mutex_;
};

}  // namespace

std::string_view platform() { return ORTRAIN_GPU_PLATFORM; }

int device_count() {
  static const int count = [] {
    int found = 0;
    if (ORTRAIN_GPU(GetDeviceCount)(&found) != ORTRAIN_GPU(Success)) {
      static_cast<void>(ORTRAIN_GPU(GetLastError)());  // no driver: no device
      found = 0;
    }
    return found;
  }();
  return count;
}

Device& device(int index) {
  static const auto* const devices = [] {
    auto* all = new std::vector<std::unique_ptr<GpuDevice>>();
    for (int i = 0; i < device_count(); ++i) all->push_back(std::make_unique<GpuDevice>(i));
    return all;
  }();
  if (index < 0 || index >= device_count()) {
    throw DeviceError(str("there is no device ", platform(), ":", index, "; ", device_count(),
                          device_count() == 1 ? " is" : " are", " visible"));
  }
#if !defined(__HIPCC__)
  constexpr int kLeast = 80;
  if (const int capability = compute_capability(index); capability < kLeast) {
    throw DeviceError(str("the device ", platform(), ":", index, " has compute capability ",
                          capability / 10.0, ", expected ", kLeast / 10, " or later"));
  }
#endif
  return *(*devices)[static_cast<size_t>(index)];
}

void set_allocator(Allocator replacement, ResultAllocator of_results) {
  const std::lock_guard lock(allocator_mutex);
  allocator = std::move(replacement);
  result_allocator = std::move(of_results);
}

namespace {

int device_attribute(int index, ORTRAIN_GPU_ATTRIBUTE_TYPE attribute) {
  int value = 0;
  require(ORTRAIN_GPU(DeviceGetAttribute)(&value, attribute, index), "asking about the device");
  return value;
}

}  // namespace

int current_device() {
  int index = 0;
  if (ORTRAIN_GPU(GetDevice)(&index) == ORTRAIN_GPU(Success)) return index;
  static_cast<void>(ORTRAIN_GPU(GetLastError)());
  return 0;
}

int multiprocessors(int index) {
  return device_attribute(index, ORTRAIN_GPU_ATTRIBUTE_MULTIPROCESSORS);
}

int64_t shared_memory_per_block(int index) {
#if defined(__HIPCC__)
  (void)index;
  return int64_t{64} << 10;
#else
  return device_attribute(index, cudaDevAttrMaxSharedMemoryPerBlockOptin);
#endif
}

int compute_capability(int index) {
#if defined(__HIPCC__)
  (void)index;
  return 0;
#else
  return 10 * device_attribute(index, cudaDevAttrComputeCapabilityMajor) +
         device_attribute(index, cudaDevAttrComputeCapabilityMinor);
#endif
}

void give_shared_memory(const void* kernel, size_t bytes) {
#if defined(__HIPCC__)
  (void)kernel;  // blocks can have all there is
  (void)bytes;
#else
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  cudaFuncAttributes given;
  require(cudaFuncGetAttributes(&given, kernel), "asking about a kernel");
  if (given.maxDynamicSharedSizeBytes >= static_cast<int>(bytes)) return;
  require(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(bytes)),
          "asking for shared memory");
#endif
}

void check_device_call(int code, const char* what) {
  if (code == 0) return;
  const auto error = static_cast<ORTRAIN_GPU(Error_t)>(code);
  // Else whoever asks next, such as PyTorch after a launch, takes it for an error of its own.
  static_cast<void>(ORTRAIN_GPU(GetLastError)());
  throw DeviceError(str(what, ": ", ORTRAIN_GPU(GetErrorString)(error), " (", code, ")"));
}

}  // namespace ortrain::gpu
