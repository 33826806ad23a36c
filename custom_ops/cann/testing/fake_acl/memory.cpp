#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "counters.h"
#include "fake_acl.h"

namespace fake_acl {
namespace {

constexpr std::size_t kAlignment = 512;
// A gap after every block, so that neighbours never touch: one byte too far is in no block.
constexpr std::size_t kGap = 32;
// Larger blocks are given back to the system instead of being filled; they read as zero.
constexpr std::size_t kMostPoison = std::size_t{64} << 20;

[[noreturn]] void stop(const char* what) {
  std::perror(what);
  std::abort();
}

char* map_file(int file, std::size_t size, int protection) {
  // No memory is set aside before it is touched.
  void* const base = mmap(nullptr, size, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
  if (base == MAP_FAILED) stop("[fake ACL] mmap");
  return static_cast<char*>(base);
}

}  // namespace

DeviceMemory::DeviceMemory()
    : size_(std::size_t{environment_number("TQ_FAKE_ACL_MEMORY_MB", 16384)} << 20) {
  file_ = memfd_create("fake_acl_device", MFD_CLOEXEC);
  if (file_ < 0) stop("[fake ACL] memfd_create");
  if (size_ == 0 || ftruncate(file_, static_cast<off_t>(size_)) != 0) stop("[fake ACL] ftruncate");
  host_ = map_file(file_, size_, PROT_READ | PROT_WRITE);
  device_ = map_file(file_, size_, PROT_NONE);
}

void* DeviceMemory::allocate(std::size_t bytes) {
  if (bytes > size_) return nullptr;
  const std::size_t taken = (bytes + kGap + kAlignment - 1) / kAlignment * kAlignment;
  const std::lock_guard<std::mutex> lock(mutex_);
  std::size_t offset = 0;  // the first that has room behind it
  for (auto block = blocks_.begin(); block != blocks_.end(); ++block) {
    if (block->first - offset >= taken) break;
    offset = block->first + block->second.taken;
  }
  if (taken > size_ - offset) return nullptr;
  blocks_[offset] = {bytes, taken};
  poison(offset, taken);
  return device_ + offset;
}

bool DeviceMemory::release(void* address) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!is_device(address, 1)) return false;
  const auto block = blocks_.find(offset_of(address));
  if (block == blocks_.end()) return false;
  poison(block->first, block->second.taken);
  blocks_.erase(block);
  return true;
}

bool DeviceMemory::is_device(const void* address, std::size_t bytes) const {
  const auto first = reinterpret_cast<std::uintptr_t>(address);
  const auto begin = reinterpret_cast<std::uintptr_t>(device_);
  // Written so that no sum can wrap around.
  return first >= begin ? first - begin < size_ : begin - first < bytes;
}

bool DeviceMemory::is_live(const void* address, std::size_t bytes) const {
  if (!is_device(address, 1)) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::size_t offset = offset_of(address);
  const auto block = block_at(offset);
  if (block == blocks_.end()) return false;
  const std::size_t inside = offset - block->first;
  return inside <= block->second.asked && bytes <= block->second.asked - inside;
}

void* DeviceMemory::alias(const void* address) const {
  return is_device(address, 1) ? host_ + offset_of(address) : nullptr;
}

std::string DeviceMemory::describe(const void* address) const {
  char text[32];
  std::snprintf(text, sizeof text, "%p", address);
  if (!is_device(address, 1)) return std::string(text) + " (host)";
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::size_t offset = offset_of(address);
  const auto block = block_at(offset);
  if (block == blocks_.end()) return std::string(text) + " (device, in no live block)";
  return std::string(text) + " (device, " + std::to_string(offset - block->first) +
         " bytes into a live block of " + std::to_string(block->second.asked) + ")";
}

// The block whose bytes, padding included, hold this offset.
DeviceMemory::Blocks::const_iterator DeviceMemory::block_at(std::size_t offset) const {
  auto block = blocks_.upper_bound(offset);
  if (block == blocks_.begin()) return blocks_.end();
  --block;
  return offset - block->first < block->second.taken ? block : blocks_.end();
}

void DeviceMemory::poison(std::size_t offset, std::size_t bytes) {
  if (bytes <= kMostPoison) {
    std::memset(host_ + offset, 0xFF, bytes);
    return;
  }
  // Both mappings lose the pages; the next touch finds zeros.
  if (fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                static_cast<off_t>(bytes)) != 0) {
    stop("[fake ACL] fallocate");
  }
}

DeviceMemory& device_memory() {
  static DeviceMemory* const instance = new DeviceMemory;
  return *instance;
}

}  // namespace fake_acl

extern "C" {

void* fake_acl_alias(const void* device_address) {
  return fake_acl::device_memory().alias(device_address);
}

int fake_acl_is_live(const void* address, size_t bytes) {
  return fake_acl::device_memory().is_live(address, bytes);
}

int fake_acl_is_device(const void* address, size_t bytes) {
  return fake_acl::device_memory().is_device(address, bytes);
}

}  // extern "C"
