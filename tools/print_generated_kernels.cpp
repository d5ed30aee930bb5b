// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// Writes generated kernels into a folder, one file each, for tools/check_generated_kernels.py:
//   ortrain_print_kernels FOLDER [ROUNDS_OF_RANDOM_PROGRAMS]

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>

#include "ortrain/gpu/expr_samples_test.h"
#include "ortrain/gpu/expr_source.h"

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s FOLDER [ROUNDS]\n", argv[0]);
    return 2;
  }
  using namespace ortrain::gpu;
  const std::filesystem::path folder = argv[1];
  std::filesystem::create_directories(folder);
  std::vector<ExprSample> samples = case_samples(true);
  for (ExprSample& sample : random_samples(argc > 2 ? std::atoi(argv[2]) : 2)) {
    samples.push_back(std::move(sample));
  }
  std::map<std::string, std::string> texts;
  for (const ExprSample& sample : samples) {
    for (const bool vectors : {true, false}) {
      const ExprSource source = print_source(ExprKernelPlan(sample.program, sample.dims, vectors));
      texts[source.entry] = source.text;
    }
  }
  for (const auto& [entry, text] : texts) {
    std::ofstream(folder / (entry + ".cu")) << expr_prelude() << text;
  }
  std::printf("%zu kernels\n", texts.size());
  return 0;
}
