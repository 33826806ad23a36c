// Operators new and delete of the library's own, for a linker that exports those of a static C++
// library: the process would then take ours for its own. Hidden by a flag of the compiler (see
// CMakeLists.txt).
#include <cstdlib>
#include <new>

namespace {

void* allocate(std::size_t size) {
  void* const out = std::malloc(size ? size : 1);
  if (out == nullptr) throw std::bad_alloc();
  return out;
}

void* allocate_aligned(std::size_t size, std::align_val_t alignment) noexcept {
  void* out = nullptr;
  return posix_memalign(&out, static_cast<std::size_t>(alignment), size ? size : 1) == 0 ? out
                                                                                         : nullptr;
}

void* allocate(std::size_t size, std::align_val_t alignment) {
  void* const out = allocate_aligned(size, alignment);
  if (out == nullptr) throw std::bad_alloc();
  return out;
}

}  // namespace

void* operator new(std::size_t size) { return allocate(size); }
void* operator new[](std::size_t size) { return allocate(size); }
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  return std::malloc(size ? size : 1);
}
void* operator new[](std::size_t size, const std::nothrow_t&) noexcept {
  return std::malloc(size ? size : 1);
}
void* operator new(std::size_t size, std::align_val_t align) { return allocate(size, align); }
void* operator new[](std::size_t size, std::align_val_t align) { return allocate(size, align); }
void* operator new(std::size_t size, std::align_val_t align, const std::nothrow_t&) noexcept {
  return allocate_aligned(size, align);
}
void* operator new[](std::size_t size, std::align_val_t align, const std::nothrow_t&) noexcept {
  return allocate_aligned(size, align);
}
void operator delete(void* at) noexcept { std::free(at); }
void operator delete[](void* at) noexcept { std::free(at); }
void operator delete(void* at, std::size_t) noexcept { std::free(at); }
void operator delete[](void* at, std::size_t) noexcept { std::free(at); }
void operator delete(void* at, const std::nothrow_t&) noexcept { std::free(at); }
void operator delete[](void* at, const std::nothrow_t&) noexcept { std::free(at); }
void operator delete(void* at, std::align_val_t) noexcept { std::free(at); }
void operator delete[](void* at, std::align_val_t) noexcept { std::free(at); }
void operator delete(void* at, std::size_t, std::align_val_t) noexcept { std::free(at); }
void operator delete[](void* at, std::size_t, std::align_val_t) noexcept { std::free(at); }
void operator delete(void* at, std::align_val_t, const std::nothrow_t&) noexcept { std::free(at); }
void operator delete[](void* at, std::align_val_t, const std::nothrow_t&) noexcept {
  std::free(at);
}
