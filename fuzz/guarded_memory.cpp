// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "fuzz/guarded_memory.h"

#include <sanitizer/asan_interface.h>

#include <cstdlib>
#include <cstring>

#include "ortrain/base/error.h"
#include "ortrain/runtime/plan_verifier.h"

namespace ortrain::fuzz {
namespace {

class GuardedHost final : public Device {
 public:
  std::string name() const override { return "cpu"; }
  bool is_host() const override { return true; }
  std::shared_ptr<Block> arena(size_t bytes, void*) override {
    std::shared_ptr<Block> block = exact_block(bytes);
    std::memset(block->data(), fill_, bytes);
    arena_ = block.get();
    return {block.get(), [block, this](Block*) {
              show(block->data(), block->bytes());
              arena_ = nullptr;
            }};
  }
  std::shared_ptr<Block> tensor(size_t bytes, void*) override { return exact_block(bytes); }
  void copy(void* to, const void* from, size_t bytes, void*) override { move(to, from, bytes); }
  void upload(void* to, const void* from, size_t bytes, void*) override { move(to, from, bytes); }
  void write(void* to, const void* from, size_t bytes, void*) override { move(to, from, bytes); }
  void zero(void* to, size_t bytes, void*) override {
    if (bytes > 0) std::memset(to, 0, bytes);
  }
  void download(void* to, const void* from, size_t bytes, void*) override { move(to, from, bytes); }
  void synchronize(void*) override {}
  Fault* fault_slot() override { return nullptr; }

  void set_fill(uint8_t fill) { fill_ = fill; }
  void hide_arena() {
    if (arena_ != nullptr) ASAN_POISON_MEMORY_REGION(arena_->data(), arena_->bytes());
  }
  void show_arena() {
    if (arena_ != nullptr) show(arena_->data(), arena_->bytes());
  }
  // A part of the arena; anything else has its bounds already.
  void show_part(const void* data, size_t bytes) {
    if (arena_ == nullptr || data == nullptr || bytes == 0) return;
    const auto* const begin = static_cast<const char*>(arena_->data());
    const auto* const at = static_cast<const char*>(data);
    if (at >= begin && at < begin + arena_->bytes()) show(data, bytes);
  }

 private:
  static void show(const void* data, size_t bytes) { ASAN_UNPOISON_MEMORY_REGION(data, bytes); }
  static void move(void* to, const void* from, size_t bytes) {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }

  uint8_t fill_ = 0;
  Block* arena_ = nullptr;  // of the one run at a time
};

GuardedHost& guarded_host() {
  static auto* const device = new GuardedHost();
  return *device;
}

KernelFn guarded(KernelFn run, StepBytes bytes) {
  return [run = std::move(run), bytes = std::move(bytes)](const KernelArgs& args) {
    GuardedHost& device = guarded_host();
    device.hide_arena();
    for (size_t i = 0; i < bytes.inputs.size(); ++i) device.show_part(args.in[i], bytes.inputs[i]);
    for (size_t i = 0; i < bytes.outputs.size(); ++i) {
      device.show_part(args.out[i], bytes.outputs[i]);
    }
    device.show_part(args.workspace, bytes.workspace);
    run(args);
    device.show_arena();
  };
}

}  // namespace

KernelRegistry& guarded_kernels() {
  static auto* const registry = [] {
    auto* const made = new KernelRegistry(guarded_host());
    register_all_cpu_kernels(*made);
    return made;
  }();
  return *registry;
}

void set_arena_fill(uint8_t fill) { guarded_host().set_fill(fill); }

std::shared_ptr<Block> exact_block(size_t bytes) {
  void* data = nullptr;
  // Of 0 bytes one, which no kernel has a reason to touch.
  if (posix_memalign(&data, 64, bytes == 0 ? 1 : bytes) != 0) {
    throw OutOfMemoryError(str("no memory for ", bytes, " bytes"));
  }
  if (bytes == 0) ASAN_POISON_MEMORY_REGION(data, 1);
  return {new Block(data, bytes), [](Block* block) {
            if (block->bytes() == 0) ASAN_UNPOISON_MEMORY_REGION(block->data(), 1);
            std::free(block->data());
            delete block;
          }};
}

std::shared_ptr<const ExecutionPlan> make_guarded_plan(const Graph& graph,
                                                       const std::vector<Dims>& input_dims,
                                                       const KernelRegistry& kernels,
                                                       const PlanOptions& options) {
  auto plan =
      std::make_shared<ExecutionPlan>(*make_execution_plan(graph, input_dims, kernels, options));
  std::vector<StepBytes> steps = verify_plan(graph, input_dims, *plan);
  for (size_t s = 0; s < steps.size(); ++s) {
    plan->steps[s].run = guarded(std::move(plan->steps[s].run), std::move(steps[s]));
  }
  return plan;
}

}  // namespace ortrain::fuzz
