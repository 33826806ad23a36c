// What a simulated core was asked to do: the instructions of its pipes, by kind and size, the bytes
// that it moved, what it waited for, and the accesses of its scalar unit; nothing here is a time.
//
// Loops, addresses and branches of the scalar unit are plain C++ here and cannot be seen.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>

namespace shim {

struct Counts {
  // Vector instructions of one kind, whose widest operands have elements of `from` and `to` bytes.
  struct Vector {
    uint64_t instructions = 0;
    uint64_t repeats = 0;  // of up to 256 bytes of its widest operand
  };
  // Transfers of one queue: one piece is what lies together in global memory.
  struct Moved {
    uint64_t transfers = 0, pieces = 0, bytes = 0;

    void add(uint64_t count, uint64_t each) {
      ++transfers;
      pieces += count;
      bytes += count * each;
    }
  };

  std::map<std::tuple<const char*, size_t, size_t>, Vector> vector;  // names are literals
  Moved in, out;                                                     // MTE2 and MTE3
  uint64_t barriers = 0, flags_waited = 0;
  uint64_t scalar_reads = 0, scalar_writes = 0;  // of UB
  uint64_t scalar_loads = 0;                     // of global memory

  void vectors(const char* what, size_t from, size_t to, uint64_t repeats) {
    Vector& kind = vector[{what, from, to}];
    ++kind.instructions;
    kind.repeats += repeats;
  }

  std::string json() const;
};

}  // namespace shim
