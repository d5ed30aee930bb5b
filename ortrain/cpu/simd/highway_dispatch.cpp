// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
//
// What Highway's headers leave to its library: which targets this processor runs, and which was
// chosen. Defined here, no library of Highway is linked, so a wheel needs none where it runs; the
// symbols stay hidden and never meet those of a libhwy that another package brings. Reporting fewer
// targets than a processor has is always right: dispatch falls back to the best one reported.
// clang-format off: the list of targets comes before any Highway header.
#include "ortrain/cpu/simd/targets.h"
#include "hwy/base.h"
#include "hwy/targets.h"
// clang-format on

#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if HWY_ARCH_X86
#include <cpuid.h>
#endif

namespace ortrain::cpu {
namespace {

#if HWY_ARCH_X86
struct CpuidLeaf {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

CpuidLeaf cpuid(unsigned leaf) {
  CpuidLeaf r;
  // Leaves the zeros where the processor has no such leaf.
  __get_cpuid_count(leaf, 0, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

// Register sets that the system saves (Intel SDM vol. 1, 13.3): bits 1 and 2 those of AVX, 5 to 7
// those of AVX-512 as well. Needs OSXSAVE.
uint64_t saved_registers() {
  uint32_t low = 0, high = 0;
  // xgetbv by name needs -mxsave.
  __asm__ volatile(".byte 0x0f, 0x01, 0xd0" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t{high} << 32) | low;
}

constexpr bool has_all(uint64_t value, uint64_t bits) { return (value & bits) == bits; }

// The features are those that Highway compiles its targets with (HWY_TARGET_STR_*).
int64_t detected_targets() {
  const CpuidLeaf basic = cpuid(1), extended = cpuid(7);
  if (!has_all(basic.ecx, bit_SSSE3 | bit_SSE4_1 | bit_SSE4_2 | bit_PCLMUL | bit_AES | bit_AVX |
                              bit_FMA | bit_F16C | bit_OSXSAVE) ||
      !has_all(extended.ebx, bit_AVX2 | bit_BMI | bit_BMI2)) {
    return 0;
  }
  const uint64_t saved = saved_registers();
  if (!has_all(saved, 0x6)) return 0;
  int64_t targets = HWY_AVX2;
  if (has_all(saved, 0xe6) &&
      has_all(extended.ebx,
              uint64_t{bit_AVX512F} | bit_AVX512VL | bit_AVX512DQ | bit_AVX512BW | bit_AVX512CD)) {
    targets |= HWY_AVX3;
  }
  return targets;
}
#else
// Elsewhere the compiler's baseline is all there is (NEON on AArch64).
int64_t detected_targets() { return 0; }
#endif

std::atomic<int64_t> disabled{0};
std::atomic<int64_t> set_for_test{0};

}  // namespace
}  // namespace ortrain::cpu

namespace hwy {

int64_t SupportedTargets() {
  static const int64_t detected = ortrain::cpu::detected_targets() | HWY_ENABLED_BASELINE;
  const int64_t for_test = ortrain::cpu::set_for_test;
  const int64_t targets = (for_test != 0 ? for_test : detected) & ~ortrain::cpu::disabled;
  return targets != 0 ? targets : HWY_STATIC_TARGET;
}

void SetSupportedTargetsForTest(int64_t targets) {
  ortrain::cpu::set_for_test = targets;
  GetChosenTarget().DeInit();
}

void DisableTargets(int64_t disabled_targets) {
  ortrain::cpu::disabled = disabled_targets;
  GetChosenTarget().DeInit();
}

ChosenTarget& GetChosenTarget() {
  static ChosenTarget chosen;
  return chosen;
}

// Assertions in Highway's headers, which sanitized builds hold.
void Abort(const char* file, int line, const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  std::fprintf(stderr, "%s:%d: ", file, line);
  std::vfprintf(stderr, format, arguments);
  std::fputc('\n', stderr);
  va_end(arguments);
  std::abort();
}

}  // namespace hwy
