// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <unordered_map>
#include <vector>

#include "oneapi/dnnl/dnnl.hpp"
#include "ortrain/cpu/onednn_abi.h"

namespace ortrain::onednn {

// One direction of a convolution for one shape, for as many threads as OpenMP would start when it
// is made: run with fewer it is wrong, or waits forever. oneDNN chooses the layouts; reorders
// between them and the dense row-major layouts of the engine are part of the run, through memory
// that all convolutions of a thread share. Throws dnnl::error.
class Conv {
 public:
  explicit Conv(const OrtrainOnednnConv& conv);
  void run(const float* const* in, float* const* out);

 private:
  struct Operand {
    int argument = 0;
    dnnl::memory plain;   // the caller's address
    dnnl::memory chosen;  // the same object as `plain` when no reorder is needed
    dnnl::reorder reorder;
    bool reordered = false;
    size_t offset = 0;  // of `chosen` in the shared memory, where reordered
  };
  Operand operand(int argument, const dnnl::memory::desc& plain, const dnnl::memory::desc& chosen,
                  bool is_input);

  dnnl::primitive primitive_;
  std::vector<Operand> inputs_;
  std::vector<Operand> outputs_;
  std::unordered_map<int, dnnl::memory> arguments_;
  size_t shared_bytes_ = 0;
};

// The same for whatever number of threads OpenMP grants to a run.
class ConvOfTeams {
 public:
  explicit ConvOfTeams(const OrtrainOnednnConv& conv);
  void run(const float* const* in, float* const* out);

 private:
  OrtrainOnednnConv conv_;
  std::map<int, Conv> by_size_;
};

}  // namespace ortrain::onednn
