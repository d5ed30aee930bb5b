// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <omp.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "ortrain/base/error.h"
#include "ortrain/cpu/gemm.h"
#include "ortrain/cpu/onednn.h"

// A signal's frame is written below the stack pointer: code that has it in the heap while it
// computes lets any signal overwrite what lies there.
namespace ortrain::cpu {
namespace {

struct Seen {
  uintptr_t begin, end;  // of the stack
  volatile sig_atomic_t signals, outside;
};

Seen seen;

void look(int, siginfo_t*, void* context) {
  const auto* machine = static_cast<const ucontext_t*>(context);
  const auto pointer = static_cast<uintptr_t>(machine->uc_mcontext.gregs[REG_RSP]);
  seen.signals = seen.signals + 1;
  if (pointer < seen.begin || pointer >= seen.end) seen.outside = seen.outside + 1;
}

// Sends this thread a signal every few microseconds, handled on a stack of its own.
class Signals {
 public:
  Signals() {
    pthread_attr_t attributes;
    void* lowest = nullptr;
    size_t size = 0;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &lowest, &size);
    pthread_attr_destroy(&attributes);
    seen = {reinterpret_cast<uintptr_t>(lowest), reinterpret_cast<uintptr_t>(lowest) + size, 0, 0};

    stack_t stack{};
    stack.ss_sp = memory_.data();
    stack.ss_size = memory_.size();
    sigaltstack(&stack, &old_stack_);
    struct sigaction action{};
    action.sa_sigaction = look;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
    sigaction(SIGRTMIN, &action, &old_action_);
    sigevent event{};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = SIGRTMIN;
    event._sigev_un._tid = static_cast<pid_t>(syscall(SYS_gettid));
    timer_create(CLOCK_MONOTONIC, &event, &timer_);
    constexpr long kNanoseconds = 20000;
    const itimerspec period{{0, kNanoseconds}, {0, kNanoseconds}};
    timer_settime(timer_, 0, &period, nullptr);
  }
  ~Signals() {
    timer_delete(timer_);
    sigaction(SIGRTMIN, &old_action_, nullptr);
    sigaltstack(&old_stack_, nullptr);
  }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

 private:
  std::array<std::byte, 1 << 18> memory_{};
  timer_t timer_{};
  stack_t old_stack_{};
  struct sigaction old_action_{};
};

// Runs until some signals have come, and tells how many found the stack pointer elsewhere.
// On one thread, which the signals go to: on more of them it would wait in between.
template <class Run>
int signals_outside(Run run) {
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  run();  // prepares
  const auto signals = std::make_unique<Signals>();
  constexpr int kEnough = 8;
  constexpr int kMost = 100000;
  for (int i = 0; i < kMost && seen.signals < kEnough; ++i) run();
  EXPECT_GE(seen.signals, kEnough);
  omp_set_num_threads(threads);
  return seen.outside;
}

TEST(StackPointer, StaysInTheStackDuringProducts) {
  std::mt19937 random(20);
  constexpr std::array<int64_t, 14> kExtents{1,   5,   16,  48,  64,  80,  85,
                                             128, 250, 257, 384, 512, 768, 1100};
  std::uniform_int_distribution<size_t> pick(0, kExtents.size() - 1);
  std::vector<float> a(1100 * 1100, 0.5f), b(a), c(a);
  constexpr int kProducts = 150;
  for (int i = 0; i < kProducts; ++i) {
    const int64_t m = kExtents[pick(random)];
    const int64_t n = kExtents[pick(random)];
    const int64_t k = kExtents[pick(random)];
    const bool trans_a = random() % 2 != 0;
    const bool trans_b = random() % 2 != 0;
    const float beta = random() % 2 != 0 ? 1.0f : 0.0f;
    const float* bias = random() % 4 == 0 ? b.data() : nullptr;
    EXPECT_EQ(signals_outside([&] {
                gemm(trans_a, trans_b, m, n, k, 1e-3f, a.data(), trans_a ? m : k, b.data(),
                     trans_b ? k : n, beta, c.data(), n, bias);
              }),
              0)
        << str(m, "x", n, "x", k, trans_a ? " A transposed" : "", trans_b ? " B transposed" : "");
  }
}

OrtrainOnednnConv convolution(int32_t kind, int64_t channels, int64_t out_channels, int64_t groups,
                              int64_t edge, int64_t kernel, int64_t stride, int64_t dilation) {
  OrtrainOnednnConv conv{};
  conv.kind = kind;
  conv.spatial = 2;
  conv.batch = 2;
  conv.in_channels = channels;
  conv.out_channels = out_channels;
  conv.groups = groups;
  for (int axis = 0; axis < 2; ++axis) {
    conv.in[axis] = edge;
    conv.kernel[axis] = kernel;
    conv.stride[axis] = stride;
    conv.dilation[axis] = dilation;
    conv.pad_begin[axis] = conv.pad_end[axis] = dilation * (kernel / 2);
    conv.out[axis] = (edge + 2 * conv.pad_begin[axis] - dilation * (kernel - 1) - 1) / stride + 1;
  }
  return conv;
}

TEST(StackPointer, StaysInTheStackDuringConvolutions) {
  if (onednn() == nullptr) GTEST_SKIP() << onednn_missing_reason();
  std::vector<float> x(2 * 128 * 40 * 40, 0.5f), w(256 * 256 * 9, 0.25f), y(x);
  for (const int64_t channels : {3, 24, 64}) {
    for (const int64_t groups : {int64_t{1}, int64_t{3}, channels}) {
      if (channels % groups != 0) continue;
      for (const auto& [kernel, stride, dilation] :
           {std::array<int64_t, 3>{1, 1, 1}, {3, 1, 1}, {3, 2, 1}, {3, 1, 2}, {2, 2, 1}}) {
        for (const int32_t kind :
             {kOrtrainConvForward, kOrtrainConvBackwardData, kOrtrainConvBackwardWeights}) {
          const OrtrainOnednnConv shape =
              convolution(kind, channels, 2 * channels, groups, 20, kernel, stride, dilation);
          std::string why;
          const auto conv = OnednnConv::make(shape, &why);
          if (!conv) continue;
          const float* in[] = {kind == kOrtrainConvForward ? x.data() : y.data(),
                               kind == kOrtrainConvBackwardWeights ? x.data() : w.data(), nullptr};
          std::vector<float> result(kind == kOrtrainConvBackwardWeights ? w.size() : y.size());
          float* out[] = {result.data(), nullptr};
          EXPECT_EQ(signals_outside([&] { conv->run(in, out); }), 0)
              << str("direction ", kind, ", ", channels, " channels in ", groups,
                     " groups, kernel ", kernel, ", stride ", stride, ", dilation ", dilation);
        }
      }
    }
  }
}

TEST(StackPointer, StaysInTheStackWithoutAvx512) {
  const std::string program = std::filesystem::read_symlink("/proc/self/exe");
  const std::string command = str("ONEDNN_MAX_CPU_ISA=AVX2 '", program,
                                  "' --gtest_filter='StackPointer.*DuringProducts' > /dev/null");
  EXPECT_EQ(std::system(command.c_str()), 0) << command;
}

}  // namespace
}  // namespace ortrain::cpu
