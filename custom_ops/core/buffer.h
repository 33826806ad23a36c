// Uninitialised floats, aligned for the widest vectors, without exceptions.
#pragma once

#include <cstddef>
#include <limits>
#include <new>

namespace tq {

class FloatBuffer {
 public:
  explicit FloatBuffer(std::size_t count) {
    if (count > std::numeric_limits<std::size_t>::max() / (2 * sizeof(float))) return;
    data_ = static_cast<float*>(
        ::operator new(count * sizeof(float) + kAlignment, kAlign, std::nothrow));
  }
  ~FloatBuffer() { ::operator delete(data_, kAlign); }
  FloatBuffer(const FloatBuffer&) = delete;
  FloatBuffer& operator=(const FloatBuffer&) = delete;

  // Null when there was no memory.
  float* get() const { return data_; }

 private:
  static constexpr std::size_t kAlignment = 64;
  static constexpr std::align_val_t kAlign{kAlignment};
  float* data_ = nullptr;
};

}  // namespace tq
