// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// Several threads use what they share at once: plans, blocks, profiles, registries. `make tsan`
// looks for races.
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <thread>

#include "ortrain/autodiff/build_backward.h"
#include "ortrain/ir/text.h"
#include "ortrain/passes/pipeline.h"
#include "ortrain/runtime/backward_parts.h"
#include "ortrain/runtime/profiler.h"
#include "ortrain/runtime/session.h"

namespace ortrain {
namespace {

constexpr int kThreads = 4;

constexpr char kModel[] = R"(
graph g (float32[n, 8] x, float32[8, 16] w1 [parameter "w1" grad],
         float32[16, 8] w2 [parameter "w2" grad]) => (y) {
  a = MatMul(x, w1)
  b = Gelu(a)
  c = Softmax(b)
  y = MatMul(c, w2)
}
)";

Graph training_graph() {
  Graph graph = parse_graph(kModel);
  run_pipeline(graph, "simplify");
  build_backward(graph, {.output_indices = {0}});
  graph.remove_dead_nodes();
  graph.sort();
  run_pipeline(graph, "fuse");
  return graph;
}

void in_threads(const std::function<void(int)>& work) {
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) threads.emplace_back([&, t] { work(t); });
  for (std::thread& thread : threads) thread.join();
}

// The contents of all inputs for `rows` rows, and one step with them.
class Step {
 public:
  Step(const std::shared_ptr<Session>& session, int64_t rows) : session_(session) {
    for (const GraphInput& input : session->graph().inputs()) {
      Dims dims;
      for (const Dim& extent : session->graph().value(input.value).shape) {
        dims.push_back(extent.is_constant() ? extent.constant() : rows);
      }
      int64_t count = 1;
      for (int64_t extent : dims) count *= extent;
      std::vector<float> values(static_cast<size_t>(count));
      for (size_t i = 0; i < values.size(); ++i) {
        values[i] = static_cast<float>((i * 7 + dims_.size() * 3) % 13) * 0.1f - 0.6f;
      }
      tensors_.push_back(std::move(values));
      dims_.push_back(std::move(dims));
      const bool gradient = input.role == InputRole::gradient;
      forward_.push_back(gradient ? nullptr : tensors_.back().data());
      backward_.push_back(gradient ? tensors_.back().data() : nullptr);
    }
  }

  // Runs the forward; the context holds what the backward needs.
  std::unique_ptr<RunContext> forward() {
    plan_ = session_->plan(dims_);
    auto context = std::make_unique<RunContext>(session_, plan_);
    const std::vector<RunOutput> outputs = context->forward(forward_);
    sum_ = sum_of(outputs);
    return context;
  }
  // And the backward, in parts. Returns the sum of all results.
  double backward(RunContext& context) {
    context.begin_backward(backward_);
    for (const BackwardPart& part : backward_parts(session_->graph(), *plan_, 1)) {
      sum_ += sum_of(context.continue_backward(part.end));
    }
    return sum_;
  }

 private:
  static double sum_of(const std::vector<RunOutput>& outputs) {
    double sum = 0;
    for (const RunOutput& output : outputs) {
      if (!output.block) continue;
      const auto* data = static_cast<const float*>(output.block->data());
      for (int64_t i = 0; i < output.spec.numel(); ++i) sum += std::abs(data[i]);
    }
    return sum;
  }

  std::shared_ptr<Session> session_;
  std::vector<std::vector<float>> tensors_;
  std::vector<Dims> dims_;
  std::vector<const void*> forward_, backward_;
  std::shared_ptr<const ExecutionPlan> plan_;
  double sum_ = 0;
};

// Few plans are kept, so that threads drop those that others run.
std::shared_ptr<Session> shared_session() {
  return std::make_shared<Session>(training_graph(), cpu_kernels(),
                                   Session::Options{.max_plans = 3});
}

double expected_sum(int64_t rows) {
  Step step(shared_session(), rows);
  const std::unique_ptr<RunContext> context = step.forward();
  return step.backward(*context);
}

TEST(Threads, ShareASession) {
  const auto session = shared_session();
  std::vector<double> expected;
  for (int64_t rows = 0; rows < 8; ++rows) expected.push_back(expected_sum(rows));
  in_threads([&](int t) {
    std::minstd_rand random(static_cast<unsigned>(t + 1));
    for (int i = 0; i < 40; ++i) {
      const auto rows = static_cast<int64_t>(random() % expected.size());
      Step step(session, rows);
      const std::unique_ptr<RunContext> context = step.forward();
      EXPECT_EQ(step.backward(*context), expected[static_cast<size_t>(rows)]);
      EXPECT_LE(session->num_plans(), 3u);
      EXPECT_NE(session->latest_plan(), nullptr);
    }
  });
}

// As autograd does: its own threads run the backward, and free what the forward has held.
TEST(Threads, HandABackwardOver) {
  struct Handed {
    std::unique_ptr<Step> step;
    std::unique_ptr<RunContext> context;
    int64_t rows;
  };
  const auto session = shared_session();
  std::vector<double> expected;
  for (int64_t rows = 0; rows < 8; ++rows) expected.push_back(expected_sum(rows));
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Handed> queue;
  constexpr int kSteps = 60;
  std::atomic<int> left = kSteps * (kThreads / 2);
  in_threads([&](int t) {
    if (t % 2 == 0) {
      for (int i = 0; i < kSteps; ++i) {
        const int64_t rows = (i * 5 + t) % 8;
        auto step = std::make_unique<Step>(session, rows);
        auto context = step->forward();
        const std::lock_guard lock(mutex);
        queue.push_back({std::move(step), std::move(context), rows});
        changed.notify_one();
      }
      return;
    }
    while (left.fetch_sub(1) > 0) {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return !queue.empty(); });
      const Handed handed = std::move(queue.front());
      queue.pop_front();
      lock.unlock();
      EXPECT_EQ(handed.step->backward(*handed.context), expected[static_cast<size_t>(handed.rows)]);
    }
  });
}

TEST(Threads, TakeBlocksFromOnePool) {
  const auto pool = BlockPool::create();
  std::mutex mutex;
  std::vector<std::shared_ptr<Block>> others;
  in_threads([&](int t) {
    std::minstd_rand random(static_cast<unsigned>(t + 1));
    for (int i = 0; i < 300; ++i) {
      const size_t bytes = random() % 5000 + 1;
      std::shared_ptr<Block> block = i % 3 == 0 ? pool->arena(bytes) : pool->tensor(bytes);
      std::fill_n(static_cast<char*>(block->data()), bytes, static_cast<char>(t));
      if (i % 50 == 0) pool->trim();
      const std::lock_guard lock(mutex);  // the block of another thread is freed here
      others.push_back(std::move(block));
      if (others.size() > 8) others.erase(others.begin() + static_cast<int>(random() % 8));
    }
  });
  others.clear();
  EXPECT_EQ(pool->stats().bytes_in_use, 0u);
}

TEST(Threads, ReadAProfileThatOthersFill) {
  const auto session = shared_session();
  std::atomic<bool> done = false;
  set_profiling(true);
  std::thread reader([&] {
    while (!done) {
      session->profile().snapshot();
      all_profiles();
      session->profile().clear();
      std::this_thread::yield();
    }
  });
  in_threads([&](int t) {
    for (int i = 0; i < 20; ++i) {
      Step step(session, t + 1);
      const std::unique_ptr<RunContext> context = step.forward();
      step.backward(*context);
    }
  });
  set_profiling(false);
  done = true;
  reader.join();
}

TEST(Threads, BuildGraphsOfTheirOwn) {
  const std::string expected = print_graph(training_graph());
  in_threads([&](int) {
    for (int i = 0; i < 10; ++i) EXPECT_EQ(print_graph(training_graph()), expected);
  });
}

}  // namespace
}  // namespace ortrain
