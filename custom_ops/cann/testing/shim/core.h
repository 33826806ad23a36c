// One simulated vector core: its unified buffer (UB), its pipes, and what it saw go wrong.
//
// Instructions run at once and in program order; what is checked is whether they had to. Each pipe
// counts its instructions, and knows how far every other pipe had come when it last waited for it
// (vector clocks). A block of 32 bytes of UB remembers who wrote it last and who read it since. An
// access that is not ordered behind them is a hazard:
//
//   read or write after a write   by another pipe without flags between; on the vector pipe also by
//                                 an earlier instruction without a barrier between
//   write after a read            by another pipe without flags between. The scalar unit waits for
//                                 what it reads, and vector instructions read before later ones
//                                 write, so neither counts
//
// A store to global memory that overlaps an earlier one is a hazard unless PipeBarrier<PIPE_MTE3>, or
// a flag to another pipe and one back, is between them. On 2002, where the memory is written in lines
// of 32 bytes, stores that share a line overlap; two cores may not share one at all. A core may load
// what it stored behind a flag from the one pipe to the other, and never what another one stores.
//
// An instruction may not read what an earlier repeat of its own wrote: its repeats are pipelined.
// Hazards are also: addresses outside UB or outside a buffer, bytes that were never written, flags
// that are set twice, waited for in vain or left over, and whatever the instructions check.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "counts.h"

// Behind PIPE_ALL are those that the kernels have no work for, and CANN's own headers name.
enum pipe_t {
  PIPE_S, PIPE_V, PIPE_MTE2, PIPE_MTE3, PIPE_ALL, PIPE_M, PIPE_MTE1, PIPE_MTE4, PIPE_MTE5, PIPE_V2,
  PIPE_FIX
};

namespace shim {

constexpr int kPipes = 4;
constexpr uint32_t kBlock = 32;
constexpr uint32_t kMostBuffers = 64;  // of one TPipe
// The API keeps the last 8 KB of UB.
#if __NPU_ARCH__ == 2201
constexpr uint32_t kUbBytes = 184 * 1024;
constexpr bool kStoresLines = false;
#elif __NPU_ARCH__ == 2002
constexpr uint32_t kUbBytes = 248 * 1024;
constexpr bool kStoresLines = true;  // a store reaches the whole 32-byte lines of global memory
#else
#error "the shim knows __NPU_ARCH__ 2201 and 2002"
#endif

// A synchronisation statement of the kernels.
struct Site {
  std::string file;
  int line;
  std::string kind;
  bool operator<(const Site& other) const {
    return std::tie(file, line, kind) < std::tie(other.file, other.line, other.kind);
  }
};

struct SiteState {
  uint64_t executed = 0;
  bool skipped = false;
};

// All sites that ran, over all launches; mutations skip some.
std::map<Site, SiteState>& sites();
bool runs(const char* kind, const char* file, int line);

// Counts a hazard and keeps the messages of the first ones.
void report(const std::string& message);

class Core {
 public:
  Core(uint32_t index, uint32_t count);

  uint32_t index() const { return index_; }
  uint32_t count() const { return count_; }

  void fail(const std::string& message);

  // Whole blocks of UB, until it is full.
  uint8_t* allocate(uint32_t bytes);
  uint32_t allocated() const { return top_; }

  void issue(int pipe) { ++clock_[pipe]; }
  uint64_t issued(int pipe) const { return clock_[pipe]; }

  // What the core was asked to do so far.
  Counts& counts() { return counts_; }

  void aligned(const void* address, const char* what);

  // Checks an access by the latest instruction of a pipe; returns whether it may be made.
  bool read(int pipe, const void* address, uint64_t bytes, const char* what);
  bool write(int pipe, const void* address, uint64_t bytes, const char* what);

  // Bytes that an instruction leaves in an unknown state.
  void spoil(const void* address, uint64_t bytes);

  void set_flag(int from, int to, int id);
  void wait_flag(int from, int to, int id);
  void barrier(int pipe);

  // The host's view of global memory, null where it may not be touched: every access lies in one
  // live block. Other cores' are checked when the launch ends.
  uint8_t* global(const void* address, uint64_t bytes, bool is_write, const char* what);

  // At the end of the kernel.
  void finish();

 private:
  struct Block {
    int writer = -1;
    uint64_t write_time = 0;
    uint64_t read_time[kPipes] = {};
  };
  // Bytes of a line of global memory, a bit each, that stores not ordered by now wrote.
  struct Line {
    uint32_t bytes = 0;
    uint64_t time = 0;  // of the latest store
  };
  struct Flag {
    bool set = false;
    uint64_t seen[kPipes] = {};
  };

  uint64_t offset(const void* address) const {
    return static_cast<uint64_t>(static_cast<const uint8_t*>(address) - base_);
  }
  bool in_ub(const void* address, uint64_t bytes, const char* what);
  void stored(uintptr_t address, uint64_t bytes, const char* what);
  void loaded(uintptr_t address, uint64_t bytes, const char* what);
  // The other pipes finish one instruction before the next.
  void ordered(int pipe, int other, uint64_t time, const char* what, uint64_t block) {
    if (pipe == other && (pipe != PIPE_V || time == clock_[pipe])) return;
    if (time > seen_[pipe][other]) unordered(pipe, other, what, block);
  }
  void unordered(int pipe, int other, const char* what, uint64_t block);

  uint32_t index_, count_, top_ = 0, buffers_ = 0;
  uint8_t* base_;
  std::vector<Block> blocks_;
  std::vector<uint8_t> written_;  // by byte
  uint64_t clock_[kPipes] = {};
  uint64_t seen_[kPipes][kPipes] = {};
  std::map<std::tuple<int, int, int>, Flag> flags_;
  std::unordered_map<uintptr_t, Line> lines_;  // by address / 32
  Counts counts_;
};

// The core that is simulated.
Core& core();

}  // namespace shim
