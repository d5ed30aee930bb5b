// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/simulator_races.h"

#include <dlfcn.h>
#include <link.h>

#include <array>
#include <memory>
#include <unordered_map>
#include <utility>

#include "ortrain/base/error.h"
#include "ortrain/gpu/simulator.h"

namespace ortrain::gpu::simulator {
namespace {

enum class Kind : uint8_t { none, read, write, atomic };

struct Access {
  const void* code = nullptr;
  AccessPlace place = {};
  uint32_t launch = 0;
  Kind kind = Kind::none;
};

// Of a byte. Of the readers since the last write, the first and the last one of another thread.
struct Byte {
  Access write, read, other_read;
};

constexpr size_t kPageBytes = 64;
using Page = std::array<Byte, kPageBytes>;

const char* name_of(Kind kind) {
  return kind == Kind::read ? "read" : kind == Kind::write ? "written" : "changed by an atomic";
}

// Where code lies in its file, for addr2line.
std::string where(const void* code) {
  Dl_info info = {};
  if (dladdr(code, &info) == 0 || info.dli_fname == nullptr) return "?";
  const std::string file = info.dli_fname;
  return str(file.substr(file.rfind('/') + 1), "+",
             reinterpret_cast<uintptr_t>(code) - reinterpret_cast<uintptr_t>(info.dli_fbase));
}

// What all loaded files have of it: shared memory of every kernel, 1.4 MB here.
uintptr_t bytes_of_thread_storage() {
  uintptr_t bytes = 0;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* sum) {
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const ElfW(Phdr) & header = info->dlpi_phdr[i];
          if (header.p_type == PT_TLS) {
            *static_cast<uintptr_t*>(sum) += header.p_memsz + header.p_align;
          }
        }
        return 0;
      },
      &bytes);
  return bytes;
}

class Shadow {
 public:
  void begin_launch() {
    ++launch_;
    fences_.clear();
    // Pages of memory that was given back must not grow without end.
    if (pages_.size() > (size_t{1} << 14)) pages_.clear();
  }
  void begin_block(const void* shared, size_t bytes) {
    shared_ = reinterpret_cast<uintptr_t>(shared);
    shared_bytes_ = bytes;
  }
  void enter(const AccessPlace* place, const void* stack, size_t bytes) {
    place_ = place;
    stack_ = reinterpret_cast<uintptr_t>(stack);
    stack_bytes_ = bytes;
  }
  void leave() { place_ = nullptr; }
  void fence() {
    if (place_ != nullptr) ++fences_[place_->block];
  }

  void access(const void* address, size_t bytes, Kind kind, const void* code) {
    if (place_ == nullptr) return;
    const auto at = reinterpret_cast<uintptr_t>(address);
    if (at - stack_ < stack_bytes_) return;
    if (at - reinterpret_cast<uintptr_t>(&coordinates) < sizeof(coordinates)) return;
    const bool shared = is_shared(at);
    Access access{code, *place_, launch_, kind};
    const auto fences = fences_.find(place_->block);
    access.place.fences = fences == fences_.end() ? 0 : fences->second;
    const AccessPlace* const place = place_;
    place_ = nullptr;  // what follows may be instrumented
    for (size_t i = 0; i < bytes; ++i) note(at + i, access, shared);
    place_ = place;
  }

  std::string take() { return std::exchange(found_, {}); }

 private:
  // Static shared memory is the thread's own storage, in front of its control block.
  bool is_shared(uintptr_t at) const {
    if (at - shared_ < shared_bytes_) return true;
    static const uintptr_t storage = bytes_of_thread_storage();
    const auto end = reinterpret_cast<uintptr_t>(__builtin_thread_pointer());
    return at < end && end - at <= storage;
  }

  void note(uintptr_t at, const Access& now, bool shared) {
    Byte& byte = pages_[at / kPageBytes][at % kPageBytes];
    const bool writes = now.kind != Kind::read;
    for (const Access* before : {&byte.write, &byte.read, &byte.other_read}) {
      if (counts(*before, now, shared) && conflicts(*before, now)) report(*before, now, shared);
    }
    if (shared && !writes && !counts(byte.write, now, shared)) {
      report_unwritten(now);
    }
    if (writes) {
      byte.write = now;
      byte.read = byte.other_read = {};
    } else if (!counts(byte.read, now, shared)) {
      byte.read = now;
    } else {
      byte.other_read = now;
    }
  }

  // Memory of another launch is ordered, and shared memory of another block is another one.
  static bool counts(const Access& before, const Access& now, bool shared) {
    return before.kind != Kind::none && before.launch == now.launch &&
           (!shared || before.place.block == now.place.block);
  }

  bool conflicts(const Access& before, const Access& now) const {
    if (before.kind == Kind::read && now.kind == Kind::read) return false;
    if (before.kind == Kind::atomic && now.kind == Kind::atomic) return false;
    const AccessPlace &a = before.place, &b = now.place;
    if (a.block != b.block) {
      const auto fences = fences_.find(a.block);
      return fences == fences_.end() || fences->second == a.fences || b.fences == 0;
    }
    if (a.thread == b.thread) return false;
    if (a.block_barriers != b.block_barriers) return false;
    return a.warp != b.warp || a.warp_barriers == b.warp_barriers;
  }

  void report(const Access& before, const Access& now, bool shared) {
    if (!found_.empty()) return;
    const auto side = [](const Access& access) {
      return str(name_of(access.kind), " by thread ", access.place.thread, " of block ",
                 access.place.block, " (", where(access.code), ")");
    };
    found_ = str(shared ? "shared" : "global", " memory is ", side(before), " and ", side(now),
                 " with no barrier between");
  }
  void report_unwritten(const Access& now) {
    if (!found_.empty()) return;
    found_ = str("shared memory that no thread has written is read by thread ", now.place.thread,
                 " of block ", now.place.block, " (", where(now.code), ")");
  }

  uint32_t launch_ = 0;
  std::unordered_map<uintptr_t, Page> pages_;
  std::unordered_map<uint32_t, uint32_t> fences_;  // by block
  const AccessPlace* place_ = nullptr;
  uintptr_t stack_ = 0, shared_ = 0;
  size_t stack_bytes_ = 0, shared_bytes_ = 0;
  std::string found_;
};

Shadow& shadow() {
  static thread_local const std::unique_ptr<Shadow> made = std::make_unique<Shadow>();
  return *made;
}

}  // namespace

void begin_launch() { shadow().begin_launch(); }
void begin_block(const void* shared, size_t bytes) { shadow().begin_block(shared, bytes); }
void enter_thread(const AccessPlace* place, const void* stack, size_t bytes) {
  shadow().enter(place, stack, bytes);
}
void leave_thread() { shadow().leave(); }
void note_access(const void* address, size_t bytes, bool writes) {
  shadow().access(address, bytes, writes ? Kind::write : Kind::read, __builtin_return_address(0));
}
void note_fence() { shadow().fence(); }
std::string take_race() { return shadow().take(); }

}  // namespace ortrain::gpu::simulator

#if defined(ORTRAIN_GPU_RACES)
// The calls that -fsanitize=thread puts in front of accesses (GCC 12, sanitizer.def).
namespace sim = ortrain::gpu::simulator;
#define ORTRAIN_NOTE(address, bytes, kind) \
  sim::shadow().access(address, bytes, sim::Kind::kind, __builtin_return_address(0))
#define ORTRAIN_PLAIN(bytes)                                                                 \
  void __tsan_read##bytes(void* address) { ORTRAIN_NOTE(address, bytes, read); }             \
  void __tsan_write##bytes(void* address) { ORTRAIN_NOTE(address, bytes, write); }           \
  void __tsan_unaligned_read##bytes(void* address) { ORTRAIN_NOTE(address, bytes, read); }   \
  void __tsan_unaligned_write##bytes(void* address) { ORTRAIN_NOTE(address, bytes, write); } \
  void __tsan_volatile_read##bytes(void* address) { ORTRAIN_NOTE(address, bytes, read); }    \
  void __tsan_volatile_write##bytes(void* address) { ORTRAIN_NOTE(address, bytes, write); }
#define ORTRAIN_ATOMIC(bits, type)                                                                \
  type __tsan_atomic##bits##_load(const volatile type* a, int) {                                  \
    ORTRAIN_NOTE(const_cast<type*>(a), bits / 8, atomic);                                         \
    return __atomic_load_n(a, __ATOMIC_SEQ_CST);                                                  \
  }                                                                                               \
  void __tsan_atomic##bits##_store(volatile type* a, type v, int) {                               \
    ORTRAIN_NOTE(const_cast<type*>(a), bits / 8, atomic);                                         \
    __atomic_store_n(a, v, __ATOMIC_SEQ_CST);                                                     \
  }                                                                                               \
  type __tsan_atomic##bits##_exchange(volatile type* a, type v, int) {                            \
    ORTRAIN_NOTE(const_cast<type*>(a), bits / 8, atomic);                                         \
    return __atomic_exchange_n(a, v, __ATOMIC_SEQ_CST);                                           \
  }                                                                                               \
  type __tsan_atomic##bits##_fetch_add(volatile type* a, type v, int) {                           \
    ORTRAIN_NOTE(const_cast<type*>(a), bits / 8, atomic);                                         \
    return __atomic_fetch_add(a, v, __ATOMIC_SEQ_CST);                                            \
  }                                                                                               \
  type __tsan_atomic##bits##_fetch_sub(volatile type* a, type v, int) {                           \
    ORTRAIN_NOTE(const_cast<type*>(a), bits / 8, atomic);                                         \
    return __atomic_fetch_sub(a, v, __ATOMIC_SEQ_CST);                                            \
  }                                                                                               \
  type __tsan_atomic##bits##_fetch_and(volatile type* a, type v, int) {                           \
    ORTRAIN_NOTE(const_cast<type*>(a), bits / 8, atomic);                                         \
    return __atomic_fetch_and(a, v, __ATOMIC_SEQ_CST);                                            \
  }                                                                                               \
  type __tsan_atomic##bits##_fetch_or(volatile type* a, type v, int) {                            \
    ORTRAIN_NOTE(const_cast<type*>(a), bits / 8, atomic);                                         \
    return __atomic_fetch_or(a, v, __ATOMIC_SEQ_CST);                                             \
  }                                                                                               \
  type __tsan_atomic##bits##_fetch_xor(volatile type* a, type v, int) {                           \
    ORTRAIN_NOTE(const_cast<type*>(a), bits / 8, atomic);                                         \
    return __atomic_fetch_xor(a, v, __ATOMIC_SEQ_CST);                                            \
  }                                                                                               \
  bool __tsan_atomic##bits##_compare_exchange_strong(volatile type* a, type* c, type v, int,      \
                                                     int) {                                       \
    ORTRAIN_NOTE(const_cast<type*>(a), bits / 8, atomic);                                         \
    return __atomic_compare_exchange_n(a, c, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);       \
  }                                                                                               \
  bool __tsan_atomic##bits##_compare_exchange_weak(volatile type* a, type* c, type v, int, int) { \
    ORTRAIN_NOTE(const_cast<type*>(a), bits / 8, atomic);                                         \
    return __atomic_compare_exchange_n(a, c, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);       \
  }
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void* address, size_t bytes) { ORTRAIN_NOTE(address, bytes, read); }
void __tsan_write_range(void* address, size_t bytes) { ORTRAIN_NOTE(address, bytes, write); }
ORTRAIN_PLAIN(1)
ORTRAIN_PLAIN(2)
ORTRAIN_PLAIN(4)
ORTRAIN_PLAIN(8)
ORTRAIN_PLAIN(16)
ORTRAIN_ATOMIC(8, uint8_t)
ORTRAIN_ATOMIC(16, uint16_t)
ORTRAIN_ATOMIC(32, uint32_t)
ORTRAIN_ATOMIC(64, uint64_t)
}
#endif
