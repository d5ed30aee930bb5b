// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/simulator.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#include "ortrain/base/error.h"
#include "ortrain/gpu/simulator_races.h"

#if !defined(__x86_64__)
#error "The simulator switches stacks with x86-64 instructions."
#endif

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

// Saves the registers that a call keeps, and the stack, at *from; goes on where `to` was saved.
extern "C" void ortrain_simulator_switch(void** from, void* to);
asm(R"(
.text
.hidden ortrain_simulator_switch
.type ortrain_simulator_switch, @function
ortrain_simulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size ortrain_simulator_switch, .-ortrain_simulator_switch
)");

namespace ortrain::gpu::simulator {

thread_local Coordinates coordinates;

namespace {

constexpr unsigned kLanes = 32;
constexpr unsigned kMaxThreads = 1024;
constexpr unsigned kMaxRows = 65535;
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kStackBytes = size_t{512} << 10;
#else
constexpr size_t kStackBytes = size_t{64} << 10;
#endif

std::atomic<ThreadOrder> thread_order{ThreadOrder::ascending};

// Where threads meet: the last of those that are left lets the others go.
struct MeetingPoint {
  unsigned members = 0;
  unsigned arrived = 0;
  uint64_t generation = 0;

  bool open() {
    if (arrived < members) return false;
    arrived = 0;
    ++generation;
    return true;
  }
};

struct Warp {
  MeetingPoint meeting;
  uint64_t slots[2][kLanes] = {};
};

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};

struct Fiber {
  void* stack_pointer = nullptr;
  bool done = true;
  // Waits until the meeting's generation is another one.
  const MeetingPoint* meeting = nullptr;
  uint64_t generation = 0;
  unsigned exchanges = 0;
  AccessPlace place = {};
  std::vector<Copy> copies = {};        // that have not arrived
  std::vector<size_t> group_ends = {};  // how many of them the open groups hold, up to each

  bool can_run() const {
    return !done && (meeting == nullptr || meeting->generation != generation);
  }
};

// Runs the blocks that one operating system thread gets.
class BlockRunner {
 public:
  BlockRunner() : fibers_(kMaxThreads), warps_(kMaxThreads / kLanes) {
    stacks_ = mmap(nullptr, kStackBytes * kMaxThreads, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    check(stacks_ != MAP_FAILED, "no memory for the stacks of the simulator");
  }
  ~BlockRunner() { munmap(stacks_, kStackBytes * kMaxThreads); }
  BlockRunner(const BlockRunner&) = delete;
  BlockRunner& operator=(const BlockRunner&) = delete;

  static BlockRunner& of_this_thread() {
    static thread_local std::unique_ptr<BlockRunner> runner;
    if (!runner) runner = std::make_unique<BlockRunner>();
    return *runner;
  }

  // `number`: of the block in its launch.
  void run_block(const Coordinates& place, uint32_t number, unsigned threads, size_t shared_bytes,
                 const std::function<void()>& body) {
    body_ = &body;
    block_ = place;
    error_ = nullptr;
    any_ = false;
    if (shared_.size() * sizeof(Line) < shared_bytes) {
      shared_.resize((shared_bytes + sizeof(Line) - 1) / sizeof(Line));
    }
    // What a kernel reads before it writes it is no zero.
    std::fill(shared_.begin(), shared_.end(), Line{});
    meeting_ = {.members = threads};
    for (unsigned w = 0; w * kLanes < threads; ++w) {
      warps_[w].meeting = {.members = std::min(kLanes, threads - w * kLanes)};
    }
    if (kFindsRaces) begin_block(shared_.data(), shared_bytes);
    for (unsigned t = 0; t < threads; ++t) prepare(t, number);
    order_.resize(threads);
    std::iota(order_.begin(), order_.end(), 0u);
    const ThreadOrder order = thread_order.load();
    if (order == ThreadOrder::descending) std::reverse(order_.begin(), order_.end());
    unsigned left = threads;
    uint64_t random = 0x9e3779b97f4a7c15u * (place.block.x + 1);
    while (left > 0) {
      if (order == ThreadOrder::shuffled) {
        for (unsigned i = threads - 1; i > 0; --i) {
          random = random * 6364136223846793005u + 1442695040888963407u;
          std::swap(order_[i], order_[(random >> 33) % (i + 1)]);
        }
      }
      bool moved = false;
      for (unsigned t : order_) {
        if (!fibers_[t].can_run()) continue;
        resume(t);
        moved = true;
        if (fibers_[t].done) --left;
      }
      if (error_) std::rethrow_exception(error_);
      if (kFindsRaces) {
        if (const std::string race = take_race(); !race.empty()) throw InternalError(race);
      }
      if (!moved) {
        throw InternalError("threads of a block wait at a barrier that others do not reach");
      }
    }
  }

  void wait_at(MeetingPoint& meeting) {
    Fiber& fiber = fibers_[current_];
    ++meeting.arrived;
    const uint64_t generation = meeting.generation;
    if (meeting.open()) return;
    fiber.meeting = &meeting;
    fiber.generation = generation;
    leave();
    fiber.meeting = nullptr;
  }

  void block_barrier() {
    wait_at(meeting_);
    ++fibers_[current_].place.block_barriers;
  }
  void warp_barrier() {
    wait_at(warps_[current_ / kLanes].meeting);
    ++fibers_[current_].place.warp_barriers;
  }
  bool any_in_block(bool value) {
    if (value) any_ = true;
    block_barrier();
    const bool result = any_;
    block_barrier();
    any_ = false;
    block_barrier();
    return result;
  }
  uint64_t exchange(uint64_t bits, int lane) {
    Warp& warp = warps_[current_ / kLanes];
    // Two sets of slots: whoever is ahead by one exchange writes to the other one.
    uint64_t* slots = warp.slots[fibers_[current_].exchanges++ % 2];
    slots[current_ % kLanes] = bits;
    wait_at(warp.meeting);
    return slots[static_cast<unsigned>(lane) % kLanes];
  }
  void* shared() { return shared_.data(); }

  void copy_later(const Copy& copy) {
    for (const void* address : {static_cast<const void*>(copy.to), copy.from}) {
      check(reinterpret_cast<uintptr_t>(address) % copy.bytes == 0,
            "an asynchronous copy at an address that is no multiple of its bytes");
    }
    note_copy(copy);
    std::memset(copy.to, 0xff, copy.bytes);
    fibers_[current_].copies.push_back(copy);
  }
  void end_copy_group() {
    Fiber& fiber = fibers_[current_];
    fiber.group_ends.push_back(fiber.copies.size());
  }
  void wait_for_copies(size_t left) {
    Fiber& fiber = fibers_[current_];
    if (fiber.group_ends.size() <= left) return;
    const size_t groups = fiber.group_ends.size() - left;
    const size_t count = fiber.group_ends[groups - 1];
    for (size_t i = 0; i < count; ++i) {
      const Copy& copy = fiber.copies[i];
      note_copy(copy);
      if (copy.from == nullptr) {
        std::memset(copy.to, 0, copy.bytes);
      } else {
        std::memcpy(copy.to, copy.from, copy.bytes);
      }
    }
    fiber.copies.erase(fiber.copies.begin(), fiber.copies.begin() + static_cast<ptrdiff_t>(count));
    fiber.group_ends.erase(fiber.group_ends.begin(),
                           fiber.group_ends.begin() + static_cast<ptrdiff_t>(groups));
    for (size_t& end : fiber.group_ends) end -= count;
  }

 private:
  struct alignas(64) Line {
    unsigned char bytes[64];
    Line() { std::fill(bytes, bytes + sizeof(bytes), 0xcd); }
  };

  char* stack_of(unsigned t) { return static_cast<char*>(stacks_) + t * kStackBytes; }

  // It may happen at any time from where it is begun to where it is waited for.
  static void note_copy(const Copy& copy) {
    if (!kFindsRaces) return;
    note_access(copy.to, copy.bytes, true);
    if (copy.from != nullptr) note_access(copy.from, copy.bytes, false);
  }

  void prepare(unsigned t, uint32_t block) {
    // As after a switch: six registers and the address to go on at, where the stack is as a call
    // leaves it, 8 bytes below a multiple of 16.
    void** top = reinterpret_cast<void**>(stack_of(t) + kStackBytes) - 1;
    *--top = reinterpret_cast<void*>(&BlockRunner::start);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    fibers_[t] = {.stack_pointer = top, .done = false};
    fibers_[t].place = {.block = block,
                        .thread = static_cast<uint16_t>(t),
                        .warp = static_cast<uint16_t>(t / kLanes)};
  }

  void resume(unsigned t) {
    current_ = t;
    coordinates = block_;
    coordinates.thread = {t, 0, 0};
    if (kFindsRaces) enter_thread(&fibers_[t].place, stack_of(t), kStackBytes);
#if defined(__SANITIZE_ADDRESS__)
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, stack_of(t), kStackBytes);
    ortrain_simulator_switch(&host_stack_, fibers_[t].stack_pointer);
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#else
    ortrain_simulator_switch(&host_stack_, fibers_[t].stack_pointer);
#endif
    if (kFindsRaces) leave_thread();
  }

  // From a thread of the block back to run_block.
  void leave() {
#if defined(__SANITIZE_ADDRESS__)
    void* fake = nullptr;
    const bool done = fibers_[current_].done;
    __sanitizer_start_switch_fiber(done ? nullptr : &fake, host_bottom_, host_size_);
    ortrain_simulator_switch(&fibers_[current_].stack_pointer, host_stack_);
    __sanitizer_finish_switch_fiber(fake, &host_bottom_, &host_size_);
#else
    ortrain_simulator_switch(&fibers_[current_].stack_pointer, host_stack_);
#endif
  }

  static void start() {
    BlockRunner& runner = of_this_thread();
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &runner.host_bottom_, &runner.host_size_);
#endif
    try {
      (*runner.body_)();
    } catch (...) {
      if (!runner.error_) runner.error_ = std::current_exception();
    }
    Fiber& fiber = runner.fibers_[runner.current_];
    fiber.done = true;
    Warp& warp = runner.warps_[runner.current_ / kLanes];
    for (MeetingPoint* meeting : {&runner.meeting_, &warp.meeting}) {
      if (--meeting->members > 0) meeting->open();
    }
    runner.leave();
    __builtin_unreachable();
  }

  void* stacks_ = nullptr;
  void* host_stack_ = nullptr;
  const void* host_bottom_ = nullptr;
  size_t host_size_ = 0;
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  std::vector<Line> shared_;
  std::vector<unsigned> order_;
  MeetingPoint meeting_;
  bool any_ = false;
  unsigned current_ = 0;
  Coordinates block_;
  const std::function<void()>* body_ = nullptr;
  std::exception_ptr error_;
};

}  // namespace

namespace {
thread_local std::vector<std::function<void()>>* recording = nullptr;
}  // namespace

Recorder::Recorder() {
  check(recording == nullptr, "a recording is under way");
  recording = &kept_;
}
Recorder::~Recorder() { recording = nullptr; }
std::vector<std::function<void()>> Recorder::take() { return std::move(kept_); }
bool is_recording() { return recording != nullptr; }

void submit(std::function<void()> work) {
  if (recording != nullptr) {
    recording->push_back(std::move(work));
  } else {
    work();
  }
}

void set_thread_order(ThreadOrder order) { thread_order = order; }

void run(Index3 grid, unsigned threads, size_t shared_bytes, const std::function<void()>& body) {
  check(threads > 0 && threads <= kMaxThreads && threads % kLanes == 0,
        "a block has a multiple of 32 threads, 1024 at most");
  check(shared_bytes <= (size_t{227} << 10), "a block has at most 227 KiB of shared memory");
  check(grid.y <= kMaxRows && grid.z <= kMaxRows,
        "a launch has at most 65535 blocks along y and z");
  const int64_t blocks = int64_t{grid.x} * grid.y * grid.z;
  std::exception_ptr error;
  std::mutex mutex;
  if (kFindsRaces) begin_launch();
#pragma omp parallel for schedule(dynamic, 1) if (!kFindsRaces)
  for (int64_t b = 0; b < blocks; ++b) {
    try {
      Coordinates place;
      place.block = {static_cast<unsigned>(b % grid.x), static_cast<unsigned>(b / grid.x % grid.y),
                     static_cast<unsigned>(b / grid.x / grid.y)};
      place.block_size = {threads, 1, 1};
      place.grid_size = grid;
      BlockRunner::of_this_thread().run_block(place, static_cast<uint32_t>(b), threads,
                                              shared_bytes, body);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

void block_barrier() { BlockRunner::of_this_thread().block_barrier(); }
void warp_barrier() { BlockRunner::of_this_thread().warp_barrier(); }
bool any_in_block(bool value) { return BlockRunner::of_this_thread().any_in_block(value); }
void copy_later(void* to, const void* from, size_t bytes) {
  BlockRunner::of_this_thread().copy_later({to, from, bytes});
}
void end_copy_group() { BlockRunner::of_this_thread().end_copy_group(); }
void wait_for_copies(size_t left) { BlockRunner::of_this_thread().wait_for_copies(left); }
void fence() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (kFindsRaces) note_fence();
}
void* dynamic_shared() { return BlockRunner::of_this_thread().shared(); }
uint64_t exchange_bits(uint64_t bits, int lane) {
  return BlockRunner::of_this_thread().exchange(bits, lane);
}

}  // namespace ortrain::gpu::simulator
