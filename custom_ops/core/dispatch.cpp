// Chooses the kernels: a named level, or the best one that the processor has features and the
// operating system has registers for.
#include "core/dispatch.h"

#include <cstdint>
#include <cstring>

#if defined(TQ_SCALAR_ONLY)
#elif defined(__x86_64__) || defined(_M_X64)
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

#ifdef TQ_X86

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

bool has_avxvnni() { return has_avx2() && has(cpuid(7, 1).eax, 4); }

bool has_avx512vnni() { return has_avx512() && has(cpuid(7, 0).ecx, 11); }

#endif

#if defined(TQ_ARM)

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

// A level and its integer products, which lie in files of their own.
struct Level {
  Kernels kernels;  // as it is used by default
  const IntegerKernels* integers;
};

// Products with integers are the default. What they cost is in docs/performance.md.
Level join(const Kernels& kernels, const char* name, const IntegerKernels* integers) {
  Level level{kernels, integers};
  level.kernels.name = name;
  level.kernels.integers = integers;
  return level;
}

// What the others are compared with: in floating point.
const Level* scalar_level() {
  static const Level level = [] {
    Level all = join(*scalar_kernels(), "scalar", scalar_integers());
    all.kernels.integers = nullptr;
    return all;
  }();
  return &level;
}

#if defined(TQ_X86)

#if defined(TQ_WITHOUT_avx512vl)
const Level* avx512vnni_level() { return nullptr; }
const Level* avx512_level() { return nullptr; }
#else
const Level* avx512vnni_level() {
  static const Level level = [] {
    Level all = join(*avx512_kernels(), "avx512vnni", avx512vnni_integers());
    all.kernels.multiply_pairs = avx512vnni_multiply_pairs();
    all.kernels.search_bytes = avx512vnni_search_bytes();
    return all;
  }();
  return level.integers == nullptr ? nullptr : &level;
}

// Without VNNI, floats of 512 bits take longer than the bytes of AVX2: see docs/performance.md.
const Level* avx512_level() {
  static const Level level = join(*avx512_kernels(), "avx512", avx2_integers());
  return &level;
}
#endif

const Level* avxvnni_level() {
  static const Level level = join(*avx2_kernels(), "avxvnni", avxvnni_integers());
  return level.integers == nullptr ? nullptr : &level;
}

const Level* avx2_level() {
  static const Level level = join(*avx2_kernels(), "avx2", avx2_integers());
  return &level;
}

bool is_supported(const Level* level) {
  if (level == avx512vnni_level()) return has_avx512vnni();
  if (level == avx512_level()) return has_avx512();
  if (level == avxvnni_level()) return has_avxvnni();
  return level != avx2_level() || has_avx2();
}

#elif defined(TQ_ARM)

const Level* neondot_level() {
  static const Level level = join(*neon_kernels(), "neondot", neondot_integers());
  return level.integers == nullptr ? nullptr : &level;
}

const Level* neon_level() {
  static const Level level = join(*neon_kernels(), "neon", neon_integers());
  return &level;
}

bool is_supported(const Level* level) {
  return level != neondot_level() || has_neondot();  // NEON is part of every aarch64
}

#else

bool is_supported(const Level*) { return true; }

#endif

// Best first; those that the compiler has.
std::vector<const Level*> compiled_levels() {
  std::vector<const Level*> all;
  for (const Level* level : {
#if defined(TQ_X86)
           avx512vnni_level(), avx512_level(), avxvnni_level(), avx2_level(),
#elif defined(TQ_ARM)
           neondot_level(), neon_level(),
#endif
           scalar_level()}) {
    if (level != nullptr) all.push_back(level);
  }
  return all;
}

// The levels of supported_kernels() with the same products.
std::vector<Kernels> with_same_products(bool has_integers) {
  std::vector<Kernels> all;
  for (const Level* level : compiled_levels()) {
    if (!is_supported(level)) continue;
    all.push_back(level->kernels);
    all.back().integers = has_integers ? level->integers : nullptr;
    if (!has_integers) all.back().multiply_pairs = nullptr;
  }
  return all;
}

}  // namespace

std::vector<const Kernels*> compiled_kernels() {
  std::vector<const Kernels*> all;
  for (const Level* level : compiled_levels()) all.push_back(&level->kernels);
  return all;
}

std::vector<const Kernels*> supported_kernels() {
  std::vector<const Kernels*> all;
  for (const Level* level : compiled_levels()) {
    if (is_supported(level)) all.push_back(&level->kernels);
  }
  return all;
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
  if (name == nullptr || *name == '\0') return &kernels;
  static const std::vector<Kernels> of_floats = with_same_products(false);
  static const std::vector<Kernels> of_integers = with_same_products(true);
  const std::vector<Kernels>* all = nullptr;
  if (std::strcmp(name, "float") == 0) all = &of_floats;
  if (std::strcmp(name, "8") == 0) all = &of_integers;
  if (all == nullptr) {
    const bool is_gone = std::strcmp(name, "16") == 0;
    reason = std::string(kProductsVariable) + " is '" + name + "', " +
             (is_gone ? "which was removed: unset it, or use 8 or float" : "expected 8 or float");
    return nullptr;
  }
  for (const Kernels& one : *all) {
    if (std::strcmp(one.name, kernels.name) == 0) return &one;
  }
  return &kernels;
}

}  // namespace tq
