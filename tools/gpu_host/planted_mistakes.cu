// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// What tools/check_gpu_host.py must find before it is believed: ortrain_planted_mistakes NAME makes
// one mistake of a host; "none" makes none. Without a name, the names and the rule that each
// breaks.

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace {

struct Span {
  float* data;
  int count;
};

__global__ void __launch_bounds__(64) fill(Span span) {
  if (threadIdx.x < static_cast<unsigned>(span.count)) span.data[threadIdx.x] = 1;
}
extern __shared__ float shared_values[];
__global__ void reverse(float* data) {
  shared_values[threadIdx.x] = data[threadIdx.x];
  __syncthreads();
  data[threadIdx.x] = shared_values[blockDim.x - 1 - threadIdx.x];
}

float* take(int count) {
  void* memory = nullptr;
  static_cast<void>(cudaMalloc(&memory, static_cast<size_t>(count) * sizeof(float)));
  return static_cast<float*>(memory);
}
void drop(void* memory) { static_cast<void>(cudaFree(memory)); }

cudaStream_t make_stream() {
  cudaStream_t stream = nullptr;
  static_cast<void>(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}

void begin(cudaStream_t stream) {
  static_cast<void>(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
}
cudaGraphExec_t end(cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  static_cast<void>(cudaStreamEndCapture(stream, &graph));
  if (graph == nullptr) return nullptr;
  static_cast<void>(cudaGraphInstantiateWithFlags(&executable, graph, 0));
  static_cast<void>(cudaGraphDestroy(graph));
  return executable;
}
cudaGraphExec_t record_fill(cudaStream_t stream, float* data) {
  begin(stream);
  fill<<<1, 64, 0, stream>>>({data, 64});
  return end(stream);
}

void none() {
  const cudaStream_t stream = make_stream();
  float* const data = take(64);
  fill<<<1, 64>>>({data, 64});
  reverse<<<1, 64, 256, stream>>>(data);
  const cudaGraphExec_t recording = record_fill(stream, data);
  for (int i = 0; i < 3; ++i) static_cast<void>(cudaGraphLaunch(recording, stream));
  std::vector<float> host(64);
  static_cast<void>(cudaMemcpyAsync(host.data(), data, 256, cudaMemcpyDeviceToHost, stream));
  static_cast<void>(cudaStreamSynchronize(stream));
  static_cast<void>(cudaGraphExecDestroy(recording));
  static_cast<void>(cudaStreamDestroy(stream));
  drop(data);
}
void freed_argument() {
  float* const data = take(64);
  drop(data);
  fill<<<1, 64>>>({data, 64});
}
void pageable_argument() {
  std::vector<float> host(64);
  reverse<<<1, 64, 256>>>(host.data());
}
void recording_of_freed_memory() {
  const cudaStream_t stream = make_stream();
  float* const data = take(64);
  const cudaGraphExec_t recording = record_fill(stream, data);
  drop(data);
  static_cast<void>(cudaGraphLaunch(recording, stream));
}
void destroyed_recording() {
  const cudaStream_t stream = make_stream();
  const cudaGraphExec_t recording = record_fill(stream, take(64));
  static_cast<void>(cudaGraphExecDestroy(recording));
  static_cast<void>(cudaGraphLaunch(recording, stream));
}
void too_many_threads() { fill<<<1, 128>>>({take(128), 128}); }
void too_much_shared_memory() { reverse<<<1, 64, 64 << 10>>>(take(64)); }
void wait_in_a_capture() {
  const cudaStream_t stream = make_stream();
  begin(stream);
  static_cast<void>(cudaStreamSynchronize(stream));
  end(stream);
}
void allocation_in_a_capture() {
  const cudaStream_t stream = make_stream();
  begin(stream);
  take(64);
  end(stream);
}
void copy_beyond_the_end() {
  std::vector<float> host(65);
  static_cast<void>(cudaMemcpyAsync(host.data(), take(64), 260, cudaMemcpyDeviceToHost, nullptr));
}
void destroyed_stream() {
  const cudaStream_t stream = make_stream();
  static_cast<void>(cudaStreamDestroy(stream));
  fill<<<1, 64, 0, stream>>>({take(64), 64});
}
void remade_stream() {
  const cudaStream_t stream = make_stream();
  static_cast<void>(cudaStreamDestroy(stream));
  make_stream();
  fill<<<1, 64, 0, stream>>>({take(64), 64});
}
void work_beside_a_recording() {
  const cudaStream_t stream = make_stream();
  float* const data = take(64);
  begin(stream);
  fill<<<1, 64>>>({data, 64});
  end(stream);
}
void recording_of_a_free() {
  const cudaStream_t stream = make_stream();
  float* const data = take(64);
  begin(stream);
  static_cast<void>(cudaFreeAsync(data, stream));
  end(stream);
}
void ended_by_another_thread() {
  const cudaStream_t stream = make_stream();
  begin(stream);
  std::thread([stream] { end(stream); }).join();
}
void unjoined_stream() {
  const cudaStream_t stream = make_stream(), other = make_stream();
  float* const data = take(64);
  cudaEvent_t event = nullptr;
  static_cast<void>(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  begin(stream);
  static_cast<void>(cudaEventRecord(event, stream));
  static_cast<void>(cudaStreamWaitEvent(other, event, 0));
  fill<<<1, 64, 0, other>>>({data, 64});
  end(stream);
}
void fill_of_freed_memory() {
  float* const data = take(64);
  drop(data);
  static_cast<void>(cudaMemsetAsync(data, 0, 256, nullptr));
}
void copy_of_another_kind() {
  std::vector<float> host(64);
  static_cast<void>(cudaMemcpyAsync(take(64), host.data(), 256, cudaMemcpyDeviceToDevice, nullptr));
}
void recorded_copy_of_pageable_memory() {
  const cudaStream_t stream = make_stream();
  std::vector<float> host(64);
  float* const data = take(64);
  begin(stream);
  static_cast<void>(cudaMemcpyAsync(data, host.data(), 256, cudaMemcpyHostToDevice, stream));
  end(stream);
}
void error_left_behind() {
  static_cast<void>(cudaSetDevice(7));
  fill<<<1, 64>>>({take(64), 64});
}
void freed_twice() {
  float* const data = take(64);
  drop(data);
  drop(data);
}
void host_reads_the_device() {
  const volatile float* const data = take(64);
  std::exit(data[0] == 1 ? 4 : 5);
}

struct Mistake {
  const char* name;
  const char* rule;  // and a word of what is said
  void (*make)();
};
constexpr Mistake kMistakes[] = {
    {"none", "", none},
    {"freed_argument", "address: fill", freed_argument},
    {"pageable_argument", "address: reverse", pageable_argument},
    {"recording_of_freed_memory", "address: in a recording", recording_of_freed_memory},
    {"destroyed_recording", "refused call: cudaGraphLaunch", destroyed_recording},
    {"too_many_threads", "launch: 128 threads", too_many_threads},
    {"too_much_shared_memory", "launch: bytes of shared memory", too_much_shared_memory},
    {"wait_in_a_capture", "refused call: cudaStreamSynchronize", wait_in_a_capture},
    {"allocation_in_a_capture", "refused call: cudaMalloc", allocation_in_a_capture},
    {"copy_beyond_the_end", "address: source of a copy", copy_beyond_the_end},
    {"destroyed_stream", "refused call: cudaErrorInvalidResourceHandle", destroyed_stream},
    {"remade_stream", "refused call: cudaErrorInvalidResourceHandle", remade_stream},
    {"work_beside_a_recording", "capture: beside the recording", work_beside_a_recording},
    {"recording_of_a_free", "capture: a free", recording_of_a_free},
    {"ended_by_another_thread", "refused call: cudaErrorStreamCaptureWrongThread",
     ended_by_another_thread},
    {"unjoined_stream", "refused call: cudaErrorStreamCaptureUnjoined", unjoined_stream},
    {"fill_of_freed_memory", "address: target of a fill", fill_of_freed_memory},
    {"copy_of_another_kind", "address: of another kind", copy_of_another_kind},
    {"recorded_copy_of_pageable_memory", "address: of the host", recorded_copy_of_pageable_memory},
    {"error_left_behind", "stale error: cudaErrorInvalidDevice", error_left_behind},
    {"freed_twice", "refused call: cudaFree", freed_twice},
    {"host_reads_the_device", "host access: the host", host_reads_the_device},
};

}  // namespace

int main(int argc, char** argv) {
  for (const Mistake& mistake : kMistakes) {
    if (argc < 2) {
      std::printf("%s\t%s\n", mistake.name, mistake.rule);
    } else if (std::strcmp(argv[1], mistake.name) == 0) {
      mistake.make();
      return 0;
    }
  }
  return argc < 2 ? 0 : 2;
}
