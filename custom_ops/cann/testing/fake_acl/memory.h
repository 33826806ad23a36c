// The device's memory: one file in memory, mapped twice. Addresses that are handed out are of a
// mapping that the host may not touch, so a host that dereferences one faults, as it would with a
// real device; code on a stream goes through the other mapping.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <string>

namespace fake_acl {

class DeviceMemory {
 public:
  DeviceMemory();

  // Null when no gap is large enough. What the block holds is all ones: NaN as a float, -1 as a
  // signed integer.
  void* allocate(std::size_t bytes);
  // False for what is not the start of a live block.
  bool release(void* address);

  bool is_device(const void* address, std::size_t bytes) const;
  bool is_live(const void* address, std::size_t bytes) const;
  // Null for what is not in the device's range.
  void* alias(const void* address) const;
  // "0x... (512 bytes into a live block of 1024)", for messages.
  std::string describe(const void* address) const;

 private:
  struct Block {
    std::size_t asked, taken;
  };
  using Blocks = std::map<std::size_t, Block>;

  std::size_t offset_of(const void* address) const {
    return static_cast<std::size_t>(static_cast<const char*>(address) - device_);
  }
  Blocks::const_iterator block_at(std::size_t offset) const;
  void poison(std::size_t offset, std::size_t bytes);

  mutable std::mutex mutex_;
  int file_ = -1;
  char* device_ = nullptr;
  char* host_ = nullptr;
  std::size_t size_;
  Blocks blocks_;
};

DeviceMemory& device_memory();

}  // namespace fake_acl
