// The rules of core.h.
#include "core.h"

#include <algorithm>

namespace shim {
namespace {

constexpr uint8_t kUnknown = 0xCD;
constexpr int kEvents = 8;

const char* name(int pipe) {
  static const char* const names[] = {"S", "V", "MTE2", "MTE3"};
  return names[pipe];
}

std::string name(int from, int to, int id) {
  return std::string("flag ") + name(from) + "_" + name(to) + " " + std::to_string(id);
}

}  // namespace

Core::Core(uint32_t index, uint32_t count)
    : index_(index), count_(count), blocks_(kUbBytes / kBlock), written_(kUbBytes, 0) {
  alignas(kBlock) static uint8_t ub[kUbBytes];  // of one core after the other
  base_ = ub;
  std::memset(base_, kUnknown, kUbBytes);
}

void Core::fail(const std::string& message) {
  report("core " + std::to_string(index_) + ": " + message);
}

uint8_t* Core::allocate(uint32_t bytes) {
  const uint64_t whole = (static_cast<uint64_t>(bytes) + kBlock - 1) / kBlock * kBlock;
  if (whole > kUbBytes - top_) {
    fail("UB overflow: " + std::to_string(top_ + whole) + " of " + std::to_string(kUbBytes));
    return base_;
  }
  if (++buffers_ > kMostBuffers) fail(std::to_string(buffers_) + " buffers, of 64 at most");
  uint8_t* const place = base_ + top_;
  top_ += static_cast<uint32_t>(whole);
  return place;
}

void Core::aligned(const void* address, const char* what) {
  if (offset(address) % kBlock) fail(std::string(what) + " is not aligned to 32 bytes");
}

bool Core::read(int pipe, const void* address, uint64_t bytes, const char* what) {
  if (!in_ub(address, bytes, what)) return false;
  const uint64_t first = offset(address);
  if (const void* const gap = std::memchr(written_.data() + first, 0, bytes)) {
    const auto at = static_cast<const uint8_t*>(gap) - written_.data();
    fail(std::string(what) + " reads UB+" + std::to_string(at) + ", which nobody wrote");
  }
  for (uint64_t b = first / kBlock; b <= (first + bytes - 1) / kBlock; ++b) {
    Block& block = blocks_[b];
    if (block.writer >= 0) ordered(pipe, block.writer, block.write_time, what, b);
    if (block.writer == pipe && block.write_time == clock_[pipe]) {
      fail(std::string(what) + " reads what it wrote itself at UB+" + std::to_string(b * kBlock));
    }
    block.read_time[pipe] = clock_[pipe];
  }
  return true;
}

bool Core::write(int pipe, const void* address, uint64_t bytes, const char* what) {
  if (!in_ub(address, bytes, what)) return false;
  const uint64_t first = offset(address);
  std::memset(written_.data() + first, 1, bytes);
  for (uint64_t b = first / kBlock; b <= (first + bytes - 1) / kBlock; ++b) {
    Block& block = blocks_[b];
    if (block.writer >= 0) ordered(pipe, block.writer, block.write_time, what, b);
    for (int reader = PIPE_V; reader < kPipes; ++reader) {
      if (reader == pipe || block.read_time[reader] == 0) continue;
      ordered(pipe, reader, block.read_time[reader], what, b);
    }
    block.writer = pipe;
    block.write_time = clock_[pipe];
  }
  return true;
}

void Core::spoil(const void* address, uint64_t bytes) {
  std::memset(written_.data() + offset(address), 0, bytes);
  std::memset(base_ + offset(address), kUnknown, bytes);
}

void Core::set_flag(int from, int to, int id) {
  if (id < 0 || id >= kEvents) fail("event " + std::to_string(id) + " does not exist");
  Flag& flag = flags_[{from, to, id}];
  if (flag.set) fail(name(from, to, id) + " is set twice");
  flag.set = true;
  std::memcpy(flag.seen, seen_[from], sizeof flag.seen);
  flag.seen[from] = clock_[from];
}

void Core::wait_flag(int from, int to, int id) {
  Flag& flag = flags_[{from, to, id}];
  ++counts_.flags_waited;
  if (!flag.set) fail(name(from, to, id) + " is waited for and not set: a hang");
  flag.set = false;
  for (int p = 0; p < kPipes; ++p) {
    if (flag.seen[p] > seen_[to][p]) seen_[to][p] = flag.seen[p];
  }
}

void Core::barrier(int pipe) {
  ++counts_.barriers;
  if (pipe != PIPE_ALL) {
    seen_[pipe][pipe] = clock_[pipe];
    return;
  }
  for (auto& view : seen_) std::memcpy(view, clock_, sizeof clock_);
}

void Core::finish() {
  for (const auto& [key, flag] : flags_) {
    if (!flag.set) continue;
    fail(name(std::get<0>(key), std::get<1>(key), std::get<2>(key)) + " is left set");
  }
}

bool Core::in_ub(const void* address, uint64_t bytes, const char* what) {
  if (bytes == 0) return false;
  const uint64_t first = offset(address);
  if (first <= top_ && bytes <= top_ - first) return true;
  fail(std::string(what) + " leaves the allocated UB");
  return false;
}

void Core::stored(uintptr_t address, uint64_t bytes, const char* what) {
  const uint64_t now = clock_[PIPE_MTE3];
  for (uint64_t i = address / kBlock; i <= (address + bytes - 1) / kBlock; ++i) {
    Line& line = lines_[i];
    uint32_t mask = ~0u;
    if (!kStoresLines) {
      if (i == address / kBlock) mask <<= address % kBlock;
      const uint64_t rest = (i + 1) * kBlock - std::min<uint64_t>((i + 1) * kBlock, address + bytes);
      mask &= ~0u >> rest;
    }
    if (line.time <= seen_[PIPE_MTE3][PIPE_MTE3]) line.bytes = 0;
    if ((line.bytes & mask) != 0 && line.time != now) {
      fail(std::string(what) + " overlaps an earlier store without PipeBarrier<PIPE_MTE3>");
    }
    line.bytes |= mask;
    line.time = now;
  }
}

void Core::loaded(uintptr_t address, uint64_t bytes, const char* what) {
  for (uint64_t i = address / kBlock; !lines_.empty() && i <= (address + bytes - 1) / kBlock; ++i) {
    const auto line = lines_.find(i);
    if (line == lines_.end() || line->second.time <= seen_[PIPE_MTE2][PIPE_MTE3]) continue;
    return fail(std::string(what) + " reads an earlier store that it has not waited for");
  }
}

void Core::unordered(int pipe, int other, const char* what, uint64_t block) {
  fail(std::string(what) + " on " + name(pipe) + " is not ordered behind " + name(other) +
       " at UB+" + std::to_string(block * kBlock));
}

}  // namespace shim
