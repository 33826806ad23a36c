// Levels that the processor has features, and the operating system registers, for. CMakeLists.txt also
// compiles this file alone, to ask for the levels of the machine that builds.
#include "core/processor.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) || defined(_M_X64)
#define TQ_X86 1
#if defined(_MSC_VER) && !defined(__clang__)
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#elif defined(__aarch64__) || defined(_M_ARM64)
#define TQ_ARM 1
#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(_WIN32)
#include <windows.h>
#endif
#endif

namespace tq {
namespace {

#if defined(TQ_X86)

struct Registers {
  uint32_t eax, ebx, ecx, edx;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
  Registers r{};
#if defined(_MSC_VER) && !defined(__clang__)
  int out[4];
  __cpuidex(out, static_cast<int>(leaf), static_cast<int>(subleaf));
  r = {static_cast<uint32_t>(out[0]), static_cast<uint32_t>(out[1]), static_cast<uint32_t>(out[2]),
       static_cast<uint32_t>(out[3])};
#else
  if (!__get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx)) return {};
#endif
  return r;
}

uint64_t enabled_state() {
#if defined(_MSC_VER) && !defined(__clang__)
  return _xgetbv(0);
#else
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
#endif
}

bool has(uint32_t reg, int bit) { return (reg >> bit) & 1u; }

#elif defined(TQ_ARM)

bool has_neondot() {
#if defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#elif defined(_WIN32)
  return IsProcessorFeaturePresent(43) != 0;  // PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE
#elif defined(__APPLE__)
  return true;  // every Apple silicon
#else
  return false;
#endif
}

#endif

std::vector<const char*> read_levels() {
  std::vector<const char*> all;
#if defined(TQ_X86)
  const Registers one = cpuid(1, 0), seven = cpuid(7, 0);
  const uint64_t saved = has(one.ecx, 27) ? enabled_state() : 0;  // by the operating system
  const bool fma = has(one.ecx, 12), f16c = has(one.ecx, 29);
  const bool avx2 = (saved & 0x6u) == 0x6u && fma && f16c && has(seven.ebx, 5);
  const bool avx512 = avx2 && (saved & 0xe6u) == 0xe6u && has(seven.ebx, 16) &&  // F
                      has(seven.ebx, 17) && has(seven.ebx, 30) && has(seven.ebx, 31);  // DQ, BW, VL
  if (avx512 && has(seven.ecx, 11)) all.push_back("avx512vnni");
  if (avx512) all.push_back("avx512");
  if (avx2 && has(cpuid(7, 1).eax, 4)) all.push_back("avxvnni");
  if (avx2) all.push_back("avx2");
#elif defined(TQ_ARM)
  if (has_neondot()) all.push_back("neondot");
  all.push_back("neon");  // part of every aarch64
#endif
  all.push_back("scalar");
  return all;
}

}  // namespace

const std::vector<const char*>& levels_of_processor() {
  static const std::vector<const char*> all = read_levels();
  return all;
}

bool has_level(const char* name) {
  for (const char* const level : levels_of_processor()) {
    if (std::strcmp(level, name) == 0) return true;
  }
  return false;
}

}  // namespace tq

#ifdef TQ_PRINT_LEVELS
#include <cstdio>

int main() {
  for (const char* const name : tq::levels_of_processor()) std::printf("%s;", name);
}
#endif
