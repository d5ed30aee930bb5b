// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ortrain::python {

// A hash of a few words that are spread over some bytes, the first and the last among them: another
// one, in all likelihood, after most elements have changed, as an optimizer changes them.
inline uint64_t sample_of(const void* data, size_t bytes) {
  constexpr size_t kWords = 16;
  const auto* const begin = static_cast<const unsigned char*>(data);
  uint64_t hash = bytes;
  const auto take = [&](size_t offset, size_t size) {
    uint64_t word = 0;
    std::memcpy(&word, begin + offset, size);
    hash = (hash ^ word) * 0x9E3779B97F4A7C15U;
    hash ^= hash >> 32;
  };
  if (data == nullptr || bytes == 0) return hash;
  if (bytes < sizeof(uint64_t)) {
    take(0, bytes);
    return hash;
  }
  const size_t last = bytes - sizeof(uint64_t);
  for (size_t i = 0; i < kWords; ++i) {
    take(last / (kWords - 1) * i + last % (kWords - 1) * i / (kWords - 1), sizeof(uint64_t));
  }
  return hash;
}

}  // namespace ortrain::python
