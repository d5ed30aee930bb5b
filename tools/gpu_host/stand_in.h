// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// In the place of the CUDA runtime library, on a machine without a GPU: host code that was compiled
// for a device runs as it is, what it puts onto streams is recorded and held against the rules of
// the runtime, and kernels do nothing. Copies and fills do what they say, on memory of the host
// that nothing but this library can read by the addresses that it gives out.
//
// What breaks a rule is a line of JSON, {"rule", "what", "where"}, in the file that
// ORTRAIN_STAND_IN_REPORT names, or on standard error; counts of calls are its last line.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace stand_in {

// One lock for all of the state below.
std::recursive_mutex& state_mutex();

// A rule is broken.
void report(const std::string& rule, const std::string& what);
// Adds to a count of the last line of the report.
void count(const std::string& what, int64_t by = 1);

// A result of a call as the runtime gives it: errors are kept for cudaGetLastError. `expected`: the
// caller asks in order to know, which is no broken rule.
cudaError_t result(cudaError_t code, const char* call, bool expected = false);

std::string text_of(const void* address);

// Reports an error that an earlier call left behind in this thread: whoever asks next, such as
// PyTorch after a launch, takes it for its own.
void report_stale_error(const char* call);

// Whether the call is the one that ORTRAIN_STAND_IN_FAIL ("cudaMalloc:7") wants to fail.
bool fails_now(const std::string& call);

// Counts what still exists, for the last line.
void count_alive();

// --- memory.cpp

// Address space of the device, never given out twice; null where the device is full.
void* take_memory(size_t bytes);
// False where there is none at that address.
bool drop_memory(void* address);
bool is_device_address(uint64_t address);
// Reports a range that is not inside of one block alive; 0 bytes may lie right behind its end.
// Memory of the host has to be pinned, unless it may be any.
bool check_range(const void* address, size_t bytes, const std::string& user, bool may_be_host);
// The same for a word among a kernel's arguments, which may be an address or a number; where it is
// an argument by itself, it may be no memory of the host either that is not pinned. (Structures
// have padding, which holds whatever was there.)
void check_word(uint64_t word, bool is_alone, const std::string& user);
// Where the host reads and writes what lies at an address, on the device or not.
void* host_view(const void* address);
size_t bytes_in_use();

// --- kernels.cpp

struct KernelProperties {
  int registers = 0;                                  // of a thread; 0 where nothing is known
  int most_threads = 0;                               // of a block, by its launch bounds
  size_t shared = 0;                                  // bytes of a block that it always has
  std::vector<std::pair<size_t, size_t>> parameters;  // offset, bytes
  bool known = false;
};
struct Kernel {
  std::string name;
  KernelProperties properties;
  int most_dynamic_shared = 0;  // bytes of a launch, at present
};
// Of all kernels in a file of device code.
std::map<std::string, KernelProperties> read_cubin(const char* data, size_t bytes);

// --- streams.cpp

// Work as it lies in a queue or in a graph.
struct Operation {
  std::string what;
  // Checks what it touches; copies and fills, where it `performs`.
  std::function<void(const std::string& how, bool performs)> run;
};

// Puts it onto the stream: runs it, or keeps it where the stream is being captured. The result
// belongs to `call`.
cudaError_t submit(cudaStream_t stream, Operation operation, const char* call);
// Of a call that would disturb the capture of a stream by this thread (or by any, in global mode):
// the captures are invalid afterwards. Success where there is none.
cudaError_t disturb_captures(const char* call);

}  // namespace stand_in
