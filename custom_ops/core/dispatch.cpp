// Chooses the kernels: a named level, or the best one that the processor has features and the
// operating system has registers for.
#include "core/dispatch.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) || defined(_M_X64)
#define TQ_X86 1
#if defined(_MSC_VER) && !defined(__clang__)
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace tq {
namespace {

#ifdef TQ_X86

struct Registers {
  uint32_t eax, ebx, ecx, edx;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
  Registers r{};
#if defined(_MSC_VER) && !defined(__clang__)
  int out[4];
  __cpuidex(out, static_cast<int>(leaf), static_cast<int>(subleaf));
  r = {static_cast<uint32_t>(out[0]), static_cast<uint32_t>(out[1]),
       static_cast<uint32_t>(out[2]), static_cast<uint32_t>(out[3])};
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

// The processor has the instructions and the operating system saves the registers.
bool has_avx2() {
  const Registers one = cpuid(1, 0);
  const bool saves = has(one.ecx, 27) && (enabled_state() & 0x6u) == 0x6u;
  const bool fma = has(one.ecx, 12);
  const bool f16c = has(one.ecx, 29);
  return saves && fma && f16c && has(cpuid(7, 0).ebx, 5);
}

bool has_avx512() {
  if (!has_avx2() || (enabled_state() & 0xe6u) != 0xe6u) return false;
  const uint32_t ebx = cpuid(7, 0).ebx;
  return has(ebx, 16) && has(ebx, 17) && has(ebx, 30) && has(ebx, 31);  // F, DQ, BW, VL
}

bool has_avx512vnni() { return has_avx512() && has(cpuid(7, 0).ecx, 11); }

#endif

#if defined(__aarch64__) && defined(__linux__)
bool has_neondot() { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }
#elif defined(__aarch64__) && defined(__APPLE__)
bool has_neondot() { return true; }  // every Apple silicon
#else
bool has_neondot() { return false; }
#endif

// A level with integer products, which lie in files of their own.
Kernels join(const Kernels& level, const char* name, const IntegerKernels* integers) {
  Kernels all = level;
  all.name = name;
  all.integers = integers;
  return all;
}

const Kernels* whole_avx2_kernels() {
  if (avx2_kernels() == nullptr) return nullptr;
  static const Kernels kernels = join(*avx2_kernels(), avx2_kernels()->name, avx2_integers());
  return &kernels;
}

const Kernels* avx512vnni_kernels() {
  if (avx512_kernels() == nullptr || avx512vnni_integers() == nullptr) return nullptr;
  static const Kernels kernels = [] {
    Kernels all = join(*avx512_kernels(), "avx512vnni", avx512vnni_integers());
    all.multiply_pairs = avx512vnni_multiply_pairs();
    all.search_bytes = avx512vnni_search_bytes();
    return all;
  }();
  return &kernels;
}

const Kernels* whole_neon_kernels() {
  if (neon_kernels() == nullptr) return nullptr;
  static const Kernels kernels = join(*neon_kernels(), neon_kernels()->name, neon_integers());
  return &kernels;
}

const Kernels* neondot_kernels() {
  if (neon_kernels() == nullptr || neondot_integers() == nullptr) return nullptr;
  static const Kernels kernels = join(*neon_kernels(), "neondot", neondot_integers());
  return &kernels;
}

bool is_supported(const Kernels* kernels) {
#ifdef TQ_X86
  if (kernels == avx512vnni_kernels()) return has_avx512vnni();
  if (kernels == avx512_kernels()) return has_avx512();
  if (kernels == whole_avx2_kernels()) return has_avx2();
#endif
  if (kernels == neondot_kernels()) return has_neondot();
  return kernels != nullptr;  // NEON is part of every aarch64
}

}  // namespace

std::vector<const Kernels*> compiled_kernels() {
  std::vector<const Kernels*> all;
  for (const Kernels* kernels :
       {avx512vnni_kernels(), avx512_kernels(), whole_avx2_kernels(), neondot_kernels(),
        whole_neon_kernels(), scalar_kernels()}) {
    if (kernels != nullptr) all.push_back(kernels);
  }
  return all;
}

std::vector<const Kernels*> supported_kernels() {
  std::vector<const Kernels*> supported;
  for (const Kernels* kernels : compiled_kernels()) {
    if (is_supported(kernels)) supported.push_back(kernels);
  }
  return supported;
}

const Kernels* find_kernels(const char* name, std::string& reason) {
  const std::vector<const Kernels*> supported = supported_kernels();
  if (name == nullptr || *name == '\0') return supported.front();
  std::string names;
  for (const Kernels* kernels : supported) {
    if (std::strcmp(kernels->name, name) == 0) return kernels;
    names += (names.empty() ? "" : ", ") + std::string(kernels->name);
  }
  reason = std::string(kIsaVariable) + " is '" + name + "', but this machine has only " + names;
  return nullptr;
}

const Kernels* with_products(const Kernels& kernels, const char* name, std::string& reason) {
  if (name == nullptr || *name == '\0' || std::strcmp(name, "integer") == 0) return &kernels;
  if (std::strcmp(name, "float") != 0) {
    reason = std::string(kProductsVariable) + " is '" + name + "', expected float or integer";
    return nullptr;
  }
  static const std::vector<Kernels> exact = [] {
    std::vector<Kernels> all;
    for (const Kernels* one : supported_kernels()) {
      all.push_back(*one);
      all.back().integers = nullptr;
      all.back().multiply_pairs = nullptr;
    }
    return all;
  }();
  for (const Kernels& one : exact) {
    if (std::strcmp(one.name, kernels.name) == 0) return &one;
  }
  return &kernels;
}

}  // namespace tq
