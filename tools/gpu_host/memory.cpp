// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "stand_in.h"

namespace stand_in {
namespace {

constexpr size_t kSpace = size_t{1} << 42;    // addresses
constexpr size_t kMemory = size_t{80} << 30;  // bytes at once, as an H100 has
constexpr size_t kAlignment = 512;
constexpr size_t kGap = 4096;  // between two blocks: what lies behind one is in none
constexpr size_t kPart = 256;  // to multiples of which parts of a block are placed
// Where a block begins in its page. Structures among arguments have padding, which holds what was
// there before; a flag or a small number beside the rest of an address gives no address of a block.
constexpr size_t kBegin = 0xc0;
constexpr uint64_t kSmall = 0x10;
constexpr uint64_t kSmallHalf = uint64_t{1} << 20;
constexpr uint64_t kWindow = uint64_t{1} << 32;

// One file under two addresses: the device's, at which every access faults, and the host's.
struct Space {
  char* device = nullptr;
  char* host = nullptr;
  int file = -1;
  size_t next = kGap;
  size_t in_use = 0;
  std::map<uint64_t, size_t> blocks;  // address, bytes
  std::map<uint64_t, size_t> freed;
  std::map<uint64_t, size_t> pinned;
};

void on_fault(int, siginfo_t* info, void*) {
  if (is_device_address(reinterpret_cast<uint64_t>(info->si_addr))) {
    report("host access", "the host reads or writes " + text_of(info->si_addr));
  }
  std::signal(SIGSEGV, SIG_DFL);
  std::raise(SIGSEGV);
}

Space& space() {
  static Space* const made = [] {
    auto* s = new Space();
    s->file = memfd_create("device memory", 0);
    if (s->file < 0 || ftruncate(s->file, static_cast<off_t>(kSpace)) != 0) std::abort();
    // Where a small number in the lower half of a word, beside what its padding held before, is no
    // address of a block.
    void* device = mmap(nullptr, kSpace + 2 * kWindow, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    void* host =
        mmap(nullptr, kSpace, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, s->file, 0);
    if (device == MAP_FAILED || host == MAP_FAILED) std::abort();
    const auto at = reinterpret_cast<uint64_t>(device);
    s->device = static_cast<char*>(device) + ((at / kWindow + 1) * kWindow + kWindow / 4 - at);
    s->host = static_cast<char*>(host);
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);
    return s;
  }();
  return *made;
}

// The block that begins last at or before it.
std::map<uint64_t, size_t>::const_iterator block_before(uint64_t address) {
  auto at = space().blocks.upper_bound(address);
  return at == space().blocks.begin() ? space().blocks.end() : std::prev(at);
}

bool is_mapped(uint64_t address) {
  const uint64_t page = address & ~uint64_t{4095};
  return msync(reinterpret_cast<void*>(page), 1, MS_ASYNC) == 0;
}

// Whether it is in one of the ranges: address, bytes.
bool is_in(const std::map<uint64_t, size_t>& ranges, uint64_t address) {
  const auto at = ranges.upper_bound(address);
  return at != ranges.begin() && address < std::prev(at)->first + std::prev(at)->second;
}
bool is_pinned(uint64_t address) { return is_in(space().pinned, address); }

}  // namespace

void* take_memory(size_t bytes) {
  const std::lock_guard lock(state_mutex());
  Space& s = space();
  const size_t whole = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (bytes > kMemory || s.in_use + whole > kMemory) return nullptr;
  if (s.next + whole + 2 * kGap > kSpace) std::abort();
  const uint64_t next = reinterpret_cast<uint64_t>(s.device) + s.next;
  const uint64_t window =
      (next / kWindow + 1) * kWindow;  // no block holds what begins with a small half
  if (next + kBegin + whole > window) s.next += window + kSmallHalf - next;
  char* const at = s.device + s.next + kBegin;
  s.blocks[reinterpret_cast<uint64_t>(at)] = bytes;
  s.next = (s.next + kBegin + whole + 2 * kGap - 1) / kGap * kGap;
  s.in_use += whole;
  count("blocks");
  return at;
}

bool drop_memory(void* address) {
  const std::lock_guard lock(state_mutex());
  Space& s = space();
  const auto at = s.blocks.find(reinterpret_cast<uint64_t>(address));
  if (at == s.blocks.end()) return false;
  const size_t whole = (at->second + kAlignment - 1) / kAlignment * kAlignment;
  s.in_use -= whole;
  const auto offset = static_cast<off_t>(static_cast<char*>(address) - s.device);
  if (whole >= 4096) {
    fallocate(s.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset,
              static_cast<off_t>(whole));
  }
  s.freed.insert(*at);
  s.blocks.erase(at);
  return true;
}

bool is_device_address(uint64_t address) {
  const auto begin = reinterpret_cast<uint64_t>(space().device);
  return address >= begin && address < begin + kSpace;
}

bool check_range(const void* address, size_t bytes, const std::string& user, bool may_be_host) {
  const std::lock_guard lock(state_mutex());
  const auto from = reinterpret_cast<uint64_t>(address);
  if (!is_device_address(from)) {
    if (may_be_host || bytes == 0 || is_pinned(from)) return true;
    report("address",
           user + ": " + std::to_string(bytes) + " bytes of the host, " + text_of(address));
    return false;
  }
  const auto at = block_before(from);
  if (at != space().blocks.end()) {
    // What has no elements may lie behind the last part of a block, where the next would begin.
    const size_t rounded = (at->second + kPart - 1) / kPart * kPart;
    const uint64_t end = at->first + (bytes == 0 ? rounded : at->second);
    if (from <= end && bytes <= end - from) return true;
  }
  report("address", user + ": " + std::to_string(bytes) + " bytes at " + text_of(address));
  return false;
}

void check_word(uint64_t word, bool is_alone, const std::string& user) {
  constexpr uint64_t kLeast = uint64_t{1} << 32;  // below are numbers
  constexpr uint64_t kMost = uint64_t{1} << 47;
  if (word < kLeast || word >= kMost) return;
  const std::lock_guard lock(state_mutex());
  Space& s = space();
  const auto begin = reinterpret_cast<uint64_t>(s.device);
  if (word >= begin && word < begin + s.next) {
    const bool was_block = (word & 0xff) >= kSmall && is_in(s.freed, word);
    const bool is_small = (word & 0xffffffff) < kSmallHalf;  // a structure of two halves
    if ((is_alone && !is_small) || was_block)
      check_range(reinterpret_cast<const void*>(word), 0, user, false);
    return;
  }
  if (!is_alone || is_device_address(word) || !is_mapped(word)) return;
  if (is_pinned(word)) return;
  report("address", user + ": memory of the host that is not pinned, " +
                        text_of(reinterpret_cast<const void*>(word)));
}

void* host_view(const void* address) {
  const auto at = reinterpret_cast<uint64_t>(address);
  if (!is_device_address(at)) return const_cast<void*>(address);
  return space().host + (at - reinterpret_cast<uint64_t>(space().device));
}

size_t bytes_in_use() {
  const std::lock_guard lock(state_mutex());
  return space().in_use;
}

std::string text_of(const void* address) {
  const std::lock_guard lock(state_mutex());
  const auto at = reinterpret_cast<uint64_t>(address);
  char text[160];
  if (!is_device_address(at)) {
    std::snprintf(text, sizeof text, "%p", address);
    return text;
  }
  const auto block = block_before(at);
  const uint64_t offset = at - reinterpret_cast<uint64_t>(space().device);
  if (block == space().blocks.end()) {
    std::snprintf(text, sizeof text, "device address %#lx, before any block", offset);
  } else {
    std::snprintf(text, sizeof text,
                  "device address %#lx, %lu behind the beginning of a block of %lu bytes", offset,
                  at - block->first, block->second);
  }
  return text;
}

namespace {

cudaError_t allocate(void** memory, size_t bytes, const char* call) {
  *memory = nullptr;
  if (bytes == 0) return result(cudaSuccess, call);
  *memory = fails_now(call) ? nullptr : take_memory(bytes);
  return result(*memory == nullptr ? cudaErrorMemoryAllocation : cudaSuccess, call, true);
}

// Memory that a recording takes or gives belongs to it, which is not modelled.
Operation of_no_recording(const std::string& what) {
  return {what, [](const std::string& how, bool performs) {
            if (!performs) report("capture", how);
          }};
}

cudaError_t release(void* memory, const char* call) {
  if (memory == nullptr || drop_memory(memory)) return result(cudaSuccess, call);
  return result(cudaErrorInvalidValue, call);
}

Operation copy_of(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return {
      "a copy of " + std::to_string(bytes) + " bytes", [=](const std::string& how, bool performs) {
        const auto at = reinterpret_cast<uint64_t>(to), source = reinterpret_cast<uint64_t>(from);
        const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
        const bool of_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
        if (bytes > 0 && kind != cudaMemcpyDefault &&
            (to_device != is_device_address(at) || of_device != is_device_address(source))) {
          report("address", how + ": it is of another kind than it says");
        }
        if (at < source + bytes && source < at + bytes && at != source) {
          report("address", how + ": source and target overlap");
        }
        // Pageable memory is read or written now, not when a recording is launched.
        const bool there = check_range(to, bytes, how + ", target of a copy", performs);
        if (check_range(from, bytes, how + ", source of a copy", performs) && there && performs) {
          std::memmove(host_view(to), host_view(from), bytes);
        }
      }};
}

Operation fill_of(void* to, int value, size_t bytes) {
  return {"a fill of " + std::to_string(bytes) + " bytes",
          [=](const std::string& how, bool performs) {
            if (check_range(to, bytes, how + ", target of a fill", false) && performs) {
              std::memset(host_view(to), value, bytes);
            }
          }};
}

}  // namespace
}  // namespace stand_in

using namespace stand_in;

extern "C" {

size_t ortrain_stand_in_bytes_in_use() { return bytes_in_use(); }

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  if (const cudaError_t code = disturb_captures("cudaMalloc")) return code;
  return allocate(memory, bytes, "cudaMalloc");
}
cudaError_t cudaFree(void* memory) {
  if (memory != nullptr) {
    if (const cudaError_t code = disturb_captures("cudaFree")) return code;
  }
  return release(memory, "cudaFree");
}
cudaError_t cudaMallocAsync(void** memory, size_t bytes, cudaStream_t stream) {
  if (const cudaError_t code =
          submit(stream, of_no_recording("an allocation"), "cudaMallocAsync")) {
    return code;
  }
  return allocate(memory, bytes, "cudaMallocAsync");
}
cudaError_t cudaFreeAsync(void* memory, cudaStream_t stream) {
  if (const cudaError_t code = submit(stream, of_no_recording("a free"), "cudaFreeAsync"))
    return code;
  return release(memory, "cudaFreeAsync");
}

cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  if (const cudaError_t code = disturb_captures("cudaHostAlloc")) return code;
  const std::lock_guard lock(state_mutex());
  *memory = std::aligned_alloc(4096, std::max<size_t>(4096, (bytes + 4095) / 4096 * 4096));
  space().pinned[reinterpret_cast<uint64_t>(*memory)] = bytes;
  return result(cudaSuccess, "cudaHostAlloc");
}
cudaError_t cudaMallocHost(void** memory, size_t bytes) { return cudaHostAlloc(memory, bytes, 0); }
cudaError_t cudaFreeHost(void* memory) {
  if (const cudaError_t code = disturb_captures("cudaFreeHost")) return code;
  const std::lock_guard lock(state_mutex());
  if (space().pinned.erase(reinterpret_cast<uint64_t>(memory)) == 0 && memory != nullptr) {
    return result(cudaErrorInvalidValue, "cudaFreeHost");
  }
  std::free(memory);
  return result(cudaSuccess, "cudaFreeHost");
}
cudaError_t cudaHostRegister(void* memory, size_t bytes, unsigned) {
  const std::lock_guard lock(state_mutex());
  space().pinned[reinterpret_cast<uint64_t>(memory)] = bytes;
  return result(cudaSuccess, "cudaHostRegister");
}
cudaError_t cudaHostUnregister(void* memory) {
  const std::lock_guard lock(state_mutex());
  space().pinned.erase(reinterpret_cast<uint64_t>(memory));
  return result(cudaSuccess, "cudaHostUnregister");
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return result(cudaSuccess, "cudaHostGetDevicePointer");
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return submit(stream, copy_of(to, from, bytes, kind), "cudaMemcpyAsync");
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  if (const cudaError_t code = disturb_captures("cudaMemcpy")) return code;
  return submit(nullptr, copy_of(to, from, bytes, kind), "cudaMemcpy");
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream) {
  for (size_t row = 0; row < height; ++row) {
    const cudaError_t code =
        submit(stream,
               copy_of(static_cast<char*>(to) + row * to_pitch,
                       static_cast<const char*>(from) + row * from_pitch, width, kind),
               "cudaMemcpy2DAsync");
    if (code != cudaSuccess) return code;
  }
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return submit(stream, fill_of(to, value, bytes), "cudaMemsetAsync");
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  if (const cudaError_t code = disturb_captures("cudaMemset")) return code;
  return submit(nullptr, fill_of(to, value, bytes), "cudaMemset");
}
cudaError_t cudaMemGetInfo(size_t* left, size_t* all) {
  *all = kMemory;
  *left = kMemory - bytes_in_use();
  return result(cudaSuccess, "cudaMemGetInfo");
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address) {
  const std::lock_guard lock(state_mutex());
  *found = {};
  const auto at = reinterpret_cast<uint64_t>(address);
  if (is_device_address(at)) {
    found->type = cudaMemoryTypeDevice;
    found->devicePointer = const_cast<void*>(address);
  } else if (is_pinned(at)) {
    found->type = cudaMemoryTypeHost;
    found->devicePointer = found->hostPointer = const_cast<void*>(address);
  } else {
    found->type = cudaMemoryTypeUnregistered;
    found->hostPointer = const_cast<void*>(address);
  }
  return result(cudaSuccess, "cudaPointerGetAttributes");
}

}  // extern "C"
