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
  const char* rule;
  void (*make)();
};
constexpr Mistake kMistakes[] = {
    {"none", "", none},
    {"freed_argument", "address", freed_argument},
    {"pageable_argument", "address", pageable_argument},
    {"recording_of_freed_memory", "address", recording_of_freed_memory},
    {"destroyed_recording", "refused call", destroyed_recording},
    {"too_many_threads", "launch", too_many_threads},
    {"too_much_shared_memory", "launch", too_much_shared_memory},
    {"wait_in_a_capture", "refused call", wait_in_a_capture},
    {"allocation_in_a_capture", "refused call", allocation_in_a_capture},
    {"copy_beyond_the_end", "address", copy_beyond_the_end},
    {"destroyed_stream", "refused call", destroyed_stream},
    {"freed_twice", "refused call", freed_twice},
    {"host_reads_the_device", "host access", host_reads_the_device},
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
