// Arrays between two inaccessible pages: one byte too far is a fault, not a lucky read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#include <unistd.h>
#define TQ_GUARD_PAGES 1
#endif

namespace tq::test {

enum class Side { kEnd, kBegin };  // which end of the array touches a guard page

template <class T>
class Guarded {
 public:
  explicit Guarded(std::size_t count, Side side = Side::kEnd) : count_(count) {
    const std::size_t bytes = count * sizeof(T);
#ifdef TQ_GUARD_PAGES
    const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t inner = (bytes + page - 1) / page * page;
    size_ = inner + 2 * page;
    base_ = static_cast<unsigned char*>(
        mmap(nullptr, size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED) std::abort();
    if (inner > 0 && mprotect(base_ + page, inner, PROT_READ | PROT_WRITE) != 0) std::abort();
    data_ = reinterpret_cast<T*>(base_ + page + (side == Side::kEnd ? inner - bytes : 0));
#else
    (void)side;
    size_ = bytes;
    // Zeros, as new pages are.
    base_ = static_cast<unsigned char*>(std::calloc(bytes + 1, 1));
    data_ = reinterpret_cast<T*>(base_);
#endif
  }
  ~Guarded() {
#ifdef TQ_GUARD_PAGES
    munmap(base_, size_);
#else
    std::free(base_);
#endif
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  T* data() { return data_; }
  const T* data() const { return data_; }
  std::size_t size() const { return count_; }
  T& operator[](std::size_t i) { return data_[i]; }
  const T& operator[](std::size_t i) const { return data_[i]; }
  T* begin() { return data_; }
  T* end() { return data_ + count_; }

 private:
  std::size_t count_, size_ = 0;
  unsigned char* base_ = nullptr;
  T* data_ = nullptr;
};

}  // namespace tq::test
