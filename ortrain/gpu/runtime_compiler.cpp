// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/runtime_compiler.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <tuple>

#include "ortrain/base/error.h"
#include "ortrain/gpu/kernel_cache.h"

namespace ortrain::gpu {
namespace {

// condition_variable::wait is a symbol of libstdc++ that systems of 2022 lack; this is not.
template <class Condition>
void wait_until(std::condition_variable& variable, std::unique_lock<std::mutex>& lock,
                Condition condition) {
  while (!variable.wait_for(lock, std::chrono::hours(1), condition)) {
  }
}

// A few threads that compile. Never destroyed: at exit, what waits is dropped, and what runs is
// waited for, since compilers do not like to lose their own static data while they work.
class CompilePool {
 public:
  static CompilePool& instance() {
    static CompilePool* const pool = new CompilePool();
    return *pool;
  }

  void add(std::function<void()> job) {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
    // A process made by fork has none of its parent's threads.
    if (owner_ != getpid()) {
      owner_ = getpid();
      threads_ = idle_ = running_ = 0;
    }
    if (idle_ == 0 && threads_ < most_) {
      ++threads_;
      std::thread([this] { work(); }).detach();
    }
    ready_.notify_one();
  }

 private:
  CompilePool() : most_(std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, 8)) {
    std::atexit([] { instance().stop(); });
  }

  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      ++idle_;
      wait_until(ready_, lock, [this] { return !jobs_.empty(); });
      --idle_;
      const std::function<void()> job = std::move(jobs_.front());
      jobs_.pop_front();
      ++running_;
      lock.unlock();
      job();
      lock.lock();
      --running_;
      finished_.notify_all();
    }
  }

  void stop() {
    std::unique_lock lock(mutex_);
    jobs_.clear();
    if (owner_ == getpid()) wait_until(finished_, lock, [this] { return running_ == 0; });
  }

  std::mutex mutex_;
  std::condition_variable ready_;
  std::condition_variable finished_;
  std::deque<std::function<void()>> jobs_;
  int most_;
  int threads_ = 0;
  int idle_ = 0;
  int running_ = 0;
  pid_t owner_ = getpid();
};

CompiledKernel make_kernel(const SourceCompiler& compiler, const std::string& source,
                           const std::string& entry) {
  const std::string key = str(compiler.identity, "\n", source);
  const KernelCache cache = KernelCache::from_flag();
  CompiledKernel made;
  if (const std::optional<std::string> code = cache.find(key)) {
    try {
      made.kernel = compiler.load(*code, entry);
      return made;
    } catch (const Error& error) {
      made.notes.push_back(str("compiling ", entry, " again: ", error.what()));
    }
  }
  const auto start = std::chrono::steady_clock::now();
  const std::string code = compiler.compile(source);
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
  made.notes.push_back(str("compiled ", entry, " in ", static_cast<int>(took.count()), " ms"));
  made.kernel = compiler.load(code, entry);
  std::string why;
  if (!cache.store(key, code, &why)) {
    made.notes.push_back(str("kernels are not kept on disk: ", why));
  }
  return made;
}

}  // namespace

namespace {

struct KernelJobs {
  using Key = std::tuple<std::string, std::string, std::string>;
  std::mutex mutex;
  std::map<Key, KernelJob> jobs;

  static KernelJobs& instance() {
    static auto* const all = new KernelJobs();
    return *all;
  }
};

}  // namespace

KernelJob compile_kernel(const SourceCompiler& compiler, const std::string& source,
                         const std::string& entry) {
  KernelJobs& all = KernelJobs::instance();
  const std::lock_guard lock(all.mutex);
  const auto [place, is_first] =
      all.jobs.try_emplace(KernelJobs::Key(compiler.identity, source, entry));
  if (is_first) {
    auto task = std::make_shared<std::packaged_task<CompiledKernel()>>(
        [&compiler, source, entry] { return make_kernel(compiler, source, entry); });
    place->second = task->get_future().share();
    CompilePool::instance().add([task] { (*task)(); });
  }
  return place->second;
}

size_t num_kernel_jobs() {
  KernelJobs& all = KernelJobs::instance();
  const std::lock_guard lock(all.mutex);
  return all.jobs.size();
}

}  // namespace ortrain::gpu
