// Tensors, buffers, flags and barriers of the Ascend C API; see kernel_operator.h.
#pragma once

#include <cstdint>

#include "core.h"

using half = _Float16;

constexpr int32_t EVENT_ID0 = 0, EVENT_ID1 = 1, EVENT_ID2 = 2;

namespace AscendC {

enum class TPosition { VECCALC };

constexpr int route(pipe_t from, pipe_t to) { return from * shim::kPipes + to; }

enum class HardEvent {
  MTE2_V = route(PIPE_MTE2, PIPE_V),
  V_MTE2 = route(PIPE_V, PIPE_MTE2),
  V_MTE3 = route(PIPE_V, PIPE_MTE3),
  MTE3_V = route(PIPE_MTE3, PIPE_V),
  MTE2_S = route(PIPE_MTE2, PIPE_S),
  V_S = route(PIPE_V, PIPE_S),
  S_V = route(PIPE_S, PIPE_V),
  MTE3_MTE2 = route(PIPE_MTE3, PIPE_MTE2)
};

constexpr int from(HardEvent event) { return static_cast<int>(event) / shim::kPipes; }
constexpr int to(HardEvent event) { return static_cast<int>(event) % shim::kPipes; }

// Where a statement stands is part of the call, so that mutations can name and skip it.
template <HardEvent E>
void SetFlag(int32_t id, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  if (shim::runs("SetFlag", file, line)) shim::core().set_flag(from(E), to(E), id);
}

template <HardEvent E>
void WaitFlag(int32_t id, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  if (shim::runs("WaitFlag", file, line)) shim::core().wait_flag(from(E), to(E), id);
}

template <pipe_t P>
void PipeBarrier(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  if (shim::runs("PipeBarrier", file, line)) shim::core().barrier(P);
}

inline int64_t GetBlockIdx() { return shim::core().index(); }
inline int64_t GetBlockNum() { return shim::core().count(); }

// `count` elements of UB from `data`; `buffer` is what was allocated.
template <typename T>
class LocalTensor {
 public:
  LocalTensor() = default;
  LocalTensor(uint8_t* data, uint64_t bytes) : data_(data), bytes_(bytes) {}

  LocalTensor operator[](uint32_t index) const {
    const uint64_t offset = static_cast<uint64_t>(index) * sizeof(T);
    if (offset > bytes_) {
      shim::core().fail("a local tensor is indexed beyond its end");
      return LocalTensor(data_, 0);
    }
    return LocalTensor(data_ + offset, bytes_ - offset);
  }

  template <typename U>
  LocalTensor<U> ReinterpretCast() const {
    return LocalTensor<U>(data_, bytes_);
  }

  T GetValue(uint32_t index) const {
    shim::core().issue(PIPE_S);
    ++shim::core().counts().scalar_reads;
    uint8_t* const place = data_ + static_cast<uint64_t>(index) * sizeof(T);
    T value{};
    if (inside(index) && shim::core().read(PIPE_S, place, sizeof(T), "GetValue")) {
      std::memcpy(&value, place, sizeof value);
    }
    return value;
  }

  void SetValue(uint32_t index, T value) const {
    shim::core().issue(PIPE_S);
    ++shim::core().counts().scalar_writes;
    uint8_t* const place = data_ + static_cast<uint64_t>(index) * sizeof(T);
    if (inside(index) && shim::core().write(PIPE_S, place, sizeof(T), "SetValue")) {
      std::memcpy(place, &value, sizeof value);
    }
  }

  uint32_t GetSize() const { return static_cast<uint32_t>(bytes_ / sizeof(T)); }

  uint8_t* bytes() const { return data_; }
  uint64_t size() const { return bytes_; }

 private:
  bool inside(uint32_t index) const {
    if (index < GetSize()) return true;
    shim::core().fail("a scalar access leaves its local tensor");
    return false;
  }

  uint8_t* data_ = nullptr;
  uint64_t bytes_ = 0;
};

template <typename T>
class GlobalTensor {
 public:
  void SetGlobalBuffer(T* data, uint64_t count) {
    data_ = data;
    count_ = count;
  }

  GlobalTensor operator[](uint64_t index) const {
    GlobalTensor part;
    if (index > count_) shim::core().fail("a global tensor is indexed beyond its end");
    part.SetGlobalBuffer(data_ + index, index > count_ ? 0 : count_ - index);
    return part;
  }

  T GetValue(uint64_t index) const {
    T value{};
    ++shim::core().counts().scalar_loads;
    if (const uint8_t* const place = (*this)[index].host(sizeof(T), false, "GetValue")) {
      std::memcpy(&value, place, sizeof value);
    }
    return value;
  }

  // The host's view of the first `bytes`; null, and a hazard, where they may not be touched.
  uint8_t* host(uint64_t bytes, bool is_write, const char* what) const {
    if (bytes > count_ * sizeof(T)) {
      shim::core().fail(std::string(what) + " leaves its global tensor");
      return nullptr;
    }
    return shim::core().global(data_, bytes, is_write, what);
  }

 private:
  T* data_ = nullptr;
  uint64_t count_ = 0;
};

template <TPosition P>
class TBuf {
 public:
  void init(uint32_t bytes) { data_ = shim::core().allocate(bytes), bytes_ = bytes; }

  template <typename T>
  LocalTensor<T> Get() const {
    return LocalTensor<T>(data_, bytes_);
  }

 private:
  uint8_t* data_ = nullptr;
  uint32_t bytes_ = 0;
};

class TPipe {
 public:
  TPipe() = default;
  TPipe(const TPipe&) = delete;
  ~TPipe() { shim::core().barrier(PIPE_ALL); }

  template <TPosition P>
  void InitBuffer(TBuf<P>& buffer, uint32_t bytes) {
    buffer.init(bytes);
  }
};

}  // namespace AscendC
