// DataCopy and DataCopyPad between global memory and UB; see kernel_operator.h.
#pragma once

#include "tensors.h"

namespace AscendC {

namespace checked {

// What every transfer does: `count` pieces of `bytes`, whose beginnings are `local_step` bytes apart in
// UB and `global_step` in global memory. MTE2 writes whole blocks of UB, of which the rest is unknown.
template <typename T>
void move(const char* what, int pipe, const LocalTensor<T>& local, const GlobalTensor<T>& global,
          uint64_t count, uint64_t bytes, uint64_t local_step, uint64_t global_step) {
  shim::Core& core = shim::core();
  const bool is_in = pipe == PIPE_MTE2;
  const uint64_t whole = (bytes + shim::kBlock - 1) / shim::kBlock * shim::kBlock;
  (is_in ? core.counts().in : core.counts().out).add(count, bytes);
  for (uint64_t i = 0; i < count; ++i) {
    if (i * local_step + (is_in ? whole : bytes) > local.size()) {
      return core.fail(std::string(what) + " leaves its local tensor");
    }
    uint8_t* const inside = local.bytes() + i * local_step;
    uint8_t* const outside = global[i * global_step / sizeof(T)].host(bytes, !is_in, what);
    if (is_in ? !core.write(pipe, inside, whole, what) : !core.read(pipe, inside, bytes, what)) {
      return;
    }
    if (is_in) core.spoil(inside + bytes, whole - bytes);
    if (outside != nullptr) std::memcpy(is_in ? inside : outside, is_in ? outside : inside, bytes);
  }
}

template <typename T>
void copy(int pipe, const LocalTensor<T>& local, const GlobalTensor<T>& global, uint32_t count) {
  const uint64_t bytes = static_cast<uint64_t>(count) * sizeof(T);
  shim::core().issue(pipe);
  shim::core().aligned(local.bytes(), "DataCopy's local tensor");
  if (bytes > 0 && bytes % shim::kBlock == 0) {
    return move("DataCopy", pipe, local, global, 1, bytes, 0, 0);
  }
  shim::core().fail("DataCopy of " + std::to_string(bytes) +
                    " bytes, which is not a positive multiple of 32");
}

}  // namespace checked

template <typename T>
void DataCopy(const LocalTensor<T>& to, const GlobalTensor<T>& from, uint32_t count) {
  checked::copy(PIPE_MTE2, to, from, count);
}

template <typename T>
void DataCopy(const GlobalTensor<T>& to, const LocalTensor<T>& from, uint32_t count) {
  checked::copy(PIPE_MTE3, from, to, count);
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

template <typename T>
void pad(int pipe, const LocalTensor<T>& local, const GlobalTensor<T>& global,
         const DataCopyExtParams& shape, uint64_t local_blocks, uint64_t global_bytes) {
  const uint64_t bytes = shape.blockLen;
  shim::core().issue(pipe);
  shim::core().aligned(local.bytes(), "DataCopyPad's local tensor");
  if (shape.blockCount >= 1 && shape.blockCount <= 4095 && bytes >= 1 && bytes <= 2097151) {
    const uint64_t blocks = (bytes + shim::kBlock - 1) / shim::kBlock;
    return move("DataCopyPad", pipe, local, global, shape.blockCount, bytes,
                (blocks + local_blocks) * shim::kBlock, bytes + global_bytes);
  }
  shim::core().fail("DataCopyPad of " + std::to_string(shape.blockCount) + " blocks of " +
                    std::to_string(bytes) + " bytes");
}

}  // namespace checked

template <typename T>
void DataCopyPad(const LocalTensor<T>& to, const GlobalTensor<T>& from,
                 const DataCopyExtParams& shape, const DataCopyPadExtParams<T>& padding) {
  if (padding.isPad) shim::core().fail("the shim has no padding values");
  checked::pad(PIPE_MTE2, to, from, shape, shape.dstStride, shape.srcStride);
}

template <typename T>
void DataCopyPad(const GlobalTensor<T>& to, const LocalTensor<T>& from,
                 const DataCopyExtParams& shape) {
  checked::pad(PIPE_MTE3, from, to, shape, shape.srcStride, shape.dstStride);
}

#endif

}  // namespace AscendC
