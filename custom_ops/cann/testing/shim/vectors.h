// Vector instructions of the Ascend C API; see kernel_operator.h.
//
// Two forms: `count` elements one after the other, or `repeats` of `mask` elements whose blocks of
// 32 bytes are `BlkStride` blocks apart within a repeat and `RepStride` from repeat to repeat.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "lanes.h"

namespace AscendC {

enum class RoundMode { CAST_NONE, CAST_RINT, CAST_FLOOR };
enum class CMPMODE { LT, GT, EQ, LE, GE, NE };
enum class SELMODE { VSEL_CMPMASK_SPR, VSEL_TENSOR_SCALAR_MODE, VSEL_TENSOR_TENSOR_MODE };

namespace vec {

// ---- casts

template <typename To, typename From>
struct Pair : std::false_type {};
template <>
struct Pair<half, uint8_t> : std::true_type {};
template <>
struct Pair<uint8_t, half> : std::true_type {};
template <>
struct Pair<float, half> : std::true_type {};
template <>
struct Pair<half, float> : std::true_type {};
template <>
struct Pair<int32_t, float> : std::true_type {};
template <>
struct Pair<int32_t, half> : std::true_type {};
template <>
struct Pair<float, int32_t> : std::true_type {};

template <typename To, typename From>
constexpr bool has_mode(RoundMode mode) {
  if (std::is_same_v<To, int32_t>) return mode != RoundMode::CAST_NONE;
  if (mode == RoundMode::CAST_NONE) return true;
  const bool narrows = sizeof(To) < sizeof(From) || std::is_same_v<From, int32_t>;
  return narrows && __NPU_ARCH__ == 2201;
}

template <typename To, typename From>
To convert(From from, RoundMode mode) {
  if constexpr (std::is_integral_v<To>) {
    double value = static_cast<double>(static_cast<float>(from));
    value = mode == RoundMode::CAST_FLOOR ? std::floor(value) : std::nearbyint(value);
    if (std::isnan(value)) value = 0;
    const double low = static_cast<double>(std::numeric_limits<To>::min());
    return static_cast<To>(
        std::clamp(value, low, static_cast<double>(std::numeric_limits<To>::max())));
  } else {
    if (mode != RoundMode::CAST_NONE && mode != RoundMode::CAST_RINT) {
      shim::core().fail("the shim rounds floats to nearest only");
    }
    return static_cast<To>(from);
  }
}

template <typename To, typename From>
void check_cast(RoundMode mode) {
  static_assert(Pair<To, From>::value, "Cast does not have this pair of types");
  if (has_mode<To, From>(mode)) return;
  shim::core().fail("Cast does not have this rounding for its types");
}

}  // namespace vec

#define SHIM_BINARY(NAME, EXPRESSION)                                                       \
  template <typename T>                                                                     \
  void NAME(const LocalTensor<T>& to, const LocalTensor<T>& a, const LocalTensor<T>& b,     \
            uint32_t count) {                                                               \
    vec::each(#NAME, to, count, [](T x, T y) { return static_cast<T>(EXPRESSION); }, a, b); \
  }                                                                                         \
  template <typename T>                                                                     \
  void NAME(const LocalTensor<T>& to, const LocalTensor<T>& a, const LocalTensor<T>& b,     \
            uint64_t mask, uint8_t repeats, const BinaryRepeatParams& p) {                  \
    vec::each(                                                                              \
        #NAME, mask, repeats, [](T x, T y) { return static_cast<T>(EXPRESSION); },          \
        vec::Lanes<T>(to, p.dstBlkStride, p.dstRepStride),                                  \
        vec::Lanes<T>(a, p.src0BlkStride, p.src0RepStride),                                 \
        vec::Lanes<T>(b, p.src1BlkStride, p.src1RepStride));                                \
  }

SHIM_BINARY(Add, x + y)
SHIM_BINARY(Sub, x - y)
SHIM_BINARY(Mul, x* y)
SHIM_BINARY(Div, x / y)
SHIM_BINARY(Max, x > y ? x : y)
#undef SHIM_BINARY

#define SHIM_SCALAR(NAME, EXPRESSION)                                                 \
  template <typename T>                                                               \
  void NAME(const LocalTensor<T>& to, const LocalTensor<T>& a, T y, uint32_t count) { \
    vec::each(#NAME, to, count, [y](T x) { return static_cast<T>(EXPRESSION); }, a);  \
  }

SHIM_SCALAR(Muls, x* y)
SHIM_SCALAR(Adds, x + y)
SHIM_SCALAR(Maxs, x > y ? x : y)
SHIM_SCALAR(Mins, x < y ? x : y)
#undef SHIM_SCALAR

template <typename T>
void Muls(const LocalTensor<T>& to, const LocalTensor<T>& a, T y, uint64_t mask, uint8_t repeats,
          const UnaryRepeatParams& p) {
  vec::each(
      "Muls", mask, repeats, [y](T x) { return static_cast<T>(x * y); },
      vec::Lanes<T>(to, p.dstBlkStride, p.dstRepStride),
      vec::Lanes<T>(a, p.srcBlkStride, p.srcRepStride));
}

inline void Exp(const LocalTensor<float>& to, const LocalTensor<float>& from, uint32_t count) {
  vec::each("Exp", to, count, [](float x) { return std::exp(x); }, from);
}

inline void Sqrt(const LocalTensor<float>& to, const LocalTensor<float>& from, uint32_t count) {
  vec::each("Sqrt", to, count, [](float x) { return std::sqrt(x); }, from);
}

template <typename T>
void Duplicate(const LocalTensor<T>& to, T value, uint32_t count) {
  static_assert(sizeof(T) >= 2, "Duplicate has no types of 8 bits");
  vec::each("Duplicate", to, count, [value] { return value; });
}

template <typename To, typename From>
void Cast(const LocalTensor<To>& to, const LocalTensor<From>& from, RoundMode mode,
          uint32_t count) {
  vec::check_cast<To, From>(mode);
  vec::each("Cast", to, count, [mode](From x) { return vec::convert<To>(x, mode); }, from);
}

template <typename To, typename From>
void Cast(const LocalTensor<To>& to, const LocalTensor<From>& from, RoundMode mode, uint64_t mask,
          uint8_t repeats, const UnaryRepeatParams& p) {
  vec::check_cast<To, From>(mode);
  vec::each(
      "Cast", mask, repeats, [mode](From x) { return vec::convert<To>(x, mode); },
      vec::Lanes<To>(to, p.dstBlkStride, p.dstRepStride),
      vec::Lanes<From>(from, p.srcBlkStride, p.srcRepStride));
}

// Offsets and base in bytes. CANN has whole repeats, the number of which it cuts to eight bits, and an
// instruction for the rest.
template <typename T>
void Gather(const LocalTensor<T>& to, const LocalTensor<T>& from,
            const LocalTensor<uint32_t>& offsets, uint32_t base, uint32_t count) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Gather has types of 16 and 32 bits");
  shim::Core& core =
      vec::begin("Gather", sizeof(T), sizeof(T), vec::repeats_of(count, sizeof(T)),
                 {to.bytes(), from.bytes(), offsets.bytes()});
  const uint64_t whole = static_cast<uint64_t>(count) * sizeof(T) / vec::kRepeatBytes;
  if (whole > 0 && count * sizeof(T) % vec::kRepeatBytes != 0) {
    core.counts().vectors("Gather", sizeof(T), sizeof(T), 0);
  }
  if (whole > vec::kMostRepeats) {
    core.fail("Gather of " + std::to_string(whole) + " whole repeats, of 255 at most");
  }
  if (!vec::fits("Gather", to, count) || !vec::fits("Gather", offsets, count)) return;
  vec::apart("Gather", to.bytes(), count * sizeof(T), offsets.bytes(), count * 4ull, false);
  if (!core.read(PIPE_V, offsets.bytes(), count * 4ull, "Gather")) return;
  std::vector<T> picked(count);
  std::vector<bool> known(from.GetSize());
  for (uint32_t i = 0; i < count; ++i) {
    const uint64_t offset =
        static_cast<uint64_t>(base) + vec::at<uint32_t>(offsets.bytes() + i * 4ull);
    if (offset % sizeof(T) || offset + sizeof(T) > from.size()) {
      core.fail("Gather's offset " + std::to_string(offset) + " is not in its source");
      return;
    }
    picked[i] = vec::at<T>(from.bytes() + offset);
    if (known[offset / sizeof(T)]) continue;
    known[offset / sizeof(T)] = true;
    vec::apart("Gather", to.bytes(), count * sizeof(T), from.bytes() + offset, sizeof(T), false);
    if (!core.read(PIPE_V, from.bytes() + offset, sizeof(T), "Gather")) return;
  }
  if (!core.write(PIPE_V, to.bytes(), count * sizeof(T), "Gather")) return;
  std::memcpy(to.bytes(), picked.data(), count * sizeof(T));
}

inline void CompareScalar(const LocalTensor<uint8_t>& bits, const LocalTensor<float>& from, float y,
                          CMPMODE mode, uint32_t count) {
  const char* const what = "CompareScalar";
  shim::Core& core =
      vec::begin(what, sizeof(float), sizeof(float), vec::repeats_of(count, sizeof(float)),
                 {bits.bytes(), from.bytes()});
  if (count * sizeof(float) % vec::kRepeatBytes) core.fail("CompareScalar takes whole 256 bytes");
  if (mode != CMPMODE::GE && mode != CMPMODE::LT) core.fail("the shim compares with GE and LT");
  if (!vec::fits(what, from, count) || !vec::fits(what, bits, count / 8)) return;
  if (!core.read(PIPE_V, from.bytes(), count * sizeof(float), what)) return;
  if (!core.write(PIPE_V, bits.bytes(), count / 8, what)) return;
  std::memset(bits.bytes(), 0, count / 8);
  for (uint32_t i = 0; i < count; ++i) {
    const float x = vec::at<float>(from.bytes() + i * sizeof(float));
    const bool set = mode == CMPMODE::GE ? x >= y : x < y;
    bits.bytes()[i / 8] |= static_cast<uint8_t>(set << i % 8);
  }
}

// CANN spreads `other` over a block, for which it waits.
inline void Select(const LocalTensor<float>& to, const LocalTensor<uint8_t>& bits,
                   const LocalTensor<float>& from, float other, SELMODE mode, uint32_t count) {
  const char* const what = "Select";
  shim::Core& core = vec::begin(what, sizeof(float), sizeof(float),
                                vec::repeats_of(count, sizeof(float)),
                                {to.bytes(), bits.bytes(), from.bytes()});
  core.counts().vectors("Select's scalar", sizeof(float), sizeof(float), 1);
  core.counts().barriers += __NPU_ARCH__ == 2201 ? 2 : 3;
  if (mode != SELMODE::VSEL_TENSOR_SCALAR_MODE) core.fail("Select with another mode");
  if (!vec::fits(what, to, count) || !vec::fits(what, from, count)) return;
  if (!vec::fits(what, bits, (count + 7) / 8)) return;
  if (!core.read(PIPE_V, bits.bytes(), (count + 7) / 8, what)) return;
  if (!core.read(PIPE_V, from.bytes(), count * sizeof(float), what)) return;
  if (!core.write(PIPE_V, to.bytes(), count * sizeof(float), what)) return;
  for (uint32_t i = 0; i < count; ++i) {
    const bool set = bits.bytes()[i / 8] >> i % 8 & 1;
    const float x = vec::at<float>(from.bytes() + i * sizeof(float));
    vec::put<float>(to.bytes() + i * sizeof(float), set ? x : other);
  }
}

#if __NPU_ARCH__ == 2201

struct BrcbRepeatParams {
  uint16_t dstBlkStride, dstRepStride;
};

// Each repeat makes a block of each of eight elements.
template <typename T>
void Brcb(const LocalTensor<T>& to, const LocalTensor<T>& from, uint8_t repeats,
          const BrcbRepeatParams& strides) {
  static_assert(sizeof(T) == 4, "the shim has Brcb of 32 bits");
  constexpr uint32_t kPerBlock = shim::kBlock / sizeof(T);
  shim::Core& core = vec::begin("Brcb", sizeof(T), sizeof(T), repeats, {to.bytes(), from.bytes()});
  if (!vec::shape("Brcb", kPerBlock, repeats, sizeof(T))) return;
  if (!vec::fits("Brcb", from, static_cast<uint64_t>(repeats) * kPerBlock)) return;
  const uint64_t read = static_cast<uint64_t>(repeats) * shim::kBlock;
  if (!core.read(PIPE_V, from.bytes(), read, "Brcb")) return;
  for (uint32_t r = 0; r < repeats; ++r) {
    for (uint32_t i = 0; i < kPerBlock; ++i) {
      const uint64_t block = static_cast<uint64_t>(r) * strides.dstRepStride +
                             static_cast<uint64_t>(i) * strides.dstBlkStride;
      if (!vec::fits("Brcb", to, (block + 1) * kPerBlock)) return;
      uint8_t* const place = to.bytes() + block * shim::kBlock;
      vec::apart("Brcb", place, shim::kBlock, from.bytes(), read, false);
      if (!core.write(PIPE_V, place, shim::kBlock, "Brcb")) return;
      const T value = vec::at<T>(from.bytes() + (r * kPerBlock + i) * sizeof(T));
      for (uint32_t lane = 0; lane < kPerBlock; ++lane) {
        vec::put(place + lane * sizeof(T), value);
      }
    }
  }
}

#endif

#define SHIM_BLOCK_REDUCE(NAME, EXPRESSION)                                                       \
  inline void NAME(const LocalTensor<float>& to, const LocalTensor<float>& from, int32_t repeats, \
                   int32_t mask, int32_t dstRepStride, int32_t srcBlkStride,                      \
                   int32_t srcRepStride) {                                                        \
    vec::reduce_blocks(#NAME, to, from, repeats, mask, dstRepStride, srcBlkStride, srcRepStride,  \
                       [](float* x) { return EXPRESSION; });                                      \
  }

SHIM_BLOCK_REDUCE(BlockReduceSum, vec::tree(x, 8))
SHIM_BLOCK_REDUCE(BlockReduceMax, *std::max_element(x, x + 8))
#undef SHIM_BLOCK_REDUCE

}  // namespace AscendC
