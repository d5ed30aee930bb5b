// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// The functions that libFuzzer looks for, for the target that the build names.
#include <cstdlib>

#include "fuzz/targets.h"

extern "C" {

size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t limit);

int LLVMFuzzerInitialize(int*, char***) {
  // One thread: inputs are small, and whether memory is wrong must not depend on the schedule.
  setenv("OMP_NUM_THREADS", "1", 1);
  return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ortrain::fuzz::ORTRAIN_FUZZ_RUN({data, size});
  return 0;
}

#ifdef ORTRAIN_FUZZ_MUTATE
// Three of four inputs are changed as the format wants it, the rest byte by byte.
size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t limit, unsigned int seed) {
  if (seed % 4 != 0) {
    const size_t changed = ortrain::fuzz::ORTRAIN_FUZZ_MUTATE(data, size, limit, seed);
    if (changed > 0) return changed;
  }
  return LLVMFuzzerMutate(data, size, limit);
}
#endif
}
