// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/runtime_compiler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include "ortrain/base/error.h"
#include "ortrain/base/log.h"
#include "ortrain/gpu/gpu_device.h"
#include "ortrain/gpu/host_compiler.h"
#include "ortrain/testing/harness.h"

namespace ortrain::gpu {
namespace {

namespace fs = std::filesystem;

// An environment variable for the time of a scope.
class Setting {
 public:
  Setting(const char* name, const std::string& value) : name_(name) {
    setenv(name, value.c_str(), 1);
  }
  ~Setting() { unsetenv(name_); }

 private:
  const char* name_;
};

class NoKernel final : public LoadedKernel {
 public:
  void launch(unsigned, unsigned, void*, const void*) const override {}
};

// Counts what it compiles; its code is the source.
struct CountingCompiler {
  explicit CountingCompiler(std::string identity) {
    compiler.identity = std::move(identity);
    compiler.compile = [this](const std::string& source) {
      ++compiled;
      return "code of " + source;
    };
    compiler.load = [this](const std::string& code, const std::string&) {
      ++loaded;
      if (code.find("unloadable") != std::string::npos && compiled == 0) {
        throw DeviceError("not for this device");
      }
      return std::make_shared<NoKernel>();
    };
  }
  SourceCompiler compiler;
  std::atomic<int> compiled = 0;
  std::atomic<int> loaded = 0;
};

// They stay: the jobs of a process are kept, and name their compiler.
CountingCompiler& counting(const std::string& identity) { return *new CountingCompiler(identity); }

class RuntimeCompilerTest : public ::testing::Test {
 protected:
  RuntimeCompilerTest() {
    std::string pattern = (fs::temp_directory_path() / "ortrain-jobs-XXXXXX").string();
    EXPECT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  ~RuntimeCompilerTest() override { fs::remove_all(folder_); }
  std::string folder_;
};

TEST_F(RuntimeCompilerTest, EqualSourcesShareAJob) {
  const Setting cache("ORTRAIN_KERNEL_CACHE_DIR", "off");
  CountingCompiler& one = counting("share " + folder_);
  std::vector<KernelJob> jobs(16);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < jobs.size(); ++i) {
    threads.emplace_back(
        [&, i] { jobs[i] = compile_kernel(one.compiler, i % 2 == 0 ? "a" : "b", "entry"); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const KernelJob& job : jobs) EXPECT_NE(job.get().kernel, nullptr);
  EXPECT_EQ(jobs[0].get().kernel, jobs[2].get().kernel);
  EXPECT_NE(jobs[0].get().kernel, jobs[1].get().kernel);
  EXPECT_EQ(one.compiled, 2);
}

TEST_F(RuntimeCompilerTest, LaterProcessesReadFromTheDisk) {
  const Setting cache("ORTRAIN_KERNEL_CACHE_DIR", folder_ + "/kernels");
  // Compilers of the same identity at other addresses stand for other processes, if only their
  // entries differ: those are not part of what lies on the disk.
  CountingCompiler& first = counting("disk " + folder_);
  CountingCompiler& second = counting("disk " + folder_);
  CountingCompiler& newer = counting("disk, newer " + folder_);
  compile_kernel(first.compiler, "source", "one").get();
  EXPECT_EQ(first.compiled, 1);
  compile_kernel(second.compiler, "source", "two").get();
  EXPECT_EQ(second.compiled, 0);
  EXPECT_EQ(second.loaded, 1);
  compile_kernel(newer.compiler, "source", "three").get();
  EXPECT_EQ(newer.compiled, 1);
}

TEST_F(RuntimeCompilerTest, WhatTheDeviceDoesNotTakeIsCompiledAgain) {
  const Setting cache("ORTRAIN_KERNEL_CACHE_DIR", folder_ + "/kernels");
  CountingCompiler& first = counting("reload " + folder_);
  CountingCompiler& second = counting("reload " + folder_);
  compile_kernel(first.compiler, "unloadable", "one").get();
  compile_kernel(second.compiler, "unloadable", "two").get();
  EXPECT_EQ(second.compiled, 1);
  EXPECT_EQ(second.loaded, 2);
}

TEST_F(RuntimeCompilerTest, ErrorsNameTheCompilerAndItsWords) {
  const Setting cache("ORTRAIN_KERNEL_CACHE_DIR", "off");
  static const SourceCompiler compiler = host_source_compiler("c++");
  try {
    compile_kernel(compiler, "int x = no_such_name;", "entry").get();
    FAIL();
  } catch (const InternalError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("no_such_name"));
  }
  static const SourceCompiler missing = host_source_compiler("/no/such/compiler");
  EXPECT_THROW(compile_kernel(missing, "", "entry").get(), InternalError);
  EXPECT_THROW(compile_kernel(compiler, "", "entry").get(), InternalError);  // no such kernel
}

testing::OpCase case_named(const std::string& op, const std::string& name) {
  for (const testing::OpCase& op_case : testing::all_cases().all()) {
    if (op_case.op == op && op_case.name == name) return op_case;
  }
  throw InternalError("no such case");
}

// One case of the harness on one of its kernels, against "ref".
void expect_passes(const testing::OpCase& op_case, const std::string& kernel) {
  bool ran = false;
  for (const testing::CheckRow& row : testing::check_kernels(op_case, kernels(0))) {
    if (row.kernel != kernel) continue;
    EXPECT_FALSE(row.refused) << row.message;
    EXPECT_TRUE(row.passed) << row.message;
    ran = true;
  }
  EXPECT_TRUE(ran);
}

TEST_F(RuntimeCompilerTest, GeneratedKernelsRunNodes) {
  const Setting cache("ORTRAIN_KERNEL_CACHE_DIR", folder_ + "/kernels");
  const Setting compiler("ORTRAIN_GPU_COMPILER", "host");
  expect_passes(case_named("ortrain::Fused", "norm_64"), "generated");
  EXPECT_FALSE(fs::is_empty(folder_ + "/kernels"));
}

TEST_F(RuntimeCompilerTest, WithoutACompilerNodesAreInterpreted) {
  const testing::OpCase op_case = case_named("ortrain::Fused", "norm_64");
  for (const testing::CheckRow& row : testing::check_kernels(op_case, kernels(0))) {
    if (row.kernel != "generated") continue;
    EXPECT_TRUE(row.refused);
    EXPECT_THAT(row.message, ::testing::HasSubstr("ORTRAIN_GPU_COMPILER"));
  }
  expect_passes(op_case, "interpreted");
}

TEST_F(RuntimeCompilerTest, WhatDoesNotCompileIsInterpreted) {
  const Setting cache("ORTRAIN_KERNEL_CACHE_DIR", "off");
  const Setting compiler("ORTRAIN_GPU_COMPILER", "/bin/false");
  const Setting log("ORTRAIN_LOG", "dispatch");
  std::string lines;
  set_log_sink([&](std::string_view, std::string_view line) { lines += line; });
  expect_passes(case_named("ortrain::Fused", "norm_17"), "generated");
  set_log_sink(nullptr);
  EXPECT_THAT(lines, ::testing::HasSubstr("a fused node is interpreted: /bin/false failed"));
}

}  // namespace
}  // namespace ortrain::gpu
