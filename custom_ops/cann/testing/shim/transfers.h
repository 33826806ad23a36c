// DataCopy and DataCopyPad between global memory and UB; see kernel_operator.h.
#pragma once

#include "tensors.h"

namespace AscendC {

namespace checked {

inline bool whole_blocks(uint64_t bytes, const char* what) {
  if (bytes > 0 && bytes % shim::kBlock == 0) return true;
  shim::core().fail(std::string(what) + " of " + std::to_string(bytes) +
                    " bytes, which is not a positive multiple of 32");
  return false;
}

template <typename T>
bool holds(const LocalTensor<T>& tensor, uint64_t bytes, const char* what) {
  if (bytes <= tensor.size()) return true;
  shim::core().fail(std::string(what) + " leaves its local tensor");
  return false;
}

}  // namespace checked

template <typename T>
void DataCopy(const LocalTensor<T>& to, const GlobalTensor<T>& from, uint32_t count) {
  shim::Core& core = shim::core();
  const uint64_t bytes = static_cast<uint64_t>(count) * sizeof(T);
  core.issue(PIPE_MTE2);
  core.counts().in.add(1, bytes);
  core.aligned(to.bytes(), "DataCopy's local tensor");
  if (!checked::whole_blocks(bytes, "DataCopy") || !checked::holds(to, bytes, "DataCopy")) return;
  const uint8_t* const source = from.host(bytes, false, "DataCopy");
  if (core.write(PIPE_MTE2, to.bytes(), bytes, "DataCopy") && source != nullptr) {
    std::memcpy(to.bytes(), source, bytes);
  }
}

template <typename T>
void DataCopy(const GlobalTensor<T>& to, const LocalTensor<T>& from, uint32_t count) {
  shim::Core& core = shim::core();
  const uint64_t bytes = static_cast<uint64_t>(count) * sizeof(T);
  core.issue(PIPE_MTE3);
  core.counts().out.add(1, bytes);
  core.aligned(from.bytes(), "DataCopy's local tensor");
  if (!checked::whole_blocks(bytes, "DataCopy") || !checked::holds(from, bytes, "DataCopy")) return;
  uint8_t* const target = to.host(bytes, true, "DataCopy");
  if (core.read(PIPE_MTE3, from.bytes(), bytes, "DataCopy") && target != nullptr) {
    std::memcpy(target, from.bytes(), bytes);
  }
}

// All in blocks of 32 bytes; a stride is from the end of one piece of data to the start of the
// next.
struct DataCopyParams {
  uint16_t blockCount, blockLen, srcStride, dstStride;
};

template <typename T>
void DataCopy(const GlobalTensor<T>& to, const LocalTensor<T>& from, const DataCopyParams& shape) {
  shim::Core& core = shim::core();
  core.issue(PIPE_MTE3);
  core.aligned(from.bytes(), "DataCopy's local tensor");
  if (shape.blockCount < 1 || shape.blockCount > 4095 || shape.blockLen < 1) {
    core.fail("DataCopy of " + std::to_string(shape.blockCount) + " pieces of " +
              std::to_string(shape.blockLen) + " blocks");
    return;
  }
  const uint64_t bytes = shape.blockLen * static_cast<uint64_t>(shim::kBlock);
  core.counts().out.add(shape.blockCount, bytes);
  for (uint64_t i = 0; i < shape.blockCount; ++i) {
    const uint64_t place = i * (bytes + shape.srcStride * shim::kBlock);
    if (!checked::holds(from, place + bytes, "DataCopy")) return;
    const uint64_t step = bytes + static_cast<uint64_t>(shape.dstStride) * shim::kBlock;
    uint8_t* const target = to[i * step / sizeof(T)].host(bytes, true, "DataCopy");
    if (!core.read(PIPE_MTE3, from.bytes() + place, bytes, "DataCopy")) return;
    if (target != nullptr) std::memcpy(target, from.bytes() + place, bytes);
  }
}

#if __NPU_ARCH__ == 2201

// Lengths in bytes; the stride in global memory in bytes, that in UB in blocks, each from the end
// of a block of data to the start of the next.
struct DataCopyExtParams {
  uint16_t blockCount;
  uint32_t blockLen, srcStride, dstStride, rsv;
};

template <typename T>
struct DataCopyPadExtParams {
  bool isPad;
  uint8_t leftPadding, rightPadding;
  T paddingValue;
};

namespace checked {

inline bool pad_shape(const DataCopyExtParams& shape) {
  if (shape.blockCount >= 1 && shape.blockCount <= 4095 && shape.blockLen >= 1 &&
      shape.blockLen <= 2097151) {
    return true;
  }
  shim::core().fail("DataCopyPad of " + std::to_string(shape.blockCount) + " blocks of " +
                    std::to_string(shape.blockLen) + " bytes");
  return false;
}

inline uint64_t padded(uint64_t bytes) {
  return (bytes + shim::kBlock - 1) / shim::kBlock * shim::kBlock;
}

}  // namespace checked

template <typename T>
void DataCopyPad(const LocalTensor<T>& to, const GlobalTensor<T>& from,
                 const DataCopyExtParams& shape, const DataCopyPadExtParams<T>& padding) {
  shim::Core& core = shim::core();
  core.issue(PIPE_MTE2);
  core.aligned(to.bytes(), "DataCopyPad's local tensor");
  if (padding.isPad) core.fail("the shim has no padding values");
  if (!checked::pad_shape(shape)) return;
  core.counts().in.add(shape.blockCount, shape.blockLen);
  const uint64_t step = checked::padded(shape.blockLen) + shape.dstStride * shim::kBlock;
  for (uint64_t i = 0; i < shape.blockCount; ++i) {
    const uint64_t place = i * step;
    if (!checked::holds(to, place + checked::padded(shape.blockLen), "DataCopyPad")) return;
    const GlobalTensor<T> block =
        from[i * (static_cast<uint64_t>(shape.blockLen) + shape.srcStride) / sizeof(T)];
    const uint8_t* const source = block.host(shape.blockLen, false, "DataCopyPad");
    uint8_t* const target = to.bytes() + place;
    if (!core.write(PIPE_MTE2, target, checked::padded(shape.blockLen), "DataCopyPad")) return;
    core.spoil(target + shape.blockLen, checked::padded(shape.blockLen) - shape.blockLen);
    if (source != nullptr) std::memcpy(target, source, shape.blockLen);
  }
}

template <typename T>
void DataCopyPad(const GlobalTensor<T>& to, const LocalTensor<T>& from,
                 const DataCopyExtParams& shape) {
  shim::Core& core = shim::core();
  core.issue(PIPE_MTE3);
  core.aligned(from.bytes(), "DataCopyPad's local tensor");
  if (!checked::pad_shape(shape)) return;
  core.counts().out.add(shape.blockCount, shape.blockLen);
  const uint64_t step = checked::padded(shape.blockLen) + shape.srcStride * shim::kBlock;
  for (uint64_t i = 0; i < shape.blockCount; ++i) {
    const uint64_t place = i * step;
    if (!checked::holds(from, place + shape.blockLen, "DataCopyPad")) return;
    const GlobalTensor<T> block =
        to[i * (static_cast<uint64_t>(shape.blockLen) + shape.dstStride) / sizeof(T)];
    uint8_t* const target = block.host(shape.blockLen, true, "DataCopyPad");
    const uint8_t* const source = from.bytes() + place;
    if (!core.read(PIPE_MTE3, source, shape.blockLen, "DataCopyPad")) return;
    if (target != nullptr) std::memcpy(target, source, shape.blockLen);
  }
}

#endif

}  // namespace AscendC
