// What CANN's compiler has built in, as far as our kernels reach it through CANN's own headers, so
// that CANN's code for addresses, masks, counts and strides runs on this machine. The core, its
// unified buffer (UB) and its rules are those of ../shim/core.h.
//
// An instruction makes `repeats` of 256 bytes of its widest operand. Of each operand the blocks of 32
// bytes of a repeat are `block` blocks apart, and the repeats `repeat`. Which lanes take part, the
// mask says: a bit each, the same for every repeat, or the count of all lanes, which replaces the
// repeats. Parameters have the widths of the instructions' fields, and are cut to them.
#pragma once

#include <algorithm>
#include <bitset>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>

namespace below {

constexpr uint32_t kRepeatBytes = 256;
using Active = std::bitset<kRepeatBytes / 2>;  // no operand's widest elements have one byte

// What stays from one instruction of a core to the next.
struct Registers {
  bool counts = false;
  uint64_t high = 0, low = 0;  // of the mask; CANN's headers must have set it
  uint8_t compared[16] = {};
};

inline Registers& registers() {
  static Registers all;
  return all;
}

inline uint32_t repeats_of(uint8_t repeats, uint32_t lanes) {
  const Registers& now = registers();
  return now.counts ? static_cast<uint32_t>((now.low + lanes - 1) / lanes) : repeats;
}

inline Active active(uint32_t repeat, uint32_t lanes) {
  const Registers& now = registers();
  Active on;
  for (uint32_t i = 0; i < lanes; ++i) {
    const uint64_t half = i < 64 ? now.low : now.high;
    on[i] = now.counts ? static_cast<uint64_t>(repeat) * lanes + i < now.low : half >> i % 64 & 1;
  }
  return on;
}

template <typename T>
struct Operand {
  T* data;
  uint32_t block, repeat;

  static constexpr uint32_t kPerBlock = shim::kBlock / sizeof(T);

  uint8_t* at(uint32_t r, uint32_t lane) const {
    const uint64_t blocks = static_cast<uint64_t>(r) * repeat + lane / kPerBlock * block;
    return reinterpret_cast<uint8_t*>(data) + blocks * shim::kBlock + lane % kPerBlock * sizeof(T);
  }

  T get(uint32_t r, uint32_t lane) const {
    std::remove_const_t<T> value;
    std::memcpy(&value, at(r, lane), sizeof value);
    return value;
  }

  // Whether the lanes of a repeat may be touched.
  bool touch(const char* what, uint32_t r, const Active& on, uint32_t lanes, bool is_write) const {
    for (uint32_t first = 0; first < lanes; first += kPerBlock) {
      uint32_t end = std::min(first + kPerBlock, lanes), begin = first;
      while (begin < end && !on[begin]) ++begin;
      while (begin < end && !on[end - 1]) --end;
      if (begin == end) continue;
      const uint64_t bytes = (end - begin) * sizeof(T);
      shim::Core& core = shim::core();
      if (!(is_write ? core.write(PIPE_V, at(r, begin), bytes, what)
                     : core.read(PIPE_V, at(r, begin), bytes, what))) {
        return false;
      }
    }
    return true;
  }
};

template <typename... T>
void begin(const char* what, size_t from, size_t to, uint32_t repeats, T*... operands) {
  shim::Core& core = shim::core();
  core.issue(PIPE_V);
  core.counts().vectors(what, from, to, repeats);
  (core.aligned(operands, what), ...);
}

// Calls with each repeat and its lanes.
template <typename F>
void each_repeat(const char* what, uint32_t repeats, uint32_t lanes, F f) {
  for (uint32_t r = 0; r < repeats; ++r) {
    const Active on = active(r, lanes);
    if (on.none()) return shim::core().fail(std::string(what) + " has a mask without lanes");
    if (!f(r, on)) return;
  }
}

// A result for each lane: all are read before any of a repeat is written.
template <uint32_t LANES, typename To, typename Ready, typename Get>
void each_lane(const char* what, uint32_t repeats, const Operand<To>& to, Ready ready, Get get) {
  each_repeat(what, repeats, LANES, [&](uint32_t r, const Active& on) {
    if (!ready(r, on)) return false;
    To results[LANES];
    for (uint32_t i = 0; i < LANES; ++i) {
      if (on[i]) results[i] = get(r, i);
    }
    if (!to.touch(what, r, on, LANES, true)) return false;
    for (uint32_t i = 0; i < LANES; ++i) {
      if (on[i]) std::memcpy(to.at(r, i), &results[i], sizeof(To));
    }
    return true;
  });
}

template <typename To, typename F, typename... From>
void vector(const char* what, uint8_t repeats, const Operand<To>& to, F f,
            const Operand<From>&... from) {
  constexpr uint32_t kLanes = kRepeatBytes / std::max({sizeof(To), sizeof(From)...});
  constexpr size_t kFrom = std::max({sizeof...(From) > 0 ? size_t{0} : sizeof(To), sizeof(From)...});
  const uint32_t count = repeats_of(repeats, kLanes);
  begin(what, kFrom, sizeof(To), count, to.data, from.data...);
  each_lane<kLanes>(
      what, count, to,
      [&](uint32_t r, const Active& on) { return (from.touch(what, r, on, kLanes, false) && ...); },
      [&](uint32_t r, uint32_t i) { return f(from.get(r, i)...); });
}

template <typename To, typename From, typename F>
To rounded(From from, F round) {
  if constexpr (std::is_integral_v<To>) {
    const double value = round(static_cast<double>(from));
    if (std::isnan(value)) return 0;
    using Limits = std::numeric_limits<To>;
    const double least = Limits::min(), most = Limits::max();
    return static_cast<To>(std::clamp(value, least, most));
  } else {
    return static_cast<To>(from);
  }
}

// Each block of a repeat to one element; eight repeats' go to a block.
template <typename T, typename F>
void reduce_blocks(const char* what, T* to, T* from, uint8_t repeats, uint16_t to_repeat,
                   uint16_t block, uint16_t repeat, F f) {
  static_assert(sizeof(T) == 4, "of 32 bits only");
  constexpr uint32_t kLanes = kRepeatBytes / sizeof(T), kBlocks = 8;
  const Operand<T> in{from, block, repeat}, out{to, 1, to_repeat};
  const uint32_t count = repeats_of(repeats, kLanes);
  begin(what, sizeof(T), sizeof(T), count, to, from);
  each_repeat(what, count, kLanes, [&](uint32_t r, const Active& on) {
    if (on.count() != kLanes) {
      shim::core().fail(std::string(what) + " takes whole repeats here");
      return false;
    }
    if (!in.touch(what, r, on, kLanes, false)) return false;
    T results[kBlocks];
    for (uint32_t b = 0; b < kBlocks; ++b) {
      T x[Operand<T>::kPerBlock];
      for (uint32_t i = 0; i < Operand<T>::kPerBlock; ++i) x[i] = in.get(r, b * kBlocks + i);
      results[b] = f(f(f(x[0], x[1]), f(x[2], x[3])), f(f(x[4], x[5]), f(x[6], x[7])));
    }
    if (!out.touch(what, r, on, kBlocks, true)) return false;
    std::memcpy(out.at(r, 0), results, sizeof results);
    return true;
  });
}

// A bit for each lane, those of all repeats together. Without a count it takes whole repeats.
template <typename T, typename F>
void compare(const char* what, uint8_t* to, T* from, uint8_t repeats, uint16_t block,
             uint16_t repeat, F f) {
  constexpr uint32_t kLanes = kRepeatBytes / sizeof(T);
  const Operand<T> in{from, block, repeat};
  if (!registers().counts) registers().high = registers().low = ~uint64_t{0};
  const uint32_t count = repeats_of(repeats, kLanes);
  begin(what, sizeof(T), sizeof(T), count, to, from);
  each_repeat(what, count, kLanes, [&](uint32_t r, const Active& on) {
    if (!in.touch(what, r, on, kLanes, false)) return false;
    uint8_t bits[kLanes / 8] = {};
    for (uint32_t i = 0; i < kLanes; ++i) {
      if (on[i]) bits[i / 8] |= static_cast<uint8_t>(f(in.get(r, i)) << i % 8);
    }
    uint8_t* const place = to + r * sizeof bits;
    if (!shim::core().write(PIPE_V, place, sizeof bits, what)) return false;
    std::memcpy(place, bits, sizeof bits);
    return true;
  });
}

// `offsets` lie together, and are bytes from `base`.
template <typename T>
void gather(T* to, uint32_t* offsets, uint32_t base, uint32_t to_repeat, uint8_t repeats) {
  constexpr uint32_t kLanes = kRepeatBytes / sizeof(T);
  const char* const what = "vgather";
  const Operand<T> out{to, 1, to_repeat};
  const Operand<uint32_t> in{offsets, 1, kLanes / Operand<uint32_t>::kPerBlock};
  const uint32_t count = repeats_of(repeats, kLanes);
  begin(what, sizeof(T), sizeof(T), count, to, offsets);
  const auto place = [&](uint32_t r, uint32_t i) {
    return reinterpret_cast<const T*>(static_cast<uintptr_t>(base + in.get(r, i)));
  };
  each_lane<kLanes>(
      what, count, out,
      [&](uint32_t r, const Active& on) {
        if (!in.touch(what, r, on, kLanes, false)) return false;
        for (uint32_t i = 0; i < kLanes; ++i) {
          if (!on[i]) continue;
          if (reinterpret_cast<uintptr_t>(place(r, i)) % sizeof(T)) {
            shim::core().fail("vgather has an offset between elements");
          }
          if (!shim::core().read(PIPE_V, place(r, i), sizeof(T), what)) return false;
        }
        return true;
      },
      [&](uint32_t r, uint32_t i) { return *place(r, i); });
}

inline uint64_t whole_blocks(uint64_t bytes) {
  return (bytes + shim::kBlock - 1) / shim::kBlock * shim::kBlock;
}

// `count` pieces of `bytes`, those in UB at the beginning of a block; steps are bytes from one to the
// next.
template <bool IS_LOAD>
void move(const char* what, void* to, void* from, uint32_t count, uint64_t bytes, uint64_t to_step,
          uint64_t from_step) {
  auto* const ub = static_cast<uint8_t*>(IS_LOAD ? to : from);
  auto* const global = static_cast<uint8_t*>(IS_LOAD ? from : to);
  const uint64_t whole = whole_blocks(bytes);
  shim::Core& core = shim::core();
  core.issue(IS_LOAD ? PIPE_MTE2 : PIPE_MTE3);
  (IS_LOAD ? core.counts().in : core.counts().out).add(count, bytes);
  core.aligned(ub, what);
  if (count == 0 || bytes == 0) core.fail(std::string(what) + " moves nothing");
  for (uint64_t i = 0; i < count; ++i) {
    uint8_t* const place = ub + i * (IS_LOAD ? to_step : from_step);
    uint8_t* const host =
        core.global(global + i * (IS_LOAD ? from_step : to_step), bytes, !IS_LOAD, what);
    if (!(IS_LOAD ? core.write(PIPE_MTE2, place, whole, what)
                  : core.read(PIPE_MTE3, place, bytes, what)) ||
        host == nullptr) {
      return;
    }
    if (IS_LOAD) core.spoil(place + bytes, whole - bytes);
    std::memcpy(IS_LOAD ? place : host, IS_LOAD ? host : place, bytes);
  }
}

inline int64_t absent(const char* name) {
  shim::core().fail(std::string("the second shim has no ") + name);
  return 0;
}

}  // namespace below

// ---- vectors

#define BELOW_BINARY(NAME, EXPRESSION)                                                            \
  template <typename T>                                                                           \
  void NAME(T* to, T* a, T* b, uint8_t repeats, uint8_t to_block, uint8_t a_block,                \
            uint8_t b_block, uint8_t to_repeat, uint8_t a_repeat, uint8_t b_repeat) {             \
    below::vector<T>(                                                                             \
        #NAME, repeats, {to, to_block, to_repeat},                                                \
        [](T x, T y) { return static_cast<T>(EXPRESSION); },                                      \
        below::Operand<T>{a, a_block, a_repeat}, below::Operand<T>{b, b_block, b_repeat});        \
  }
BELOW_BINARY(vadd, x + y)
BELOW_BINARY(vsub, x - y)
BELOW_BINARY(vmul, x * y)
BELOW_BINARY(vdiv, x / y)
BELOW_BINARY(vmax, x > y ? x : y)

#define BELOW_UNARY(NAME, EXPRESSION)                                                             \
  template <typename T>                                                                           \
  void NAME(T* to, T* from, uint8_t repeats, uint16_t to_block, uint16_t block,                   \
            uint8_t to_repeat, uint8_t repeat) {                                                  \
    below::vector<T>(                                                                             \
        #NAME, repeats, {to, to_block, to_repeat},                                                \
        [](T x) { return static_cast<T>(EXPRESSION); }, below::Operand<T>{from, block, repeat});  \
  }
BELOW_UNARY(vexp, std::exp(static_cast<float>(x)))
BELOW_UNARY(vsqrt, std::sqrt(static_cast<float>(x)))

#define BELOW_SCALAR(NAME, EXPRESSION)                                                            \
  template <typename T, typename U, typename... Rest>                                             \
  void NAME(T* to, T* from, U scalar, uint8_t repeats, uint16_t to_block, uint16_t block,         \
            uint8_t to_repeat, uint8_t repeat, Rest...) {                                         \
    const T y = static_cast<T>(scalar);                                                           \
    below::vector<T>(                                                                             \
        #NAME, repeats, {to, to_block, to_repeat},                                                \
        [y](T x) { return static_cast<T>(EXPRESSION); },                                          \
        below::Operand<T>{from, block, repeat});                                                  \
  }
BELOW_SCALAR(vadds, x + y)
BELOW_SCALAR(vmuls, x * y)
BELOW_SCALAR(vmaxs, x > y ? x : y)
BELOW_SCALAR(vmins, x < y ? x : y)

#define BELOW_CONVERSION(NAME, ROUND)                                                             \
  template <typename To, typename From>                                                           \
  void NAME(To* to, From* from, uint8_t repeats, uint16_t to_block, uint16_t block,               \
            uint8_t to_repeat, uint8_t repeat) {                                                  \
    below::vector<To>(                                                                            \
        #NAME, repeats, {to, to_block, to_repeat},                                                \
        [](From x) { return below::rounded<To>(x, [](double v) { return std::ROUND(v); }); },     \
        below::Operand<From>{from, block, repeat});                                               \
  }
BELOW_CONVERSION(vconv_f162f32, nearbyint)
BELOW_CONVERSION(vconv_f322f16, nearbyint)
BELOW_CONVERSION(vconv_s322f32, nearbyint)
BELOW_CONVERSION(vconv_u82f16, nearbyint)
BELOW_CONVERSION(vconv_f162u8, nearbyint)
BELOW_CONVERSION(vconv_f162s32r, nearbyint)
BELOW_CONVERSION(vconv_f322s32r, nearbyint)
BELOW_CONVERSION(vconv_f322s32a, round)
BELOW_CONVERSION(vconv_f322s32c, ceil)
BELOW_CONVERSION(vconv_f322s32f, floor)
BELOW_CONVERSION(vconv_f322s32z, trunc)

#define BELOW_COMPARISON(NAME, OPERATOR)                                                          \
  template <typename T, typename U>                                                               \
  void NAME(uint8_t* to, T* from, U y, uint8_t repeats, uint16_t, uint16_t block, uint8_t,        \
            uint8_t repeat) {                                                                     \
    below::compare(#NAME, to, from, repeats, block, repeat, [y](T x) { return x OPERATOR y; });   \
  }
BELOW_COMPARISON(vcmpvs_ge, >=)
BELOW_COMPARISON(vcmpvs_lt, <)

template <typename T, typename U>
void vector_dup(T* to, U value, uint8_t repeats, uint16_t to_block, uint16_t, uint8_t to_repeat,
                uint8_t) {
  below::vector<T>("vector_dup", repeats, {to, to_block, to_repeat},
                   [value] { return static_cast<T>(value); });
}

template <typename T>
void vcgadd(T* to, T* from, uint8_t repeats, uint16_t to_repeat, uint16_t block, uint16_t repeat) {
  below::reduce_blocks("vcgadd", to, from, repeats, to_repeat, block, repeat,
                       [](T x, T y) { return static_cast<T>(x + y); });
}

template <typename T>
void vcgmax(T* to, T* from, uint8_t repeats, uint16_t to_repeat, uint16_t block, uint16_t repeat) {
  below::reduce_blocks("vcgmax", to, from, repeats, to_repeat, block, repeat,
                       [](T x, T y) { return x > y ? x : y; });
}

// A block of each of eight elements in a repeat.
template <typename T>
void vbrcb(T* to, T* from, uint16_t to_block, uint16_t to_repeat, uint8_t repeats) {
  constexpr uint32_t kBlocks = 8;
  shim::Core& core = shim::core();
  below::begin("vbrcb", sizeof(T), sizeof(T), repeats, to, from);
  const uint64_t bytes = static_cast<uint64_t>(repeats) * kBlocks * sizeof(T);
  if (!core.read(PIPE_V, from, bytes, "vbrcb")) return;
  for (uint32_t i = 0; i < repeats * kBlocks; ++i) {
    T* const place =
        to + (i / kBlocks * to_repeat + i % kBlocks * to_block) * below::Operand<T>::kPerBlock;
    if (!core.write(PIPE_V, place, shim::kBlock, "vbrcb")) return;
    std::fill_n(place, below::Operand<T>::kPerBlock, from[i]);
  }
}

template <typename T>
void vgather(T* to, uint32_t* offsets, uint32_t base, uint16_t to_repeat, uint8_t repeats) {
  below::gather(to, offsets, base, to_repeat, repeats);
}

template <typename T>
void vgather(T* to, uint32_t* offsets, uint64_t packed) {
  below::gather(to, offsets, static_cast<uint32_t>(packed), packed >> 32 & 0xFF,
                static_cast<uint8_t>(packed >> 56));
}

template <typename T>
void set_cmpmask(T* from) {
  auto& compared = below::registers().compared;
  shim::core().issue(PIPE_V);
  if (shim::core().read(PIPE_V, from, sizeof compared, "set_cmpmask")) {
    std::memcpy(compared, from, sizeof compared);
  }
}

// Mode 1: the scalar that set_cmpmask left where a bit is not set; the bits of all repeats together.
template <typename T, typename U, typename... Rest>
void vsel(T* to, T* from, U* bits, uint8_t repeats, uint8_t to_block, uint8_t block, uint8_t,
          uint8_t to_repeat, uint8_t repeat, uint8_t, uint8_t mode = 0, Rest...) {
  if (mode != 1) return void(below::absent("vsel of another mode"));
  constexpr uint32_t kLanes = below::kRepeatBytes / sizeof(T);
  T other;
  std::memcpy(&other, below::registers().compared, sizeof other);
  const below::Operand<T> in{from, block, repeat}, out{to, to_block, to_repeat};
  const uint32_t count = below::repeats_of(repeats, kLanes);
  below::begin("vsel", sizeof(T), sizeof(T), count, to, from, bits);
  const auto set = [&](uint32_t r) {
    return reinterpret_cast<const uint8_t*>(bits) + r * (kLanes / 8);
  };
  below::each_lane<kLanes>(
      "vsel", count, out,
      [&](uint32_t r, const below::Active& on) {
        return shim::core().read(PIPE_V, set(r), (on.count() + 7) / 8, "vsel") &&
               in.touch("vsel", r, on, kLanes, false);
      },
      [&](uint32_t r, uint32_t i) { return set(r)[i / 8] >> i % 8 & 1 ? in.get(r, i) : other; });
}

inline void set_mask_count() { below::registers().counts = true; }
inline void set_mask_norm() { below::registers().counts = false; }
inline void set_vector_mask(uint64_t high, uint64_t low) {
  below::registers().high = high;
  below::registers().low = low;
}

// ---- transfers

// Lengths and gaps in blocks.
#define BELOW_COPY(NAME, IS_LOAD)                                                                 \
  inline void NAME(void* to, void* from, uint8_t, uint16_t count, uint16_t length,                \
                   uint16_t from_gap, uint16_t to_gap) {                                          \
    below::move<IS_LOAD>(#NAME, to, from, count, length * 32, (length + to_gap) * 32,             \
                         (length + from_gap) * 32);                                               \
  }
BELOW_COPY(copy_gm_to_ubuf, true)
BELOW_COPY(copy_ubuf_to_gm, false)

// Bytes, but for the gaps in UB, which are blocks.
#define BELOW_BYTES(NAME, IS_LOAD, TO_STEP, FROM_STEP)                                            \
  inline void NAME(void* to, void* from, uint8_t, uint16_t count, uint32_t length, uint8_t left,  \
                   uint8_t right, uint32_t from_gap, uint32_t to_gap) {                           \
    if (left + right > 0) below::absent("padding");                                               \
    below::move<IS_LOAD>(#NAME, to, from, count, length, TO_STEP, FROM_STEP);                     \
  }
BELOW_BYTES(copy_gm_to_ubuf_align_b8, true, below::whole_blocks(length) + uint64_t{to_gap} * 32,
            uint64_t{length} + from_gap)
BELOW_BYTES(copy_ubuf_to_gm_align_b8, false, uint64_t{length} + to_gap,
            below::whole_blocks(length) + uint64_t{from_gap} * 32)

// ---- order, and the core itself

inline void pipe_barrier(pipe_t pipe) {
  pipe <= PIPE_ALL ? shim::core().barrier(pipe) : void(below::absent("barriers of this pipe"));
}
template <typename T>
void set_flag(pipe_t from, pipe_t to, T id) {
  shim::core().set_flag(from, to, static_cast<int>(id));
}
template <typename T>
void wait_flag(pipe_t from, pipe_t to, T id) {
  shim::core().wait_flag(from, to, static_cast<int>(id));
}

template <typename... T>
void dcci(T...) {}
inline void set_atomic_none() {}
inline int64_t get_block_idx() { return shim::core().index(); }
inline int64_t get_block_num() { return shim::core().count(); }
inline int64_t get_subblockid() { return 0; }
inline int64_t get_subblockdim() { return 1; }
inline int64_t sff0(uint64_t bits) { return ~bits == 0 ? -1 : __builtin_ctzll(~bits); }
static const struct {
  operator int64_t() const { return shim::core().index(); }
} block_idx;
// CANN's headers ask for it as the first address of UB.
inline int64_t get_imm(uint64_t offset) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(shim::core().ub()) + offset);
}
