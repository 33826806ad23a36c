// Chooses the kernels: a named level, or the best one of this library that the processor has.
#include "core/dispatch.h"

#include <cstring>

#include "core/processor.h"

namespace tq {
namespace {

#ifdef TQ_FLOATS_ONLY
#define TQ_INTEGERS_OF(level) nullptr
#else
#define TQ_INTEGERS_OF(level) level##_integers()
#endif

// A level and its integer products, which lie in files of their own.
struct Level {
  Kernels kernels;  // as it is used by default
  const IntegerKernels* integers;
  bool is_supported;
};

// Best first; those that CMakeLists.txt has chosen (TQ_LEVELS).
const std::vector<Level>& compiled_levels() {
  static const std::vector<Level> levels = [] {
    std::vector<Level> all;
    const auto add = [&](const char* name, const Kernels* kernels, const IntegerKernels* integers) {
      all.push_back({*kernels, integers, has_level(name)});
      all.back().kernels.name = name;
      // Products with integers are the default. What they cost is in docs/performance.md.
      all.back().kernels.integers = integers;
    };
#ifdef TQ_HAS_avx512vnni
    add("avx512vnni", avx512_kernels(), avx512vnni_integers());
    all.back().kernels.multiply_pairs = avx512vnni_multiply_pairs();
    all.back().kernels.search_bytes = avx512vnni_search_bytes();
#endif
#ifdef TQ_HAS_avx512
    // Without VNNI, floats of 512 bits take longer than the bytes of AVX2: see docs/performance.md.
    add("avx512", avx512_kernels(), TQ_INTEGERS_OF(avx2));
#endif
#ifdef TQ_HAS_avxvnni
    add("avxvnni", avx2_kernels(), avxvnni_integers());
#endif
#ifdef TQ_HAS_avx2
    add("avx2", avx2_kernels(), TQ_INTEGERS_OF(avx2));
#endif
#ifdef TQ_HAS_neondot
    add("neondot", neon_kernels(), neondot_integers());
#endif
#ifdef TQ_HAS_neon
    add("neon", neon_kernels(), TQ_INTEGERS_OF(neon));
#endif
    // What the others are compared with: in floating point.
    add("scalar", scalar_kernels(), scalar_integers());
    all.back().kernels.integers = nullptr;
    return all;
  }();
  return levels;
}

// The levels of supported_kernels() with the same products.
std::vector<Kernels> with_same_products(bool has_integers) {
  std::vector<Kernels> all;
  for (const Level& level : compiled_levels()) {
    if (!level.is_supported) continue;
    all.push_back(level.kernels);
    all.back().integers = has_integers ? level.integers : nullptr;
    if (!has_integers) all.back().multiply_pairs = nullptr;
  }
  return all;
}

}  // namespace

std::vector<const Kernels*> compiled_kernels() {
  std::vector<const Kernels*> all;
  for (const Level& level : compiled_levels()) all.push_back(&level.kernels);
  return all;
}

std::vector<const Kernels*> supported_kernels() {
  std::vector<const Kernels*> all;
  for (const Level& level : compiled_levels()) {
    if (level.is_supported) all.push_back(&level.kernels);
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
  reason =
      std::string(kIsaVariable) + " is '" + name + "', but here this library has only " + names;
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
