// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace ortrain::gpu {

// Matrices that go from one distance between rows to another. Distances are in elements.
struct PaddedCopy {
  int64_t count = 1;  // matrices
  int64_t from_rows = 0, from_columns = 0;
  int64_t from_ld = 0, from_stride = 0;  // from_stride 0: all are copies of one matrix
  // What is written: no less than what is read; the rest is zeros.
  int64_t rows = 0, columns = 0;
  int64_t to_ld = 0, to_stride = 0;
};

// Elements of 2 or 4 bytes, at addresses that are multiples of that; the places do not overlap.
// Memory moves in words of 16 bytes on both sides however rows are aligned. One launch.
void copy_padded(const PaddedCopy& copy, size_t element_size, const void* from, void* to,
                 void* stream);

}  // namespace ortrain::gpu
