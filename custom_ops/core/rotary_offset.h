// Means of keys that turn with their slots, as rotary embeddings turn keys: of KV head n in slot p
//   m(p)[j] = offset[0, n, j] cos(f_j p) + offset[1, n, j] sin(f_j p),  f_j in radians,
// and offset[2 + p, n, j] more in the first slots, as many as there are rows for.
// An encoder subtracts m(p) from a key; attention adds <query, m(p)> to its score.
//
// Of a block of kBlock slots whose middle is c, with a_i and b_i the products of a query with the
// offsets of frequency i, the sums <query, m(c + u)> are
//   sum_i C_i cos(f_i u) + S_i sin(f_i u),  C_i = a_i cos(f_i c) + b_i sin(f_i c),
//                                           S_i = b_i cos(f_i c) - a_i sin(f_i c).
// The cosines are even in u and the sines odd, so half a block has all of them. Of slow frequencies both
// matrices [kBlock / 2, F] are of low rank; fast ones are taken as they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/buffer.h"
#include "core/kernels.h"
#include "tq/codec_spec.h"

namespace tq {

// Of vectors as long as a head: multiples of 8.
float dot_product(const float* a, const float* b, int size);

// Angles of some frequencies, and the bases of a block; a pure function of the frequencies. Arrays have
// zeros behind them, up to a multiple of every instruction set's lanes.
class RotaryTables {
 public:
  explicit RotaryTables(std::vector<float> frequencies);
  RotaryTables(const RotaryTables&) = delete;
  RotaryTables& operator=(const RotaryTables&) = delete;
  // One for all who have the same frequencies at a time.
  static std::shared_ptr<const RotaryTables> shared(const std::vector<float>& frequencies);

  const std::vector<float>& frequencies() const { return frequencies_; }
  std::size_t width() const { return width_; }
  // Bases are off by 1e-5 at most.
  const RotaryBlock& block() const { return block_; }

  // The cosines of f p, then the sines: [2, width], in a table or in `scratch`, which has as many
  // floats. Angles are taken in double; a result is off by 3e-7 at most.
  const float* at(int64_t slot, float* scratch) const;
  const float* half_block() const { return half_block_.data(); }  // of (kBlock - 1) / 2 slots

 private:
  // A slot has digits of base kDigit; a table has the angles of one digit.
  static constexpr int64_t kDigit = 128;
  static constexpr int kDigits = 3;

  const std::vector<float> frequencies_;
  const std::size_t width_;
  std::vector<float> tables_[kDigits], half_block_;
  std::unique_ptr<FloatBuffer> storage_[2];  // of the bases: aligned, since loads bound the kernels
  std::vector<int> begins_[2];
  RotaryBlock block_;
};

class RotaryOffset {
 public:
  // Of frequencies [D] and offsets [rows, heads, D], two rows or more.
  RotaryOffset(const float* frequencies, const float* offset, int64_t rows, int64_t heads,
               int head_size);

  const RotaryTables& tables() const { return *tables_; }

  // Angles of a slot, of each coordinate: cosines and sines [D].
  void angles(int64_t slot, float* cosines, float* sines) const;
  // x [D] -= m(p) of a head, with the angles of the slot.
  void subtract(int64_t head, int64_t slot, const float* cosines, const float* sines,
                float* x) const;

  // Floats of a prepared query.
  std::size_t query_width() const {
    return 2 * tables_->width() + static_cast<std::size_t>(first_slots_);
  }
  // Of a query [D], for slots that count from `padding` on.
  void prepare_query(int64_t head, int64_t padding, const float* query, float* prepared) const;
  // scores[r][t] = scores[r][t] * key_scales[t] + <query[r], m(slot + t - padding)> of the rows of a
  // block; prepared queries, of that padding, lie `pitch` floats apart.
  void add_to_scores(const Kernels& kernels, const float* prepared, std::size_t pitch, int rows,
                     int64_t slot, int64_t padding, const float* key_scales, float* scores,
                     PrefetchRange later = {}) const;

 private:
  const float* row(int64_t row, int64_t head) const {
    return offset_.data() + (row * heads_ + head) * head_size_;
  }

  const int64_t heads_;
  const int head_size_;
  const int64_t first_slots_;  // with rows of their own
  std::vector<float> offset_;  // [2 + first_slots, heads, D]
  std::vector<int> indices_;  // [D], of the frequency of a coordinate
  std::shared_ptr<const RotaryTables> tables_;
};

}  // namespace tq
