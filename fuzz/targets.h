// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

// What libFuzzer calls with bytes, one function per target. The engine's own errors are an answer
// and stay inside; what leaves (InternalError, std::bad_alloc, any other exception) is a finding,
// like a report of a sanitizer.

namespace ortrain::fuzz {

using Bytes = std::span<const uint8_t>;

// A model of ONNX: read, verified, planned at some extents, run forward and backward.
void run_onnx(Bytes input);
// A graph as text, the same way.
void run_text(Bytes input);
// A safetensors file, a folder with a checkpoint, a folder with artifacts that are trained with.
void run_checkpoint(Bytes input);
// A library of operators whose definitions and answers are drawn.
void run_extension(Bytes input);
// Sizes, extents and plans against exact arithmetic.
void run_sizes(Bytes input);

struct Target {
  std::string_view name;
  void (*run)(Bytes input);
};

inline constexpr Target kTargets[] = {{"onnx", run_onnx},
                                      {"text", run_text},
                                      {"checkpoint", run_checkpoint},
                                      {"extension", run_extension},
                                      {"sizes", run_sizes}};

// Changes an input in place as its format wants it; 0 where it is not of that format. `limit`: the
// bytes that `data` has room for.
size_t mutate_onnx(uint8_t* data, size_t size, size_t limit, uint64_t seed);
size_t mutate_text(uint8_t* data, size_t size, size_t limit, uint64_t seed);

}  // namespace ortrain::fuzz
