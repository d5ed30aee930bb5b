// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// Checks the cases of all operators on the kernels of a GPU, without PyTorch:
//   ortrain_check_kernels describe
//   ortrain_check_kernels values|gradients [--own] [--only TEXT] [--part I/N] [--seconds S]
//                         [--after NUMBER]
//
// Values: every kernel of the device against the CPU's "ref". Gradients: against the CPU's. --own
// leaves out what is not by a kernel of the provider's own. Cases are taken in an order that spreads
// operators, part I of N of them, those behind number --after. Each line of output is one JSON
// object: {"at", "case"} before a case, {"failed", "case", "kernel", "type", "message"}, and at the
// end {"cases", "passed", "failed", "refused", "largest", "left_out"}. The status is 0 unless the
// arguments are wrong (2) or the device takes no more work (3), where no last line is printed.

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "ortrain/base/error.h"
#include "ortrain/gpu/cublaslt.h"
#include "ortrain/gpu/cudnn.h"
#include "ortrain/gpu/gpu_device.h"
#include "ortrain/gpu/runtime_compiler.h"
#include "ortrain/testing/harness.h"

namespace {

using namespace ortrain;
using namespace ortrain::testing;

struct Options {
  bool gradients = false;
  bool own = false;
  std::string only;
  size_t part = 0, parts = 1;
  double seconds = 1e9;
  std::optional<size_t> after;
};

std::string quoted(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      result += '\\';
      result += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned>(c));
      result += code;
    } else {
      result += c;
    }
  }
  return result + '"';
}

// Lines reach whoever watches even where the process ends in the middle.
void print_line(const std::string& text) {
  std::fputs((text + "\n").c_str(), stdout);
  std::fflush(stdout);
}

template <class Number>
bool read(std::string_view text, Number& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

bool parse(int argc, char** argv, Options& options) {
  options.gradients = std::string_view(argv[1]) == "gradients";
  for (int i = 2; i < argc; ++i) {
    const std::string_view name = argv[i];
    if (name == "--own") {
      options.own = true;
      continue;
    }
    if (++i == argc) return false;
    const std::string_view value = argv[i];
    if (name == "--only") {
      options.only = value;
    } else if (name == "--seconds") {
      if (!read(value, options.seconds)) return false;
    } else if (name == "--after") {
      if (!read(value, options.after.emplace())) return false;
    } else if (name == "--part") {
      const size_t slash = value.find('/');
      if (slash == value.npos || !read(value.substr(0, slash), options.part) ||
          !read(value.substr(slash + 1), options.parts) || options.part >= options.parts) {
        return false;
      }
    } else {
      return false;
    }
  }
  return true;
}

bool has_own_kernel(const OpCase& op_case, const KernelRegistry& kernels) {
  const auto [domain, name] = split_op(op_case.op);
  return std::ranges::any_of(kernels.find(domain, name), [](const Kernel& kernel) {
    return kernel.make && kernel.name != "host" && kernel.name != "view";
  });
}

// By std::mt19937_64 and a shuffle of our own, so that every build has the same order.
std::vector<size_t> chosen(const Options& options, const KernelRegistry& kernels) {
  const std::vector<OpCase>& cases = all_cases().all();
  std::vector<size_t> numbers;
  for (size_t i = 0; i < cases.size(); ++i) {
    if (options.gradients && !has_gradient_check(cases[i])) continue;
    if (options.own && !has_own_kernel(cases[i], kernels)) continue;
    if (case_name(cases[i]).find(options.only) == std::string::npos) continue;
    numbers.push_back(i);
  }
  std::mt19937_64 random(0);
  for (size_t i = numbers.size(); i > 1; --i) std::swap(numbers[i - 1], numbers[random() % i]);
  std::vector<size_t> mine;
  for (size_t i = options.part; i < numbers.size(); i += options.parts) mine.push_back(numbers[i]);
  if (options.after) {
    const auto last = std::ranges::find(mine, *options.after);
    if (last != mine.end()) mine.erase(mine.begin(), last + 1);
  }
  return mine;
}

bool device_works() {
  try {
    gpu::device(0).synchronize_all();
    return true;
  } catch (const Error&) {
    return false;
  }
}

int check(const Options& options) {
  const auto start = std::chrono::steady_clock::now();
  const KernelRegistry& kernels = gpu::kernels(0);
  const std::vector<size_t> numbers = chosen(options, kernels);
  size_t checked = 0, passed = 0, failed = 0, refused = 0;
  double largest = 0;
  for (const size_t number : numbers) {
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    if (taken.count() > options.seconds) break;
    const OpCase& op_case = all_cases().all()[number];
    const std::string name = case_name(op_case);
    print_line(str("{\"at\": ", number, ", \"case\": ", quoted(name), "}"));
    std::vector<CheckRow> rows;
    try {
      rows = options.gradients ? std::vector{check_gradient(op_case, kernels)}
                               : check_kernels(op_case, kernels);
    } catch (const std::exception& error) {  // what cannot even be set up has failed
      rows = {{.name = name, .kernel = "", .message = error.what()}};
    }
    ++checked;
    bool right = true;
    for (const CheckRow& row : rows) {
      if (row.refused) {
        ++refused;
      } else if (row.passed) {
        ++passed;
        largest = std::max(largest, row.difference);
      } else {
        ++failed;
        right = false;
        print_line(str("{\"failed\": ", number, ", \"case\": ", quoted(row.name),
                       ", \"kernel\": ", quoted(row.kernel), ", \"type\": ",
                       quoted(name_of(row.type)), ", \"message\": ", quoted(row.message), "}"));
      }
    }
    if (!right && !device_works()) return 3;
  }
  print_line(str("{\"cases\": ", checked, ", \"passed\": ", passed, ", \"failed\": ", failed,
                 ", \"refused\": ", refused, ", \"largest\": ", largest,
                 ", \"left_out\": ", numbers.size() - checked, "}"));
  return 0;
}

// What is found of the device and of the libraries.
int describe() {
  print_line(str("platform ", gpu::platform(), ", devices ", gpu::device_count()));
  if (gpu::device_count() == 0) return 0;
  const std::shared_ptr<void> current = gpu::device(0).enter();
  print_line(str("compute capability ", gpu::compute_capability(0), ", multiprocessors ",
                 gpu::multiprocessors(0), ", shared memory of a block ",
                 gpu::shared_memory_per_block(0)));
  std::string why;
  const gpu::SourceCompiler* compiler = gpu::source_compiler(0, &why);
  print_line(compiler != nullptr ? "compiler " + compiler->identity : "no compiler: " + why);
  const auto products = gpu::Cublaslt::find(why);
  print_line(products ? str("cuBLASLt ", products->version()) : "no cuBLASLt: " + why);
  const auto cudnn = gpu::find_cudnn(why);
  print_line(cudnn ? str("cuDNN ", cudnn->version()) : "no cuDNN: " + why);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view what = argc > 1 ? argv[1] : "";
  try {
    if (what == "describe" && argc == 2) return describe();
    Options options;
    if ((what == "values" || what == "gradients") && parse(argc, argv, options)) {
      return check(options);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 3;
  }
  std::fprintf(stderr,
               "usage: %s describe\n"
               "       %s values|gradients [--own] [--only TEXT] [--part I/N] [--seconds S] "
               "[--after NUMBER]\n",
               argv[0], argv[0]);
  return 2;
}
