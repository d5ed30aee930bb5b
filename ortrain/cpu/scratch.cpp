// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/scratch.h"

#include <array>
#include <memory>
#include <new>

#include "ortrain/base/error.h"

namespace ortrain::cpu {
namespace {

constexpr std::align_val_t kAlignment{64};

struct AlignedDelete {
  void operator()(std::byte* bytes) const { ::operator delete[](bytes, kAlignment); }
};

struct Buffer {
  std::unique_ptr<std::byte[], AlignedDelete> bytes;
  size_t size = 0;
};

thread_local std::array<Buffer, static_cast<size_t>(ScratchSlot::kCount)> buffers;

}  // namespace

void* scratch_bytes(ScratchSlot slot, size_t bytes) {
  Buffer& buffer = buffers[static_cast<size_t>(slot)];
  if (buffer.size < bytes) {
    buffer.bytes.reset();
    buffer.size = 0;
    const size_t rounded = (bytes + 4095) / 4096 * 4096;
    buffer.bytes.reset(
        static_cast<std::byte*>(::operator new[](rounded, kAlignment, std::nothrow)));
    if (buffer.bytes == nullptr) {
      throw OutOfMemoryError(str("no memory for ", rounded, " bytes of a kernel's scratch"));
    }
    buffer.size = rounded;
  }
  return buffer.bytes.get();
}

}  // namespace ortrain::cpu
