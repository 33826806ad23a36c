// What vector instructions have in common: which bytes they touch and in what form; see vectors.h.
#pragma once

#include <algorithm>
#include <array>
#include <initializer_list>
#include <string>
#include <tuple>

#include "tensors.h"

namespace AscendC {

struct BinaryRepeatParams {
  uint8_t dstBlkStride, src0BlkStride, src1BlkStride;
  uint8_t dstRepStride, src0RepStride, src1RepStride;
};

struct UnaryRepeatParams {
  uint16_t dstBlkStride, srcBlkStride;
  uint8_t dstRepStride, srcRepStride;
};

namespace vec {

constexpr uint32_t kRepeatBytes = 256, kMostRepeats = 255;

// How many repeats the form with a count makes of elements of `bytes`.
constexpr uint64_t repeats_of(uint64_t count, size_t bytes) {
  return (count * bytes + kRepeatBytes - 1) / kRepeatBytes;
}

// An instruction whose widest operands have elements of `from` and `to` bytes.
inline shim::Core& begin(const char* what, size_t from, size_t to, uint64_t repeats,
                         std::initializer_list<const uint8_t*> operands) {
  shim::Core& core = shim::core();
  core.issue(PIPE_V);
  core.counts().vectors(what, from, to, repeats);
  for (const uint8_t* const operand : operands) core.aligned(operand, what);
  return core;
}

// Two operands of one instruction are the same or apart.
inline void apart(const char* what, const uint8_t* a, uint64_t a_bytes, const uint8_t* b,
                  uint64_t b_bytes, bool may_coincide) {
  if (a + a_bytes <= b || b + b_bytes <= a) return;
  if (may_coincide && a == b && a_bytes == b_bytes) return;
  shim::core().fail(std::string(what) + " has operands that overlap");
}

template <typename T>
bool fits(const char* what, const LocalTensor<T>& tensor, uint64_t count) {
  if (count > 0 && count * sizeof(T) <= tensor.size()) return true;
  shim::core().fail(std::string(what) + " of " + std::to_string(count) + " elements in " +
                    std::to_string(tensor.GetSize()));
  return false;
}

template <typename T>
T at(const uint8_t* place) {
  T value;
  std::memcpy(&value, place, sizeof value);
  return value;
}

template <typename T>
void put(uint8_t* place, T value) {
  std::memcpy(place, &value, sizeof value);
}

// ---- the form with a count

template <typename T, typename F, typename... U>
void each(const char* what, const LocalTensor<T>& to, uint32_t count, F f,
          const LocalTensor<U>&... from) {
  const size_t read = sizeof...(U) == 0 ? sizeof(T) : std::max({size_t{0}, sizeof(U)...});
  shim::Core& core = begin(what, read, sizeof(T), repeats_of(count, std::max(sizeof(T), read)),
                           {to.bytes(), from.bytes()...});
  if (!fits(what, to, count) || !(fits(what, from, count) && ...)) return;
  (apart(what, to.bytes(), count * sizeof(T), from.bytes(), count * sizeof(U), true), ...);
  if (!(core.read(PIPE_V, from.bytes(), count * sizeof(U), what) && ...)) return;
  if (!core.write(PIPE_V, to.bytes(), count * sizeof(T), what)) return;
  for (uint32_t i = 0; i < count; ++i) {
    put<T>(to.bytes() + i * sizeof(T), f(at<U>(from.bytes() + i * sizeof(U))...));
  }
}

// ---- the form with repeats

template <typename T>
class Lanes {
 public:
  Lanes(const LocalTensor<T>& tensor, uint32_t block_stride, uint32_t repeat_stride)
      : tensor_(tensor), block_stride_(block_stride), repeat_stride_(repeat_stride) {}

  uint8_t* block(uint32_t repeat, uint32_t block) const {
    return tensor_.bytes() +
           (static_cast<uint64_t>(repeat) * repeat_stride_ + block * block_stride_) * shim::kBlock;
  }

  // The lanes of a repeat, one after the other.
  void load(uint32_t repeat, uint32_t mask, T* values) const {
    for (uint32_t i = 0, together = run(mask); i < mask; i += together) {
      const uint32_t count = std::min(mask - i, together);
      std::memcpy(values + i, block(repeat, i / kPerBlock), count * sizeof(T));
    }
  }
  void store(uint32_t repeat, uint32_t mask, const T* values) const {
    for (uint32_t i = 0, together = run(mask); i < mask; i += together) {
      const uint32_t count = std::min(mask - i, together);
      std::memcpy(block(repeat, i / kPerBlock), values + i, count * sizeof(T));
    }
  }

  // Whether the `mask` lanes of a repeat may be touched.
  bool touch(const char* what, uint32_t repeat, uint32_t mask, bool is_write) const {
    for (uint32_t i = 0, together = run(mask); i < mask; i += together) {
      uint8_t* const place = block(repeat, i / kPerBlock);
      const uint64_t bytes = std::min(mask - i, together) * sizeof(T);
      if (place + bytes > tensor_.bytes() + tensor_.size()) {
        shim::core().fail(std::string(what) + " leaves its local tensor");
        return false;
      }
      if (is_write ? !shim::core().write(PIPE_V, place, bytes, what)
                   : !shim::core().read(PIPE_V, place, bytes, what)) {
        return false;
      }
    }
    return true;
  }

 private:
  static constexpr uint32_t kPerBlock = shim::kBlock / sizeof(T);
  // How many lanes of a repeat lie together.
  uint32_t run(uint32_t mask) const { return block_stride_ == 1 ? mask : kPerBlock; }

  const LocalTensor<T>& tensor_;
  uint32_t block_stride_, repeat_stride_;
};

inline bool shape(const char* what, uint64_t mask, uint32_t repeats, size_t element) {
  if (mask >= 1 && mask <= kRepeatBytes / element && repeats >= 1 && repeats <= kMostRepeats) return true;
  shim::core().fail(std::string(what) + " with a mask of " + std::to_string(mask) + " and " +
                    std::to_string(repeats) + " repeats");
  return false;
}

template <typename T, typename F, typename... U>
void each(const char* what, uint64_t mask, uint32_t repeats, F f, const Lanes<T>& out,
          const Lanes<U>&... in) {
  begin(what, std::max({sizeof(U)...}), sizeof(T), repeats, {out.block(0, 0), in.block(0, 0)...});
  if (!shape(what, mask, repeats, std::max({sizeof(T), sizeof(U)...}))) return;
  const uint32_t lanes = static_cast<uint32_t>(mask);
  std::tuple<std::array<U, kRepeatBytes / sizeof(U)>...> operands;
  T results[kRepeatBytes / sizeof(T)];
  for (uint32_t r = 0; r < repeats; ++r) {
    if (!(in.touch(what, r, lanes, false) && ...)) return;
    const auto compute = [&](auto&... values) {
      (in.load(r, lanes, values.data()), ...);
      for (uint32_t i = 0; i < lanes; ++i) results[i] = f(values[i]...);
    };
    std::apply(compute, operands);
    if (!out.touch(what, r, lanes, true)) return;
    out.store(r, lanes, results);
  }
}

// Sums as a tree, which is what reductions in hardware are.
inline float tree(float* values, uint32_t count) {
  for (; count > 1; count = (count + 1) / 2) {
    for (uint32_t i = 0; i < count / 2; ++i) values[i] = values[2 * i] + values[2 * i + 1];
    if (count % 2) values[count / 2] = values[count - 1];
  }
  return values[0];
}

template <typename F>
void reduce_blocks(const char* what, const LocalTensor<float>& to, const LocalTensor<float>& from,
                   int32_t repeats, int32_t mask, int32_t out_stride, int32_t block_stride,
                   int32_t repeat_stride, F f) {
  begin(what, sizeof(float), sizeof(float), repeats, {to.bytes(), from.bytes()});
  constexpr uint32_t kBlocks = 8, kFloats = 8;
  if (mask != kBlocks * kFloats || repeats < 1 || repeats > 255) {
    shim::core().fail(std::string(what) + ": the shim takes whole repeats, 1 to 255 of them");
    return;
  }
  const Lanes<float> in(from, block_stride, repeat_stride), out(to, 1, out_stride);
  for (int32_t r = 0; r < repeats; ++r) {
    if (!in.touch(what, r, mask, false) || !out.touch(what, r, kBlocks, true)) return;
    float values[kBlocks * kFloats], results[kBlocks];
    in.load(r, mask, values);
    for (uint32_t b = 0; b < kBlocks; ++b) results[b] = f(values + b * kFloats);
    out.store(r, kBlocks, results);
  }
}

}  // namespace vec

}  // namespace AscendC
