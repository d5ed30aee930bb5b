// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "ortrain/base/error.h"
#include "ortrain/gpu/gpu_device.h"
#include "ortrain/ir/text.h"
#include "ortrain/runtime/session.h"

// Plans, runs and recordings on a device that is not the host, with the simulator as the device.
namespace ortrain {
namespace {

using Floats = std::vector<float>;

std::shared_ptr<Session> session_of(const std::string& text, const KernelRegistry& kernels) {
  return std::make_shared<Session>(parse_graph(text), kernels);
}

Floats run(const std::shared_ptr<Session>& session, const std::vector<Floats>& inputs,
           const std::vector<Dims>& dims) {
  std::vector<const void*> addresses;
  for (const Floats& input : inputs) addresses.push_back(input.data());
  RunContext context(session, session->plan(dims));
  const std::vector<RunOutput> outputs = context.forward(addresses);
  const auto* data = static_cast<const float*>(outputs[0].block->data());
  return Floats(data, data + outputs[0].spec.numel());
}

constexpr const char* kSoftmax =
    "graph g (float32[n, 4] x) => (z) {\n"
    "  y = Softmax <axis = -1> (x)\n  z = LogSoftmax <axis = -1> (y)\n}";

TEST(GpuSession, RunsItsOwnKernels) {
  auto session = session_of(kSoftmax, gpu::kernels(0));
  const auto plan = session->plan({{2, 4}});
  for (const PlanStep& step : plan->steps) EXPECT_NE(step.kernel, "host");
  EXPECT_TRUE(plan->can_be_recorded);
  const Floats x{1, 2, 3, 4, 0, -1, 5, 2};
  const Floats expected = run(session_of(kSoftmax, cpu_kernels()), {x}, {{2, 4}});
  const Floats actual = run(session, {x}, {{2, 4}});
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) EXPECT_NEAR(actual[i], expected[i], 1e-5f);
}

TEST(GpuSession, RecordsStepsWhoseAddressesComeAgain) {
  auto session = session_of(kSoftmax, gpu::kernels(0));
  BlockPool::host()->trim();  // what other tests left would be handed out in turn
  for (int i = 0; i < 6; ++i) {
    // Another place for the input in every run: it is copied to one that stays.
    const Floats x(8, static_cast<float>(i));
    Floats shifted = x;
    shifted[3] += 1;
    const Floats result = run(session, {shifted}, {{2, 4}});
    EXPECT_NEAR(result[0] - result[3], 0.1749f - 0.4754f, 1e-3f) << i;
  }
  const StepRecordings::Counts counts = session->recordings().counts();
  EXPECT_EQ(counts.recorded, 1);
  EXPECT_EQ(counts.launched, 4);
  EXPECT_EQ(counts.direct, 2);
}

TEST(GpuSession, ConstantsLieOnTheDevice) {
  const std::string text =
      "graph g (float32[2, 2] x) => (z) {\n"
      "  const c = float32[2, 2] {1, 2, 3, 4}\n"
      "  y = Add(x, c)\n  z = Softmax <axis = 0> (y)\n}";
  auto session = session_of(text, gpu::kernels(0));
  const auto plan = session->plan({{2, 2}});
  ASSERT_FALSE(plan->placed.addresses.empty());
  for (size_t i = 0; i < plan->constants.size(); ++i) {
    EXPECT_NE(plan->placed.addresses[i], plan->constants[i].data());
  }
  const Floats result = run(session, {{0, 0, 0, 0}}, {{2, 2}});
  EXPECT_NEAR(result[0], 1 / (1 + std::exp(2.0f)), 1e-6f);
}

TEST(GpuSession, AnErrorOnTheDeviceNamesTheNode) {
  const std::string text =
      "graph g (float32[3] x) => (y) {\n  y = Softmax <axis = 0> (x) @ encoder.head\n}";
  auto session = session_of(text, gpu::kernels(0));
  const auto plan = session->plan({{3}});
  Device& device = gpu::device(0);
  *device.fault_slot() = {.kind = FaultKind::element,
                          .step = plan->step_numbers->first(),
                          .value = 9,
                          .position = 2,
                          .low = -3,
                          .high = 3};
  try {
    device.raise_faults();
    FAIL() << "nothing was thrown";
  } catch (const IndexError& error) {
    EXPECT_EQ(std::string(error.what()),
              "[Softmax 'encoder.head'] indices[2] = 9 is out of range for an extent of 3");
  }
  EXPECT_NO_THROW(device.raise_faults());  // once
  // A plan that is gone leaves the error without a name.
  const uint32_t number = plan->step_numbers->first() + 1000000;
  *device.fault_slot() = {.kind = FaultKind::division, .step = number};
  EXPECT_THROW(device.raise_faults(), Error);
}

TEST(GpuSession, WhatHasNoKernelRunsOnTheHost) {
  const std::string text =
      "graph g (float32[1, 1, 2, 2] x) => (y) {\n"
      "  const s = float32[4] {1, 1, 2, 2}\n  y = Resize <mode = \"nearest\"> (x, _, s)\n}";
  auto session = session_of(text, gpu::kernels(0));
  const auto plan = session->plan({{1, 1, 2, 2}});
  ASSERT_EQ(plan->steps.size(), 1u);
  EXPECT_NE(plan->steps[0].kernel == "host", plan->can_be_recorded);
  const Floats x{1, 2, 3, 4};
  EXPECT_EQ(run(session, {x}, {{1, 1, 2, 2}}),
            run(session_of(text, cpu_kernels()), {x}, {{1, 1, 2, 2}}));
}

TEST(GpuDevice, WritesWhatTheHostMayChangeAtOnce) {
  Device& device = gpu::device(0);
  const auto block = device.tensor(64, nullptr);
  int value = 5;
  device.zero(block->data(), 64, nullptr);
  device.write(block->data(), &value, sizeof(value), nullptr);
  value = 6;
  int read[2] = {};
  device.download(read, block->data(), sizeof(read), nullptr);
  EXPECT_EQ(read[0], 5);
  EXPECT_EQ(read[1], 0);
  std::vector<char> much(Device::kMostWritten + 1);
  EXPECT_THROW(device.write(block->data(), much.data(), much.size(), nullptr), InternalError);
  EXPECT_THROW(gpu::device(1), DeviceError);
}

TEST(GpuDevice, RaisesNothingWhileAnotherThreadRecords) {
  Device& device = gpu::device(0);
  *device.fault_slot() = {.kind = FaultKind::division};
  std::promise<void> begun;
  std::atomic<bool> ended = false;
  std::thread recording([&] {
    device.record([&](void*) {
      begun.set_value();
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      ended = true;
    });
  });
  begun.get_future().wait();
  EXPECT_THROW(device.raise_faults(), Error);
  EXPECT_TRUE(ended);
  recording.join();
}

TEST(GpuDevice, KeepsAFaultThatItCannotWaitFor) {
  Device& device = gpu::device(0);
  *device.fault_slot() = {.kind = FaultKind::label, .value = 7, .high = 3};
  const int64_t raised = device.num_raised();
  EXPECT_THROW(device.record([&](void*) { device.raise_faults(); }), DeviceError);
  EXPECT_EQ(device.num_raised(), raised);
  EXPECT_THROW(device.raise_faults(), IndexError);
}

TEST(GpuDevice, RefusesToWaitInARecording) {
  Device& device = gpu::device(0);
  EXPECT_THROW(device.record([&](void* stream) { device.synchronize(stream); }), DeviceError);
  EXPECT_NO_THROW(device.synchronize(nullptr));
}

TEST(StepRecordings, GivesUpWhereAddressesNeverComeAgain) {
  StepRecordings recordings;
  recordings.admit(1);
  recordings.admit(2);
  Device& device = gpu::device(0);
  int runs = 0;
  const auto work = [&](void*) { ++runs; };
  for (intptr_t i = 1; i <= 200; ++i) {
    recordings.run(device, {.plan = 1, .begin = 0, .end = 3}, {reinterpret_cast<void*>(i)}, nullptr,
                   work);
  }
  EXPECT_EQ(recordings.counts().direct, 200);
  EXPECT_EQ(runs, 200);
  // From then on addresses that do come again are not recorded either.
  for (int i = 0; i < 5; ++i) {
    recordings.run(device, {.plan = 1, .begin = 0, .end = 3}, {nullptr}, nullptr, work);
  }
  EXPECT_EQ(recordings.counts().recorded, 0);
  // Another plan is another matter.
  for (int i = 0; i < 3; ++i) {
    recordings.run(device, {.plan = 2, .begin = 0, .end = 3}, {nullptr}, nullptr, work);
  }
  EXPECT_EQ(recordings.counts().recorded, 1);
  recordings.drop(2);
  recordings.run(device, {.plan = 2, .begin = 0, .end = 3}, {nullptr}, nullptr, work);
  EXPECT_EQ(recordings.counts().launched, 1);
}

TEST(StepRecordings, WhatCannotBeRecordedRunsDirectly) {
  StepRecordings recordings;
  recordings.admit(1);
  Device& device = gpu::device(0);
  int runs = 0;
  const auto work = [&](void* stream) {
    device.synchronize(stream);
    ++runs;
  };
  for (int i = 0; i < 4; ++i) {
    recordings.run(device, {.plan = 1, .begin = 0, .end = 1}, {nullptr}, nullptr, work);
  }
  EXPECT_EQ(runs, 4);
  EXPECT_EQ(recordings.counts().recorded, 0);
}

// Runs a stretch twice with the same address: the second time it is recorded.
void record(StepRecordings& recordings, uint64_t plan, size_t begin = 0) {
  recordings.admit(plan);
  for (int i = 0; i < 2; ++i) {
    recordings.run(gpu::device(0), {.plan = plan, .begin = begin, .end = begin + 1}, {nullptr},
                   nullptr, [](void*) { gpu::device(0).zero(nullptr, 0, nullptr); });
  }
}

// Bounds of the simulated device, for the time of a test.
struct SmallLimits {
  SmallLimits(size_t recordings, size_t launches) {
    gpu::device(0).kept_recordings().set_limits({recordings, launches});
  }
  ~SmallLimits() { gpu::device(0).kept_recordings().set_limits({}); }
};

TEST(StepRecordings, AreBoundedInAll) {
  KeptRecordings& all = gpu::device(0).kept_recordings();
  ASSERT_EQ(all.counts().recordings, 0U);
  const SmallLimits limits(3, 1000);
  StepRecordings one, other;  // as those of two sessions
  record(one, 1);
  record(one, 2);
  record(other, 3);
  EXPECT_EQ(all.counts().recordings, 3U);
  record(one, 1);  // launched twice: used most recently
  EXPECT_EQ(one.counts().launched, 2);
  record(other, 4);  // in the place of plan 2's
  EXPECT_EQ(all.counts().recordings, 3U);
  record(one, 1);
  record(other, 3);
  record(other, 4);
  EXPECT_EQ(one.counts().launched, 4);
  EXPECT_EQ(other.counts().launched, 4);
  EXPECT_EQ(one.counts().recorded + other.counts().recorded, 4);
  record(one, 2);  // is made again, and launched
  EXPECT_EQ(one.counts().recorded, 3);
  EXPECT_EQ(all.counts().recordings, 3U);
}

TEST(StepRecordings, ThoseOfASessionThatIsGoneMakeRoom) {
  KeptRecordings& all = gpu::device(0).kept_recordings();
  {
    StepRecordings recordings;
    record(recordings, 1);
    record(recordings, 2);
    EXPECT_EQ(all.counts().recordings, 2U);
    EXPECT_EQ(all.counts().launches, 2U);
    recordings.drop(1);
    EXPECT_EQ(all.counts().recordings, 1U);
  }
  EXPECT_EQ(all.counts().recordings, 0U);
  EXPECT_EQ(all.counts().launches, 0U);
}

TEST(StepRecordings, LaunchesAreBoundedToo) {
  KeptRecordings& all = gpu::device(0).kept_recordings();
  const SmallLimits limits(100, 2);
  StepRecordings recordings;
  for (uint64_t plan = 0; plan < 5; ++plan) record(recordings, plan);
  EXPECT_EQ(all.counts().recordings, 2U);
  EXPECT_EQ(all.counts().launches, 2U);
}

TEST(StepRecordings, APlanThatIsDroppedStaysSo) {
  KeptRecordings& all = gpu::device(0).kept_recordings();
  StepRecordings recordings;
  recordings.admit(1);
  int runs = 0;
  for (int i = 0; i < 4; ++i) {
    recordings.run(gpu::device(0), {.plan = 1, .begin = 0, .end = 1}, {nullptr}, nullptr,
                   [&](void*) {
                     if (++runs == 2) recordings.drop(1);  // another thread, while it is recorded
                   });
  }
  EXPECT_EQ(all.counts().recordings, 0U);
  EXPECT_EQ(recordings.counts().direct, 4);
  EXPECT_EQ(recordings.counts().launched, 0);
}

}  // namespace
}  // namespace ortrain
