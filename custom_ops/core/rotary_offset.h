// Means of keys that turn with their slots, as rotary embeddings turn keys: of KV head n in slot p
//   m(p)[j] = offset[0, n, j] cos(f_j p) + offset[1, n, j] sin(f_j p),  f_j in radians.
// An encoder subtracts m(p) from a key; attention adds <query, m(p)> to its score.
//
// Of a block of kBlock slots whose middle is c, with a_i and b_i the products of a query with the
// offsets of frequency i, the sums <query, m(c + u)> are
//   sum_i C_i cos(f_i u) + S_i sin(f_i u),  C_i = a_i cos(f_i c) + b_i sin(f_i c),
//                                           S_i = b_i cos(f_i c) - a_i sin(f_i c).
// The cosines are even in u and the sines odd, so half a block has all of them; and both matrices
// [kBlock / 2, F] are of low rank, about 4 and two for each time that the fastest frequency turns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/kernels.h"
#include "tq/codec_spec.h"

namespace tq {

// Angles of some frequencies, and the bases of a block; a pure function of the frequencies.
class RotaryTables {
 public:
  explicit RotaryTables(std::vector<float> frequencies);
  // One for all who have the same frequencies at a time.
  static std::shared_ptr<const RotaryTables> shared(const std::vector<float>& frequencies);

  int count() const { return static_cast<int>(frequencies_.size()); }  // F
  const std::vector<float>& frequencies() const { return frequencies_; }

  // The cosines of f p, then the sines: [2, F], in a table or in `scratch`, which has as many floats.
  // Angles are taken in double; a result is off by 3e-7 at most.
  const float* at(int64_t slot, float* scratch) const;
  const float* half_block() const { return half_block_.data(); }  // of (kBlock - 1) / 2 slots

  // cos(f_i (u + 1/2)) = sum_k vectors[k][u] weights[i][k], u = 0 .. kBlock / 2 - 1; likewise sin.
  // Off by 1e-5 at most. `pitch` floats from one row of the weights to the next, zero from rank on.
  struct Basis {
    int rank, pitch;
    std::vector<float> vectors, weights;
  };
  const Basis& cosines() const { return cosines_; }
  const Basis& sines() const { return sines_; }

 private:
  // A slot has digits of base kDigit; a table has the angles of one digit.
  static constexpr int64_t kDigit = 128;
  static constexpr int kDigits = 3;

  const std::vector<float> frequencies_;
  std::vector<float> tables_[kDigits], half_block_;
  Basis cosines_, sines_;
};

class RotaryOffset {
 public:
  // Of frequencies [D] and offsets [2, heads, D].
  RotaryOffset(const float* frequencies, const float* offset, int64_t heads, int head_size);

  const RotaryTables& tables() const { return *tables_; }

  // Angles of a slot, of each coordinate: cosines and sines [D].
  void angles(int64_t slot, float* cosines, float* sines) const;
  // x [D] -= m(p) of a head.
  void subtract(int64_t head, const float* cosines, const float* sines, float* x) const;

  // Floats of a prepared query, and of the work of so many.
  std::size_t query_width() const { return 2 * static_cast<std::size_t>(tables_->count()); }
  std::size_t work_size(int rows) const;
  // Of a query [D], for slots that count from `padding` on.
  void prepare_query(int64_t head, int64_t padding, const float* query, float* prepared) const;
  // shifts[r][t] = <query[r], m(slot + t)> of the rows of a block; prepared queries lie `pitch` floats
  // apart.
  void shifts(const Kernels& kernels, const float* prepared, std::size_t pitch, int rows,
              int64_t slot, float* work, float* shifts) const;

 private:
  const int64_t heads_;
  const int head_size_;
  std::vector<float> offset_;  // [2, heads, D]
  std::vector<int> indices_;  // [D], of the frequency of a coordinate
  std::shared_ptr<const RotaryTables> tables_;
};

}  // namespace tq
