// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <set>
#include <thread>

#include "stand_in.h"

using namespace stand_in;

namespace {

// Of one cudaStreamBeginCapture and the streams that joined it.
struct Capture {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id thread;
  unsigned long long id = 0;
  bool is_invalid = false;
  std::vector<Operation> operations;
};

}  // namespace

struct CUstream_st {
  unsigned flags = 0;
  std::shared_ptr<Capture> capture;
  bool is_origin = false;
  bool is_joined = true;  // its captured work is waited for by the stream that began the capture
};
struct CUevent_st {
  std::shared_ptr<Capture> capture;
  std::set<cudaStream_t> covers;  // captured streams whose work it stands behind
  bool is_recorded = false;
};
struct CUgraph_st {
  std::vector<Operation> operations;
};
struct CUgraphExec_st {
  std::vector<Operation> operations;
};

namespace {

struct State {
  std::set<cudaStream_t> streams;
  std::set<cudaEvent_t> events;
  std::set<cudaGraph_t> graphs;
  std::set<cudaGraphExec_t> executables;
  std::vector<std::shared_ptr<Capture>> captures;
  unsigned long long next_capture = 1;
};

State& state() {
  static State* const one = new State();
  return *one;
}

bool is_legacy(cudaStream_t stream) { return stream == nullptr || stream == cudaStreamLegacy; }
bool is_given(cudaStream_t stream) { return is_legacy(stream) || stream == cudaStreamPerThread; }

// Null for the streams that everybody has, which cannot be captured here.
cudaStream_t own_stream(cudaStream_t stream) { return is_given(stream) ? nullptr : stream; }

bool is_alive(cudaStream_t stream) { return is_given(stream) || state().streams.contains(stream); }

// The legacy stream waits for all streams that were not made non-blocking, which a captured one
// cannot do.
bool disturbs_blocking_capture(cudaStream_t stream, bool invalidates = true) {
  if (!is_legacy(stream)) return false;
  bool found = false;
  for (const cudaStream_t each : state().streams) {
    if (each->capture && (each->flags & cudaStreamNonBlocking) == 0) {
      each->capture->is_invalid = each->capture->is_invalid || invalidates;
      found = true;
    }
  }
  return found;
}

thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;

// Work that is put elsewhere by the thread that records runs once, and in no launch of the
// recording.
void look_for_escapes(cudaStream_t own, const std::string& what) {
  for (const std::shared_ptr<Capture>& capture : state().captures) {
    if (capture->mode == cudaStreamCaptureModeThreadLocal &&
        capture->thread == std::this_thread::get_id() &&
        (own == nullptr || own->capture != capture)) {
      report("capture", what + ", beside the recording of its thread");
    }
  }
}

cudaError_t wait(cudaStream_t stream, const char* call) {
  const std::lock_guard lock(state_mutex());
  if (!is_alive(stream)) return result(cudaErrorInvalidResourceHandle, call);
  if (disturbs_blocking_capture(stream)) return result(cudaErrorStreamCaptureImplicit, call);
  if (const cudaStream_t own = own_stream(stream); own != nullptr && own->capture) {
    own->capture->is_invalid = true;
    return result(cudaErrorStreamCaptureUnsupported, call);
  }
  count("waits");
  return result(cudaSuccess, call);
}

}  // namespace

cudaError_t stand_in::disturb_captures(const char* call) {
  const std::lock_guard lock(state_mutex());
  if (mode_of_thread == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  bool found = false;
  for (const std::shared_ptr<Capture>& capture : state().captures) {
    const bool is_mine = capture->thread == std::this_thread::get_id();
    if ((is_mine && capture->mode != cudaStreamCaptureModeRelaxed) ||
        (!is_mine && capture->mode == cudaStreamCaptureModeGlobal &&
         mode_of_thread == cudaStreamCaptureModeGlobal)) {
      capture->is_invalid = true;
      found = true;
    }
  }
  return found ? result(cudaErrorStreamCaptureUnsupported, call) : cudaSuccess;
}

cudaError_t stand_in::submit(cudaStream_t stream, Operation operation, const char* call) {
  const std::lock_guard lock(state_mutex());
  if (!is_alive(stream)) return result(cudaErrorInvalidResourceHandle, call);
  if (disturbs_blocking_capture(stream)) return result(cudaErrorStreamCaptureImplicit, call);
  report_stale_error(call);
  const cudaStream_t own = own_stream(stream);
  look_for_escapes(own, operation.what);
  if (own == nullptr || !own->capture) {
    operation.run(operation.what, true);
    return result(cudaSuccess, call);
  }
  if (own->capture->is_invalid) return result(cudaErrorStreamCaptureInvalidated, call);
  operation.run(operation.what + ", captured", false);
  own->capture->operations.push_back(std::move(operation));
  own->is_joined = own->is_origin;
  return result(cudaSuccess, call);
}

void stand_in::count_alive() {
  const std::lock_guard lock(state_mutex());
  count("streams alive", static_cast<int64_t>(state().streams.size()));
  count("events alive", static_cast<int64_t>(state().events.size()));
  count("graphs alive", static_cast<int64_t>(state().graphs.size()));
  count("recordings alive", static_cast<int64_t>(state().executables.size()));
}

extern "C" {

// --- streams

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  const std::lock_guard lock(state_mutex());
  *stream = new CUstream_st();
  (*stream)->flags = flags;
  state().streams.insert(*stream);
  count("streams");
  return result(cudaSuccess, "cudaStreamCreateWithFlags");
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, 0); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const std::lock_guard lock(state_mutex());
  if (state().streams.erase(stream) == 0) {
    return result(cudaErrorInvalidResourceHandle, "cudaStreamDestroy");
  }
  if (stream->capture) report("capture", "a stream is destroyed while it is captured");
  for (const cudaEvent_t event : state().events) event->covers.erase(stream);
  count("streams destroyed");
  stream->capture.reset();  // the handle is not given out again
  return result(cudaSuccess, "cudaStreamDestroy");
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return wait(stream, "cudaStreamSynchronize");
}
cudaError_t cudaStreamQuery(cudaStream_t stream) { return wait(stream, "cudaStreamQuery"); }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return result(cudaSuccess, "cudaStreamGetPriority");
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return result(cudaSuccess, "cudaDeviceGetStreamPriorityRange");
}
cudaError_t cudaDeviceSynchronize() {
  const std::lock_guard lock(state_mutex());
  // Of any thread, in any mode.
  if (!state().captures.empty()) {
    for (const std::shared_ptr<Capture>& capture : state().captures) capture->is_invalid = true;
    return result(cudaErrorStreamCaptureUnsupported, "cudaDeviceSynchronize");
  }
  count("waits for the device");
  return result(cudaSuccess, "cudaDeviceSynchronize");
}

// --- captures

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  const std::lock_guard lock(state_mutex());
  const char* const call = "cudaStreamBeginCapture";
  if (!is_alive(stream)) return result(cudaErrorInvalidResourceHandle, call);
  if (is_given(stream)) return result(cudaErrorStreamCaptureUnsupported, call);
  if (stream->capture) return result(cudaErrorIllegalState, call);
  stream->capture = std::make_shared<Capture>();
  stream->capture->mode = mode;
  stream->capture->thread = std::this_thread::get_id();
  stream->capture->id = state().next_capture++;
  stream->is_origin = stream->is_joined = true;
  state().captures.push_back(stream->capture);
  count("captures");
  return result(cudaSuccess, call);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const std::lock_guard lock(state_mutex());
  const char* const call = "cudaStreamEndCapture";
  *graph = nullptr;
  if (!is_alive(stream)) return result(cudaErrorInvalidResourceHandle, call);
  if (is_given(stream) || !stream->capture) return result(cudaErrorIllegalState, call);
  if (!stream->is_origin) return result(cudaErrorStreamCaptureUnmatched, call);
  const std::shared_ptr<Capture> capture = stream->capture;
  if (capture->mode != cudaStreamCaptureModeRelaxed &&
      capture->thread != std::this_thread::get_id()) {
    return result(cudaErrorStreamCaptureWrongThread, call);
  }
  bool all_joined = true;
  for (const cudaStream_t each : state().streams) {
    if (each->capture != capture) continue;
    all_joined = all_joined && (each->is_origin || each->is_joined);
    each->capture = nullptr;
    each->is_origin = false;
  }
  std::erase(state().captures, capture);
  if (capture->is_invalid || fails_now(call)) {
    return result(cudaErrorStreamCaptureInvalidated, call, true);
  }
  if (!all_joined) return result(cudaErrorStreamCaptureUnjoined, call);
  *graph = new CUgraph_st{std::move(capture->operations)};
  state().graphs.insert(*graph);
  return result(cudaSuccess, call);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const std::lock_guard lock(state_mutex());
  const char* const call = "cudaStreamIsCapturing";
  *status = cudaStreamCaptureStatusNone;
  if (!is_alive(stream)) return result(cudaErrorInvalidResourceHandle, call);
  if (disturbs_blocking_capture(stream, false)) {
    return result(cudaErrorStreamCaptureImplicit, call, true);
  }
  if (const cudaStream_t own = own_stream(stream); own != nullptr && own->capture) {
    *status = own->capture->is_invalid ? cudaStreamCaptureStatusInvalidated
                                       : cudaStreamCaptureStatusActive;
  }
  return result(cudaSuccess, call);
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* num_nodes) {
  const std::lock_guard lock(state_mutex());
  const cudaStream_t own = own_stream(stream);
  if (id != nullptr) *id = own != nullptr && own->capture ? own->capture->id : 0;
  if (graph != nullptr) *graph = nullptr;
  if (nodes != nullptr) *nodes = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (num_nodes != nullptr) *num_nodes = 0;
  return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(mode_of_thread, *mode);
  return result(cudaSuccess, "cudaThreadExchangeStreamCaptureMode");
}

// --- events

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  const std::lock_guard lock(state_mutex());
  *event = new CUevent_st();
  state().events.insert(*event);
  return result(cudaSuccess, "cudaEventCreateWithFlags");
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const std::lock_guard lock(state_mutex());
  if (state().events.erase(event) == 0) {
    return result(cudaErrorInvalidResourceHandle, "cudaEventDestroy");
  }
  event->capture.reset();
  return result(cudaSuccess, "cudaEventDestroy");
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const std::lock_guard lock(state_mutex());
  const char* const call = "cudaEventRecord";
  if (!state().events.contains(event) || !is_alive(stream)) {
    return result(cudaErrorInvalidResourceHandle, call);
  }
  const cudaStream_t own = own_stream(stream);
  event->is_recorded = true;
  event->capture = own == nullptr ? nullptr : own->capture;
  event->covers.clear();
  if (event->capture) event->covers.insert(own);
  return result(cudaSuccess, call);
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const std::lock_guard lock(state_mutex());
  const char* const call = "cudaStreamWaitEvent";
  if (!state().events.contains(event) || !is_alive(stream)) {
    return result(cudaErrorInvalidResourceHandle, call);
  }
  const cudaStream_t own = own_stream(stream);
  const bool is_captured = event->capture && std::ranges::count(state().captures, event->capture);
  if (!is_captured) {
    if (own != nullptr && own->capture && event->is_recorded) {
      own->capture->is_invalid = true;
      return result(cudaErrorStreamCaptureIsolation, call);
    }
    return result(cudaSuccess, call);
  }
  if (own == nullptr) return result(cudaErrorStreamCaptureImplicit, call);
  if (own->capture && own->capture != event->capture)
    return result(cudaErrorStreamCaptureMerge, call);
  if (!own->capture) {
    own->capture = event->capture;
    own->is_joined = false;
  } else {
    for (const cudaStream_t each : event->covers) each->is_joined = true;
  }
  return result(cudaSuccess, call);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const std::lock_guard lock(state_mutex());
  if (!state().events.contains(event)) {
    return result(cudaErrorInvalidResourceHandle, "cudaEventQuery");
  }
  const bool is_captured = event->capture && std::ranges::count(state().captures, event->capture);
  if (!is_captured) return result(disturb_captures("cudaEventQuery"), "cudaEventQuery", true);
  event->capture->is_invalid = true;
  return result(cudaErrorCapturedEvent, "cudaEventQuery");
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return cudaEventQuery(event); }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1;
  return result(cudaSuccess, "cudaEventElapsedTime");
}

// --- graphs

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* num_nodes) {
  const std::lock_guard lock(state_mutex());
  if (!state().graphs.contains(graph)) return result(cudaErrorInvalidValue, "cudaGraphGetNodes");
  if (nodes != nullptr) std::fill_n(nodes, *num_nodes, nullptr);
  *num_nodes = graph->operations.size();
  return result(cudaSuccess, "cudaGraphGetNodes");
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph,
                                          unsigned long long) {
  const std::lock_guard lock(state_mutex());
  if (!state().graphs.contains(graph)) {
    return result(cudaErrorInvalidValue, "cudaGraphInstantiateWithFlags");
  }
  if (fails_now("cudaGraphInstantiate")) {
    return result(cudaErrorMemoryAllocation, "cudaGraphInstantiate", true);
  }
  *executable = new CUgraphExec_st{graph->operations};
  state().executables.insert(*executable);
  count("recordings");
  return result(cudaSuccess, "cudaGraphInstantiateWithFlags");
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                 unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(executable, graph, flags);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  const std::lock_guard lock(state_mutex());
  if (!state().executables.contains(executable)) {
    return result(cudaErrorInvalidValue, "cudaGraphLaunch");
  }
  count("launches of recordings");
  return submit(stream,
                {"a recording",
                 [operations = executable->operations](const std::string& how, bool performs) {
                   for (const Operation& each : operations) {
                     each.run(each.what + ", in " + how, performs);
                   }
                 }},
                "cudaGraphLaunch");
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  const std::lock_guard lock(state_mutex());
  if (state().graphs.erase(graph) == 0) return result(cudaErrorInvalidValue, "cudaGraphDestroy");
  graph->operations.clear();
  return result(cudaSuccess, "cudaGraphDestroy");
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  const std::lock_guard lock(state_mutex());
  if (state().executables.erase(executable) == 0) {
    return result(cudaErrorInvalidValue, "cudaGraphExecDestroy");
  }
  count("recordings destroyed");
  executable->operations.clear();
  return result(cudaSuccess, "cudaGraphExecDestroy");
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return submit(stream,
                {"a function of the host",
                 [=](const std::string&, bool performs) {
                   if (performs) function(data);
                 }},
                "cudaLaunchHostFunc");
}

}  // extern "C"
